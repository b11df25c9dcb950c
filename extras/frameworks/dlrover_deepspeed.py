"""`DeepSpeedCheckpointer` with the call shape of DLRover's Flash Checkpoint 0.6.1; needs deepspeed 0.19."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.integrations.deepspeed_fragments import refresh_weights
from flashckpt.integrations.deepspeed_state import EngineState, OneSchedule, Trained
from flashckpt.integrations.dlrover_checkpoints import Flash, Given, StorageType


class DeepSpeedCheckpointer(Flash):
    """Takes DLRover's `DeepSpeedCheckpointer`'s place, for engines with ZeRO 0 to 3.

    The engine is tracked and read where it lies; it is copied beside the next forward and backward. It comes back on any
    number of ranks and in another stage: `flashckpt.integrations.deepspeed` says what of it, and what is refused. The
    position in the data is the caller's: in `client_state`, or with that module's `FlashCheckpoint`.

    Args:
        engine: What `deepspeed.initialize` returned.
        checkpoint_dir: The root: a folder or a URL.
        comm_backend: Not used.
        deletion_strategy: Must be None.
        save_timeout: Not used: a commit that is late is late.
        **options: Of `flashckpt.Checkpointer`.

    Raises:
        ConfigError: An argument is wrong, or the engine keeps state where no snapshot would find it.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        **options: Any,
    ) -> None:
        from flashckpt.integrations.deepspeed_refusals import refuse_unsupported

        del comm_backend, save_timeout
        refuse_unsupported(engine)
        super().__init__(checkpoint_dir, deletion_strategy, 0, options)
        self._engine, self._root, self._trained = engine, os.fspath(checkpoint_dir), Trained(engine)
        self._client = Given(is_replicated=True)
        self._hook: Any = None

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Keep the engine and `client_state`, which must be the same on all ranks; the same call on every rank.

        Its step is `engine.global_steps`, whatever the tag; once after each optimizer step. Without a `load_checkpoint`
        before the first save the run begins from scratch: what the root has is abandoned.

        Raises:
            ConfigError: The engine has not stepped since the last save, or an argument is wrong.
            UnsupportedStateError: `client_state` has something that a snapshot cannot hold; names it.
        """
        del tag, save_latest
        if not self._is_open:
            self._begin(fresh=True)
        self._trained.look()
        self._client.state = dict(client_state or {})
        self._save(self._engine.global_steps, "" if self._is_root(save_dir) else save_dir, storage_type)

    def load_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Fill the engine with the newest state, from memory if all ranks have it there, else from storage. Collective.

        Returns:
            The root and the `client_state` of the save; None and None, as DeepSpeed has it, where there is nothing.

        Raises:
            ConfigError: A tag or another place is given, a part of the state is asked for, or it is loaded already.
        """
        is_whole = load_module_strict and load_optimizer_states and load_lr_scheduler_states
        if load_module_only or custom_load_fn is not None or not is_whole:
            raise ConfigError(
                "a state is loaded whole",
                found="an argument of load_checkpoint() that asks for part of it",
                state="Nothing was loaded.",
                remedy="weights alone: flashckpt.integrations.deepspeed.FlashCheckpoint(...).restore(only='model.*')",
            )
        if tag is not None:
            raise ConfigError(
                "a checkpoint is not loaded by its tag",
                found=f"tag={tag!r}",
                expected="None: the newest state of the root",
                remedy="leave it out; FlashCheckpoint(...).restore(step=N) takes an older one of `flashckpt ls`",
            )
        self._refuse_path("" if self._is_root(load_dir) else load_dir)
        if not self._begin(fresh=False):
            return None, None
        refresh_weights(self._engine)
        return self._root, self._client.state

    def close(self) -> None:
        """End the job cleanly: nothing stays in memory. DLRover's class has no such method."""
        if self._hook is not None:
            self._hook.remove()
        super().close()

    def _begin(self, *, fresh: bool) -> int:
        self._trained.look()
        schedule = self._engine.lr_scheduler
        state, scheduler = EngineState(self._engine, self._trained), None if schedule is None else OneSchedule(schedule)
        self._hook = self._trained.inner.register_step_pre_hook(lambda *_: self.checkpointer.fence())
        return self._open(fresh=fresh, engine=state, scheduler=scheduler, client=self._client, rng=True)

    def _is_root(self, place: str | None) -> bool:
        return place is None or str(place) == self._root or Path(place).absolute() == Path(self._root).absolute()


__all__ = ["DeepSpeedCheckpointer"]
