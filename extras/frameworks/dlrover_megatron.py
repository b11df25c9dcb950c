"""DLRover's call shapes for Megatron: `save_checkpoint` and `load_checkpoint` with Megatron's objects.

    from flashckpt.integrations.dlrover_megatron import load_checkpoint, save_checkpoint, StorageType
    # was: from dlrover.trainer.torch.flash_checkpoint.megatron import load_checkpoint, save_checkpoint

    iteration, flops = load_checkpoint(model, optimizer, opt_param_scheduler)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, flops, storage_type=StorageType.MEMORY)

The functions of `megatron_dist_ckpt` are in `flashckpt.integrations.dlrover_megatron_dist_ckpt`. Needs megatron-core; the
root is Megatron's `--save`, or `checkpoint_dir=`. DLRover itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashckpt.errors import ConfigError, NoCheckpointError, ShardGapError
from flashckpt.integrations.deepspeed_state import OneSchedule
from flashckpt.integrations.dlrover_checkpoints import Flash, Given, StorageType

_COUNTED = ("consumed_train_samples", "consumed_valid_samples")
_REFUSED_ARGS = ("finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng", "ckpt_step")


class MegatronCheckpointer(Flash):
    """What the functions of this module keep a state with: one for each root.

    Weights and moments are tracked by the names of the parameters and copied beside the next forward and backward; so are
    the scheduler, the loss scale, the generators, Megatron's own ones among them, and the samples that `args` counts. They
    come back on another number of data-parallel ranks too; tensor and pipeline parallel sizes stay as they were.

    Args:
        checkpoint_dir: The root: a folder or a URL.
        storage: Must be None.
        comm_backend: Not used.
        save_timeout: Not used: a commit that is late is late.
        replica_count: Partner nodes that keep a copy in memory, 0 to 2.
        **options: Of `flashckpt.Checkpointer`.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        storage: Any = None,
        comm_backend: str = "",
        save_timeout: float = 600,
        replica_count: int = 0,
        **options: Any,
    ) -> None:
        del comm_backend, save_timeout
        if storage is not None:
            raise ConfigError(
                "a storage of DLRover is not known here",
                found=type(storage).__qualname__,
                expected="None",
                remedy="give the root as a folder or a URL, and its options as storage_options=",
            )
        super().__init__(checkpoint_dir, None, replica_count, options)
        self.root = checkpoint_dir
        self._progress = Given(is_replicated=True)
        self._state: Any = None
        self._of: tuple[Any, ...] = ()
        self._removers: list[Any] = []

    def save(
        self,
        iteration: int,
        things: tuple[Sequence[torch.nn.Module], Any, Any],
        progress: Mapping[str, Any],
        storage_type: StorageType,
    ) -> None:
        """Keep the state of a model, its optimizer and its scheduler, and what else is counted.

        Raises:
            ConfigError: Other objects than before, `iteration` is not above the last one, or something cannot be kept.
        """
        if not self._is_open:
            self._begin(things, fresh=True)
        self._refuse_others(things)
        self._state.look()
        self._progress.state = dict(progress)
        self._save(iteration, "", storage_type)

    def load(self, things: tuple[Sequence[torch.nn.Module], Any, Any]) -> tuple[int, dict[str, Any]]:
        """Fill the objects with the newest state; return its iteration and what else was counted, 0 and {} without any."""
        step = self._begin(things, fresh=False)
        return step, self._progress.state

    def close(self) -> None:
        """End the job cleanly: nothing stays in memory."""
        for hook in self._removers:
            hook.remove()
        super().close()

    def _begin(self, things: tuple[Sequence[torch.nn.Module], Any, Any], *, fresh: bool) -> int:
        from flashckpt.integrations.megatron_refusals import refuse_unsupported
        from flashckpt.integrations.megatron_state import Coordinate, MegatronState

        chunks, optimizer, scheduler = things
        refuse_unsupported(chunks, optimizer)
        self._state = MegatronState(chunks, optimizer, Coordinate.here())
        for one in self._state.optimizers:
            self._removers.append(one.optimizer.register_step_pre_hook(lambda *_: self.checkpointer.fence()))
        schedule = None if scheduler is None else OneSchedule(scheduler)
        tracked = {"megatron": self._state, "opt_param_scheduler": schedule, "progress": self._progress}
        try:
            step = self._open(fresh=fresh, rng=True, **tracked)
        except ShardGapError as error:
            raise ConfigError(
                "the newest state is of another model, or of other tensor or pipeline parallel sizes",
                found=error.found.removeprefix("instead: "),
                expected=error.expected,
                state=error.state,
                remedy="start with the model and the sizes that it was saved with; data-parallel ranks may be more or fewer",
            ) from error
        self._of = (*chunks, optimizer, scheduler)
        return step

    def _refuse_others(self, things: tuple[Sequence[torch.nn.Module], Any, Any]) -> None:
        chunks, optimizer, scheduler = things
        given = (*chunks, optimizer, scheduler)
        if len(given) != len(self._of) or any(a is not b for a, b in zip(given, self._of, strict=True)):
            raise ConfigError(
                "another model, optimizer or scheduler than the one that was saved or loaded before",
                expected="the same objects in every call",
                state="Nothing was saved.",
                remedy="give another checkpoint_dir for them",
            )


_made: dict[str, MegatronCheckpointer] = {}
"""By root: DLRover's functions have one for each process as well."""


