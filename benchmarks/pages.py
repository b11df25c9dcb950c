"""What a restore's memory costs before and beside the copy: pages made, slots mapped, new slots zeroed; CPU seconds per GB.

    .venv/bin/python benchmarks/pages.py --mb 256 --rounds 7 --json FILE

One thread, cases in turns. A restore of the state makes the pages of what was never touched, maps what it reads, and copies it
with its digests; a new slot is reserved, zeroed and mapped. The sums are the floors of both on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flashckpt.bench.measure import LoadWatch, document, summarise, write_json
from flashckpt.native import copy_and_digest
from flashckpt.shm import segment_file

Found = dict[str, list[float]]
_ZEROS = bytes(1 << 20)


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


@contextlib.contextmanager
def new_file(nbytes: int) -> Iterator[int]:
    """Give a file in shared memory without a page."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), nbytes)
        yield file.fileno()


@contextlib.contextmanager
def mapped(fd: int, nbytes: int) -> Iterator[int]:
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield address_of(mapping)
    mapping.close()


def write_zeros(fd: int, nbytes: int) -> None:
    for at in range(0, nbytes, len(_ZEROS)):
        os.pwrite(fd, _ZEROS, at)


def copy_with_digests(source: int, target: int, nbytes: int) -> None:
    copy_and_digest(np.array([[source, target, nbytes]], np.int64), check=False)


def one_round(found: Found, nbytes: int) -> None:
    """Time every case once."""

    def timed(name: str, function: Callable[..., object], *words: object) -> None:
        began = time.thread_time()
        function(*words)
        found.setdefault(name, []).append((time.thread_time() - began) / nbytes * 1e9)

    with new_file(nbytes) as fd, mapped(-1, nbytes) as target:
        timed("target: made in pages of 4 KiB, one call", segment_file.populate, target, nbytes)
        timed("slot: reserved (fallocate)", os.posix_fallocate, fd, 0, nbytes)
        timed("slot: zeroed by system calls", write_zeros, fd, nbytes)
        with mapped(fd, nbytes) as slot:
            timed("slot: mapped page by page, one call", lambda: segment_file.populate(slot, nbytes, write=False))
        with mapped(fd, nbytes) as slot:
            timed("slot: mapped, one access per 64 KiB", segment_file.map_held, slot, nbytes)
            timed("copy with digests", copy_with_digests, slot, target, nbytes)
            timed("memcpy", ctypes.memmove, target, slot, nbytes)
    with new_file(nbytes) as fd, mapped(fd, nbytes) as slot:
        os.posix_fallocate(fd, 0, nbytes)
        timed(
            "slot: zeroed and mapped by page faults, one call", lambda: segment_file.populate(slot, nbytes, write=False)
        )
    with mapped(-1, nbytes) as target:
        fresh = segment_file.FreshMemory(np.array([target]), np.array([nbytes]))
        timed("target: made in huge pages, as far as they are quick", fresh.make, target, nbytes)
        found.setdefault("share of rounds that kept huge pages", []).append(float(fresh.huge_bytes > 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="MiB per case")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, found = LoadWatch(), Found()
    for _ in range(args.rounds):
        one_round(found, args.mb << 20)
    kept = found.pop("share of rounds that kept huge pages")
    summary = {name: summarise(values) for name, values in found.items()}
    for name, one in summary.items():
        print(f"{name:55} {one.text():>24} CPU s per GB, {one.median / summary['memcpy'].median:5.2f} x memcpy")
    print(f"huge pages were kept in {sum(kept):.0f} of {len(kept)} rounds")
    if args.json:
        arguments = {"mb": args.mb, "rounds": args.rounds}
        measured = {"cpu_s_per_gb": summary, "rows": found, "kept_huge_pages": kept}
        write_json(args.json, document("pages", arguments, measured, load=load, paths=[Path("/dev/shm")]))


if __name__ == "__main__":
    main()
