"""Count false alarms: snapshots of clean training that are called suspect, over the matrix of optimizers.

    PYTHONPATH=tests:. python tests/crash/clean_snapshots.py --steps 300 --json FILE

Every optimizer of the table of frameworks, and its tiny programs, trains that many steps with a snapshot in each, ended
without a clean end in the middle and restored. Beside it a mask of -inf among the parameters, which is so by design.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import integration.frameworks.optimizers  # noqa: F401 -- enters its cases
import torch
from integration.frameworks.case import REGISTRY, Case, Start
from support.one_rank import crash, step_kept

from flashckpt import Checkpointer


def trained(case: Case, folder: Path, steps: int) -> tuple[int, int]:
    """Train in two lives; return how many snapshots there were, and how many were suspect, or named a number that grew."""
    snapshots = suspect = 0
    for life, until in enumerate((steps // 2, steps)):
        torch.manual_seed(0)
        program = case.build(Start(restarted=life > 0, rank=0))
        mask = torch.nn.ParameterDict({"mask": torch.nn.Parameter(torch.full((8, 8), -torch.inf), requires_grad=False)})
        ckpt = Checkpointer(str(folder), snapshot_every=1, persist_every=10**6, job=f"clean-{folder.name}")
        ckpt.track(**program.tracked, mask=mask)
        report = ckpt.restore()
        session = ckpt._alive()
        for step in range(1 if report is None else report.step + 1, until + 1):
            program.train(step)
            step_kept(ckpt, step)
        session._stager.finish()
        alarms = int(session.stats["suspect"] + session.stats["grown"])
        snapshots, suspect = snapshots + int(session.stats["snapshots"]), suspect + alarms
        crash(ckpt)
    return snapshots, suspect


def main() -> int:
    """Train all; exit code 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each optimizer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = memory
        for number, (name, case) in enumerate(REGISTRY.items()):
            if name.endswith(", tiny"):
                found[name] = trained(case, Path(scratch, str(number)), args.steps)
                print(f"{name}: {found[name][0]} snapshots, {found[name][1]} suspect", flush=True)
    total, alarms = (sum(one[place] for one in found.values()) for place in (0, 1))
    print(f"{len(found)} optimizers, {total} snapshots, {alarms} false alarms")
    if args.json:
        args.json.write_text(json.dumps({"optimizers": found, "snapshots": total, "false_alarms": alarms}, indent=1))
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
