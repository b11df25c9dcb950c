"""Hugging Face Trainer: one callback for snapshots, restore and the order of the data.

    Trainer(..., callbacks=[FlashCheckpoint("/checkpoints/run7", snapshot_every=5, persist_every=100)])

Needs transformers 5. Trainer gives callbacks neither itself nor a chance to supply the data, so the callback finds the
Trainer that calls `on_init_end` on the stack, and puts its own `get_train_dataloader` in front of the Trainer's.
"""

# ruff: noqa: ARG002 -- hooks have the signatures of the framework

from __future__ import annotations

import inspect
import os
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.integrations.step_batches import StepBatches, same_but_order
from flashckpt.sampler import ElasticSampler
from flashckpt.state import rng

_COUNTED = ("best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen", "total_flos")


class FlashCheckpoint(TrainerCallback):  # type: ignore[misc]  # transformers is not there when types are checked
    """Snapshots, checkpoints and exact resume for a `transformers.Trainer`; do not pass `resume_from_checkpoint`.

    The training data is dealt by an `ElasticSampler` instead of the Trainer's sampler: shuffled by `args.seed`
    (`data_seed` where given), or in sequence with `train_sampling_strategy="sequential"`.

    Args:
        root: As for `Checkpointer`.
        global_batch_size: Samples of one optimizer step over all ranks. Sets `gradient_accumulation_steps` to what
            gives it, so that a run continues alike on another number of ranks. None: what the arguments give.
        persists_saves: Persist the steps that Trainer saves (`save_strategy`) too.
        **options: As for `Checkpointer`: snapshot_every and persist_every in optimizer steps, keep_last ...

    Attributes:
        checkpointer: The Checkpointer, from `on_train_begin` on.
        is_training: Whether training runs: behind it, everything is committed.

    Raises:
        ConfigError: An argument is wrong; when the Trainer is built or begins: it has data or a sampling strategy whose
            order cannot be resumed, or a global batch that its ranks and micro-batches do not give.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        global_batch_size: int | None = None,
        persists_saves: bool = False,
        **options: Any,
    ) -> None:
        self.checkpointer = Checkpointer(root, **options)
        self._persists_saves, self.is_training = persists_saves, False
        self._global_batch_size = global_batch_size
        self._trainer: Any = None
        self._batches: StepBatches | None = None
        self._before_evaluation: dict[str, Any] | None = None
        self._owed: dict[str, Any] | None = None
        self._counted: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the place of the Trainer's data order."""
        trainer = self._trainer = _calling_trainer()
        self._set_accumulation(args)
        original = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: self._loader(original())

    def _set_accumulation(self, args: Any) -> None:
        if self._global_batch_size is None:
            return
        step = args.per_device_train_batch_size * args.world_size
        if self._global_batch_size % step:
            raise ConfigError(
                "the global batch does not divide into micro-batches",
                found=f"global batch of {self._global_batch_size} samples; {args.world_size} ranks with micro-batches of "
                f"{args.per_device_train_batch_size}",
                expected="global batch = micro-batch * accumulation * ranks",
                remedy="change per_device_train_batch_size or global_batch_size",
            )
        args.gradient_accumulation_steps = self._global_batch_size // step

    def _loader(self, made: Any) -> DataLoader[Any]:
        """Return a loader like the Trainer's in everything but the order."""
        args = self._trainer.args
        _refuse_unordered(made, args)
        world = args.world_size // (
            self._trainer.get_sp_size() * self._trainer.get_cp_size() * self._trainer.get_tp_size()
        )
        if world != args.world_size:
            raise ConfigError(
                "this callback deals data to data-parallel ranks only",
                found=f"{args.world_size} ranks that are {world} data-parallel replicas",
                expected="as many replicas as ranks",
                remedy="track the parts of the Trainer with a Checkpointer, and a sampler with dp_rank and dp_size",
            )
        batch = args.per_device_train_batch_size
        step = batch * args.gradient_accumulation_steps * world
        sampler = ElasticSampler(
            made.dataset,
            dp_rank=args.process_index,
            dp_size=world,
            global_batch_size=step,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy != "sequential",
        )
        length = len(made.dataset)
        steps = length // step if args.dataloader_drop_last else -(-length // step)
        self._batches = StepBatches(sampler, batch_size=batch, steps=max(1, steps))
        return DataLoader(made.dataset, batch_sampler=self._batches, **same_but_order(made))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Track what the Trainer has made, and restore."""
        trainer, ckpt = self._trainer, self.checkpointer
        if trainer is None or self._batches is None:
            raise ConfigError(
                "the callback FlashCheckpoint was added to a Trainer that was there already",
                expected="Trainer(..., callbacks=[FlashCheckpoint(...)])",
            )
        scaler = getattr(trainer.accelerator, "scaler", None)
        self._counted = _Counted(trainer)
        ckpt.track(
            model=trainer.model_wrapped,  # with DDP or FSDP around it: says which tensors are equal on all ranks
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=scaler,
            data=self._batches,
            trainer=self._counted,
            rng=True,
        )
        self.is_training = True
        if report := ckpt.restore():
            # the second: else the first logged loss is divided by all steps so far
            state.global_step = trainer._globalstep_last_logged = trainer._initial_global_step = report.step  # noqa: SLF001
            state.epoch = self._batches.epochs_done
            if state.global_step >= state.max_steps:
                self._batches.finish()
            self._before_evaluation = (
                rng.capture()
            )  # with eval_on_start one comes now, as it did before the first step of all

            if self._counted.evaluates and isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
                self._owed = self._before_evaluation

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the restored step, where the scheduler goes by that: its snapshot was taken before."""
        if self._owed is not None:
            self._before_evaluation = rng.capture()
            rng.restore(self._owed)
            self._owed = None
            self._trainer._evaluate(None, None)  # noqa: SLF001 -- as Trainer does, with the scheduler's step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that the step is done; it is persisted if it is the last one, before Trainer loads its best model."""
        assert self._batches is not None
        may_be_last = self._may_be_last(args, state, control)
        self._counted.evaluates = self._is_evaluated(args, control)
        self.checkpointer.step(state.global_step, persist=may_be_last or self._is_saved(args, control))
        if may_be_last:
            self.checkpointer.fence()  # else the best model is loaded while the last one is copied
        state.epoch = self._batches.epochs_done
        if self.checkpointer.should_stop:
            control.should_training_stop = True
        self._keep_generators(control)

    def _may_be_last(self, args: Any, state: Any, control: Any) -> bool:
        """Whether no step may follow: that is known now, or an early stop decides it after this step's evaluation."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            return True
        others = self._trainer.callback_handler.callbacks
        is_evaluated = self._is_evaluated(args, control)
        return is_evaluated and any(isinstance(other, EarlyStoppingCallback) for other in others)

    def _is_evaluated(self, args: Any, control: Any) -> bool:
        assert self._batches is not None
        return bool(control.should_evaluate or (args.eval_strategy == "epoch" and self._batches.ends_epoch))

    def _is_saved(self, args: Any, control: Any) -> bool:
        assert self._batches is not None
        is_due = control.should_save or (args.save_strategy == "epoch" and self._batches.ends_epoch)
        return bool(self._persists_saves and is_due)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the generators before an evaluation at the end of the epoch."""
        self._keep_generators(control)

    def _keep_generators(self, control: Any) -> None:
        self._before_evaluation = rng.capture() if control.should_evaluate else None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the generators back: a run that resumes at this step does not evaluate it again, and must be the same."""
        if self._before_evaluation is not None:
            rng.restore(self._before_evaluation)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last commit, give the memory up."""
        try:
            self.checkpointer.wait()
        finally:
            self.checkpointer.close()
            self.is_training = False


