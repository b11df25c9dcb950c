"""Lightning: one callback for snapshots, restore and the order of the data.

    Trainer(callbacks=[FlashCheckpoint("/checkpoints/run7", snapshot_every=5, persist_every=100)])

Needs lightning 2.6. What a restart continues is Lightning's own state of its loops, recorded where its checkpoints
record it: in `on_train_batch_end`. The data of the training is dealt by an elastic sampler in the place of the loader's.
"""

# ruff: noqa: ARG002 -- hooks have the signatures of the framework

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.integrations.lightning_io import FlashCheckpointIO
from flashckpt.integrations.step_batches import StepBatches, same_but_order
from flashckpt.report import guarded
from flashckpt.sampler import ElasticSampler
from flashckpt.state import rng

_log = guarded(logging.getLogger("flashckpt"))


class FlashCheckpoint(Checkpoint):  # type: ignore[misc]  # lightning is not there when types are checked
    """Snapshots, checkpoints and exact resume for a `lightning.Trainer`; do not pass `ckpt_path`.

    As a checkpoint callback it is called after the others, and Lightning adds no ModelCheckpoint.

    Args:
        root: As for `Checkpointer`.
        global_batch_size: Samples of one optimizer step over all ranks. Sets `accumulate_grad_batches` to what gives
            it, so that a run continues alike on another number of ranks. None: what the arguments give.
        seed: Of the order of the training data, where the loader shuffles.
        **options: As for `Checkpointer`: snapshot_every and persist_every in optimizer steps, keep_last ...

    Attributes:
        checkpointer: The Checkpointer, from `on_fit_start` on.

    Raises:
        ConfigError: An argument is wrong; when training begins: it has data whose order cannot be resumed, a setting
            that changes what an epoch is, or a global batch that its ranks and micro-batches do not give.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, global_batch_size: int | None = None, seed: int = 0, **options: Any
    ) -> None:
        self.checkpointer = Checkpointer(root, **options)
        self._global_batch_size, self._seed = global_batch_size, seed
        self._batches: StepBatches | None = None
        self._done = 0
        self._after_batch: rng.Generators | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the data order, track what Lightning has made, and restore; no loader runs yet."""
        _refuse_settings(trainer, pl_module)
        source = trainer.fit_loop._data_source  # noqa: SLF001
        batches = self._batches = self._deal(trainer, made := source.dataloader())
        source.instance, source.name = _Loader(made.dataset, batch_sampler=batches, **same_but_order(made)), ""
        _keep_order(trainer)
        self.checkpointer.track(
            model=trainer.strategy.model,  # with DDP or FSDP around it: says which tensors are equal on all ranks
            optimizer=trainer.optimizers,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs] or None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            data=batches,
            loops=_Loops(trainer.fit_loop),
            rng=True,
        )
        _warn_of_callbacks(trainer)
        if report := self.checkpointer.restore():
            if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
                _log.warning(
                    "ReduceLROnPlateau: a validation directly behind step %d is not repeated, and the scheduler has not seen "
                    "its metric; rates may change later than without the restart", report.step
                )  # fmt: skip
            _place(trainer.fit_loop, batches)
            source.instance.is_resumed = True
        self._done = trainer.global_step

    def _deal(self, trainer: Any, made: Any) -> StepBatches:
        shuffle = _shuffles(made)
        world, batch = trainer.world_size, made.batch_size
        if self._global_batch_size is not None:
            if self._global_batch_size % (batch * world):
                raise ConfigError(
                    "the global batch does not divide into micro-batches",
                    found=f"global batch of {self._global_batch_size} samples; {world} ranks with micro-batches of {batch}",
                    expected="global batch = micro-batch * accumulation * ranks",
                    remedy="change the loader's batch_size or global_batch_size",
                )
            trainer.accumulate_grad_batches = self._global_batch_size // (batch * world)
        step = batch * world * trainer.accumulate_grad_batches
        sampler = ElasticSampler(
            made.dataset,
            dp_rank=trainer.global_rank,
            dp_size=world,
            global_batch_size=step,
            seed=self._seed,
            shuffle=shuffle,
        )
        length = len(made.dataset)
        steps = length // step if made.drop_last else -(-length // step)
        return StepBatches(sampler, batch_size=batch, steps=max(1, steps))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say that a step is done, where the batch ended one."""
        if trainer.global_step != self._done:
            self._done = trainer.global_step
            self.checkpointer.step(self._done, persist=self._may_be_last(trainer))
            if self.checkpointer.should_stop:
                trainer.should_stop = True
        self._after_batch = rng.Generators.now()

    def _may_be_last(self, trainer: Any) -> bool:
        """Whether no step may follow: that is known now, or an early stop decides it after this step."""
        loop, assumed = trainer.fit_loop, self._batches
        assert assumed is not None
        if trainer.should_stop or self._done == trainer.max_steps:
            return True
        if assumed.ends_epoch and trainer.current_epoch + 1 == trainer.max_epochs:
            return True
        is_checked = assumed.ends_epoch or loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # noqa: SLF001
        return is_checked and any(isinstance(other, EarlyStopping) for other in trainer.callbacks)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the copy under way end: callbacks such as WeightAveraging swap weights behind this, through `.data`."""
        if self._after_batch is not None:
            self.checkpointer.fence()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators back: a run that resumes at this step does not validate it again, and must be the same."""
        if self._after_batch is not None and not trainer.sanity_checking:
            rng.restore(self._after_batch.packed())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last commit, give the memory up."""
        try:
            self.checkpointer.wait()
        finally:
            self.checkpointer.close()


