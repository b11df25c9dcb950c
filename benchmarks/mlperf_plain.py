"""Checkpoints through the page cache by `write`, `fsync` and `read` alone: what DLIO asks of a device, without torch."""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flashckpt.bench.host import drop_caches
from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.bench.mlperf_run import fio

PIECE = 16 << 20
SHARES = (1 / 7, 6 / 7)  # two files of each rank, as DLIO's: parameters of 2 bytes, and 12 of the optimizer


def plain(directory: Path, ranks: int, nbytes: int, checkpoints: int) -> dict[str, Any]:
    """Return the mean seconds of the slowest rank, of checkpoints written with fsync and read after caches were dropped."""
    folder = directory / "plain"
    folder.mkdir()
    sizes = [round(nbytes / ranks * share) for share in SHARES]
    source = memoryview(mmap.mmap(-1, ranks * max(sizes)))  # of each rank its own, in no cache, as tensors are
    for at in range(0, len(source), PIECE):
        source[at : at + PIECE] = os.urandom(min(PIECE, len(source) - at))
    try:
        saved = [in_turn(ranks, partial(write, folder, at, sizes, source)) for at in range(checkpoints)]
        drop_caches()
        loaded = [in_turn(ranks, partial(read, folder, at)) for at in range(checkpoints)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        drop_caches()
    return {"save_s": sum(saved) / checkpoints, "load_s": sum(loaded) / checkpoints}


def in_turn(ranks: int, work: Callable[[int], None]) -> float:
    """Return the seconds until the last of so many processes has done its part; they are there before the clock starts."""
    gate, opened = os.pipe()
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            code = 1
            try:
                os.close(opened)
                os.read(gate, 1)  # ends when the parent closes its end
                work(rank)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    began = time.monotonic()
    os.close(opened)
    codes = [os.waitpid(child, 0)[1] for child in children]
    took = time.monotonic() - began
    os.close(gate)
    if any(codes):
        raise SystemExit(f"a process of the plain run ended with {max(codes)}")
    return took


def write(folder: Path, checkpoint: int, sizes: Sequence[int], source: memoryview, rank: int) -> None:
    """Write one rank's files, each synced."""
    mine = source[rank * max(sizes) :]
    for number, size in enumerate(sizes):
        with (folder / f"{checkpoint}-{rank}-{number}").open("wb", buffering=0) as file:
            for at in range(0, size, PIECE):
                file.write(mine[at : min(at + PIECE, size)])
            os.fsync(file.fileno())


def read(folder: Path, checkpoint: int, rank: int) -> None:
    """Read one rank's files into memory that is new."""
    for number in range(len(SHARES)):
        with (folder / f"{checkpoint}-{rank}-{number}").open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            into, at = memoryview(mmap.mmap(-1, size)), 0
            while at < size:
                at += file.readinto(into[at : at + PIECE]) or size


def main() -> int:
    """Take turns with fio, which passes the page cache by; print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--nbytes", type=int, default=1_757_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, took = LoadWatch(), dict[str, list[float]]()
    for _ in range(args.rounds):
        before = os.times()
        found = plain(args.directory, args.ranks, args.nbytes, 1)
        after = os.times()
        rates = fio(args.directory, [args.nbytes // args.ranks] * args.ranks, lambda *_: None)
        found["CPU"] = after.children_user + after.children_system - before.children_user - before.children_system
        found |= {f"fio, {way}": args.nbytes / rate for way, rate in rates.items()}
        for what, seconds in found.items():
            took.setdefault(what, []).append(seconds)
        print(", ".join(f"{what} {seconds:.2f}" for what, seconds in found.items()), flush=True)
    if args.json:
        settings = {"nbytes": args.nbytes, "ranks": args.ranks, "rounds": args.rounds}
        write_json(args.json, document("mlperf-plain", settings, {"seconds": took}, load=load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