def save_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    storage_type: StorageType = StorageType.DISK,
    storage: Any = None,
    comm_backend: str = "",
    save_timeout: float = 600,
    replica_count: int = 0,
    *,
    checkpoint_dir: str | None = None,
    **options: Any,
) -> None:
    """Keep the state in memory, or in memory and from there on storage; the same call on every rank, once an iteration.

    Without a `load_checkpoint` before the first save the run begins from scratch: what the root has is abandoned.

    Args:
        iteration: Number of the iteration just done.
        model: A module, or the list of this rank's.
        optimizer: What Megatron made, or None.
        opt_param_scheduler: The same.
        num_floating_point_operations_so_far: Comes back from `load_checkpoint`.
        storage_type: MEMORY, or DISK for a snapshot that is persisted.
        storage: Must be None.
        comm_backend: Not used.
        save_timeout: Not used.
        replica_count: Partner nodes that keep a copy in memory.
        checkpoint_dir: The root; None: Megatron's `--save`.
        **options: Of `flashckpt.Checkpointer`, in the first call.

    Raises:
        ConfigError: As `MegatronCheckpointer.save`; or an argument of Megatron asks for what cannot be done.
    """
    args = megatron_args()
    flash = _checkpointer(checkpoint_dir, args, {"storage": storage, "replica_count": replica_count, **options})
    del comm_backend, save_timeout
    counted = {key: getattr(args, key) for key in _COUNTED if getattr(args, key, None) is not None}
    progress = {"num_floating_point_operations_so_far": num_floating_point_operations_so_far, **counted}
    flash.save(iteration, (_chunks(model), optimizer, opt_param_scheduler), progress, storage_type)


def load_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    storage: Any = None,
    comm_backend: str = "",
    save_timeout: float = 600,
    replica_count: int = 0,
    *,
    checkpoint_dir: str | None = None,
    **options: Any,
) -> tuple[int, float]:
    """Fill the objects with the newest state, from memory if all ranks have it there, else from storage.

    Sets `consumed_train_samples` and `consumed_valid_samples` of Megatron's arguments.

    Args:
        model: As `save_checkpoint`.
        optimizer: The same.
        opt_param_scheduler: The same.
        load_arg: The argument of Megatron that must be the root, or None.
        strict: Must be True.
        storage: Must be None.
        comm_backend: Not used.
        save_timeout: Not used.
        replica_count: Partner nodes that keep a copy in memory.
        checkpoint_dir: The root; None: Megatron's `--save`.
        **options: Of `flashckpt.Checkpointer`.

    Returns:
        The iteration and the floating point operations so far; 0 and 0 where there is nothing.

    Raises:
        ConfigError: As `save_checkpoint`; or the state is loaded already.
        NoCheckpointError: There is nothing, and `--exit-on-missing-checkpoint` is given.
    """
    args = megatron_args()
    flash = _checkpointer(checkpoint_dir, args, {"storage": storage, "replica_count": replica_count, **options})
    del comm_backend, save_timeout
    _refuse_load(args, getattr(args, load_arg, None), flash.root, strict=strict)
    iteration, progress = flash.load((_chunks(model), optimizer, opt_param_scheduler))
    if not iteration and getattr(args, "exit_on_missing_checkpoint", False):
        raise NoCheckpointError(f"{flash.root} has no state to continue from", remedy="check --save and --load")
    _count_on(args, progress)
    return iteration, progress.get("num_floating_point_operations_so_far", 0)


def wait_latest_checkpoint(timeout: float = 1800) -> None:
    """Return when the last state that was saved to `StorageType.DISK` is committed.

    Raises:
        PersistError: It was not in `timeout` seconds, or storage failed.
    """
    for flash in _made.values():
        flash.wait_latest_checkpoint(timeout)


def close_checkpoints() -> None:
    """End the job cleanly: nothing stays in memory. DLRover has no such function."""
    while _made:
        _made.popitem()[1].close()


def megatron_args() -> Any:
    """Return Megatron's arguments; None where there is megatron-core alone, or where they are not parsed."""
    try:
        from megatron.training import get_args
    except ImportError:
        return None
    try:
        return get_args()
    except AssertionError:  # not initialised
        return None


def _checkpointer(root: str | None, args: Any, options: Mapping[str, Any]) -> MegatronCheckpointer:
    root = root or getattr(args, "save", None)
    if not root:
        raise ConfigError(
            "where to keep checkpoints is not known",
            found="no --save of Megatron" if args is not None else "no megatron.training with parsed arguments",
            expected="checkpoint_dir=",
        )
    asked = [key for key in _REFUSED_ARGS if getattr(args, key, None)]
    if asked:
        raise ConfigError(
            "an argument of Megatron asks for part of the state, which this does not do",
            found=", ".join(asked),
            expected="all of it saved and loaded",
            state="Nothing was saved or loaded.",
            remedy="leave it out; weights alone: Checkpointer.restore(only='model.*'), or flashckpt export",
        )
    if root not in _made:
        _made[root] = MegatronCheckpointer(root, **options)
    return _made[root]


def _refuse_load(args: Any, place: str | None, root: str, *, strict: bool) -> None:
    if not strict:
        raise ConfigError("a state is loaded whole", found="strict=False", state="Nothing was loaded.")
    if args is not None and place not in {None, root}:
        raise ConfigError(
            "a checkpoint is not loaded from another place than it is saved to",
            found=repr(place),
            expected=f"the newest state of {root}",
            remedy="give --save and --load one folder; `flashckpt import FOLDER ROOT` brings one of Megatron's into the root",
        )


def _count_on(args: Any, progress: Mapping[str, Any]) -> None:
    counted = {key: progress[key] for key in _COUNTED if key in progress and args is not None}
    for key, value in counted.items():
        setattr(args, key, value)
    if "consumed_train_samples" in counted:
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        update_num_microbatches(consumed_samples=counted["consumed_train_samples"])


def _chunks(model: Any) -> list[torch.nn.Module]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


__all__ = [
    "MegatronCheckpointer",
    "StorageType",
    "close_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "wait_latest_checkpoint",
]
