"""The record of a step, and the trace: one JSON line per step."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.trainer.train.nonfatal import LineFile

TRACE = "trace.jsonl"
ABANDONED = "abandoned.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One finished step. Losses in nats per token; `seconds` of wall clock; `samples`: digest of the global batch.

    `stall_ms`: how long `Checkpointer.step()` and its fence held the training thread of this rank.
    `phases`: seconds by phase (`step_phases.PHASES`); they add up to `seconds`.
    `experts`: of each layer the tokens that chose each expert; [] without experts.
    """

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
    phases: dict[str, float] = field(default_factory=dict)
    experts: list[list[int]] = field(default_factory=list)

    def expert_loads(self) -> list[float]:
        """Return for each layer the load of its most loaded expert as a multiple of the mean: 1 where all are equal."""
        return [max(tokens) * len(tokens) / max(1, sum(tokens)) for tokens in self.experts]

    def to_line(self, *, each_expert: bool = False, device_gib: float | None = None) -> str:
        """Return one JSON line; the loss is also given bit for bit, as `float.hex()`.

        Args:
            each_expert: Whether the tokens of every expert are in it; else the most loaded one of each layer.
            device_gib: Peak of memory on the reporting rank's device; None: not known.
        """
        experts: dict[str, Any] = {} if device_gib is None else {"device_gib": round(device_gib, 3)}
        if self.experts:
            experts["expert_load"] = [round(load, 4) for load in self.expert_loads()]
        if self.experts and each_expert:
            experts["expert_tokens"] = self.experts
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
                "phases_ms": {name: round(seconds * 1e3, 3) for name, seconds in self.phases.items()},
                **experts,
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
