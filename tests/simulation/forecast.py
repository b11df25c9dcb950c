"""`python -m simulation.forecast --nodes 2,16`: a job under failures drawn one by one, beside what `flashckpt plan` calculates.

The formula is given what the simulation measured of one snapshot, one persist and one restart; so what is compared is how
it puts them together: the share of time that is useful, and what is lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from random import Random
from statistics import fmean

from flashckpt.plan.model import Costs, Failures, forecast
from simulation import run
from simulation.job import Job, Setup
from simulation.plan import Fault
from simulation.run import simulate

STEP_S, PERSIST_EVERY, COPY_S = 30.0, 5, 4.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one run was like.

    Attributes:
        goodput: Share of its time in steps that were kept.
        formula: The same as `flashckpt plan` calculates it.
        lost: Steps that were repeated, per failure.
        commit_s: From the snapshot to the commit.
        requests: Of all nodes to the root, per commit.
        failures: How many there were.
        cpu_s: What it cost.
    """

    goodput: float
    formula: float
    lost: float
    commit_s: float
    requests: float
    failures: int
    cpu_s: float


def measure(nodes: int, *, hours: float, mtbf_s: float, lost_nodes: float, seed: int) -> Found:
    """Run a job of some nodes.

    Args:
        nodes: With a rank each, and a spare one.
        hours: How long.
        mtbf_s: Mean seconds between failures.
        lost_nodes: Share of failures that take a node along with its memory.
        seed: Of all that is random.
    """
    random, at_s, faults = Random(f"{seed} failures"), 0.0, list[Fault]()
    while (at_s := at_s + random.expovariate(1 / mtbf_s)) < 3600 * hours:
        kind = "lose node" if random.random() < lost_nodes else "kill rank"
        faults.append(Fault(at_s, kind, random.randrange(1000), 0.2))
    setup = Setup(nodes=nodes, step_s=STEP_S, persist_every=PERSIST_EVERY, copy_s=COPY_S, faults_s=3600 * hours)
    began_s = time.process_time()
    outcome = simulate(seed, setup, faults)
    if outcome.rule:
        raise SystemExit(outcome.tell())
    return _found(run._current[0], setup, Failures(gpus=1, gpu_mtbf_s=mtbf_s, storage_share=lost_nodes), began_s)


def _found(job: Job, setup: Setup, failures: Failures, began_s: float) -> Found:
    trained_s, taken = job.calm_s, job.rules.taken_at
    commit_s = fmean(job.committed_at[one] - taken[one] for one in job.committed_at)
    restarts = {source: [s for kind, s in job.outages if kind == source] or [0.0] for source in ("memory", "storage")}
    costs = Costs(
        stall_s=0.0,
        staged_s=setup.copy_s,
        persist_stall_s=0.0,
        persist_s=commit_s - setup.copy_s,
        restart_memory_s=fmean(restarts["memory"]),
        restart_storage_s=fmean(restarts["storage"]),
    )
    calculated = forecast(failures, costs, snapshot_s=setup.step_s, persist_every=setup.persist_every)
    return Found(
        goodput=job.calm_step * setup.step_s / trained_s,
        formula=calculated.goodput,
        lost=(job.calm_steps - job.calm_step) / max(1, len(job.outages)),
        commit_s=commit_s,
        requests=sum(job.bucket.requests.values()) / len(job.committed_at),
        failures=len(job.outages),
        cpu_s=time.process_time() - began_s,
    )


def main(arguments: list[str]) -> int:
    """Print a row for each number of nodes."""
    parser = argparse.ArgumentParser(prog="simulation.forecast", description=__doc__)
    parser.add_argument("--nodes", default="2,16", help="numbers with commas")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--mtbf", type=float, default=3600.0, help="seconds between failures of the job")
    parser.add_argument("--lost-nodes", type=float, default=0.3, help="share of failures that take memory along")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    sys.stdout.write("nodes  goodput  plan says  steps lost  commit s  requests/commit  failures  CPU s\n")
    for nodes in map(int, chosen.nodes.split(",")):
        one = measure(nodes, hours=chosen.hours, mtbf_s=chosen.mtbf, lost_nodes=chosen.lost_nodes, seed=chosen.seed)
        sys.stdout.write(
            f"{nodes:5}  {one.goodput:7.4f}  {one.formula:9.4f}  {one.lost:10.2f}  {one.commit_s:8.2f}  {one.requests:15.0f}"
            f"  {one.failures:8}  {one.cpu_s:5.1f}\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
