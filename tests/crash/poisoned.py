"""Make states bad under dlrun, by seeds, and count how the jobs end.

    PYTHONPATH=tests:. python tests/crash/poisoned.py --seeds 0:240 --json FILE          # continues what FILE holds
    PYTHONPATH=tests:. python tests/crash/poisoned.py --table FILE...

A job is right if it finishes and every step equals the unbroken run; of a script that always fails, if it ends with exit code
33 when all of `--escalate` or all older checkpoints were tried; of a sample that is always bad, if all samples but those of its step are trained, once.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from support.poisoned import Outcome, judged, planned, unbroken

LONGEST = 420
"""Steps of the unbroken run: more than any job has."""

ENDS = {
    "repaired": "finished and equal, behind restarts",
    "equal": "finished and equal, nothing seen",
    "left out": "finished and equal without the samples",
    "ended": "ended with the right message",
    "unseen": "finished, the flip in the result",
    "wrong": "wrong",
    "looped": "looped",
    "grown": "of the unseen: a warning of growth",
}
"""What a job can do, and the head of its column."""


def named(outcome: Outcome) -> list[str]:
    """Return what struck a job."""
    where = " on two nodes" if outcome.kind == "nodes" else ""
    found = [f"{one['kind']} {one['where']}".strip() + where for one in outcome.faults]
    return found or [f"{outcome.kind}, {outcome.how}, always" if outcome.kind == "sample" else "script, always"]


def ended(outcome: Outcome) -> str:
    """Return what a job did: one of `ENDS`."""
    if outcome.problem:
        return "looped" if outcome.looped else "wrong"
    if outcome.kind in {"script", "sample"}:
        return "ended" if outcome.kind == "script" else "left out"
    return "unseen" if outcome.unseen else "equal" if len(outcome.lives) == 1 else "repaired"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many faults of each kind there were, and what the jobs did that they struck."""
    counted: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        for name in named(outcome):
            counted[name].update(["struck", ended(outcome), *(["grown"] if outcome.unseen and outcome.grown else [])])
    columns = ("struck", *ENDS)
    rows = [f"| {name} | " + " | ".join(str(counted[name][one]) for one in columns) + " |" for name in sorted(counted)]
    sums = collections.Counter(ended(outcome) for outcome in outcomes)
    lives = max((len(one.lives) for one in outcomes), default=0)
    struck = sum(counter["struck"] for counter in counted.values())
    jobs = ", ".join(f"{sums[name]} {name}" for name in ENDS if sums[name])
    total = f"{len(outcomes)} jobs: {jobs}; {struck} faults; most lives of a job: {lives}"
    head = ["| fault | struck | " + " | ".join(ENDS.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    wrong = [f"wrong: seed {one.seed}: {one.problem}" for one in outcomes if one.problem]
    return "\n".join([*head, *rows, "", total, *wrong])


def held(path: Path | None) -> list[Outcome]:
    """Return the outcomes that a file holds."""
    return [Outcome(**one) for one in json.loads(path.read_text())] if path is not None and path.exists() else []


class Proof:
    """The jobs of some seeds, several at a time, each written down as it ends.

    Args:
        args: Of the command line.
        scratch: Folder of the jobs.
    """

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        self.outcomes = held(args.json)
        self._expected: dict[tuple[int, str], dict[int, list[str]]] = {}
        self._turn = threading.Lock()

    def run(self) -> None:
        """Run what is not there yet."""
        first, end = map(int, self.args.seeds.split(":"))
        done = {one.seed for one in self.outcomes}
        seeds = [seed for seed in range(first, end) if seed not in done]
        for plan in (planned(seed, 0) for seed in seeds):
            kind = plan["ranks"], plan["dtype"]
            if kind not in self._expected:
                self._expected[kind] = unbroken(self.scratch / "unbroken-{}-{}".format(*kind), plan, LONGEST)
        with ThreadPoolExecutor(self.args.jobs) as pool:
            list(pool.map(self._job, seeds))

    def _job(self, seed: int) -> None:
        if time.monotonic() > self.args.end:
            return
        plan, folder = planned(seed, self.args.faults), self.scratch / str(seed)
        expected = self._expected[plan["ranks"], plan["dtype"]]
        one = judged(folder, seed, faults=self.args.faults, expected=expected, deadline_s=self.args.deadline)
        with self._turn:
            self._note(one)
        if one.problem:
            print((folder / "output.log").read_text()[-20000:], flush=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _note(self, one: Outcome) -> None:
        self.outcomes.append(one)
        if self.args.json:
            partial = self.args.json.with_suffix(".partial")
            partial.write_text(json.dumps([asdict(outcome) for outcome in self.outcomes]))
            partial.replace(self.args.json)
        struck = sum(len(named(outcome)) for outcome in self.outcomes)
        print(f"seed {one.seed}, {one.kind}: {one.problem or ended(one)}; {len(one.lives)} lives; ", end="")
        print(f"{one.seconds:.0f} s; {struck} faults so far", flush=True)


def main() -> int:
    """Run the seeds, or show what was run; exit code 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:24", metavar="FROM:TO")
    parser.add_argument("--faults", type=int, default=8, help="in each job of many")
    parser.add_argument("--jobs", type=int, default=1, help="at a time: they wait most of theirs")
    parser.add_argument("--deadline", type=float, default=1500, metavar="S", help="of a job: it loops then")
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
