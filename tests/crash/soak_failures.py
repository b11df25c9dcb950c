"""Kill ranks of a soaking job now and then, and measure what that costs: goodput, steps lost, restarts.

    PYTHONPATH=tests:. python tests/crash/soak_failures.py --minutes 10 --step 2 --mtbf 45 --json FILE
    PYTHONPATH=tests:. python -m simulation.forecast --soak FILE    # beside what the simulation and `flashckpt plan` say

The job is that of `soak.py`, with steps of one length. A rank is killed at times that are drawn as failures are: with the same
chance in each second. A restart lasts from the kill to the begin of the step that follows; steps lost are those that were taken twice,
and the part of the one that was broken off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from crash.soak import Soak, soaking
from crash.soak_rank import PERSIST_EVERY


@dataclass(kw_only=True)
class Measured:
    """What a job has done under failures.

    Attributes:
        ranks: Of the job.
        persist_every: Steps.
        step_s: Seconds of a step, at the median.
        seconds: From the end of the first step to that of the last.
        kept: Steps between them.
        restarts_s: Of each failure.
    """

    ranks: int
    persist_every: int
    step_s: float
    seconds: float
    kept: int
    restarts_s: list[float]

    @property
    def goodput(self) -> float:
        """Share of time in steps that were kept."""
        return self.kept * self.step_s / self.seconds

    @property
    def lost(self) -> float:
        """Steps lost per failure."""
        rest_s = self.seconds - self.kept * self.step_s - sum(self.restarts_s)
        return rest_s / self.step_s / max(1, len(self.restarts_s))


def measured(steps: list[tuple[float, int]], kills: list[float], ranks: int) -> Measured:
    """Return what steps that were done at some times, and kills between them, come to."""
    step_s = median(later - at for (at, one), (later, two) in pairwise(steps) if two == one + 1)
    nexts = [(kill, min((at for at, _ in steps if at > kill), default=None)) for kill in kills]
    restarts = [at - step_s - kill for kill, at in nexts if at is not None and at - kill > step_s]
    return Measured(
        ranks=ranks, persist_every=PERSIST_EVERY, step_s=step_s, seconds=steps[-1][0] - steps[0][0],
        kept=steps[-1][1] - steps[0][1], restarts_s=restarts,
    )  # fmt: skip


def _read(path: Path) -> list[tuple[float, int]]:
    lines = path.read_text().splitlines()
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]


def kill_some(job: Soak, minutes: float, mtbf_s: float, seed: int) -> list[float]:
    """Kill a rank now and then; return when."""
    draw, end, kills = random.Random(seed), time.monotonic() + minutes * 60, list[float]()
    while (at := time.monotonic() + draw.expovariate(1 / mtbf_s)) < end:
        time.sleep(max(0.0, at - time.monotonic()))
        pid = draw.choice(list(job._ranks().values()))
        with contextlib.suppress(ProcessLookupError):  # it is being restarted
            os.kill(pid, signal.SIGKILL)
            kills.append(time.monotonic())
    time.sleep(max(0.0, end - time.monotonic()))
    return kills


def main() -> None:
    """Parse arguments; run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step", type=float, default=2.0, help="seconds")
    parser.add_argument("--mtbf", type=float, default=45.0, help="seconds between failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-soak-", ignore_cleanup_errors=True) as text:
        with soaking(Path(text), args.ranks, args.step) as job:
            kills = kill_some(job, args.minutes, args.mtbf, args.seed)
        found = measured(_read(Path(text) / "steps"), kills, args.ranks)
    print(f"{len(found.restarts_s)} failures, restarts of {fmean(found.restarts_s or [0.0]):.2f} s, steps of {found.step_s:.3f} s: "
          f"goodput {found.goodput:.4f}, {found.lost:.2f} steps lost per failure")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
