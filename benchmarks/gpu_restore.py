"""What bounds a restart on a GPU: bytes of a slot through blocks to the device, page-locking a slot, the end of a killed process.

    python benchmarks/gpu_restore.py --gb 16 --seconds 90 --json out/gpu-restore.json [--device cpu]

A slot is a file in FLASHCKPT_SHM_DIR. `blocks` brings it to the device with the product's rows of a device, copied and digested by so
many threads in blocks of so many MiB, in turns; `page-lock` registers a new mapping of it with the driver, before and after its
pages are mapped; `end` is SIGKILL until the process is gone, by what it holds. Where that folder is a tmpfs of huge pages
(`mount -t tmpfs -o huge=always`) pages cost little: compare the two.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_time import end_of, take_the_devices_path

from flashckpt import accelerator
from flashckpt.bench.measure import LoadWatch, document, interleave, summarise, write_json
from flashckpt.native import copy_and_digest
from flashckpt.restore import device_rows
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.shm.segment_file import address_of, map_held

PIECE = 64 << 20
BLOCKS = ((16, 8), (4, 8), (8, 32), (16, 32))
"""Threads, and MiB per block; (8, 32) is what a restore takes."""
HOLDS = ("a mapped slot", "a page-locked slot", "device memory", "both")


def mapped(path: Path) -> Any:
    """Return a new mapping of the slot."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def each(slot: Any, threads: int, size: int, work: Callable[[int], object]) -> None:
    """Call `work` with the first byte of every piece of the slot."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, len(slot), size)))


def through_blocks(path: Path, target: torch.Tensor, threads: int, mib: int) -> float:
    """Return GB/s from a slot that is not mapped yet to the device."""
    began, slot, size = time.perf_counter(), mapped(path), mib << 20
    device_rows.BLOCK_BYTES = size
    rows, address = DeviceRows({0: target}), address_of(slot)

    def one(at: int) -> None:
        map_held(address + at, size)
        with rows.filling(*np.array([[0], [at], [size]])) as (block,):
            copy_and_digest(np.array([[address + at, block, size]]), check=False)

    each(slot, threads, size, one)
    rows.wait()
    return len(slot) / 1e9 / (time.perf_counter() - began)


def page_lock(path: Path, *, maps: bool) -> float:
    """Return GB/s at which a slot is page-locked, after its pages were mapped by eight threads or as it is."""
    slot = mapped(path)
    address = address_of(slot)
    if maps:
        each(slot, 8, PIECE, lambda at: map_held(address + at, PIECE))
    began = time.perf_counter()
    if not accelerator.register(address, len(slot), index=0):
        return 0.0
    seconds = time.perf_counter() - began
    accelerator.unregister(address, index=0)
    return len(slot) / 1e9 / seconds


def hold(path: Path, what: str, device: str) -> None:
    """Hold something until killed."""
    slot = mapped(path)
    if what != HOLDS[2]:
        each(slot, 8, PIECE, lambda at: map_held(address_of(slot) + at, PIECE))
    memory = torch.ones(len(slot) if what in HOLDS[2:] else 1, dtype=torch.uint8, device=device)
    if what in (HOLDS[1], HOLDS[3]) and device == "cuda":
        accelerator.register(address_of(slot), len(slot), index=0)
    print("ready" if memory[0] else "", flush=True)
    time.sleep(1e6)


def end_s(path: Path, device: str, what: str) -> float:
    """Return how long a killed process takes to be gone."""
    words = [sys.executable, __file__, "--hold", what, "--device", device, "--json", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.perf_counter()
        process.kill()
        process.wait()
        return time.perf_counter() - began


def turns(cases: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """Return what cases gave in turns, once at least; the first turn is thrown away where there is time for others."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    end = time.monotonic() + seconds
    while not all(found.values()) or time.monotonic() < end:
        for name, (timing,) in interleave(cases, 1).items():
            found[name].append(timing.value)
    return {name: values[1:] or values for name, values in found.items()}


def measure(path: Path, device: str, seconds: float) -> dict[str, Any]:
    """Return the figures of all parts; each has its share of the time."""
    target = torch.empty(path.stat().st_size, dtype=torch.uint8, device=device)
    left = end_of(seconds) - time.monotonic()
    cases = {
        f"{threads} threads, {mib} MiB": partial(through_blocks, path, target, threads, mib) for threads, mib in BLOCKS
    }
    found: dict[str, Any] = {"blocks, GB/s": turns(cases, left * 0.4)}
    if device == "cuda":
        ways = {"new": partial(page_lock, path, maps=False), "mapped": partial(page_lock, path, maps=True)}
        found["page-lock, GB/s"] = turns(ways, left * 0.2)
    del target
    held = HOLDS if device == "cuda" else HOLDS[:1]
    found["end, s"] = turns({what: partial(end_s, path, device, what) for what in held}, left * 0.4)
    return found


def main() -> None:
    """Parse arguments; run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--hold", choices=HOLDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.hold:
        hold(options.json, options.hold, options.device)
    if options.device == "cpu":
        take_the_devices_path()
    load, folder = LoadWatch(), Path(os.environ.get("FLASHCKPT_SHM_DIR", "/dev/shm"))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="flashckpt-gpu-restore-") as file:
        file.truncate(max(1, int(options.gb * 1e9) // PIECE) * PIECE)
        slot = mapped(Path(file.name)).reshape(-1, PIECE)
        slot[:] = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8)
        del slot  # each part maps it itself
        found = measure(Path(file.name), options.device, options.seconds)
    rows = [
        f"{part}: {name}: {summarise(values).text()}" for part, cases in found.items() for name, values in cases.items()
    ]
    arguments = {"gb": options.gb, "device": options.device}
    write_json(options.json, document("gpu_restore", arguments, {"figures": found}, load=load) | {"rows": rows})
    print("\n".join(rows))


if __name__ == "__main__":
    main()
