"""SIGTERM to dlrun as at a preemption: seconds until its exit, when the state of that step is on storage, per GB of state.

    .venv/bin/python benchmarks/eviction.py [--gb 1] [--rounds 3] [--dir DIR]

Nothing of the state is on storage before. Beside them, the seconds of `dd ... conv=fsync` for the same bytes there.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import clean_up_on_sigterm, places

LOOP = """
import sys, torch
from flashckpt import Checkpointer
weights = torch.nn.ParameterList(torch.zeros(1 << 24) for _ in range(int(sys.argv[2])))
optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
with Checkpointer(sys.argv[1], snapshot_every=1, persist_every=10**6) as ckpt:
    ckpt.track(weights=weights, optimizer=optimizer)
    ckpt.restore()
    step = 0
    while not ckpt.should_stop:
        step += 1
        for one in weights:
            one.grad = torch.ones_like(one)
        optimizer.step()
        ckpt.step(step)
        open(f"{sys.argv[1]}.step", "w").write(str(step))
"""


def evicted_s(disk: Path, memory: Path, parts: int) -> float:
    """Return the seconds from SIGTERM to the exit of a job that has trained three steps."""
    (disk / "loop.py").write_text(LOOP)
    command = ["-m", "flashckpt.daemon.run", "--nproc-per-node=1", "--wait-flush", "--grace-timeout=600"]
    words = [sys.executable, *command, str(disk / "loop.py"), str(disk / "root"), str(parts)]
    job = subprocess.Popen(words, env={**os.environ, "FLASHCKPT_SHM_DIR": str(memory)}, start_new_session=True)
    try:
        seen = disk / "root.step"
        while not seen.exists() or int(seen.read_text() or 0) < 3:
            if job.poll() is not None:
                sys.exit(f"the job ended with exit code {job.returncode}")
            time.sleep(0.01)
        begun = time.monotonic()
        job.send_signal(signal.SIGTERM)
        job.wait()
        seconds = time.monotonic() - begun
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if not list(disk.glob("root/*/MANIFEST")):
        sys.exit("nothing is on storage")
    return seconds


def main() -> None:
    """Measure, and print one line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir")
    args = parser.parse_args()
    clean_up_on_sigterm()
    parts = max(1, round(args.gb * 1e9 / (4 << 24)))
    gb = parts * (4 << 24) / 1e9
    for _ in range(args.rounds):
        with places(args.dir) as (disk, memory):
            seconds = evicted_s(disk, memory, parts)
            begun = time.monotonic()
            count = ["bs=16M", f"count={4 * parts}", "conv=fsync", "status=none"]
            subprocess.run(["dd", "if=/dev/zero", f"of={disk}/raw", *count], check=True)
            raw = time.monotonic() - begun
        print(
            f"{gb:.2f} GB: {seconds:.1f} s, {seconds / gb:.1f} s/GB; dd {raw / gb:.1f} s/GB; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