class _Loader(DataLoader[Any]):
    """Says to Lightning that it continues in the middle of an epoch; its position is that of the tracked sampler.

    Lightning asks for an iterator of it long before the first batch, and what hooks and the loops of validation draw
    comes between. After a restore it is made where the first batch is asked for, as it was in the unbroken run.
    """

    is_resumed = False

    def __iter__(self) -> Any:
        return self._made_late() if self.is_resumed else super().__iter__()

    def _made_late(self) -> Iterator[Any]:
        self.is_resumed = False
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Loops:
    """What Lightning counts, the same on every rank."""

    flashckpt_replicated = True

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._fit_loop.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._fit_loop.load_state_dict(state_dict)


def _place(fit_loop: Any, batches: StepBatches) -> None:
    """Count batches as this layout has them, and begin a new epoch where the restored step was the last of one."""
    epoch_loop, progress = fit_loop.epoch_loop, fit_loop.epoch_loop.batch_progress
    progress.is_last_batch = batches.epochs_done >= fit_loop.epoch_progress.current.processed + 1
    dealt = len(batches) if progress.is_last_batch else batches.batches_dealt
    current = progress.current
    current.ready = current.started = current.processed = dealt
    current.completed = dealt - 1  # as Lightning has it in on_train_batch_end
    if progress.is_last_batch:
        progress.increment_completed()
        epoch_loop._batches_that_stepped += 1  # noqa: SLF001
        fit_loop.epoch_progress.increment_processed()
        fit_loop.epoch_progress.increment_completed()
        epoch_loop.restarting = fit_loop._restarting = False  # noqa: SLF001


def _keep_order(trainer: Any) -> None:
    """Keep Lightning from dealing the training data a second time; that of validation it still distributes."""
    connector, set_up = trainer._accelerator_connector, trainer.fit_loop.setup_data  # noqa: SLF001

    def setup_data() -> None:
        distributes, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        try:
            set_up()
        finally:
            connector.use_distributed_sampler = distributes

    trainer.fit_loop.setup_data = setup_data


def _shuffles(made: Any) -> bool:
    """Return whether a loader shuffles.

    Raises:
        ConfigError: It deals data in an order that is not ours to deal: it would silently begin again after a restart.
    """
    remedy = "one DataLoader over a map-style data set, with shuffle=True or False"
    if not isinstance(made, DataLoader) or not hasattr(made.dataset, "__getitem__") or made.batch_size is None:
        found = type(made.dataset if isinstance(made, DataLoader) else made).__qualname__
        raise ConfigError("the order of the training data cannot be resumed", found=found, expected=remedy)
    if isinstance(made.sampler, DistributedSampler):
        return made.sampler.shuffle
    if type(made.sampler) not in {RandomSampler, SequentialSampler}:
        found = f"a loader with a {type(made.sampler).__qualname__}"
        raise ConfigError("this order of the training data cannot be resumed", found=found, expected=remedy)
    return isinstance(made.sampler, RandomSampler)


def _warn_of_callbacks(trainer: Any) -> None:
    """Say of which callbacks no snapshot has the state."""
    others = [type(one) for one in trainer.callbacks if not isinstance(one, Checkpoint)]
    if kept := [kind.__name__ for kind in others if kind.state_dict is not Callback.state_dict]:
        _log.warning(
            "the state of %s is in no snapshot: after a restart it begins again, and may act otherwise than without one",
            ", ".join(kept),
        )  # fmt: skip


def _refuse_settings(trainer: Any, pl_module: Any) -> None:
    wrong = {
        "limit_train_batches": trainer.limit_train_batches != 1.0,
        "overfit_batches": trainer.overfit_batches != 0,
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs != 0,
        "automatic_optimization=False": not pl_module.automatic_optimization,
        "GradientAccumulationScheduler": any(
            type(other) is GradientAccumulationScheduler and other.scheduling != {0: trainer.accumulate_grad_batches}
            for other in trainer.callbacks
        ),
        # it replaces the scheduler of the program, and keeps the average
        "StochasticWeightAveraging": any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks),
    }
    if found := [name for name, is_set in wrong.items() if is_set]:
        raise ConfigError(
            "the Trainer has settings with which an epoch cannot be resumed",
            found=", ".join(found),
            expected="none of " + ", ".join(wrong),
            remedy="leave them out, or follow examples/plain_loop.py with a loop of your own",
        )


__all__ = ["FlashCheckpoint", "FlashCheckpointIO"]
