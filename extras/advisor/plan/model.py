"""The model of `flashckpt plan`: two tiers, Young's and Daly's intervals, expected goodput. Pure.

Failures are a Poisson process whose rate grows linearly with the number of GPUs. A share of them
takes host memory along (the node is lost) and is restored from storage, the others are restored
from memory. In between, work is done in snapshot periods of `snapshot_s` useful seconds plus a
stall; every `persist_every`-th snapshot is persisted beside training.

The expectation is that of a Markov chain over snapshot periods, each of which ends in success, in a process failure
(the same period again) or in a lost node (back to the last committed checkpoint); restarts can be struck themselves.
With one tier it is Daly's (1/l + R) (exp(l S) - 1). What is captured can be restored only after a delay D, and a
failure within it costs one more period: a factor exp(l D). docs/benchmarking.md derives it; the tests hold it to a
Monte-Carlo simulation that shares no formula with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PUBLISHED_INTERRUPTIONS = 419
PUBLISHED_DAYS = 54
PUBLISHED_GPUS = 16_384
PUBLISHED_GPU_HOURS = PUBLISHED_DAYS * 24 * PUBLISHED_GPUS / PUBLISHED_INTERRUPTIONS
"""GPU-hours per unexpected interruption of the published Llama 3 405B run: 50,677."""

STORAGE_SHARE = (148 + 72) / PUBLISHED_INTERRUPTIONS
"""Share of failures that take a node's memory along: GPU and HBM3 faults of the same run, where the node is replaced."""

_HUGE = 700.0  # exp() overflows above: no work gets done at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often a job of `gpus` is struck, and how often that costs host memory as well.

    `gpu_mtbf_s` is the mean time between failures of one GPU, in GPU-seconds; linear scaling is an assumption.
    """

    gpus: int
    gpu_mtbf_s: float
    storage_share: float = STORAGE_SHARE

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the whole job."""
        return self.gpu_mtbf_s / self.gpus

    @property
    def memory_rate(self) -> float:
        """Failures per second that leave the memory tier intact."""
        return (1 - self.storage_share) / self.mtbf_s

    @property
    def storage_rate(self) -> float:
        """Failures per second that are restored from storage."""
        return self.storage_share / self.mtbf_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What checkpointing and restarting cost, in seconds.

    Attributes:
        stall_s: Training blocked or slowed per snapshot.
        staged_s: From the capture until the snapshot can be restored from memory.
        persist_stall_s: Training slowed per persist (step-time uplift x its duration).
        persist_s: From the complete snapshot until the checkpoint is committed.
        restart_memory_s: From the failure until the restored step runs, state read from memory.
        restart_storage_s: The same with the state read from storage (node replaced).
    """

    stall_s: float
    staged_s: float
    persist_stall_s: float
    persist_s: float
    restart_memory_s: float
    restart_storage_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Shares of the wall time; they add up to 1."""

    goodput: float
    stall: float
    recompute: float
    restart: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """A choice: useful seconds between snapshots, snapshots per persist, and what comes of it."""

    snapshot_s: float
    persist_every: int
    forecast: Forecast

    @property
    def persist_s(self) -> float:
        """Useful seconds between persists."""
        return self.snapshot_s * self.persist_every


