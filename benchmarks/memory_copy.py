"""What copying a snapshot costs a core: memcpy, the copy with digests in Python and in C at every level, digests alone.

One thread, from private memory into touched shared memory. Cases take turns; the report has medians [min-max] of gigabytes
(10^9 bytes) per second of the clock and of CPU seconds per GiB. On a busy machine compare the CPU seconds.

    .venv/bin/python benchmarks/memory_copy.py [--gib 1] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from flashckpt.bench.measure import LoadWatch, TimedRun, document, interleave, summarise, write_json
from flashckpt.bench.table import about
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.native import copy_and_digest, implementation, levels

GIB = 1 << 30
PIECE = 256 << 10
SMALL_ROWS = 100_000


class Memory:
    """A source and a target of the same size, both touched; the target is shared memory, as a slot is."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        chunk = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        for at in range(0, nbytes, CHUNK_BYTES):
            self.source[at : at + CHUNK_BYTES] = chunk[: nbytes - at]
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(nbytes)
            self.target = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        self.target[:] = 1

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return descriptors of rows of these sizes, each at a multiple of 64 bytes."""
        room = -(-sizes // 64) * 64
        places = np.cumsum(room) - room
        assert int(room.sum()) <= self.nbytes
        return np.stack((self.source.ctypes.data + places, self.target.ctypes.data + places, sizes), axis=1)


def cases_of(memory: Memory) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return name -> (bytes, what is timed)."""
    n, source, target = memory.nbytes, memory.source.ctypes.data, memory.target.ctypes.data
    whole = memory.rows(np.array([n], np.int64))
    only = whole * np.array([1, 0, 1])
    pieces = memory.rows(np.full(n // PIECE, PIECE, np.int64))
    sizes = np.random.default_rng(1).integers(16, 800, SMALL_ROWS)
    small = memory.rows(sizes)
    order = np.random.default_rng(2).permutation(SMALL_ROWS)  # sources lie in no order, as live tensors do
    small[order, 0] = memory.rows(sizes[order])[:, 0]
    best = levels()[-1]

    def memmoves() -> None:
        for at in range(0, n, PIECE):
            ctypes.memmove(target + at, source + at, PIECE)

    def digests() -> None:
        for at in range(0, n, CHUNK_BYTES):
            xxhash.xxh3_64_intdigest(memory.source[at : at + CHUNK_BYTES].data)

    found: dict[str, tuple[int, Callable[[], Any]]] = {
        "memcpy, one call": (n, lambda: ctypes.memmove(target, source, n)),
        "memcpy, 256 KiB a call": (n, memmoves),
        "digest alone, xxhash package": (n, digests),
        f"digest alone, {best}": (n, lambda: copy_and_digest(only)),
        f"copy alone, {best}": (n, lambda: copy_and_digest(whole, digest=False)),
    }
    for level in levels():
        found[f"copy and digest, {level}"] = (n, lambda level=level: copy_and_digest(whole, level=level))  # type: ignore[misc]
    found[f"copy and digest, {best}, rows of 256 KiB"] = (n, lambda: copy_and_digest(pieces))
    for level in dict.fromkeys(("python", best)):
        name = f"copy and digest, {level}, 100,000 rows of 16 to 800 bytes"
        found[name] = (int(sizes.sum()), lambda level=level: copy_and_digest(small, level=level))  # type: ignore[misc]
    return found


def result_of(nbytes: int, timings: list[TimedRun]) -> dict[str, Any]:
    """Return the figures of one case."""
    return {
        "nbytes": nbytes,
        "gb_per_s": summarise([nbytes / 1e9 / one.wall_s for one in timings]),
        "cpu_s_per_gib": summarise([one.cpu_s * GIB / nbytes for one in timings]),
        "ms": summarise([one.wall_s * 1e3 for one in timings]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes copied, in GiB; twice as much memory is needed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = LoadWatch()
    memory = Memory(max(128 << 20, int(args.gib * GIB) // CHUNK_BYTES * CHUNK_BYTES))
    cases = cases_of(memory)
    timings = interleave({name: run for name, (_, run) in cases.items()}, args.rounds, warmup=1)
    results = {name: result_of(nbytes, timings[name]) for name, (nbytes, _) in cases.items()}
    where = {"gib": memory.nbytes / GIB, "rounds": args.rounds, "implementation": implementation()}
    made = document("memory_copy", where, results, load=load)
    print("\n".join(about(made)))
    print(f"{memory.nbytes / GIB:g} GiB, {args.rounds} rounds, {implementation()}\n")
    print("| case | GB/s | CPU s per GiB | x |\n|---|---|---|---|")
    floor = results["memcpy, one call"]["cpu_s_per_gib"].median
    for name, one in results.items():
        ratio = one["cpu_s_per_gib"].median / floor
        print(f"| {name} | {one['gb_per_s'].text()} | {one['cpu_s_per_gib'].text()} | {ratio:.2f} |")
    if args.json is not None:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
