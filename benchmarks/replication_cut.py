"""The cut link of replication.py: replicas go over addresses apart, which can be cut while the steps still reduce."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node_machine import Nodes
from support.nodes import ip

METRICS_PORT = 9464
SETTLE_S = 30.0
SHOWN = ("lag_steps", "lag_s", "pending_bytes")


def replica_address(them: Nodes, node: int) -> str:
    """Return the second address of a node, which persisters alone use."""
    return f"{them.net}.{node + 101}"


def set_up(them: Nodes, node: int) -> dict[str, str]:
    """Give a node its second address; return the environment by which its persister listens there, and serves metrics."""
    address = replica_address(them, node)
    ip("-n", f"{them.prefix}{node}", "addr", "add", f"{address}/24", "dev", f"{them.prefix}{node}v")
    return {"FLASHCKPT_REPLICA_ADDRESS": address, "FLASHCKPT_METRICS_PORT": str(METRICS_PORT)}


@contextmanager
def cut(them: Nodes, count: int) -> Iterator[None]:
    """Let no packet of any persister reach another one."""
    routes = [
        (f"{them.prefix}{node}", f"{replica_address(them, other)}/32")
        for node in range(count)
        for other in range(count)
        if other != node
    ]
    for name, address in routes:
        ip("-n", name, "route", "add", "blackhole", address)
    try:
        yield
    finally:
        for name, address in routes:
            ip("-n", name, "route", "del", "blackhole", address)


def shown(them: Nodes, node: int) -> dict[str, Any]:
    """Return what `flashckpt status` and the metrics of a node say of its replicas."""
    command = [str(Path(sys.executable).with_name("flashckpt")), "status", "--json"]
    environment = {**os.environ, "FLASHCKPT_SHM_DIR": str(them.memory(node))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (job,) = json.loads(done.stdout)["jobs"]
    return {"status": {name: job["replicas"][name] for name in (*SHOWN, "problem")}, "metrics": metrics(them, node)}


def metrics(them: Nodes, node: int) -> dict[str, float]:
    """Return the replication metrics that a node serves; its port depends on its place in the job."""
    code = (
        "import sys, urllib.request as u; print(u.urlopen(f'http://127.0.0.1:{sys.argv[1]}/metrics').read().decode())"
    )
    for port in (METRICS_PORT, METRICS_PORT + 1):
        words = ["ip", "netns", "exec", f"{them.prefix}{node}", sys.executable, "-c", code, str(port)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = re.findall(r"^(flashckpt_replica_\w+)\{[^}]*\} (\S+)$", done.stdout, re.MULTILINE)
            return {name: float(value) for name, value in found}
    return {}


def one_cut(
    them: Nodes, count: int, following: Callable[[], int], span_s: float, steps: Callable[[], Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Cut the link before a snapshot; return what is shown `span_s` after it, and how long replicas then took.

    Args:
        them: Whose link is cut.
        count: Of nodes.
        following: Gives the step of the snapshot that comes next.
        span_s: How long the link stays cut after it.
        steps: Gives all steps so far.
    """
    with cut(them, count):
        step = following()
        (snapshot,) = them.until(lambda: [one for one in steps() if one["step"] == step], f"step {step}", 600)
        threading.Event().wait(span_s)
        them.until(
            lambda: lag(them) > 0, "a lag that is shown", SETTLE_S
        )  # the persister writes its status every so often
        found, ended = shown(them, 0), time.monotonic()
    them.until(lambda: lag(them) == 0, "the replicas after the cut", 600)
    return {**found, "span": (snapshot["t"], ended), "caught_up_s": time.monotonic() - ended}


def lag(them: Nodes) -> int:
    return int(shown(them, 0)["status"]["lag_steps"])
