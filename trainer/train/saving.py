"""How a run's state is tracked, and why a checkpoint cannot be continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashckpt.errors import ConfigError, FlashckptError, SamplerStateError
from flashckpt.trainer.changes import compare, other_data, refuse_changes
from flashckpt.trainer.config import RunConfig

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.trainer.train.loop import Trainer


def checkpointer(trainer: Trainer) -> Checkpointer:
    """Return a Checkpointer that tracks everything a resume needs."""
    from flashckpt import Checkpointer

    settings = trainer.config.checkpoint
    ckpt = Checkpointer(
        settings.root,
        snapshot_every=settings.snapshot_every,
        persist_every=settings.persist_every,
        keep_last=settings.keep_last,
        job=settings.job or None,
        storage_options=settings.storage_options,
        replicate=settings.replicate,
        replicate_every=settings.replicate_every,
        replicate_rate=settings.replicate_rate or None,
    )
    ckpt.track(**_tracked(trainer), rng=True, fenced=("ema",), mesh=trainer.parallel.mesh)
    return ckpt


def _tracked(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": trainer.parallel.parts,
        "optimizer": trainer.optimizers,
        "sampler": trainer.data.sampler,
        "run": trainer.record,
        "guard": trainer.guard,
        "ema": None if trainer.average is None else trainer.average.modules,
    }


def explain(config: RunConfig, error: FlashckptError) -> None:
    """Raise ConfigError or DataError instead of `error` if a changed setting or other data is the reason."""
    from flashckpt.trainer.train.recorded_config import recorded_config

    settings = config.checkpoint
    before = recorded_config(settings.root, settings.job or None, settings.storage_options)
    if before is None:
        return
    try:
        refuse_changes(compare(before, config))
    except ConfigError as clearer:
        raise clearer from error
    if isinstance(error, SamplerStateError):
        raise other_data(error) from error
