"""Accelerate: snapshots, checkpoints and exact resume of all that `accelerator.save_state` would write.

    flash = FlashCheckpoint(accelerator, "/checkpoints/run7", data=loader, snapshot_every=5, persist_every=100)
    flash.restore()  # in the place of accelerator.load_state()
    for epoch in flash.epochs(3):
        for batch in loader:
            with accelerator.accumulate(model):
                ...
            flash.step()  # in the place of accelerator.save_state()

Needs accelerate 1.15. The loop stays the user's; what was prepared and registered is taken from the accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate.utils import DistributedType

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.integrations.prepared_data import PreparedPosition, positions_of, refuse_other_loaders
from flashckpt.integrations.shared import OneForAllRanks, OwnsCheckpointer
from flashckpt.report import RestoreReport

_OTHER_ENGINES = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM"}
_TAKEN = ("_models", "_optimizers", "_schedulers", "_custom_objects")


class FlashCheckpoint(OwnsCheckpointer):
    """Takes the place of `save_state` and `load_state` in a loop; call its methods on every rank.

    It tracks the prepared models, optimizers and schedulers, the GradScaler, what `register_for_checkpointing` was
    given, the generators of each rank, the position in the data, and its count of optimizer steps.

    Args:
        accelerator: The Accelerator.
        root: As for `Checkpointer`.
        data: What the training reads from, or several: a loader with an `ElasticSampler` in it, or that sampler, not
            prepared (exact on any number of ranks); torchdata's `StatefulDataLoader`, not prepared; or a prepared loader of
            `DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)` (exact on as many ranks).
        **options: As for `Checkpointer`: snapshot_every and persist_every in optimizer steps, keep_last ...

    Attributes:
        checkpointer: The Checkpointer.
        steps: Optimizer steps done in this run and the ones that it continues.

    Raises:
        ConfigError: An argument is wrong, DeepSpeed, Megatron-LM or a parallel layout besides data trains the model, or a
            loader's position cannot be resumed.
    """

    def __init__(self, accelerator: Any, root: str | os.PathLike[str], *, data: Any, **options: Any) -> None:
        _refuse_engines(accelerator)
        sources = list(data) if isinstance(data, (list, tuple)) else [data]
        self._positions = positions_of(sources, accelerator)
        refuse_other_loaders(accelerator, sources)
        self._accelerator = accelerator
        self.checkpointer = Checkpointer(root, **options)
        self.steps = 0
        self._known: list[int] = []

    def restore(self, **wanted: Any) -> RestoreReport | None:
        """Track what was prepared, and restore the newest state. Once, after `prepare` and before the first batch.

        Args:
            **wanted: As for `Checkpointer.restore`.

        Returns:
            What was restored; None on a fresh start.

        Raises:
            ConfigError: Nothing was prepared.
            FlashckptError: As `Checkpointer.restore`.
        """
        accelerator = self._accelerator
        if not accelerator._models or not accelerator._optimizers:  # noqa: SLF001 -- what its save_state reads
            raise ConfigError(
                "there is nothing to restore yet",
                found=f"{len(accelerator._models)} models and {len(accelerator._optimizers)} optimizers are prepared",  # noqa: SLF001 -- as above
                expected="both",
                remedy="call accelerator.prepare(model, optimizer, ...), then restore()",
            )
        for label, things in self._things().items():
            self.checkpointer.track(**_named(label, things))
        self.checkpointer.track(scaler=accelerator.scaler, rng=True)
        self._known = self._counts()
        report = self.checkpointer.restore(**wanted)
        self.steps = report.step if report else 0
        return report

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield the epochs up to `stop`, by the first of `data`: the outer loop.

        Right after a restore from the last step of an epoch, that epoch comes first, without a batch: what follows its
        last batch (evaluation, pictures, a file of weights) is in no snapshot, and is done again.

        Raises:
            ConfigError: The data counts no epochs: torchdata's StatefulDataLoader.
        """
        first, *others = self._positions
        if not callable(getattr(first, "epochs", None)):
            raise ConfigError(
                "these data count no epochs",
                found=type(first).__qualname__,
                expected="a prepared loader, or one with an ElasticSampler",
                remedy="prepare the loader, or count epochs in an object that register_for_checkpointing() is given",
            )
        yield from first.epochs(stop, others) if isinstance(first, PreparedPosition) else first.epochs(stop)

    def _things(self) -> dict[str, Iterable[Any]]:
        models, optimizers, schedulers, registered = (getattr(self._accelerator, name) for name in _TAKEN)
        return {
            "model": models,  # with DDP or FSDP around it: says which tensors are equal on all ranks
            "optimizer": optimizers,
            "scheduler": schedulers,
            "registered": [OneForAllRanks(one) for one in registered],
            "data": self._positions,
        }

    def step(self, *, persist: bool = False) -> bool:
        """Say that a batch is done, after `optimizer.step()` and whatever else belongs to it; best as the last line.

        Counts an optimizer step where the batch was the last of its accumulation, and takes a snapshot if one is due;
        does nothing else.

        Args:
            persist: Persist this step whatever `persist_every` says: the last step of a run.

        Returns:
            Whether the batch was the last of its accumulation.

        Raises:
            ConfigError: `restore()` was not called, or something was prepared or registered after it.
            FlashckptError: As `Checkpointer.step`.
        """
        if not self._accelerator.sync_gradients:
            return False
        if self._known and self._counts() != self._known:
            raise ConfigError(
                "something was prepared or registered after restore()",
                found=", ".join(f"{n} {name.strip('_')}" for name, n in zip(_TAKEN, self._counts(), strict=True)),
                expected=", ".join(f"{n} {name.strip('_')}" for name, n in zip(_TAKEN, self._known, strict=True)),
                state="Its state is in no snapshot.",
                remedy="prepare and register everything first, then call restore()",
            )
        self.steps += 1
        self.checkpointer.step(self.steps, persist=persist)
        return True

    def _counts(self) -> list[int]:
        return [len(getattr(self._accelerator, name)) for name in _TAKEN]


def _named(label: str, things: Iterable[Any]) -> dict[str, Any]:
    """Return things by the names under which they are tracked: model, model_1, ..."""
    return {label if not i else f"{label}_{i}": thing for i, thing in enumerate(things)}


def _refuse_engines(accelerator: Any) -> None:
    if (engine := _OTHER_ENGINES.get(accelerator.distributed_type)) is not None:
        raise ConfigError(
            f"{engine} keeps the state of the training where no snapshot would find it",
            found=f"Accelerator with distributed_type {accelerator.distributed_type.value}",
            expected="one process, DDP or FSDP2",
            remedy="train with FSDP2 (fsdp_version=2), or keep to accelerator.save_state()",
        )
    layout = accelerator.parallelism_config
    sizes = {name: getattr(layout, f"{name}_size", 1) for name in ("tp", "cp", "sp")}
    if found := [f"{name}_size={size}" for name, size in sizes.items() if size and size > 1]:
        raise ConfigError(
            "this class resumes data-parallel training only",
            found=", ".join(found),
            expected="as many replicas as ranks",
            remedy="track the parts with a Checkpointer, and a sampler with dp_rank and dp_size",
        )


__all__ = ["FlashCheckpoint"]
