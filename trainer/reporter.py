"""What the one reporting rank writes: trace, evaluation, spikes, tensorboard, the progress line."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate import Score
from flashckpt.trainer.metrics import ProgressLine, StepRecord, Trace, flops_per_token

logger = logging.getLogger(__name__)
EVAL, SPIKES = "eval.jsonl", "spikes.jsonl"


class Reporter:
    """Writes everything of a run that is for people and programs to read.

    Args:
        config: The run.
        world: Number of ranks.
        after: Step that was restored; whatever was written for later steps is taken back.
    """

    def __init__(self, config: RunConfig, *, world: int, after: int) -> None:
        folder = config.log.folder
        self._batch_tokens = config.train.global_batch * config.train.seq_len
        self._trace = Trace(folder, after)
        self._eval = Trace(folder, after, name=EVAL, abandoned=f"abandoned.{EVAL}") if config.eval.every else None
        self._spikes: Trace | None = None
        self._folder, self._after = folder, after
        self._board = _open_board(folder, after) if config.log.tensorboard else None
        self._progress = ProgressLine(
            steps=config.train.steps,
            every=config.log.every,
            peak_tflops=config.log.peak_tflops,
            flops=flops_per_token(config.model, config.train.seq_len),
            world=world,
        )

    def step(self, record: StepRecord) -> None:
        """Write one finished step."""
        self._trace.write(record.to_line())
        self._progress.show(record, self._batch_tokens)
        if self._board is not None:
            values = {"loss": record.loss, "gradient norm": record.norm, "learning rate": record.rate}
            values |= {f"loss/{name}": value for name, value in record.channels.items()}
            self._to_board(values, record.step)

    def scores(self, step: int, scores: Mapping[str, Score]) -> None:
        """Write an evaluation."""
        rounded = {
            name: {
                "loss": round(score.loss, 6),
                "perplexity": round(score.perplexity, 4),
                "bits_per_byte": round(score.bits_per_byte, 6),
            }
            for name, score in scores.items()
        }
        if self._eval is not None:
            self._eval.write(json.dumps({"step": step, "held_out": rounded}))
        self._to_board({f"held out/{name} bits per byte": score.bits_per_byte for name, score in scores.items()}, step)
        logger.info(
            "step %d, held out: %s",
            step,
            "  ".join(f"{name} ppl {s.perplexity:.2f} ({s.bits_per_byte:.3f} bits/byte)" for name, s in scores.items()),
        )

    def spike(self, step: int, loss: float, norm: float, ids: Sequence[int], action: str) -> None:
        """Write a loss spike with the samples that were trained in it."""
        if self._spikes is None:
            # Nothing is taken back here: a rolled-back spike is exactly what this file is for.
            self._spikes = Trace(self._folder, 1 << 62, name=SPIKES)
        line = {"step": step, "loss": loss, "norm": norm, "action": action, "samples": list(ids)}
        self._spikes.write(json.dumps(line))
        logger.warning("step %d: loss %.4f is a spike (%s); its samples are in %s", step, loss, action, SPIKES)

    def close(self) -> None:
        """Close every file."""
        for trace in (self._trace, self._eval, self._spikes):
            if trace is not None:
                trace.close()
        if self._board is not None:
            self._board.close()

    def _to_board(self, values: Mapping[str, float], step: int) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:  # a full disk costs the curve, never the run
            logger.warning("tensorboard is given up: %s", error)
            self._board = None


def _open_board(folder: str, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("log.tensorboard is on, but tensorboard is not installed: pip install 'flashckpt[trainer]'")
        return None
    # purge_step: curves of steps that a crash took back are cut, so none is drawn twice
    return SummaryWriter(log_dir=f"{folder}/tensorboard", purge_step=after + 1)