def young(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval sqrt(2 C M) in seconds of useful work between captures (first order)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval in seconds; for C of 2 M and above it is M."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def expected_s(work_s: float, rate: float) -> float:
    """Return the expected time until `work_s` seconds without a failure are through, from a fresh start each time."""
    if rate * work_s > _HUGE:
        return math.inf
    return math.expm1(rate * work_s) / rate if rate > 0 else work_s


@dataclass(frozen=True, slots=True)
class _Restart:
    """Expected seconds of a restart from memory, its chance to end in a lost node, seconds of one from storage."""

    memory_s: float
    lost: float
    storage_s: float


def _restart(failures: Failures, costs: Costs) -> _Restart:
    """Return what a restart really takes: a failure during it starts it again, a lost node turns it into the long one."""
    rate = failures.memory_rate + failures.storage_rate
    struck = -math.expm1(-rate * costs.restart_memory_s)
    through = 1 - struck * failures.memory_rate / rate
    return _Restart(
        memory_s=struck / rate / through,
        lost=struck * failures.storage_rate / rate / through,
        storage_s=expected_s(costs.restart_storage_s, rate),
    )


def running_share(failures: Failures, costs: Costs) -> float:
    """Return the share of wall time that is not spent in restarts (work, stall and recompute together)."""
    restart = _restart(failures, costs)
    after_process_s = restart.memory_s + restart.lost * restart.storage_s
    return 1 / (1 + failures.memory_rate * after_process_s + failures.storage_rate * restart.storage_s)


def _snapshot_period(failures: Failures, costs: Costs, period_s: float) -> tuple[float, float]:
    """Return (expected seconds, -log of the chance of success) of one period, until it is through or a node is lost."""
    restart = _restart(failures, costs)
    rate = failures.memory_rate + failures.storage_rate
    struck = -math.expm1(-rate * period_s)
    process = struck * failures.memory_rate / rate
    through = 1 - process * (1 - restart.lost)
    seconds = (struck / rate + process * restart.memory_s) / through
    # A failure before the newest snapshot is staged costs one more period, in time and in exposure.
    again = math.exp(min(_HUGE, failures.memory_rate * costs.staged_s))
    return seconds * again, max(0.0, rate * period_s + math.log(through)) * again


def forecast(failures: Failures, costs: Costs, *, snapshot_s: float, persist_every: int) -> Forecast:
    """Return the expected shares of wall time for one choice of intervals.

    Args:
        failures: Rates.
        costs: Seconds.
        snapshot_s: Useful seconds between snapshots, above 0.
        persist_every: Snapshots per persist, at least 1. Exact for `persist_s` up to the persist interval: a persist
            that takes longer delays the next one, which the caller has to rule out (`best` does).
    """
    stall_s = costs.stall_s + costs.persist_stall_s / persist_every
    seconds, exposure = _snapshot_period(failures, costs, snapshot_s + stall_s)
    storage_s = _restart(failures, costs).storage_s
    delay = failures.storage_rate * (costs.persist_s + costs.staged_s)
    if persist_every * exposure + delay > _HUGE or math.isinf(storage_s):
        wall_s = math.inf
    else:
        lost = -math.expm1(-exposure)
        attempts = math.expm1(persist_every * exposure)
        visits = attempts / lost if lost > 0 else persist_every
        wall_s = (seconds * visits + storage_s * attempts) * math.exp(delay)
    running = running_share(failures, costs)
    goodput, stall = persist_every * snapshot_s / wall_s, persist_every * stall_s / wall_s
    recompute = max(0.0, running - goodput - stall)
    return Forecast(goodput=goodput, stall=stall, recompute=recompute, restart=1 - running)


def best(
    failures: Failures,
    costs: Costs,
    *,
    step_s: float = 0.0,
    persist_floor_s: float = 0.0,
) -> Intervals:
    """Return the intervals with the highest expected goodput.

    Snapshots are taken at steps, and not before the snapshot before them is staged; persists not before the persist
    before them is through, so both intervals have a floor.

    Args:
        failures: Rates.
        costs: Seconds.
        step_s: Seconds per step; the snapshot interval becomes a whole number of steps. 0: any interval.
        persist_floor_s: Lower bound of the persist interval besides `persist_s` (requests that the storage answers).
    """
    floor_s = max(step_s, costs.staged_s, 1e-3)

    def on_steps(seconds: float) -> float:
        return max(1, round(seconds / step_s)) * step_s if step_s > 0 else seconds

    def persists(snapshot_s: float) -> Intervals:
        return _best_persist(failures, costs, snapshot_s, max(persist_floor_s, costs.persist_s))

    def loss(seconds: float) -> float:
        return -persists(seconds).forecast.goodput

    guess_s = max(floor_s, young(costs.stall_s, 1 / failures.memory_rate) if failures.memory_rate > 0 else floor_s)
    found_s = _minimum(loss, floor_s, 100 * guess_s)
    ceil_s = math.ceil(floor_s / step_s) * step_s if step_s > 0 else floor_s
    chosen_s = max(on_steps(found_s), ceil_s)
    return persists(chosen_s)


def _best_persist(failures: Failures, costs: Costs, snapshot_s: float, floor_s: float) -> Intervals:
    """Return the best whole number of snapshots per persist, not below `floor_s` seconds of work."""
    least = max(1, math.ceil(floor_s / snapshot_s - 1e-9))

    def at(every: int) -> Intervals:
        outcome = forecast(failures, costs, snapshot_s=snapshot_s, persist_every=every)
        return Intervals(snapshot_s=snapshot_s, persist_every=every, forecast=outcome)

    if failures.storage_rate <= 0 or costs.persist_stall_s <= 0:
        return at(least)  # persisting costs training nothing: as often as the storage allows
    ideal = young(costs.persist_stall_s, 1 / failures.storage_rate) / snapshot_s
    high = max(least + 1, math.ceil(4 * ideal))
    found = _minimum(lambda every: -at(max(least, round(every))).forecast.goodput, least, high)
    near = {max(least, round(found) + shift) for shift in (-1, 0, 1)}
    return max((at(every) for every in near), key=lambda choice: choice.forecast.goodput)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the place of the minimum of a unimodal function by golden sections of the logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = math.log(low), math.log(max(high, low * 1.0001))
    for _ in range(60):
        inner, outer = right - ratio * (right - left), left + ratio * (right - left)
        if function(math.exp(inner)) <= function(math.exp(outer)):
            right = outer
        else:
            left = inner
        if right - left < 1e-4:
            break
    return math.exp((left + right) / 2)


def wrong_intervals(
    failures: Failures,
    costs: Costs,
    chosen: Intervals,
    *,
    persist_floor_s: float = 0.0,
) -> list[tuple[float, float, float]]:
    """Return (factor, goodput with the snapshot interval off by it, goodput with the persist interval off by it)."""
    rows = []
    for factor in (0.1, 0.25, 0.5, 1, 2, 4, 10):
        every = max(1, round(chosen.persist_every / factor))
        snapshots = forecast(failures, costs, snapshot_s=chosen.snapshot_s * factor, persist_every=every)
        every = max(1, round(chosen.persist_every * factor))
        # Faster than the storage takes them is not possible: intervals below the persist time mean the persist time.
        least = math.ceil(max(costs.persist_s, persist_floor_s) / chosen.snapshot_s - 1e-9)
        persists = forecast(failures, costs, snapshot_s=chosen.snapshot_s, persist_every=max(every, least, 1))
        rows.append((factor, snapshots.goodput, persists.goodput))
    return rows
