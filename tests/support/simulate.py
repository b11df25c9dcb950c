"""Monte-Carlo simulation of the same world as `flashckpt.plan.model`, failure by failure.

It exists to check the formulas (tests and docs), so it shares no formula with them: it draws failures
and follows what is in memory and on storage at that moment.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from flashckpt.plan.model import Costs, Failures, Forecast


@dataclass(slots=True)
class _World:
    """Where the job is: `work` counts snapshot periods; times are wall seconds."""

    failures: Failures
    costs: Costs
    snapshot_s: float
    persist_every: int
    random: random.Random
    clock_s: float = 0.0
    restart_s: float = 0.0
    in_memory: int = 0  # newest snapshot that can be restored, in snapshot periods
    on_storage: int = 0  # newest committed checkpoint, likewise
    reached: int = 0  # what has ever been captured (only for the parts of the forecast)
    committing: list[tuple[float, int]] = field(default_factory=list)

    def draw(self) -> tuple[float, bool]:
        """Return seconds until the next failure and whether it takes the node's memory along."""
        return self.random.expovariate(1 / self.failures.mtbf_s), self.random.random() < self.failures.storage_share

    def run_until(self, end_s: float) -> None:
        """Train from the restored snapshot until the failure at `end_s`, capturing and persisting."""
        costs, period, now_s = self.costs, self.in_memory, self.clock_s
        while True:
            period += 1
            now_s += self.snapshot_s + costs.stall_s
            persisted = period % self.persist_every == 0
            now_s += costs.persist_stall_s if persisted else 0.0
            staged_s = now_s + costs.staged_s
            if staged_s > end_s:
                break
            self.in_memory = period
            if persisted and period > self.on_storage and all(period != queued for _, queued in self.committing):
                self.committing.append((staged_s + costs.persist_s, period))
        self.clock_s = end_s
        self.settle()

    def settle(self) -> None:
        """Commit what the daemon has finished by now."""
        done = [period for at_s, period in self.committing if at_s <= self.clock_s]
        self.on_storage = max([self.on_storage, *done])
        self.committing = [entry for entry in self.committing if entry[0] > self.clock_s]

    def restart(self, node_lost: bool) -> None:
        """Restart until one attempt is through; a lost node loses memory and persists in flight."""
        while True:
            if node_lost:
                self.in_memory, self.committing = self.on_storage, []
            needed_s = self.costs.restart_storage_s if node_lost else self.costs.restart_memory_s
            next_s, next_lost = self.draw()
            spent_s = min(needed_s, next_s)
            self.clock_s += spent_s
            self.restart_s += spent_s
            self.settle()
            if next_s > needed_s:
                return
            # A second failure while a node is being replaced still needs storage: memory is not back yet.
            node_lost = node_lost or next_lost


def simulate(
    failures: Failures, costs: Costs, *, snapshot_s: float, persist_every: int, count: int, seed: int
) -> Forecast:
    """Follow a job through `count` failures and return the shares of its wall time.

    Args:
        failures: Rates.
        costs: Seconds.
        snapshot_s: Useful seconds between snapshots.
        persist_every: Snapshots per persist.
        count: Failures to follow; the error of the result falls with its root.
        seed: Of the random numbers.
    """
    world = _World(failures, costs, snapshot_s, persist_every, random.Random(seed))
    for _ in range(count):
        after_s, node_lost = world.draw()
        world.run_until(world.clock_s + after_s)
        world.restart(node_lost)
    done = world.in_memory
    wall_s = world.clock_s
    goodput = done * snapshot_s / wall_s
    stall = (done * costs.stall_s + math.floor(done / persist_every) * costs.persist_stall_s) / wall_s
    restart = world.restart_s / wall_s
    return Forecast(goodput=goodput, stall=stall, recompute=1 - goodput - stall - restart, restart=restart)
