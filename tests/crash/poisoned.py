"""Make states bad under dlrun, by seeds, and count how the jobs end.

    PYTHONPATH=tests:. python tests/crash/poisoned.py --seeds 0:100 --json FILE          # or: make poisoned

Each job has several faults that strike once each; of every eighth the script fails whatever is restored. A job is right if
it finishes and every step equals the unbroken run, or, of a script that fails, if it ends with exit code 33 when all of
`--escalate` was tried.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from support.poisoned import Outcome, judged, planned, unbroken


def table(outcomes: list[Outcome]) -> str:
    """Return how many faults of each kind there were, and how many jobs with one did not do as they should."""
    struck: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    unseen: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        names = [f"{one['kind']} {one['where']}".strip() for one in outcome.faults] or ["script"]
        struck.update(names)
        wrong.update(set(names) if outcome.problem else ())
        unseen.update(names if outcome.unseen else ())
    rows = [f"| {name} | {struck[name]} | {unseen[name]} | {wrong[name]} |" for name in sorted(struck)]
    return "\n".join(["| fault | struck | unseen | jobs with it that were wrong |", "|---|---|---|---|", *rows])


def main() -> int:
    """Run the seeds; exit code 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", metavar="FROM:TO")
    parser.add_argument("--faults", type=int, default=8, help="in each job")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = memory
        longest = max(planned(seed, args.faults)["steps"] for seed in range(first, end))
        expected = {}
        for seed in range(first, end):
            ranks = 2 if seed % 8 == 3 else 1
            kind = ranks, planned(seed, args.faults)["dtype"]
            if kind not in expected:
                expected[kind] = unbroken(Path(scratch, "unbroken-{}-{}".format(*kind)), ranks, longest, kind[1])
            folder = Path(scratch, str(seed))
            one = judged(folder, seed, faults=args.faults, ranks=ranks, expected=expected[kind])
            outcomes.append(one)
            print(
                f"seed {seed}: {one.problem or ('unseen' if one.unseen else 'right')}; {len(one.faults)} faults, lives from {one.lives}",
                flush=True,
            )
            if one.problem:
                print((folder / "output.log").read_text()[-6000:], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    print(table(outcomes))
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
