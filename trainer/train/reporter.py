"""What the one reporting rank writes: trace, evaluation, spikes, tensorboard, the progress line."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.printable import printable
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate.results import Scores, curves_of, plain_scores, score_lines
from flashckpt.trainer.generate.samples import Sample
from flashckpt.trainer.nonfatal import Nonfatal
from flashckpt.trainer.train.metrics import ProgressLine, StepRecord, Trace, flops_per_token

logger = logging.getLogger(__name__)
EVAL, SPIKES, SAMPLES = "eval.jsonl", "spikes.jsonl", "samples.jsonl"
BOARD_PATIENCE = 100
"""After a failure tensorboard is retried once every so many steps: a new writer costs a file and a thread."""


class Reporter:
    """Writes all outputs of a run: trace, scores, spikes, progress.

    Args:
        config: The run.
        world: Number of ranks.
        after: Step that was restored; output for later steps is removed.
    """

    def __init__(self, config: RunConfig, *, world: int, after: int) -> None:
        folder = config.log.folder
        self._batch_tokens = config.train.global_batch * config.train.seq_len
        self._trace = Trace(folder, after)
        self._eval = Trace(folder, after, name=EVAL, abandoned=f"abandoned.{EVAL}") if config.eval.every else None
        self._samples = (
            Trace(folder, after, name=SAMPLES, abandoned=f"abandoned.{SAMPLES}") if config.samples.every else None
        )
        self._spikes: Trace | None = None
        self._folder, self._after = folder, after
        self._board = Board(folder, after) if config.log.tensorboard else None
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
            self._board.add(values, record.step)

    def scores(self, step: int, scores: Scores) -> None:
        """Write an evaluation."""
        if self._eval is not None:
            self._eval.write(json.dumps({"step": step, **plain_scores(scores)}))
        if self._board is not None:
            self._board.add(curves_of(scores), step)
        for line in score_lines(scores):
            logger.info("step %d, %s", step, line)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write what the model says."""
        if self._samples is not None:
            line = {"step": step, "samples": [{"prompt": one.prompt, "text": one.text} for one in samples]}
            self._samples.write(json.dumps(line))
        if self._board is not None:
            self._board.say({f"sample/{one.prompt[:40]}": one.prompt + one.text for one in samples}, step)
        for one in samples:
            logger.info("step %d, sample: %s|%s", step, printable(one.prompt), printable(one.text))

    def spike(self, step: int, loss: float, norm: float, ids: Sequence[int], action: str) -> None:
        """Write a loss spike with the samples that were trained in it."""
        if self._spikes is None:
            # not truncated on rollback: a rolled-back spike is exactly what this file records
            self._spikes = Trace(self._folder, 1 << 62, name=SPIKES)
        line = {"step": step, "loss": loss, "norm": norm, "action": action, "samples": list(ids)}
        self._spikes.write(json.dumps(line))
        logger.warning("step %d: loss %.4f is a spike (%s); its samples are in %s", step, loss, action, SPIKES)

    def close(self) -> None:
        """Close every file, and report what could not be written."""
        for output in (self._trace, self._eval, self._samples, self._spikes, self._board, self._progress):
            if output is not None:
                output.close()


class Board:
    """Curves for tensorboard. A full disk costs points, which are counted and reported; never the run.

    Args:
        folder: The run's log folder.
        after: Step that was restored; points of later steps are removed, so that none is drawn twice.
    """

    def __init__(self, folder: str, after: int) -> None:
        self._folder, self._after = f"{folder}/tensorboard", after
        self._writer: Any = None
        self._writing = Nonfatal(self._folder)
        self._calls = 0  # since writing failed
        self._is_installed = True

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each named curve."""
        self._attempt(
            lambda writer: [writer.add_scalar(name, values[name], step) for name in values], step, len(values)
        )

    def say(self, texts: Mapping[str, str], step: int) -> None:
        """Add a text under each name, as it is: markdown shows indented lines so."""
        shown = {name: "".join(f"    {line}\n" for line in text.splitlines()) for name, text in texts.items()}
        self._attempt(lambda writer: [writer.add_text(name, shown[name], step) for name in shown], step, len(shown))

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None and not self._writing.attempt(self._writer.close, lines=0):
            self._writing.lost += 1
        self._writing.report()

    def _attempt(self, put: Callable[[Any], object], step: int, lines: int) -> None:
        if self._is_installed and not self._writing.attempt(lambda: self._put(put, step), lines=lines):
            self._give_up()

    def _put(self, put: Callable[[Any], object], step: int) -> None:
        if self._writer is None:
            self._calls += 1
            if self._writing.lost and self._calls % BOARD_PATIENCE:
                raise OSError(errno.EAGAIN, "not writing for now")
            self._writer = _summary_writer(self._folder, self._after)
            self._is_installed = self._writer is not None
        if self._writer is not None:
            put(self._writer)
            self._after = step

    def _give_up(self) -> None:
        # Its thread died of the error; a new writer begins a new file after the last accepted point.
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writer.close()
        self._writer = None


def _summary_writer(folder: str, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("log.tensorboard is on, but tensorboard is not installed: pip install 'flashckpt[trainer]'")
        return None
    return SummaryWriter(log_dir=folder, purge_step=after + 1)
