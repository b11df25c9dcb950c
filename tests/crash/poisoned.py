"""Make states bad under dlrun, by seeds, and count how the jobs end.

    PYTHONPATH=tests:. python tests/crash/poisoned.py --seeds 0:240 --json FILE          # continues what FILE holds
    PYTHONPATH=tests:. python tests/crash/poisoned.py --table FILE...

A job is right if it finishes and every step equals the unbroken run; of a script that always fails, if it ends with exit code
33 when all of `--escalate` was tried; of a sample that is always bad, if all samples but those of its step are trained, once.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from support.poisoned import Outcome, judged, planned, unbroken

LONGEST = 420
"""Steps of the unbroken run: more than any job has."""


def named(outcome: Outcome) -> list[str]:
    """Return what struck a job."""
    where = " on two nodes" if outcome.kind == "nodes" else ""
    found = [f"{one['kind']} {one['where']}".strip() + where for one in outcome.faults]
    return found or [f"{outcome.kind}, {outcome.how}, always" if outcome.kind == "sample" else "script, always"]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many faults of each kind there were, and how many jobs with one did not do as they should."""
    columns: dict[str, collections.Counter[str]] = {
        name: collections.Counter() for name in ("struck", "unseen", "of these a warning of growth", "in jobs that were wrong")
    }  # fmt: skip
    for outcome in outcomes:
        says = True, outcome.unseen, outcome.unseen and outcome.grown, bool(outcome.problem)
        for counter, is_so in zip(columns.values(), says, strict=True):
            counter.update(named(outcome) if is_so else ())
    rows = [f"| {name} | " + " | ".join(str(one[name]) for one in columns.values()) + " |" for name in sorted(columns["struck"])]  # fmt: skip
    wrong = [one for one in outcomes if one.problem]
    lives = max((len(one.lives) for one in outcomes), default=0)
    total = (
        f"{len(outcomes)} jobs, {len(wrong)} wrong; {columns['struck'].total()} faults; most lives of a job: {lives}"
    )
    head = ["| fault | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*head, *rows, "", total, *(f"wrong: seed {one.seed}: {one.problem}" for one in wrong)])


def held(path: Path | None) -> list[Outcome]:
    """Return the outcomes that a file holds."""
    return [Outcome(**one) for one in json.loads(path.read_text())] if path is not None and path.exists() else []


class Proof:
    """The jobs of some seeds, one after another, each written down as it ends.

    Args:
        args: Of the command line.
        scratch: Folder of the jobs.
    """

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        self.outcomes = held(args.json)
        self._expected: dict[tuple[int, str], dict[int, list[str]]] = {}

    def run(self) -> None:
        """Run what is not there yet."""
        first, end = map(int, self.args.seeds.split(":"))
        done = {one.seed for one in self.outcomes}
        for seed in range(first, end):
            if seed not in done and time.monotonic() < self.args.end:
                self._job(seed)

    def _job(self, seed: int) -> None:
        plan, folder = planned(seed, self.args.faults), self.scratch / str(seed)
        kind = plan["ranks"], plan["dtype"]
        if kind not in self._expected:
            self._expected[kind] = unbroken(self.scratch / "unbroken-{}-{}".format(*kind), plan, LONGEST)
        one = judged(folder, seed, faults=self.args.faults, expected=self._expected[kind])
        self.outcomes.append(one)
        if self.args.json:
            partial = self.args.json.with_suffix(".partial")
            partial.write_text(json.dumps([asdict(outcome) for outcome in self.outcomes]))
            partial.replace(self.args.json)
        struck = sum(len(named(outcome)) for outcome in self.outcomes)
        says = one.problem or ("unseen" if one.unseen else "right")
        print(f"seed {seed}, {one.kind}: {says}; {len(one.lives)} lives; {struck} faults so far", flush=True)
        if one.problem:
            print((folder / "output.log").read_text()[-6000:], flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the seeds, or show what was run; exit code 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:24", metavar="FROM:TO")
    parser.add_argument("--faults", type=int, default=8, help="in each job of many")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no job later")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    args.end = time.monotonic() + 60 * args.minutes
    if args.table:
        outcomes = [one for path in args.table for one in held(path)]
    else:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as memory,
        ):
            os.environ["FLASHCKPT_SHM_DIR"] = memory
            proof = Proof(args, Path(scratch))
            proof.run()
            outcomes = proof.outcomes
    print(table(outcomes))
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
