"""torchtitan: snapshots, checkpoints and exact resume by one line of its config.

    config.checkpoint = FlashCheckpointManager.Config(root="s3://bucket/run7", interval=500, snapshot_every=5)

in a function of a config registry, where torchtitan has `CheckpointManager.Config`. Needs torchtitan 0.3 or later, with
loaders of torchdata or of Grain: what is there is found by what it has, not by a version. Every step goes to a Checkpointer; torchtitan's own manager still reads and writes what is not a checkpoint of the run: initial
weights, and those for Hugging Face at the end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer import TRAIN_STATE, BaseCheckpointManager, CheckpointManager
from torchtitan.tools import filesystem

from flashckpt import Checkpointer
from flashckpt.environment import env
from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.integrations.shared import OneForAllRanks
from flashckpt.report import guarded
from flashckpt.state import rng
from flashckpt.state.data_sources import PAGE, continuation_of, refuse_other_workers

_log = guarded(logging.getLogger("flashckpt"))
_MESH = ["pp", "batch", "cp", "tp"]


class FlashCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is not there when types are checked
    """Takes the place of torchtitan's CheckpointManager; made by its Config, in `Trainer`.

    It tracks the model parts, the optimizers, the schedulers, what Trainer counts, the generators of each rank, and the
    position in the data of each data-parallel rank: exact on as many of them, in any layout.

    Attributes:
        checkpointer: The Checkpointer, where `enable` is set.
    """

    save_future = None

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # as above
        """The settings that torchtitan's managers share, and new ones.

        Of the former, `interval` counts steps between checkpoints on storage, and the last step is always one;
        `keep_latest_k` and `load_step` are about these. `folder` has torchtitan's own checkpoints: the newest is continued
        where `root` has none yet, and the final weights for Hugging Face go there (`last_save_in_hf`).

        Raises:
            ConfigError: Something is set that this manager cannot do.
        """

        enable: bool = True
        """Whether snapshots and checkpoints are taken and restored."""

        root: str = ""
        """Folder or URL of the checkpoints. Empty: "flashckpt" in the trainer's dump folder."""

        snapshot_every: int = 5
        """Steps between snapshots in memory."""

        data_on_other_ranks: Literal["refuse", "restart"] = "refuse"
        """On another number of data-parallel ranks torchtitan's loaders have no position: refuse to continue, or read the
        data from its beginning."""

        async_mode: str = "disabled"
        """torchtitan's, to be left alone: a snapshot is always copied beside training."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further arguments of `flashckpt.Checkpointer`: keep_every, compression, replicate, storage_options, ..."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)  # super() knows no class with slots
            _refuse_settings(self)

        def to_dict(self) -> dict[str, Any]:
            """Return what torchtitan logs: without storage options, since they hold credentials."""
            shown: dict[str, Any] = BaseCheckpointManager.Config.to_dict(self)
            shown["options"] = {key: value for key, value in shown["options"].items() if key != "storage_options"}
            return shown

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
        **others: Any,
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        _refuse_replicas(others)
        self._config, self._trainer = config, states.get(TRAIN_STATE)
        self.folder = filesystem.join(base_folder, config.folder)
        self.keep_latest_k = 0  # in that folder; the Checkpointer keeps what it writes
        self._storage = _storage()
        self._own_parts = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._states = states
        self.checkpointer = Checkpointer(
            config.root or filesystem.join(base_folder, "flashckpt"),
            snapshot_every=config.snapshot_every,
            persist_every=config.interval,
            keep_last=config.keep_latest_k or None,
            **config.options,
        )
        self._ranks = self._track()

    def _track(self) -> _DataRanks:
        parts, mesh = self._own_parts, _mesh_of(self._trainer)
        if mesh is None:  # then no rank is known to share another one's data
            rank, ranks = dist.get_rank(), dist.get_world_size()
        else:
            rank, ranks = mesh.get_local_rank("batch"), mesh.size(_MESH.index("batch"))
        counted: dict[str, Any] = {name: OneForAllRanks(thing) for name, thing in self._states.items()}
        self.checkpointer.track(
            model=parts["model_parts"],
            optimizer=list(parts["optimizers"]),
            lr_scheduler=OneForAllRanks(parts["lr_schedulers"]),
            mesh=mesh,
            rng=True,
            **counted,
        )
        found = _DataRanks(ranks)
        if (loader := parts["dataloader"]) is not None:
            _refuse_inexact(loader)
            _take_positions(loader, every=self._config.snapshot_every, instead_of=self._config.interval)
            positions: dict[str, Any] = {"data": found, f"data-{rank}": _Position(loader, ranks)}
            self.checkpointer.track(**positions)
        return found

    def _load(self, step: int = -1) -> bool:
        trainer = self._trainer
        # a restart continues what the first start made of that step
        wanted = None if step == -1 or _is_restart() else step
        report = self.checkpointer.restore(step=wanted)
        if report is not None:
            self._check_data(report.step)
        if trainer is not None:
            _end_when_asked(trainer, self.checkpointer)
            _validate_aside(trainer, self.checkpointer)
        return report is not None or self._load_initial()

    def _check_data(self, step: int) -> None:
        ranks, before = self._ranks.now, self._ranks.recorded
        if before in (None, ranks):
            return
        if self._config.data_on_other_ranks == "refuse":
            raise SamplerStateError(
                "torchtitan's loader has no position on another number of data-parallel ranks",
                found=f"step {step} of a run on {before}",
                expected=f"one on {ranks}",
                state="Nothing was trained; every snapshot and checkpoint is intact.",
                remedy="train on as many data-parallel ranks, in any layout, or read the data from its beginning: "
                "--checkpoint.data-on-other-ranks restart",
            )
        _log.warning(
            "step %d was trained on %d data-parallel ranks, now %d: the data begins again", step, before, ranks
        )

    def _load_initial(self) -> bool:
        """Let torchtitan's own manager load what a new run starts from, if there is anything."""
        config = self._config
        if not (config.initial_load_path or config.initial_load_in_hf or self._storage.isdir(self.folder)):
            return False
        own = self._own_manager()
        try:
            return bool(own.load())
        finally:
            own.close()

    def _own_manager(self) -> CheckpointManager:
        settings = {one.name: getattr(self._config, one.name) for one in fields(BaseCheckpointManager.Config)}
        settings |= {"keep_latest_k": 0, "load_step": -1}
        return CheckpointManager.Config(**settings).build(**self._own_parts, states=dict(self._states))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_first = curr_step == 1 and self._config.enable_first_step_checkpoint
        self.checkpointer.step(curr_step, persist=last_step or is_first)
        if last_step and self._config.last_save_in_hf:
            own = self._own_manager()
            try:
                own.save(curr_step, last_step=True)
            finally:
                own.close()
        return True

    def _maybe_wait_for_staging(self) -> None:
        self.checkpointer.fence()

    def _wait_for_saving(self) -> None:
        self.checkpointer.wait()

    def _close(self) -> None:
        """Wait for the last commit, give the memory up; after an error keep it for the next start."""
        self.enable = False  # torchtitan may close twice
        try:
            if sys.exc_info()[0] is None:
                self.checkpointer.wait()
        finally:
            self.checkpointer.close()


