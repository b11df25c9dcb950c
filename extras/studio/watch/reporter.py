"""What the one reporting rank writes: trace, evaluation, spikes; it hands every step to the pages and the display."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from flashckpt.printable import printable
from flashckpt.trainer.config import RunConfig, without_secrets
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.evaluate.results import Scores, curves_of, plain_scores, score_lines
from flashckpt.trainer.generate.samples import Sample
from flashckpt.trainer.model.flops import flops_per_token, peak_tflops
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.start import expected_mfu
from flashckpt.trainer.train.metrics import StepRecord, Trace
from flashckpt.trainer.train.terminal import terminal_of
from flashckpt.trainer.watch.beside import Beside
from flashckpt.trainer.watch.board import Board
from flashckpt.trainer.watch.engine import EngineWatch
from flashckpt.trainer.watch.events import Events
from flashckpt.trainer.watch.figures import StepMeter, curves
from flashckpt.trainer.watch.live import LiveDisplay
from flashckpt.trainer.watch.plain import ProgressLine
from flashckpt.trainer.watch.wandb_page import WandbPage

logger = logging.getLogger(__name__)
EVAL, SPIKES, SAMPLES = "eval.jsonl", "spikes.jsonl", "samples.jsonl"
_CLOSE_S = 60.0
"""Seconds for the last points of a page at the end of a run."""


class Reporter:
    """Writes all outputs of a run: trace, scores, spikes, progress.

    Args:
        config: The run.
        world: Number of ranks.
        after: Step that was restored; output for later steps is removed.
        engine: What the engine does; None without checkpoints.
        events: What is shown of the past; None begins without.
        device: Name of this rank's device, for its peak; "": not one of those known.
        device_bytes: Returns the peak of memory on the device; None where there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        world: int,
        after: int,
        engine: EngineWatch | None = None,
        events: Events | None = None,
        device: str = "",
        device_bytes: Callable[[], int] | None = None,
    ) -> None:
        folder = config.log.folder
        self._world, self._events = world, events or Events()
        self._pages = [(page, Beside(name)) for name, page in _pages(config, after).items()]
        self._trace, self._every = Trace(folder, after), config.log.every
        self._eval = Trace(folder, after, name=EVAL, abandoned=f"abandoned.{EVAL}") if config.eval.every else None
        self._samples = (
            Trace(folder, after, name=SAMPLES, abandoned=f"abandoned.{SAMPLES}") if config.samples.every else None
        )
        self._spikes: Trace | None = None
        self._folder = folder
        self._display = _display(config, self._events)
        self._meter = StepMeter(
            batch_tokens=config.train.global_batch * config.train.seq_len,
            flops=flops_per_token(config.model, config.train.seq_len),
            peak_tflops=_peak(config, device),
            planned_mfu=expected_mfu(config, resolve_layout(config, world), device),
            world=world,
            device_bytes=device_bytes,
            engine=engine,
        )

    def step(self, record: StepRecord) -> None:
        """Write one finished step."""
        figures = self._meter.measure(record)
        # every expert of every layer is thousands of numbers in some models: as often as the log has a line
        each_expert = record.step % self._every == 0
        self._trace.write(record.to_line(each_expert=each_expert, device_gib=figures.device_gib))
        self._display.show(record, figures)
        if self._pages:
            self._draw(curves(record, figures, self._world), record.step)

    def _draw(self, values: Mapping[str, float], step: int) -> None:
        for page, thread in self._pages:
            thread.do(functools.partial(page.add, values, step))

    def note(self, step: int, text: str) -> None:
        """Show an event on the display, and mark its step on TensorBoard's page."""
        self._events.add(step, text)
        for page, thread in self._pages:
            thread.do(functools.partial(page.note, text, step))

    def started(self, step: int, line: str) -> None:
        """Log how long the start took, by phase, and show it with the first step."""
        logger.info("%s", line)
        self.note(step, line)

    def scores(self, step: int, scores: Scores) -> None:
        """Write an evaluation."""
        if self._eval is not None:
            self._eval.write(json.dumps({"step": step, **plain_scores(scores)}))
        self._draw(curves_of(scores), step)
        for line in score_lines(scores):
            self._events.add(step, line)
            logger.info("step %d, %s", step, line)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write what the model says."""
        if self._samples is not None:
            line = {"step": step, "samples": [{"prompt": one.prompt, "text": one.text} for one in samples]}
            self._samples.write(json.dumps(line))
        texts = {f"sample/{one.prompt[:40]}": one.prompt + one.text for one in samples}
        for page, thread in self._pages:
            thread.do(functools.partial(page.say, texts, step))
        for one in samples:
            text = f"sample: {printable(one.prompt)}|{printable(one.text)}"
            self._events.add(step, text)
            logger.info("step %d, %s", step, text)

    def spike(self, step: int, loss: float, norm: float, ids: Sequence[int], action: str) -> None:
        """Write a loss spike with the samples that were trained in it."""
        if self._spikes is None:
            # not truncated on rollback: a rolled-back spike is exactly what this file records
            self._spikes = Trace(self._folder, 1 << 62, name=SPIKES)
        line = {"step": step, "loss": loss, "norm": norm, "action": action, "samples": list(ids)}
        self._spikes.write(json.dumps(line))
        logger.warning("step %d: loss %.4f is a spike (%s); its samples are in %s", step, loss, action, SPIKES)
        self.note(step, f"loss {loss:.4f} is a spike ({action})")

    def close(self) -> None:
        """Close every file, and report what could not be written."""
        self._display.close()
        for page, thread in self._pages:
            thread.close(page.close, _CLOSE_S)
        for output in (self._trace, self._eval, self._samples, self._spikes):
            if output is not None:
                output.close()


def _pages(config: RunConfig, after: int) -> dict[str, Board | WandbPage]:
    pages: dict[str, Board | WandbPage] = {}
    if config.log.tensorboard:
        pages["tensorboard"] = Board(config.log.folder, after)
    if config.log.wandb:
        pages["wandb"] = WandbPage(config.log, recorded_values(without_secrets(config)), after)
    return pages


def _display(config: RunConfig, events: Events) -> LiveDisplay | ProgressLine:
    terminal = terminal_of(config.log.display)
    if terminal is not None:
        try:
            return LiveDisplay(terminal, steps=config.train.steps, events=events)
        except (ImportError, OSError, ValueError) as error:
            logger.warning("no live display: %s", error)
    return ProgressLine(steps=config.train.steps, every=config.log.every)


def _peak(config: RunConfig, device: str) -> float:
    if config.log.peak_tflops or not device:
        return config.log.peak_tflops
    peak = peak_tflops(device)
    if peak:
        logger.info("MFU is of %g TFLOPS per device (%s, dense bfloat16)", peak, device)
    else:
        logger.info("no MFU: the peak of %s is not known, set log.peak_tflops", device)
    return peak
