"""torchft as its documentation starts it: a lighthouse, and one torchrun for each replica group. Nothing else.

`--nproc-per-node N` is the number of groups, of one rank each, as for DDP in its example. What a scheduler does for such a
job is done here: SIGTERM is handed on, and once a group has trained to the end the others get five seconds for theirs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=3")
GRACE_S = 5.0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(groups: Sequence[subprocess.Popen[bytes]]) -> None:
    """Hand SIGTERM on."""
    for one in groups:
        one.terminate()


def main() -> int:
    """Start all; wait until one has trained to the end, then for the others."""
    groups, script = int(sys.argv[1].partition("=")[2]), sys.argv[2:]
    port = free_port()
    bind = f"--bind=[::]:{port}"
    lighthouse = subprocess.Popen([Path(sys.executable).with_name("torchft_lighthouse"), *LIGHTHOUSE, bind])
    shared = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": str(groups)}
    shared["RACE_ATTEMPT"] = str(time.time_ns())
    running = [
        subprocess.Popen(
            [sys.executable, *TORCHRUN, f"--master-port={free_port()}", *script],
            env={**shared, "REPLICA_GROUP_ID": str(group)},
        )
        for group in range(groups)
    ]
    signal.signal(signal.SIGTERM, lambda *_: end(running))
    while not any(one.poll() == 0 for one in running) and any(one.poll() is None for one in running):
        time.sleep(0.05)
    until = time.monotonic() + GRACE_S
    while any(one.poll() is None for one in running) and time.monotonic() < until:
        time.sleep(0.05)
    for one in (*running, lighthouse):
        one.kill()
    codes = [one.wait() for one in running]
    return 0 if 0 in codes else 1


if __name__ == "__main__":
    sys.exit(main())
