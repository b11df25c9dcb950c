"""Read-only access to a root: fill objects from a checkpoint, without job, daemon or memory tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flashckpt.core.settings import checked
from flashckpt.errors import ConfigError
from flashckpt.report import RestoreReport
from flashckpt.restore.coordinator import RestoreCoordinator, RestoreRequest
from flashckpt.state.placement import current_world, trainable
from flashckpt.state.registry import StateRegistry
from flashckpt.storage.factory import check_options, root_url


class Reader:
    """Reads checkpoints and changes nothing: for evaluation, export, another program. Made by `readonly`."""

    def __init__(self, root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._root, self._options = root_url(root), checked("storage_options", storage_options)
        check_options(self._root, self._options)
        self._things: dict[str, Any] = {}
        self._mesh: Any = None

    def track(self, *, mesh: Any = None, **things: Any) -> None:
        """Name the objects to fill, as `Checkpointer.track`; its other settings are of runs that take snapshots.

        Raises:
            ConfigError: One of them is given.
        """
        if settings := [name for name in ("rng", "replicated_over", "fenced", "exclude") if name in things]:
            raise ConfigError(
                f"readonly() has no {settings[0]}= in track()",
                found=f"{settings[0]}={things[settings[0]]!r}",
                expected="mesh=, and the objects to fill by name",
                state="Nothing was read.",
                remedy="leave it out: random state belongs to the run that continues, and what is not tracked stays as it is",
            )
        self._mesh = mesh if mesh is not None else self._mesh
        self._things |= things

    def restore(
        self,
        step: int | None = None,
        generation: int | None = None,
        only: str | None = None,
        strict: bool = True,
    ) -> RestoreReport:
        """Fill the tracked objects from storage. Collective; arguments and errors as `Checkpointer.restore`.

        Raises:
            NoCheckpointError: There is none.
        """
        tracked = StateRegistry(current_world(self._mesh))
        for name, thing in self._things.items():
            tracked.add(name, thing)
        request = RestoreRequest(root=self._root, step=step, generation=generation, only=only, strict=strict)
        with trainable(tracked.parts()):
            return RestoreCoordinator(tracked=tracked, directory=None, options=self._options, request=request).read()
