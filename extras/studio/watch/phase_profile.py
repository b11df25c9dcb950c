"""`--profile-phases N`: what takes the time of a step on each rank, and what of it compute does not hide."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from flashckpt import collectives
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.profile_range import WARM_STEPS
from flashckpt.trainer.train.step_phases import PHASES, PhaseTimer

COMPUTE = ("forward", "backward", "clip", "optimizer")
"""Phases that compute; what else a step takes is exposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPhases:
    """The mean step of one rank, in seconds.

    Attributes:
        plain: Of each phase in the steps as they are.
        synchronised: Of each phase where all ranks begin it together.
        waited: For the others, at the ends of the phases.
    """

    plain: Mapping[str, float]
    synchronised: Mapping[str, float]
    waited: float

    @property
    def step(self) -> float:
        """Of a step as it is."""
        return sum(self.plain.values())


class PhaseProfile:
    """Measures some steps as they are, then as many in which the device and all ranks meet at each mark.

    Nothing that is trained depends on it. What a phase sends beside its compute, as FSDP and DDP do, is in that phase.
    """

    def __init__(self, steps: int, timer: PhaseTimer, device: torch.device) -> None:
        self._steps, self._timer, self._device = steps, timer, device
        self._seen, self._waited = 0, 0.0
        self._each: list[Mapping[str, float]] = []
        self.is_done = False

    def settle(self) -> None:
        """See `Meeting`."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def meet(self) -> None:
        """See `Meeting`."""
        began = time.perf_counter()
        dist.barrier()
        self._waited += time.perf_counter() - began

    def before(self) -> None:
        """Begin to synchronise, if the next step is the first of those."""
        if len(self._each) == self._steps and not self.is_done:
            self._timer.meeting = self

    def finished(self, record: StepRecord) -> list[str]:
        """Take a step; return what there is to say behind the last one. Collective then."""
        self._seen += 1
        if self.is_done or self._seen <= WARM_STEPS:
            return []
        self._each.append(record.phases)
        if len(self._each) < 2 * self._steps:
            return []
        self.is_done, self._timer.meeting = True, None
        mine = [_mean(self._each[: self._steps]), _mean(self._each[self._steps :]), self._waited / self._steps]
        found = [RankPhases(plain=a, synchronised=b, waited=c) for a, b, c in collectives.all_gather(mine)]
        return phase_lines(found, self._steps)


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in each) for name in PHASES}


def exposed_s(ranks: Sequence[RankPhases]) -> float:
    """Return what a step takes beyond the compute of the slowest rank, seconds."""
    compute = max(sum(one.synchronised[name] for name in COMPUTE) for one in ranks)
    return max(0.0, median(one.step for one in ranks) - compute)


def phase_lines(ranks: Sequence[RankPhases], steps: int) -> list[str]:
    """Return a table of the phases, and what follows from it, in ms."""
    rows = [(name, [one.synchronised[name] for one in ranks], [one.plain[name] for one in ranks]) for name in PHASES]
    waits: list[Any] = [one.waited for one in ranks]
    lines = [
        f"phases of {len(ranks)} ranks, means of {steps} steps in ms: all ranks begin each phase together; and as they are",
        f"{'phase':20}{'min':>10}{'median':>10}{'max':>10}  {'rank':>5}{'as it is':>12}",
    ]
    for name, values, plain in [*rows, ("waiting for others", waits, [])]:
        slowest = max(range(len(values)), key=values.__getitem__)
        numbers = "".join(f"{1e3 * one:10.2f}" for one in (min(values), median(values), values[slowest]))
        lines.append(f"{name:20}{numbers}  {slowest:5d}" + (f"{1e3 * median(plain):12.2f}" if plain else ""))
    together, step = sum(max(values) for _, values, _ in rows), median(one.step for one in ranks)
    exposed = exposed_s(ranks)
    lines.append(
        f"a step takes {1e3 * step:.2f} ms; its phases one after another, each of its slowest rank, {1e3 * together:.2f} ms. "
        f"Not hidden behind {', '.join(COMPUTE)}: {1e3 * exposed:.2f} ms ({exposed / max(step, 1e-9):.1%})"
    )
    return lines
