"""The trace (one JSON line per step), the progress line, and their records."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.trainer.model.initial import count_parameters
from flashckpt.trainer.model_config import ModelConfig
from flashckpt.trainer.nonfatal import LineFile, nonfatal_stream

TRACE = "trace.jsonl"
ABANDONED = "abandoned.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One finished step. Losses in nats per token; `seconds` of wall clock; `samples`: digest of the global batch."""

    step: int
    loss: float
    norm: float
    rate: float
    tokens: int
    samples: str
    seconds: float
    channels: dict[str, float] = field(default_factory=dict)
    skipped: bool = False
    stall_ms: float = 0.0

    def to_line(self) -> str:
        """Return one JSON line; the loss is also given bit for bit, as `float.hex()`."""
        return json.dumps(
            {
                "step": self.step,
                "loss": self.loss.hex(),
                "loss_nats": round(self.loss, 6),
                "norm": self.norm.hex(),
                "lr": self.rate,
                "tokens": self.tokens,
                "samples": self.samples,
                "channels": {name: round(value, 6) for name, value in self.channels.items()},
                "skipped": self.skipped,
                "seconds": round(self.seconds, 4),
                "stall_ms": round(self.stall_ms, 3),
                "time": round(time.time(), 3),
            }
        )


class Trace:
    """A JSONL file of a run with one line per step: no step twice, despite any crashes.

    Lines after the restored step are moved to another file, so what a crash cost stays visible. A full disk costs
    lines, which are counted and reported; never the run.

    Args:
        folder: The run's log folder; created.
        after: Step that was restored; later lines are moved away. 0 starts a new trace.
        name: The file.
        abandoned: The file for lines of steps that were rolled back.
    """

    def __init__(
        self, folder: str | os.PathLike[str], after: int, *, name: str = TRACE, abandoned: str = ABANDONED
    ) -> None:
        self._abandoned, self._after = Path(folder, abandoned), after
        self._file = LineFile(Path(folder, name), prepare=self._take_back)

    def write(self, line: str) -> None:
        """Append one JSON line."""
        self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _take_back(self, fd: int) -> None:
        """Move the lines of later steps to the other file. Truncating a file needs no space on its disk."""
        with os.fdopen(os.dup(fd), "rb") as file:
            kept, lost = _split(file.read(), self._after)
        if lost:
            abandoned = LineFile(self._abandoned)
            for line in lost:
                abandoned.write(line.decode(errors="replace").rstrip("\n"))
            abandoned.close()
        os.ftruncate(fd, kept)


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the whole lines of a trace; a line that is being written is left out."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _split(data: bytes, after: int) -> tuple[int, list[bytes]]:
    """Return the number of bytes before the first line of a later step, and the whole lines from there on."""
    whole = [
        line for line in data.splitlines(keepends=True) if line.endswith(b"\n")
    ]  # incomplete: a step that never finished
    for number, line in enumerate(whole):
        if _step(line) > after:
            return sum(map(len, whole[:number])), whole[number:]
    return sum(map(len, whole)), []


def _step(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1  # damaged: left in place


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return training FLOPs per token, 6 N + 12 L H Q T (PaLM, appendix B)."""
    return 6.0 * count_parameters(model, active=True) + 12.0 * model.layers * model.heads * model.head_size * seq_len


class ProgressLine:
    """One line per step on standard error: rewritten in place on a terminal, appended elsewhere.

    Args:
        steps: Steps of the whole run.
        every: Print each n-th step.
        peak_tflops: Peak of one device, for MFU; 0: not known.
        flops: FLOPs per token.
        world: Number of devices.
    """

    def __init__(self, *, steps: int, every: int, peak_tflops: float = 0.0, flops: float = 0.0, world: int = 1) -> None:
        self._steps, self._every, self._peak, self._flops, self._world = steps, every, peak_tflops, flops, world
        self._out = nonfatal_stream(sys.stderr, "standard error")
        self._pace_s = 0.0

    def show(self, record: StepRecord, batch_tokens: int) -> None:
        """Print `record` if it is an n-th step."""
        self._pace_s = record.seconds if not self._pace_s else 0.8 * self._pace_s + 0.2 * record.seconds
        if record.step % self._every and record.step != self._steps:
            return
        line = self.text(record, batch_tokens)
        end = "\n" if record.step == self._steps else ""
        self._out.write(f"\r\x1b[K{line}{end}" if self._out.isatty() else line + "\n")

    def close(self) -> None:
        """Report lines that could not be printed."""
        self._out.report()

    def text(self, record: StepRecord, batch_tokens: int) -> str:
        """Return the line."""
        rate = batch_tokens / record.seconds if record.seconds > 0 else 0.0
        mfu = f"{rate * self._flops / (self._peak * 1e12 * self._world):.1%}" if self._peak else "n/a"
        left_s = int(self._pace_s * (self._steps - record.step))
        skipped = "  skipped" if record.skipped else ""
        return (
            f"step {record.step}/{self._steps}  loss {record.loss:.4f}  gnorm {record.norm:.2f}  lr {record.rate:.1e}  "
            f"tok/s {rate:,.0f}  mfu {mfu}  snap {record.stall_ms:.1f} ms  eta {left_s // 60}m{left_s % 60:02d}s{skipped}"
        )