class _DataRanks:
    """How many data-parallel ranks the data is dealt to, now and when a snapshot was taken."""

    flashckpt_replicated = True

    def __init__(self, now: int) -> None:
        self.now = now
        self.recorded: int | None = None

    def state_dict(self) -> dict[str, int]:
        return {"ranks": self.now}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.recorded = state_dict["ranks"]


class _Position:
    """Where the loader of a data-parallel rank is; the ranks that share its data hold it too, all under one name.

    Args:
        loader: Of torchtitan.
        ranks: Data-parallel ranks.
    """

    flashckpt_replicated = True
    flashckpt_optional = True  # a rank that the recorded run did not have; `_DataRanks` tells
    restored_stage = "running"

    def __init__(self, loader: Any, ranks: int) -> None:
        self._loader, self._own, self._ranks = loader, _without_pickle(loader), ranks
        self.flashckpt_progress = 0

    @property
    def batch_sampler(self) -> Any:
        """What the loader draws from: by it a restore knows the first iterator."""
        return getattr(self._loader, "batch_sampler", None)

    def commit(self, samples: int | None = None) -> None:  # noqa: ARG002 -- the signature of samplers
        """Count a step: the loader itself has counted its batches."""
        self.flashckpt_progress += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self._ranks, "loader": self._own.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict["ranks"] == self._ranks:
            refuse_other_workers("data", self._loader, state_dict["loader"])
            self._own.load_state_dict(state_dict["loader"])


