"""The progress line: rewritten in place on a terminal, appended elsewhere."""

from __future__ import annotations

import sys

from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.nonfatal import nonfatal_stream
from flashckpt.trainer.watch.figures import Figures


def duration(seconds: float) -> str:
    """Return a time to wait: "0m45s", "3h07m", "2d05h"."""
    whole = max(0, int(seconds))
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


class StepPace:
    """Seconds per step, smoothed over about five."""

    def __init__(self) -> None:
        self._step_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one step."""
        self._step_s = seconds if not self._step_s else 0.8 * self._step_s + 0.2 * seconds

    def left_s(self, steps: int) -> float:
        """Return the seconds that so many steps will take."""
        return self._step_s * steps


def progress_text(record: StepRecord, figures: Figures, *, steps: int, left_s: float) -> str:
    """Return one line about a step."""
    mfu = "n/a" if figures.mfu is None else f"{figures.mfu:.1%}"
    mfu += "" if figures.mfu is None or figures.planned_mfu is None else f" (plan {figures.planned_mfu:.1%})"
    skipped = "  skipped" if record.skipped else ""
    load = f"load {max(record.expert_loads()):.2f}  " if record.experts else ""
    return (
        f"step {record.step}/{steps}  loss {record.loss:.4f}  gnorm {record.norm:.2f}  lr {record.rate:.1e}  {load}"
        f"tok/s {figures.tokens_per_s:,.0f}  mfu {mfu}  snap {record.stall_ms:.1f} ms  eta {duration(left_s)}{skipped}"
    )


class ProgressLine:
    """One line per step on standard error."""

    def __init__(self, *, steps: int, every: int) -> None:
        self._steps, self._every = steps, every
        self._out = nonfatal_stream(sys.stderr, "standard error")
        self._pace = StepPace()

    def show(self, record: StepRecord, figures: Figures) -> None:
        """Print `record` if it is an n-th step."""
        self._pace.add(record.seconds)
        if record.step % self._every and record.step != self._steps:
            return
        line = self.text(record, figures)
        end = "\n" if record.step == self._steps else ""
        self._out.write(f"\r\x1b[K{line}{end}" if self._out.isatty() else line + "\n")

    def text(self, record: StepRecord, figures: Figures) -> str:
        """Return the line."""
        left_s = self._pace.left_s(self._steps - record.step)
        return progress_text(record, figures, steps=self._steps, left_s=left_s)

    def close(self) -> None:
        """Report lines that could not be printed."""
        self._out.report()
