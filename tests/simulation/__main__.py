"""`python -m simulation --minutes 3 --seed 7`: new seeds for some minutes, or one; a broken rule is told as a story.

A seed that breaks a rule is shrunk, and the line is printed that makes it a test: one more in tests/simulation/seeds.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from multiprocessing import get_context
from typing import NamedTuple

from simulation.forecast import speed
from simulation.run import Outcome, shrink, simulate


def main(arguments: list[str]) -> int:
    """Run seeds until the time is over or a rule is broken; the exit code is 1 then."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="the first one; without it one that nobody has tried")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--only", action="store_true", help="this seed alone, and tell its story")
    chosen = parser.parse_args(arguments)
    seed = time.time_ns() // 1000 % 10**9 if chosen.seed is None else chosen.seed
    if chosen.only:
        outcome = simulate(seed)
        sys.stdout.write(outcome.tell(400) + "\n")
        return int(bool(outcome.rule))
    with get_context("fork").Pool(chosen.workers) as pool:
        firsts = [(seed + at, chosen.workers, 60 * chosen.minutes) for at in range(chosen.workers)]
        runs = []
        for one in pool.imap_unordered(_run, firsts):
            if one.broken is not None:
                return _tell(simulate(one.broken))
            runs.append(one)
    counts = sum((Counter(one.counts) for one in runs), Counter[str]())
    days = sum(one.virtual_s for one in runs) / 86400
    sys.stdout.write(
        f"{sum(one.seeds for one in runs)} seeds from {seed} on: nothing was broken in {days:.2f} virtual days"
        f" ({', '.join(f'{number} {what}' for what, number in sorted(counts.items()) if ' a ' not in what)})\n"
        f"{speed()}\n"
    )
    return 0


class _Run(NamedTuple):
    """What one process has tried; `broken`: a seed that broke a rule."""

    seeds: int
    virtual_s: float
    counts: dict[str, int]
    broken: int | None


def _run(given: tuple[int, int, float]) -> _Run:
    first, stride, seconds = given
    began, seed = time.monotonic(), first
    virtual_s, counts = 0.0, Counter[str]()
    while time.monotonic() - began < seconds:
        outcome = simulate(seed)
        virtual_s += outcome.virtual_s
        counts.update(outcome.counts)
        seed += stride
        if outcome.rule:
            return _Run((seed - first) // stride, virtual_s, dict(counts), outcome.seed)
    return _Run((seed - first) // stride, virtual_s, dict(counts), None)


def _tell(outcome: Outcome) -> int:
    short = shrink(outcome)
    faults = "".join(f"\n        {fault}," for fault in short.faults)
    sys.stdout.write(f"{short.tell()}\n\nIts line in tests/simulation/seeds.py:\n")
    sys.stdout.write(f"    Seed({outcome.rule!r}, {short.seed}, {short.setup}, [{faults}\n    ]),\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
