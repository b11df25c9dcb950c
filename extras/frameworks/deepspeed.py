"""DeepSpeed: snapshots, checkpoints and exact resume of an engine with ZeRO 0 to 3, on any number of ranks.

    flash = FlashCheckpoint(engine, "/checkpoints/run7", data=loader, snapshot_every=5, persist_every=100)
    flash.restore()  # in the place of engine.load_checkpoint()
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()
        flash.step()  # in the place of engine.save_checkpoint()

Needs deepspeed 0.19. The loop and the engine stay the user's.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.integrations.deepspeed_fragments import refresh_weights
from flashckpt.integrations.deepspeed_refusals import refuse_unsupported
from flashckpt.integrations.deepspeed_state import EngineState, OneSchedule, Trained
from flashckpt.integrations.shared import OwnsCheckpointer, Share, check_share, elastic_in
from flashckpt.report import RestoreReport

_LOADERS = "give the loader an ElasticSampler, or use torchdata's StatefulDataLoader"


class FlashCheckpoint(OwnsCheckpointer):
    """Takes the place of `save_checkpoint` and `load_checkpoint` in a loop; call its methods on every rank.

    It tracks the fp32 weights and the state of the optimizer by the names of the parameters, parameters that are not
    trained, buffers, the scheduler, the loss scale, what the engine counts, the generators of each rank, and the position
    in the data. Anything else is tracked by `flash.checkpointer.track(...)` before `restore()`.

    Args:
        engine: What `deepspeed.initialize` returned.
        root: As for `Checkpointer`.
        data: What the training reads from, or several: a loader with an `ElasticSampler` in it, or that sampler (exact on
            any number of ranks); torchdata's `StatefulDataLoader` (exact on as many).
        **options: As for `Checkpointer`: snapshot_every and persist_every in optimizer steps, keep_last ...

    Attributes:
        checkpointer: The Checkpointer.
        steps: Optimizer steps done in this run and the ones that it continues, with those that DeepSpeed skipped.

    Raises:
        ConfigError: An argument is wrong, the engine keeps state where no snapshot would find it, or a loader's position
            cannot be resumed.
    """

    def __init__(self, engine: Any, root: str | os.PathLike[str], *, data: Any, **options: Any) -> None:
        refuse_unsupported(engine)
        sources = list(data) if isinstance(data, (list, tuple)) else [data]
        self._positions = _positions_of(sources, engine)
        self._engine, self._trained = engine, Trained(engine)
        self.checkpointer = Checkpointer(root, **options)
        self.steps = self._seen = 0
        self._hook: Any = None

    def restore(self, **wanted: Any) -> RestoreReport | None:
        """Track the engine's state, and restore the newest one. Once, before the first batch.

        Args:
            **wanted: As for `Checkpointer.restore`.

        Returns:
            What was restored; None on a fresh start.

        Raises:
            UnsupportedStateError: The state of this optimizer cannot be made before its first step.
            FlashckptError: As `Checkpointer.restore`.
        """
        engine, trained = self._engine, self._trained
        trained.look()
        scheduler = None if engine.lr_scheduler is None else OneSchedule(engine.lr_scheduler)
        state = EngineState(engine, trained)
        self.checkpointer.track(engine=state, scheduler=scheduler, data=self._positions, rng=True)
        self._hook = trained.inner.register_step_pre_hook(lambda *_: self.checkpointer.fence())
        report = self.checkpointer.restore(**wanted)
        if report is not None:
            refresh_weights(engine)
        self.steps, self._seen = report.step if report else 0, engine.global_steps
        return report

    def step(self, *, persist: bool = False) -> bool:
        """Say that a batch is done, after `engine.step()` and whatever else belongs to it; best as the last line.

        Counts an optimizer step where the batch was the last of its accumulation, and takes a snapshot if one is due;
        does nothing else.

        Args:
            persist: Persist this step whatever `persist_every` says: the last step of a run.

        Returns:
            Whether the batch was the last of its accumulation.

        Raises:
            ConfigError: `restore()` was not called.
            FlashckptError: As `Checkpointer.step`.
        """
        if self._engine.global_steps == self._seen:
            return False
        self._seen = self._engine.global_steps
        if self._hook is not None:
            self._trained.look()
        self.steps += 1
        self.checkpointer.step(self.steps, persist=persist)
        return True

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        super()._end()


def _positions_of(sources: list[Any], engine: Any) -> list[Any]:
    """Return what is tracked of each source of the training data.

    Raises:
        ConfigError: The position of one cannot be resumed.
    """
    if not [source for source in sources if source is not None]:
        raise ConfigError(
            "data= is missing: the loader or sampler that training reads",
            expected="FlashCheckpoint(engine, root, data=loader)",
            remedy=_LOADERS,
        )
    if engine.training_dataloader is not None:
        raise ConfigError(
            "the loader that DeepSpeed makes keeps no position",
            found="deepspeed.initialize(training_data=...)",
            expected="a loader of the program",
            remedy=f"leave training_data out; {_LOADERS}",
        )
    return [_position(source, engine) for source in sources]


def _position(source: Any, engine: Any) -> Any:
    if (elastic := elastic_in(source)) is not None:
        share = Share(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            accumulation=engine.gradient_accumulation_steps(),
            place_remedy="ElasticSampler(dp_rank=torch.distributed.get_rank(), dp_size=torch.distributed.get_world_size(), ...)",
            batch_remedy='global_batch_size=engine.train_batch_size(), and a configuration with "train_batch_size" set and '
            '"gradient_accumulation_steps" left out',
        )
        check_share(elastic, source, share)
        return elastic
    if isinstance(source, DataLoader) and not callable(getattr(source, "state_dict", None)):
        raise ConfigError(
            "the position of a loader cannot be resumed",
            found=f"a {type(source).__qualname__} with a {type(source.sampler).__qualname__}",
            expected="an ElasticSampler in it, or a StatefulDataLoader",
            remedy=_LOADERS,
        )
    return source


__all__ = ["FlashCheckpoint"]
