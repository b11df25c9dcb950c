"""What the benchmarks of several nodes need of a machine, what is noted of it, and what their ranks leave to be read."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.bench.host import available_bytes
from flashckpt.bench.measure import median
from flashckpt.errors import ConfigError, SharedMemoryError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.nodes import Nodes, nodes
from typing_extensions import Self

__all__ = ["LogTimes", "Nodes", "marks", "nodes", "places", "rates", "require_machine", "require_room"]

IMPORTS = 0.5e9
"""Bytes that a rank, its launcher and its persister take for what they import."""
USABLE = 0.9
"""Share of the available memory that is planned with."""


def require_machine(*programs: str) -> None:
    """Refuse a machine on which nodes cannot be made.

    Raises:
        ConfigError: Not root, or a program is missing.
    """
    state = "Nothing was started or written."
    if os.geteuid() != 0:
        raise ConfigError(
            "nodes are network namespaces, which only root can make",
            found=f"user id {os.geteuid()}",
            expected="user id 0",
            state=state,
            remedy="run it by sudo",
        )
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise ConfigError(
            "a program that makes nodes is missing",
            found=f"no {', '.join(missing)} in PATH",
            expected="iproute2 (ip, tc) and util-linux (unshare)",
            state=state,
            remedy="apt-get install iproute2 util-linux",
        )


def require_room(count: int, nbytes: float, copies: float) -> None:
    """Refuse a state whose copies on all nodes do not fit into this machine.

    Args:
        count: Nodes at once.
        nbytes: State per node.
        copies: What a node holds of it, as multiples.

    Raises:
        SharedMemoryError: There is not enough; names what there is and what it takes.
    """
    need, there = count * (copies * nbytes + IMPORTS), available_bytes()
    if need > USABLE * there:
        raise SharedMemoryError(
            f"{count} nodes of {nbytes / 1e9:g} GB of state do not fit into this machine",
            found=f"{there / 1e9:.1f} GB of memory available",
            expected=f"{need / USABLE / 1e9:.1f} GB ({copies:g} times the state per node: training, slots and replicas)",
            state="Nothing of this size was started.",
            remedy="give a smaller --gb",
        )


@contextmanager
def places(where: str | None) -> Iterator[Path]:
    """A folder for storage and logs, and one in memory under which every node has its own; both are removed."""
    with (
        tempfile.TemporaryDirectory(dir=where, prefix="flashckpt-nodes-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-nodes-", ignore_cleanup_errors=True) as memory,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = memory
        yield Path(folder)


def marks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the whole lines that the ranks of each host have left, in their order."""
    found = {}
    for path in folder.glob("marks-*"):
        lines = path.read_text().splitlines(keepends=True)
        found[path.name.removeprefix("marks-")] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


class LogTimes:
    """Notes when each line of the nodes' logs came, by the clock of the marks, as long as it is open."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._at = folder, dict[Path, int]()
        self.lines: list[tuple[float, str, str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(0.01):
            for path in self._folder.glob("node*.log"):
                with path.open(errors="replace") as file:
                    file.seek(self._at.get(path, 0))
                    found = file.read()
                    self._at[path] = file.tell()
                self.lines += [(time.monotonic(), path.stem, line) for line in found.splitlines() if line]


def rates(folder: Path, nbytes: int) -> dict[str, float]:
    """Return bytes per second of one memcpy in warm memory, and of a write with fsync into the storage folder."""
    source = np.ones(max(1, min(nbytes, 10**9)), np.uint8)
    target, copies, writes = np.zeros_like(source), [], []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
        path = folder / "rate"
        began = time.perf_counter()
        with path.open("wb") as file:
            file.write(source.data)
            os.fsync(file.fileno())
        writes.append(time.perf_counter() - began)
        path.unlink()
    return {"memcpy_bytes_per_s": source.nbytes / median(copies), "write_bytes_per_s": source.nbytes / median(writes)}
