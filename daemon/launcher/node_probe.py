"""Measurements of `--node-check` on one node alone: a matrix product, its memory, its disk. In seconds, infinite where it failed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

LIMIT_S = 30.0
"""Seconds after which a device or disk counts as broken."""
_HOST_BYTES, _DISK_BYTES, _CHUNK_BYTES = 64 << 20, 16 << 20, 1 << 30
_DEVICE_SHARE = 0.9
"""The share of a device's free memory that is tried."""
INFINITE = float("inf")


def fastest(work: Callable[[], bool], rounds: int) -> float:
    """Return the seconds of the fastest of some rounds; infinite if one of them returned False."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        is_right = work()
        times.append(time.perf_counter() - begun if is_right else INFINITE)
    return min(times) if INFINITE not in times else INFINITE


def product_and_memory(size: int = 512) -> tuple[float, float]:
    """Measure this node's processor, or its first device and 90 % of that one's free memory."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    one = torch.ones(size, size, device=device)
    product_s = fastest(lambda: float((one @ one)[0, 0]) == size, 5)
    free = torch.accelerator.get_memory_info()[0] if device is not None and device.type != "cpu" else 0
    nbytes, chunk = (int(free * _DEVICE_SHARE), _CHUNK_BYTES) if free else (_HOST_BYTES, _HOST_BYTES)

    def written_and_read() -> bool:
        held = [torch.full((chunk // 8,), 0x5A5A5A5A5A5A5A5A, device=device) for _ in range(max(1, nbytes // chunk))]
        return all(bool((part == 0x5A5A5A5A5A5A5A5A).all()) for part in held)

    return product_s, fastest(written_and_read, 1 if free else 3)


def node_product_and_memory() -> tuple[float, float]:
    """Return `product_and_memory`; of a device in a child process, so that the agent holds no device context."""
    import torch

    if not torch.accelerator.is_available():
        return product_and_memory()
    code = "import json; from flashckpt.daemon.launcher.node_probe import product_and_memory as of; print(json.dumps(of(4096)))"
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError, OSError):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        product_s, memory_s = json.loads(done.stdout)
        return float(product_s), float(memory_s)
    return INFINITE, INFINITE


def disk_s(folder: str, limit_s: float = LIMIT_S) -> float:
    """Return the seconds until a file in a folder is durable and read again; a disk that hangs keeps only its thread."""
    found = [INFINITE]

    def work() -> None:
        block, begun = os.urandom(_DISK_BYTES), time.perf_counter()
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() == block:
                found[0] = time.perf_counter() - begun

    thread = threading.Thread(target=work, name="flashckpt-node-check", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0]