def _without_pickle(loader: Any) -> Any:
    """Return what has the loader's own state: torchtitan's ParallelAwareDataloader wraps a pickle around it."""
    definer = next((kind for kind in type(loader).__mro__ if "state_dict" in vars(kind)), None)
    is_wrapped = definer is not None and definer.__name__ == "ParallelAwareDataloader"
    return super(definer, loader) if is_wrapped else loader


def _storage() -> SimpleNamespace:
    """Return what torchtitan's managers ask of paths, its `CheckpointStorage`."""
    return SimpleNamespace(
        isdir=filesystem.isdir, isfile=filesystem.isfile, listdir=filesystem.listdir, remove=filesystem.rmtree
    )


def _mesh_of(trainer: Any) -> Any:
    """Return the mesh of all ranks by which torchtitan deals data; None where nobody says."""
    dims = getattr(trainer, "parallel_dims", None)
    return None if dims is None else dims.get_optional_mesh(_MESH, include_singleton_axes=True)


def _refuse_inexact(loader: Any) -> None:
    """Refuse a loader that certainly leaves samples out, or repeats them, after a restart; warn where nobody can tell.

    Raises:
        ConfigError: Names what is exact.
    """
    found = continuation_of(loader)
    if found is None or found.is_exact:
        return
    if not found.remedy:
        _log.warning("data (%s): %s; see %s", type(loader).__qualname__, found.words, PAGE)
        return
    raise ConfigError(
        f"torchtitan's loader, a {type(loader).__qualname__}, has no exact position",
        found=found.words,
        expected="a source that is exact at every restart",
        state="Nothing was loaded or written.",
        remedy=found.remedy.partition("; or ")[0],
    )


def _take_positions(loader: Any, *, every: int, instead_of: int) -> None:
    """Let the workers of a loader say as often as there are snapshots where they are: what follows is read again."""
    steps = getattr(loader, "snapshot_every_n_steps", None)
    if steps is not None:
        loader.snapshot_every_n_steps = max(1, steps * every // instead_of)


def _end_when_asked(trainer: Any, checkpointer: Any) -> None:
    """End the loop of a Trainer when every rank is to stop."""
    may_continue: Callable[[], bool] = trainer.should_continue_training
    trainer.should_continue_training = lambda: may_continue() and not checkpointer.should_stop


def _validate_aside(trainer: Any, checkpointer: Checkpointer) -> None:
    """Let validation leave the generators as they were: a run that resumes at this step does not validate it again."""
    if (validator := getattr(trainer, "validator", None)) is None:
        return
    validate: Callable[..., Any] = validator.validate

    def aside(*arguments: Any, **named: Any) -> Any:
        before = rng.capture()
        with checkpointer.paused():
            result = validate(*arguments, **named)
        rng.restore(before)
        return result

    validator.validate = aside


def _is_restart() -> bool:
    return env.FLASHCKPT_RESTART > 0


def _refuse_replicas(others: Mapping[str, Any]) -> None:
    if others:
        raise ConfigError(
            "unsupported arguments of another Trainer class",
            found=", ".join(sorted(others)),
            expected="torchtitan's Trainer: replicas of torchft start and end apart, and no snapshot would be common to them",
            remedy="train without torchft under dlrun, or keep torchft's own TorchFTCheckpointManager",
        )


def _refuse_settings(config: Any) -> None:
    """Refuse what is set and would have no effect.

    Raises:
        ConfigError: Names the setting.
    """
    remedies = {
        "async_mode": (config.async_mode != "disabled", "leave it out: a snapshot is always copied beside training"),
        "create_seed_checkpoint": (
            config.create_seed_checkpoint,
            "make it with torchtitan's CheckpointManager, and start here from it: --checkpoint.initial-load-path",
        ),
        "load_only": (config.load_only, "read the root with Checkpointer.readonly(root), which writes nothing"),
        "exclude_from_loading": (
            bool(config.exclude_from_loading),
            "to begin the data again: --checkpoint.data-on-other-ranks restart; to take weights alone: --checkpoint.initial-load-path",
        ),
    }
    for name, (is_set, remedy) in remedies.items():
        if is_set:
            raise ConfigError(
                f"this manager cannot do what checkpoint.{name} asks",
                found=f"{name}={getattr(config, name)!r}",
                state="Nothing was loaded or written.",
                remedy=remedy,
            )


__all__ = ["FlashCheckpointManager"]
