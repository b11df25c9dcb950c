"""`python -m simulation.forecast --nodes 2,16`: jobs under failures drawn one by one, beside what `flashckpt plan` calculates.

Failures come as often as the published run of Llama 3 had them, in proportion to the nodes, unless `--mtbf` says otherwise. Calm is
jumped over (`simulation.calm`). The formula is given what the simulation measured of one snapshot, one persist and one
restart, and how often failures came; so what is compared is how it puts them together: the share of time that is useful.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from flashckpt.plan.model import PUBLISHED_GPU_HOURS, STORAGE_SHARE, Costs, Failures, Forecast, forecast
from simulation import run
from simulation.job import Setup
from simulation.plan import Fault
from simulation.run import simulate

GPUS_PER_NODE = 8
NODE_MTBF_S = 3600 * PUBLISHED_GPU_HOURS / GPUS_PER_NODE
"""Between failures of one node."""
FORECAST = Setup(step_s=30.0, persist_every=5, copy_s=4.0)
"""The job, but for its size."""


@dataclass(kw_only=True)
class Found:
    """How jobs of one size went, all together.

    Attributes:
        setup: Of each job.
        seconds: Of the calendar, since its first step began.
        run_s: Those of them that were run, not skipped.
        kept, taken: Steps that were left at the end, and that were taken.
        outages: What each ended with, and its seconds.
        commits, commit_s: How many, and the sum from each snapshot to its commit.
        requests: Of all nodes to the root.
        cpu_s: What it cost.
    """

    setup: Setup
    seconds: float = 0.0
    run_s: float = 0.0
    kept: int = 0
    taken: int = 0
    outages: list[tuple[str, float]] = field(default_factory=list)
    commits: int = 0
    commit_s: float = 0.0
    requests: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Found) -> Found:
        """Return both together."""
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)[1:]}
        return Found(setup=self.setup, **sums)

    @property
    def goodput(self) -> float:
        """Share of time in steps that were kept."""
        return self.kept * self.setup.step_s / self.seconds

    @property
    def lost(self) -> float:
        """Steps lost per failure: those that were repeated, and the part of the one that was broken off."""
        rest_s = self.seconds - self.kept * self.setup.step_s - sum(seconds for _, seconds in self.outages)
        return rest_s / self.setup.step_s / max(1, len(self.outages))

    @property
    def planned_lost(self) -> float:
        """The same as `flashckpt plan` calculates it."""
        return self.formula.recompute * self.seconds / self.setup.step_s / max(1, len(self.outages))

    @property
    def formula(self) -> Forecast:
        """What `flashckpt plan` calculates from the same costs and as many failures."""
        seconds = {kind: [s for one, s in self.outages if one == kind] for kind in ("memory", "storage")}
        costs = Costs(
            stall_s=0.0,
            staged_s=self.setup.copy_s,
            persist_stall_s=0.0,
            persist_s=self.commit_s / self.commits - self.setup.copy_s,
            restart_memory_s=fmean(seconds["memory"] or [0.0]),
            restart_storage_s=fmean(seconds["storage"] or [0.0]),
        )
        count = max(1, len(self.outages))
        failures = Failures(gpus=1, gpu_mtbf_s=self.seconds / count, storage_share=len(seconds["storage"]) / count)
        return forecast(failures, costs, snapshot_s=self.setup.step_s, persist_every=self.setup.persist_every)


def measure(setup: Setup, *, mtbf_s: float, lost_nodes: float, jumps: bool, seed: int) -> Found:
    """Run a job.

    Args:
        setup: The job, and how long it runs.
        mtbf_s: Mean seconds between failures of the job.
        lost_nodes: Share of failures that take a node along with its memory.
        jumps: What is like what was before is not run.
        seed: Of all that is random.
    """
    random, at_s, faults = Random(f"{seed} failures"), 0.0, list[Fault]()
    while (at_s := at_s + random.expovariate(1 / mtbf_s)) < setup.faults_s:
        kind = "lose node" if random.random() < lost_nodes else "kill rank"
        faults.append(Fault(at_s, kind, random.randrange(10**6), 0.2))
    began_s = time.process_time()
    outcome = simulate(seed, setup, faults, jumps=jumps)
    if outcome.rule:
        raise SystemExit(outcome.tell())
    job, skipped = run._current[0], run._current[0].calendar.skipped
    return Found(
        setup=setup,
        seconds=job.calm_s + skipped.seconds - job.trains_since_s,
        run_s=job.calm_s - job.trains_since_s,
        kept=job.calm_step + skipped.steps,
        taken=job.calm_steps + skipped.steps,
        outages=job.outages,
        commits=len(job.committed_at) + skipped.cycles,
        commit_s=sum(job.committed_at[one] - job.rules.taken_at[one] for one in job.committed_at) + skipped.commit_s,
        requests=sum(job.bucket.requests.values()) + skipped.requests + job.calendar.requests_of_sweeps,
        cpu_s=time.process_time() - began_s,
    )


def speed(nodes: int = 16) -> str:
    """Return how many virtual job-days a processor second is worth, by running some."""
    short, long = (replace(FORECAST, nodes=nodes, faults_s=seconds) for seconds in (600.0, 30 * 86400.0))
    rate: dict[str, float] = {"mtbf_s": NODE_MTBF_S / nodes, "lost_nodes": STORAGE_SHARE}
    full, quick = measure(short, **rate, jumps=False, seed=1), measure(long, **rate, jumps=True, seed=1)
    days = [one.seconds / 86400 / one.cpu_s for one in (full, quick)]
    return f"a processor second runs {days[0]:.4f} virtual job-days of {nodes} nodes in full, {days[1]:.2f} with jumps over calm"


HEAD = "nodes  ranks     days  failures  goodput  plan says  steps lost  plan says  restart s  commit s  requests/commit  days run  CPU s/day\n"


def row(one: Found) -> str:
    """Return what is printed of jobs of one size."""
    days = one.seconds / 86400
    return (
        f"{one.setup.nodes:5}  {one.setup.nodes * one.setup.per_node:5}  {days:7.1f}  {len(one.outages):8}"
        f"  {one.goodput:7.5f}  {one.formula.goodput:9.5f}  {one.lost:10.2f}  {one.planned_lost:9.2f}"
        f"  {fmean([s for _, s in one.outages] or [0.0]):9.2f}  {one.commit_s / one.commits:8.2f}"
        f"  {one.requests / one.commits:15.0f}  {one.run_s / 86400:8.3f}  {one.cpu_s / days:9.4f}\n"
    )


def beside(soak: dict[str, Any], seed: int) -> str:
    """Return a measured job, the same one in the simulation five times as long, and what `flashckpt plan` says of each."""
    step_s, seconds, restarts_s = soak["step_s"], soak["seconds"], soak["restarts_s"]
    copy_s = step_s / 100
    real = Setup(nodes=1, per_node=soak["ranks"], step_s=step_s, persist_every=soak["persist_every"], copy_s=copy_s,
                 faults_s=5 * seconds, restart_s=fmean(restarts_s))  # fmt: skip
    measured = Found(setup=real, seconds=seconds, kept=soak["kept"], outages=[("memory", one) for one in restarts_s],
                     commits=1, commit_s=step_s)  # fmt: skip
    found = measure(real, mtbf_s=seconds / len(restarts_s), lost_nodes=0.0, jumps=True, seed=seed)
    return "          failures  goodput  plan says  steps lost  plan says  restart s\n" + "".join(
        f"{name:9} {len(one.outages):8}  {one.goodput:7.4f}  {one.formula.goodput:9.4f}  {one.lost:10.2f}"
        f"  {one.planned_lost:9.2f}  {fmean([s for _, s in one.outages]):9.2f}\n"
        for name, one in (("measured", measured), ("simulated", found))
    )


def main(arguments: Sequence[str]) -> int:
    """Print a row for each number of nodes."""
    parser = argparse.ArgumentParser(prog="simulation.forecast", description=__doc__)
    parser.add_argument("--nodes", default="2,16", help="numbers with commas")
    parser.add_argument("--per-node", type=int, default=1, help="ranks on each")
    parser.add_argument("--days", type=float, help="of each job; without it as many as bring 20 failures")
    parser.add_argument("--jobs", type=int, default=1, help="of each size")
    parser.add_argument("--mtbf", type=float, help="seconds between failures of the job")
    parser.add_argument(
        "--lost-nodes", type=float, default=STORAGE_SHARE, help="share of failures that take memory along"
    )
    parser.add_argument("--step", type=float, default=FORECAST.step_s, help="its seconds")
    parser.add_argument("--full", action="store_true", help="run calm, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--soak", type=Path, help="beside what tests/crash/soak_failures.py has measured")
    chosen = parser.parse_args(arguments)
    if chosen.soak:
        sys.stdout.write(beside(json.loads(chosen.soak.read_text()), chosen.seed))
        return 0
    sys.stdout.write(HEAD)
    for nodes in map(int, chosen.nodes.split(",")):
        mtbf_s = chosen.mtbf or NODE_MTBF_S / nodes
        seconds = 86400 * chosen.days if chosen.days else 20 * mtbf_s
        setup = Setup(nodes=nodes, per_node=chosen.per_node, step_s=chosen.step, persist_every=FORECAST.persist_every,
                      copy_s=min(FORECAST.copy_s, chosen.step / 5), faults_s=seconds)  # fmt: skip
        work = partial(_measured, setup, mtbf_s, chosen.lost_nodes, not chosen.full)
        with get_context("fork").Pool(chosen.workers) as pool:
            jobs = list(pool.imap_unordered(work, range(chosen.seed, chosen.seed + chosen.jobs)))
        sys.stdout.write(row(sum(jobs[1:], jobs[0])))
        sys.stdout.flush()
    return 0


def _measured(setup: Setup, mtbf_s: float, lost_nodes: float, jumps: bool, seed: int) -> Found:
    return measure(setup, mtbf_s=mtbf_s, lost_nodes=lost_nodes, jumps=jumps, seed=seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
