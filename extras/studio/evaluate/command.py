"""`--evaluate`: the scores of a checkpoint, or of weights from elsewhere, without training. In any layout."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.distributed as dist

from flashckpt.environment import env
from flashckpt.errors import ConfigError, NoCheckpointError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate.results import Scores, score_table
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.hub.source import AVERAGE, MODEL, CheckpointWeights, SavedWeights, WeightSource, open_weights
from flashckpt.trainer.hub.start import refuse_other_model
from flashckpt.trainer.hub.weights import load
from flashckpt.trainer.parallel.apply import build_parallel
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.prepare.corpus import prepare_corpus


def evaluate(config: RunConfig, step: str | None = None) -> tuple[Scores, str]:
    """Return the scores of the weights of a run, the same on every rank, and where the weights were.

    They are those of the newest checkpoint of the run (`ema.evaluate`: their average), or else those of `init.from`. Nothing is written but the text
    of a run without `[[data.sources]]`.

    Raises:
        NoCheckpointError: the run has no checkpoint of `step`.
        ConfigError: there are none, or they are those of another model.
        DataError, LayoutError: see `Evaluator` and `resolve_layout`.
    """
    layout = resolve_layout(config, env.WORLD_SIZE)
    if not config.data.sources and config.eval.held_out:
        prepare_corpus(config.data.folder, config.data.source, config.data.holdout_every)
    source = _weights(config, step)
    try:
        config = _as_written(config, source)
        refuse_other_model(config.model, source.model, source.where)
        with process_group(config) as device:
            parallel = build_parallel(on_device(config, device.type), layout, device)
            evaluator = Evaluator(config, parallel)
            _refuse_different(source.where, device)
            load(parallel.bare_parts(), source)
            return evaluator.scores(), source.where
    finally:
        source.close()


def evaluation(config: RunConfig, step: str | None = None) -> str:
    """Return where the weights were and their scores as a table, as `evaluate` finds them; raises as it does."""
    scores, where = evaluate(config, step)
    return f"{where}\n{score_table(scores)}"


def _as_written(config: RunConfig, source: WeightSource) -> RunConfig:
    """Return the run as it is in the phase that wrote the weights."""
    if not config.phase.each or not isinstance(source, SavedWeights):
        return config
    model = replace(config.model, rope_base=source.model.rope_base)
    return replace(config, model=model, train=replace(config.train, seq_len=source.run.train.seq_len))


def _weights(config: RunConfig, step: str | None) -> WeightSource:
    wanted = AVERAGE if config.ema.evaluate else MODEL
    if step is not None:  # never other weights in its place
        return CheckpointWeights(config.checkpoint.root, step, config.checkpoint.storage_options, wanted)
    for place, label in ((config.checkpoint.root, wanted), (config.init.from_, MODEL)):
        if place:
            try:
                return open_weights(place, config.checkpoint.storage_options, label)
            except NoCheckpointError:
                continue
    raise ConfigError(
        "there are no weights to evaluate",
        found=f"no checkpoint in checkpoint.root = {config.checkpoint.root!r}, init.from = {config.init.from_!r}",
        expected="the root of a run that has a checkpoint, or init.from",
        state="Nothing was started.",
    )


def _refuse_different(where: str, device: torch.device) -> None:
    """Raise ConfigError if the ranks read different checkpoints: one was committed between their looks. Collective."""
    number = int.from_bytes(hashlib.blake2b(where.encode(), digest_size=7).digest(), "little")
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        raise ConfigError(
            "the ranks found different checkpoints",
            found=f"{where} on this one",
            expected="the same newest checkpoint on all ranks (is the run still training?)",
            state="Nothing was evaluated.",
            remedy="start again, or evaluate a root to which nothing is written",
        )
