"""CPU that a restore from memory takes on 4 KiB pages and on huge ones, in memcpys of its state: fresh processes, in turns.

    mount -t tmpfs -o huge=always,size=4G tmpfs DIR
    .venv/bin/python benchmarks/huge_pages.py --huge DIR [--small /dev/shm] [--mb 384] [--rounds 7] [--json FILE]

CPU of the process in `restore()`, its fixed part included, which other work on the machine changes little; the memcpy is
torch's, of as many bytes, in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flashckpt.bench.measure import LoadWatch, document, write_json


def restore(shm: str, root: str, agent: str, nbytes: int) -> None:
    """Restore what lies in memory and print what that took; where nothing does, put two snapshots there."""
    os.environ |= {"FLASHCKPT_SHM_DIR": shm, "FLASHCKPT_AGENT_DIR": agent, "OMP_NUM_THREADS": "1"}
    import torch

    from flashckpt import Checkpointer
    from flashckpt.shm.agent_folder import LOCK
    from flashckpt.shm.lease import Lease

    held = Lease(Path(agent) / LOCK, create=True)
    assert held.exclusive(0)  # as under an agent: no daemon is started
    model = torch.nn.ParameterList([torch.ones(nbytes // 64) for _ in range(16)])
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=None, slots=2, job="huge-pages")
    ckpt.track(model=model)
    began = time.process_time()
    report = ckpt.restore()
    took = time.process_time() - began
    step = 0 if report is None else report.step
    while report is None and ckpt.stats.get("snapshots", 0) < 2:
        ckpt.step(step := step + 1)
        ckpt.fence()
        time.sleep(0.05)
    source, target, copies = torch.ones(nbytes // 4), torch.zeros(nbytes // 4), []
    for _ in range(3):
        began = time.process_time()
        target.copy_(source)
        copies.append(time.process_time() - began)
    print(json.dumps({"restore_s": took, "memcpy_s": min(copies), "restored": report is not None}), flush=True)
    os._exit(0)  # as a killed process: what is in memory stays


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--huge", required=True)
    parser.add_argument("--small", default="/dev/shm")
    parser.add_argument("--mb", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load, rows = LoadWatch(), dict[str, list[dict[str, Any]]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=given.huge) as huge,
        tempfile.TemporaryDirectory(dir=given.small) as small,
    ):
        places = {"huge": huge, "4 KiB": small}
        for number in range(given.rounds + 1):
            for name, shm in places.items():
                home = Path(folder) / name.replace(" ", "")
                (home / "agent").mkdir(parents=True, exist_ok=True)
                words = [shm, str(home / "root"), str(home / "agent"), str(given.mb << 20)]
                ran = subprocess.run([sys.executable, __file__, "rank", *words], capture_output=True, text=True, check=True)  # fmt: skip
                found = json.loads(ran.stdout.splitlines()[-1])
                assert found["restored"] == (number > 0), ran.stderr
                if number:
                    rows.setdefault(name, []).append(found | {"ratio": found["restore_s"] / found["memcpy_s"]})
    for name, found in rows.items():
        ratios = sorted(one["ratio"] for one in found)
        print(f"{name:6} {statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}] memcpys")
    if given.json:
        write_json(given.json, document("huge_pages", vars(given) | {"json": None}, rows, load=load))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        restore(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    main()
