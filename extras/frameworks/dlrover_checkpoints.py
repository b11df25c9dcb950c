"""Checkpointers with the call shapes of DLRover's Flash Checkpoint 0.6.1, over `flashckpt.Checkpointer`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.report import guarded

_log = guarded(logging.getLogger("flashckpt"))


class StorageType(Enum):
    """Where a state is kept."""

    MEMORY = auto()
    DISK = auto()


def refuse_strategy(deletion_strategy: Any) -> None:
    """Refuse a deletion strategy of DLRover.

    Raises:
        ConfigError: It is one.
    """
    if deletion_strategy is not None:
        raise ConfigError(
            "a deletion strategy of DLRover is not known here",
            found=type(deletion_strategy).__qualname__,
            expected="None",
            remedy="pass keep_last=N, keep_every=N: options of flashckpt.Checkpointer",
        )


class Given:
    """State that the caller gives with each save."""

    def __init__(self, *, is_replicated: bool) -> None:
        self.flashckpt_replicated = is_replicated
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was given last."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it for the caller."""
        self.state = dict(state)


class Flash:
    """What all of them have in common.

    Args:
        checkpoint_dir: The root.
        deletion_strategy: Must be None.
        replicate: Partner nodes that keep a copy.
        options: Of `Checkpointer`.
    """

    def __init__(self, checkpoint_dir: str, deletion_strategy: Any, replicate: int, options: Mapping[str, Any]) -> None:
        refuse_strategy(deletion_strategy)
        settings = {"snapshot_every": 1, "persist_every": None, "keep_last": None, "replicate": replicate}
        self.checkpointer = Checkpointer(checkpoint_dir, **{**settings, **options})
        self._is_open = self._is_path_said = False

    def wait_latest_checkpoint(self, timeout: float = 1800, max_steps: int | None = None) -> None:
        """Return when the last state that was saved to `StorageType.DISK` is committed.

        Args:
            timeout: Seconds.
            max_steps: Not used: ms-swift gives the last step of its run.

        Raises:
            PersistError: It was not in `timeout` seconds, or storage failed.
        """
        del max_steps
        self.checkpointer.wait(timeout)

    def close(self) -> None:
        """End the job cleanly: nothing stays in memory. DLRover's classes have no such method."""
        self.checkpointer.close()

    def _open(self, *, fresh: bool, **things: Any) -> int:
        """Track and restore, once; return the step of what was there, 0 where there was nothing.

        Raises:
            ConfigError: This was done before, by a load or by a save.
        """
        if self._is_open:
            raise ConfigError(
                "load_checkpoint() after this checkpointer has loaded or saved",
                expected="one load_checkpoint(), before the first save_checkpoint()",
                state="What was saved is kept, and training may continue.",
                remedy="load first; to go back to what was saved, start the job again, or close() this checkpointer after a save "
                "to StorageType.DISK and load with another one",
            )
        self.checkpointer.track(**things)
        report = self.checkpointer.restore(fresh=fresh)
        self._is_open = True
        return 0 if report is None else report.step

    def _save(self, step: int, path: str, storage_type: StorageType) -> None:
        if not isinstance(storage_type, StorageType):
            raise ConfigError(
                "unknown storage type",
                found=repr(storage_type),
                expected="StorageType.MEMORY or StorageType.DISK of flashckpt.integrations.dlrover",
                state="Nothing was saved.",
            )
        if path and not self._is_path_said:
            self._is_path_said = True
            _log.warning("path=%r is not used: checkpoints are in the root, `flashckpt ls` lists them", path)
        self.checkpointer.step(step, persist=storage_type is StorageType.DISK)

    def _refuse_path(self, resume_path: str) -> None:
        if resume_path:
            raise ConfigError(
                "a checkpoint is not loaded from a path",
                found=repr(resume_path),
                expected="the newest state of the root",
                remedy="`flashckpt import FILE ROOT --step N` brings a torch.save file into the root",
            )


