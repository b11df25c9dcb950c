"""How fast bytes leave a GPU: into pageable, page-locked, registered and mapped memory, as a share of the best rate of the run.

    python benchmarks/gpu_bus.py --seconds 25 --json out/gpu-bus.json [--device cpu]

The limit is the best single copy into memory that the driver made itself. Registered memory is tmpfs that was page-locked afterwards, as the
slots are; mapped memory is written by a kernel, without a copy engine. All kinds take turns in every round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_time import end_of

from flashckpt import accelerator
from flashckpt.bench.measure import LoadWatch, document, interleave, summarise, write_json

PIECES = 64


class Mapped:
    """Page-locked host memory as an array of the device."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // 4,), "typestr": "<i4", "data": (address, False), "version": 2,
        }  # fmt: skip


class Bus:
    """A source on the device and a target of every kind.

    Args:
        nbytes: Of one transfer.
        device: "cuda", or "cpu" to run the same program without one.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.is_cuda, self.nbytes = device == "cuda", nbytes
        self.source = torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device=device)
        self.targets: dict[str, Callable[[], None]] = {}
        self.refused: dict[str, str] = {}
        self.register_s = 0.0
        pageable = torch.zeros_like(self.source, device="cpu")
        self.targets["pageable"] = lambda: self.copy(pageable)
        self._registered()
        if self.is_cuda:
            locked = torch.zeros_like(self.source, device="cpu", pin_memory=True)
            self.targets["page-locked"] = lambda: self.copy(locked)
            self.targets["page-locked, 64 pieces"] = lambda: self.pieces(locked)

    def _registered(self) -> None:
        folder = Path(os.environ.get("FLASHCKPT_SHM_DIR", "/dev/shm"))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.ftruncate(file.fileno(), self.nbytes)
            self.memory = mmap.mmap(file.fileno(), self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        view: Any = np.frombuffer(self.memory, np.int32)
        slot, address = torch.from_numpy(view), int(view.ctypes.data)
        self.targets["tmpfs, not registered"] = lambda: self.copy(slot)
        if not self.is_cuda:
            return
        started = time.perf_counter()
        if not accelerator.register(address, self.nbytes, index=0):
            self.refused["tmpfs, registered"] = "cudaHostRegister refused it"
            return
        self.register_s = time.perf_counter() - started
        del self.targets["tmpfs, not registered"]
        self.targets["tmpfs, registered"] = lambda: self.copy(slot)
        try:
            mapped = torch.as_tensor(Mapped(address, self.nbytes), device="cuda")
            self.targets["mapped, by a kernel"] = lambda: self.kernel(mapped)
            self.kernel(mapped)
        except Exception as error:  # noqa: BLE001 -- a driver that does not map it is a finding
            self.targets.pop("mapped, by a kernel", None)
            self.refused["mapped, by a kernel"] = str(error).splitlines()[0]

    def copy(self, target: torch.Tensor) -> None:
        """One copy, waited for."""
        target.copy_(self.source, non_blocking=True)
        self.wait()

    def pieces(self, target: torch.Tensor) -> None:
        """The same in pieces, as many tensors are."""
        for part, source in zip(target.chunk(PIECES), self.source.chunk(PIECES), strict=True):
            part.copy_(source, non_blocking=True)
        self.wait()

    def kernel(self, target: torch.Tensor) -> None:
        """Written by the multiprocessors over the bus."""
        torch.add(self.source, 0, out=target)
        self.wait()

    def wait(self) -> None:
        """Until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    """Parse arguments; run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=2048, help="of one transfer, in 10^6 bytes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    end, load = end_of(options.seconds), LoadWatch()
    bus = Bus(int(options.mb * 1e6) // 256 * 256, options.device)
    series: dict[str, list[float]] = {name: [] for name in bus.targets}
    interleave(bus.targets, 1)
    while time.monotonic() < end - 1 and len(series["pageable"]) < 20:
        for name, timings in interleave(bus.targets, 1).items():
            series[name] += [bus.nbytes / timing.wall_s / 1e9 for timing in timings]
    rates = {name: summarise(values) for name, values in series.items() if values}
    limit = max(rate.max for rate in rates.values())
    rows = [f"limit: {limit:.1f} GB/s, the best of the run; {bus.nbytes / 1e9:.2f} GB per transfer"]
    rows += [f"{name}: {rate.text()} GB/s = {rate.median / limit:.0%}, n={rate.n}" for name, rate in rates.items()]
    rows += [f"{name}: {why}" for name, why in bus.refused.items()]
    if bus.register_s:
        rows.append(f"page-locking {bus.nbytes / 1e9:.2f} GB of tmpfs took {bus.register_s:.2f} s")
    found = {"rates_gb_per_s": rates, "limit_gb_per_s": limit, "register_s": bus.register_s, "refused": bus.refused}
    result = document("gpu_bus", {"mb": options.mb, "device": options.device}, found, load=load)
    write_json(options.json, result | {"rows": rows})


if __name__ == "__main__":
    main()
