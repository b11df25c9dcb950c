"""The figures of a step that are not part of its result: speed, memory, checkpoints. And their names on the pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt.environment import env
from flashckpt.trainer.flops import mfu
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.nonfatal import nonfatal_stream
from flashckpt.trainer.watch.engine import EngineWatch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is known about one step besides its record; None where it is not known.

    Attributes:
        tokens_per_s: Of all ranks together.
        mfu: Share of the devices' peak, 0.0 to 1.0.
        planned_mfu: What the plan expects of it.
        device_gib: Peak that torch has allocated on the reporting rank's device, GiB.
        host_gib: Resident memory of the reporting rank, the snapshots that it maps included, GiB.
        snapshot, committed, lag, restarts: As of EngineWatch, in steps.
    """

    tokens_per_s: float
    mfu: float | None = None
    planned_mfu: float | None = None
    device_gib: float | None = None
    host_gib: float | None = None
    snapshot: int = 0
    committed: int | None = None
    lag: int | None = None
    restarts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeter:
    """Measures the figures of a step.

    Attributes:
        batch_tokens: Of the global batch.
        flops: Per token.
        peak_tflops: Of one device; 0: not known.
        planned_mfu: As Figures has it.
        device_bytes: Returns the peak of memory on the device; None where there is none.
        engine: What the engine does; None without checkpoints.
    """

    batch_tokens: int
    flops: float = 0.0
    peak_tflops: float = 0.0
    world: int = 1
    planned_mfu: float | None = None
    device_bytes: Callable[[], int] | None = None
    engine: EngineWatch | None = None

    def measure(self, record: StepRecord) -> Figures:
        """Return the figures of a step that has just ended."""
        speed = self.batch_tokens / record.seconds if record.seconds > 0 else 0.0
        engine = self.engine
        return Figures(
            tokens_per_s=speed,
            mfu=mfu(speed, self.flops, self.peak_tflops * 1e12, self.world) if self.peak_tflops else None,
            planned_mfu=self.planned_mfu,
            device_gib=None if self.device_bytes is None else self.device_bytes() / 2**30,
            host_gib=resident_gib(),
            snapshot=0 if engine is None else engine.snapshot,
            committed=None if engine is None else engine.committed,
            lag=None if engine is None else engine.lag,
            restarts=env.FLASHCKPT_RESTART if engine is None else engine.restarts,
        )


def resident_gib() -> float | None:
    """Return the resident memory of this process; None where /proc does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 -- a third of the time of Path
            return int(file.read().split()[1]) * _PAGE_BYTES / 2**30
    except (OSError, ValueError, IndexError):
        return None


def curves(record: StepRecord, figures: Figures, world: int) -> dict[str, float]:
    """Return the point of each curve at this step by its name, on TensorBoard's page and wandb's alike."""
    values: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/gradient norm": record.norm,
        "train/learning rate": record.rate,
        "throughput/tokens per second": figures.tokens_per_s,
        "throughput/tokens per second and device": figures.tokens_per_s / world,
        "throughput/seconds per step": record.seconds,
        "throughput/MFU": figures.mfu,
        "throughput/MFU planned": figures.planned_mfu,
        "memory/device peak GiB": figures.device_gib,
        "memory/host resident GiB": figures.host_gib,
        "checkpoint/snapshot stall ms": record.stall_ms,
        "checkpoint/persist lag steps": figures.lag,
        "checkpoint/restarts so far": float(figures.restarts),
    }
    values |= {f"train/loss {name}": value for name, value in record.channels.items()}
    for layer, load in enumerate(loads := record.expert_loads()):
        values |= {f"experts/layer {layer} load, max over mean": load, "experts/load, max over mean": max(loads)}
    values |= {f"phase/{name} ms": seconds * 1e3 for name, seconds in record.phases.items()}
    return {name: value for name, value in values.items() if value is not None}


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