class DdpCheckpointer(Flash):
    """Takes DLRover's `DdpCheckpointer`'s place: the caller gives a state dict, and gets it back.

    What is given is copied before `save_checkpoint` returns, into one of several slots: a kill in the middle leaves the
    state before. While the memory of the first state is still being made, a save to memory is left out, and the log says so. To have it copied beside training, track the objects themselves with a `flashckpt.Checkpointer`.

    Args:
        checkpoint_dir: The root: a folder or a URL.
        local_shard_num: Not used.
        global_shard_num: 1: the state is the same on all ranks; else each rank has its own.
        comm_backend: Not used.
        deletion_strategy: Must be None.
        save_timeout: Not used: a commit that is late is late.
        replica_count: Partner nodes that keep a copy in memory, 0 to 2.
        **options: Of `flashckpt.Checkpointer`.
    """

    def __init__(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
        self,
        checkpoint_dir: str,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        replica_count: int = 0,
        **options: Any,
    ) -> None:
        del local_shard_num, comm_backend, save_timeout
        super().__init__(checkpoint_dir, deletion_strategy, replica_count, options)
        self._given = Given(is_replicated=global_shard_num == 1)

    def save_checkpoint(
        self, step: int, state_dict: Mapping[str, Any], path: str = "", storage_type: StorageType = StorageType.DISK
    ) -> None:
        """Keep a state in memory, or in memory and from there on storage; the same call on every rank.

        Without a `load_checkpoint` before the first save the run begins from scratch: what the root has is abandoned.

        Raises:
            ConfigError: `step` is not above the last one, or an argument is wrong.
            UnsupportedStateError: The state has something that a snapshot cannot hold; names it.
        """
        if not self._is_open:
            self._open(fresh=True, given=self._given)
        self._given.state = dict(state_dict)
        self._save(step, path, storage_type)

    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]:
        """Return the newest state, from memory if all ranks have it there, else from storage; {} if there is none.

        Raises:
            ConfigError: A path is given, or the state is loaded already.
        """
        self._refuse_path(resume_path)
        self._open(fresh=False, given=self._given)
        return self._given.state


class FsdpShardCheckpointer(Flash):
    """Takes DLRover's `FsdpShardCheckpointer`'s place, for models under FSDP2 (`fully_shard`), DDP or none.

    The model and the optimizer are tracked and read where they lie; they are copied beside the next forward and backward.

    Args:
        checkpoint_dir: The root: a folder or a URL.
        comm_backend: Not used.
        deletion_strategy: Must be None.
        save_timeout: Not used.
        **options: Of `flashckpt.Checkpointer`.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        **options: Any,
    ) -> None:
        del comm_backend, save_timeout
        super().__init__(checkpoint_dir, deletion_strategy, 0, options)
        self._extra = Given(is_replicated=True)
        self._of: tuple[torch.nn.Module, torch.optim.Optimizer] | None = None

    def save_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_sd: Mapping[str, Any] | None = None,
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Keep model, optimizer and `extra_sd`, which must be the same on all ranks; see `DdpCheckpointer.save_checkpoint`.

        Raises:
            ConfigError: Another model or optimizer than before, `step` is not above the last one, or an argument is wrong.
        """
        if not self._is_open:
            self._begin(model, optimizer, fresh=True)
        if self._of is None or self._of[0] is not model or self._of[1] is not optimizer:
            raise ConfigError(
                "another model or optimizer than the one that was saved or loaded before",
                expected="the same objects in every call",
                state="Nothing was saved.",
                remedy="make a FsdpShardCheckpointer with another folder for them",
            )
        self._extra.state = dict(extra_sd or {})
        self._save(step, path, storage_type)

    def load_checkpoint(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, resume_path: str = ""
    ) -> dict[str, Any]:
        """Fill model and optimizer with the newest state, on any number of ranks; return its `extra_sd`, {} if there is none.

        Raises:
            ConfigError: A path is given, or the state is loaded already.
        """
        self._refuse_path(resume_path)
        self._begin(model, optimizer, fresh=False)
        return self._extra.state

    def _begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, fresh: bool) -> None:
        self._open(fresh=fresh, model=model, optimizer=optimizer, extra=self._extra)
        self._of = model, optimizer


class FsdpFullCheckpointer(FsdpShardCheckpointer):
    """Takes DLRover's `FsdpFullCheckpointer`'s place: as `FsdpShardCheckpointer`, with its arguments.

    No rank gathers the whole state: a checkpoint here has no layout, and loads on any number of ranks, one too. Where one
    file is wanted, `flashckpt export ROOT FILE` writes it.
    """
