"""What the one reporting rank writes: trace, evaluation, spikes; it hands every step to the pages and the display."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.printable import printable
from flashckpt.trainer.config import RunConfig, without_secrets
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.evaluate.results import Scores, curves_of, plain_scores, score_lines
from flashckpt.trainer.flops import flops_per_token, peak_tflops
from flashckpt.trainer.generate.samples import Sample
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.start import expected_mfu
from flashckpt.trainer.train.metrics import StepRecord, Trace
from flashckpt.trainer.train.nonfatal import Nonfatal, terminal_of
from flashckpt.trainer.watch.engine import EngineWatch, Events
from flashckpt.trainer.watch.figures import ProgressLine, StepMeter, curves
from flashckpt.trainer.watch.live import LiveDisplay
from flashckpt.trainer.watch.wandb_page import WandbPage

logger = logging.getLogger(__name__)
EVAL, SPIKES, SAMPLES = "eval.jsonl", "spikes.jsonl", "samples.jsonl"
_CLOSE_S = 60.0
"""Seconds for the last points of a page at the end of a run."""
LIMIT = 1000
"""Calls that may wait; more are dropped and counted."""
BOARD_PATIENCE = 100
"""After a failure tensorboard is retried once every so many steps: a new writer costs a file and a thread."""
_FLUSH_S = 10
"""Seconds after which points are in the file: a killed rank loses no more of its curves."""


class Reporter:
    """Writes all outputs of a run: trace, scores, spikes, progress.

    Args:
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


class Beside:
    """Runs calls that may be slow, imports or files or sockets, one after another in one thread. Close it before the process ends.

    Args:
        name: Of the thread and in the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(LIMIT)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # a hung server must not keep it
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Have `call` run soon; dropped where too many wait."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def close(self, last: Callable[[], object], timeout_s: float) -> bool:
        """Run what waits, then `last`; return whether that was done in time, and log what was lost."""
        end = time.monotonic() + timeout_s
        for call in (last, None):
            try:
                self._calls.put(call, timeout=max(0.0, end - time.monotonic()))
            except queue.Full:
                break
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._dropped:
            logger.warning("%s: %d steps were left out, since it was too slow", self._name, self._dropped)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s: its last points may be missing", self._name, timeout_s)
            return False
        return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("%s failed; training continues", self._name)


class Board:
    """A run's page in TensorBoard. A full disk costs points, which are counted and reported; never the run.

    Args:
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
        self._attempt(lambda: self._points(values, step), step, lines=len(values))

    def note(self, text: str, step: int) -> None:
        """Mark a step with a text, in the tab of texts."""
        self._attempt(lambda: self._writer.add_text("events", text, step), step, lines=1)

    def say(self, texts: Mapping[str, str], step: int) -> None:
        """Add a text under each name, as it is: markdown shows indented lines so."""
        shown = {name: "".join(f"    {line}\n" for line in text.splitlines()) for name, text in texts.items()}
        self._attempt(lambda: [self._writer.add_text(name, shown[name], step) for name in shown], step, len(shown))

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None and not self._writing.attempt(self._writer.close, lines=0):
            self._writing.lost += 1
        self._writing.report()

    def _attempt(self, write: Callable[[], object], step: int, lines: int) -> None:
        if self._is_installed and not self._writing.attempt(lambda: self._write(write, step), lines=lines):
            self._give_up()

    def _points(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _write(self, write: Callable[[], object], step: int) -> None:
        if self._writer is None:
            self._calls += 1
            if self._writing.lost and self._calls % BOARD_PATIENCE:
                raise OSError(errno.EAGAIN, "not writing for now")
            self._writer = _summary_writer(self._folder, self._after)
            self._is_installed = self._writer is not None
        if self._writer is not None:
            write()
            self._after = max(self._after, step)

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
    return SummaryWriter(log_dir=folder, purge_step=after + 1, flush_secs=_FLUSH_S)