class _Counted:
    """What a Trainer counts beside steps, the same on every rank."""

    flashckpt_replicated = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.evaluates = False  # behind this step

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        counted = {name: getattr(trainer.state, name) for name in _COUNTED}
        # Trainer adds up on each rank what it sums over the ranks when it logs: here every rank counts like this one
        counted["total_flos"] += trainer.current_flos * max(1, trainer.args.world_size)
        return {**counted, "evaluates": self.evaluates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluates = state_dict.get("evaluates", False)  # of before this record
        for name in state_dict.keys() - {"evaluates"}:
            setattr(self._trainer.state, name, state_dict[name])
        self._trainer.current_flos = 0


def _calling_trainer() -> Any:
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back
    raise ConfigError(
        "no Trainer called FlashCheckpoint.on_init_end",
        expected="Trainer(..., callbacks=[FlashCheckpoint(...)])",
    )


def _refuse_unordered(made: Any, args: Any) -> None:
    """Refuse data whose order is not ours to deal: it would silently begin again after a restart."""
    if isinstance(made.dataset, IterableDataset) or not hasattr(made.dataset, "__len__"):
        raise ConfigError(
            "the order of the training data cannot be resumed",
            found=f"{type(made.dataset).__qualname__}, which is read in sequence and has no length",
            expected="a map-style data set: __len__ and __getitem__",
            remedy="load it map-style (datasets: streaming=False)",
        )
    if args.train_sampling_strategy not in {"random", "sequential"}:
        raise ConfigError(
            "this order of the training data cannot be resumed",
            found=f"train_sampling_strategy={args.train_sampling_strategy!r}",
            expected="'random' or 'sequential'",
        )
    if args.n_gpu > 1:
        raise ConfigError(
            "one process with several devices is not supported",
            found=f"{args.n_gpu} devices in one process",
            expected="one process per device",
            remedy="dlrun --nproc-per-node N",
        )


__all__ = ["FlashCheckpoint"]
