"""What several integrations have in common: state that is one for all ranks, and an object that owns a Checkpointer."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from flashckpt import Checkpointer


class OneForAllRanks:
    """A framework's object whose state is the same on all ranks, and is kept once.

    Args:
        thing: Has `state_dict` and `load_state_dict`.
    """

    flashckpt_replicated = True
    flashckpt_is_of_users = True

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        state: dict[str, Any] = self._thing.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it its state."""
        self._thing.load_state_dict(state_dict)


class OwnsCheckpointer:
    """An object of a training loop that has made its Checkpointer and ends it."""

    checkpointer: Checkpointer

    @property
    def should_stop(self) -> bool:
        """Whether every rank is to end after the step just done."""
        return self.checkpointer.should_stop

    def close(self) -> None:
        """Wait for the last commit, give the memory up.

        Raises:
            PersistError: As `Checkpointer.wait`; the memory is given up nevertheless.
        """
        try:
            self.checkpointer.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()
