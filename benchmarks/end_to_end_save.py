"""The processes of `end_to_end.py`: one that holds the state and saves it by each way, and one that only looks at storage."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashckpt.bench.worker import serve

EXTENT = 16 << 20
BUFFER = 4 * EXTENT
RAW_THREADS = 2
TENSORS = 100
JOB = "bench-end-to-end"


class Trainer:
    """The state, its checkpointer, and the other ways to save it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import torch
        from end_to_end_model import Model

        from flashckpt import Checkpointer

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.folder = Path(config["folder"])
        self.root = self.folder / "flashckpt"
        self.model = Model(int(config["bytes"]))
        self.nbytes = self.model.nbytes
        self.copies = [torch.empty_like(one).fill_(1) for one in self.model.parameters()]
        self.buffer = mmap.mmap(-1, BUFFER)
        self.buffer[:] = b"\1" * BUFFER
        self._complete, self._complete_at = threading.Event(), 0.0
        self.ckpt = Checkpointer(str(self.root), snapshot_every=1, persist_every=1, keep_last=1, job=JOB)
        self.ckpt.on_snapshot = self._completed
        # its step is the fence: parameters of a model without one would be copied before step() returns
        self.ckpt.track(model=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.ckpt.restore()
        self.step = 0

    def _completed(self, step: int) -> None:
        del step
        self._complete_at = time.monotonic()
        self._complete.set()

    def ready(self) -> int:
        """Save until there is memory for every snapshot; bytes of the state."""
        from flashckpt.shm.job_directory import JobDirectory

        while self.ckpt.stats.get("snapshots", 0) < 3:
            self.step += 1
            self.ckpt.step(self.step)
            self.ckpt.wait(600)
        record = JobDirectory.open(JOB, create=False).read_generation()
        assert record is not None
        self.generation = record.number
        return self.nbytes

    def next_step(self) -> tuple[int, str]:
        """The step that is saved next, and the file that makes it a checkpoint."""
        from flashckpt.checkpoint.root_records import MANIFEST, prefix_of

        self.step += 1
        return self.step, str(self.root / prefix_of(self.generation, self.step) / MANIFEST)

    def flashckpt(self, step: int) -> dict[str, float]:
        """Take and persist one snapshot; when it began (time.monotonic) and seconds since then."""
        self._complete.clear()
        began = time.monotonic()
        self.ckpt.step(step)
        called = time.monotonic()
        self.ckpt.wait(600)
        waited = time.monotonic()
        assert self._complete.is_set(), "the snapshot was skipped"
        return {
            "began": began,
            "call": called - began,
            "restorable": self._complete_at - began,
            "wait": waited - began,
        }

    def save(self, way: str) -> dict[str, float]:
        """Save by another way; seconds until it is durable, and for a save beside training until the call returned."""
        if way in ("raw", "memcpy"):
            began = time.monotonic()
            self._raw() if way == "raw" else self._memcpy()
            return {way: time.monotonic() - began}
        from flashckpt.bench import rank

        tensors = {name: one.detach() for name, one in self.model.named_parameters()}
        folder = self.folder / f"{way}.0"
        try:
            found = rank.write(tensors, rank=0, name=way, directory=str(self.folder), beside=lambda _: 0.0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        stages = {way: found["durable_s"]}
        return stages | ({f"{way}, call": found["blocked_s"]} if "async" in way else {})

    def _memcpy(self) -> None:
        for copy, parameter in zip(self.copies, self.model.parameters(), strict=True):
            copy.copy_(parameter.detach())

    def _raw(self) -> None:
        path, view = self.folder / "raw", memoryview(self.buffer)
        size = self.nbytes // 4096 * 4096
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        os.posix_fallocate(fd, 0, size)

        def work(index: int) -> None:
            for at in range(index * EXTENT, size, RAW_THREADS * EXTENT):
                source = at % BUFFER
                os.pwrite(fd, view[source : source + min(EXTENT, size - at)], at)

        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(work, range(RAW_THREADS)))
        os.fsync(fd)
        os.close(fd)
        path.unlink()

    def close(self) -> None:
        """End the job and wait until its daemon has removed the memory."""
        from flashckpt.shm.job_directory import JobDirectory

        path, end = JobDirectory.open(JOB, create=False).path, time.monotonic() + 120
        self.ckpt.close()
        while path.exists() and time.monotonic() < end:
            time.sleep(0.05)


class Reader:
    """Looks at storage as any other process may."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from flashckpt.storage.factory import open_store

        self.store = open_store(Path(config["folder"]) / "flashckpt")

    def watch(self, path: str) -> float:
        """Wait until a checkpoint is there and is the newest; when that was, time.monotonic."""
        from flashckpt.checkpoint.catalog import newest_checkpoint

        while not os.path.exists(path):  # noqa: PTH110 -- the cheapest look there is
            time.sleep(0.0005)
        seen = time.monotonic()
        newest = newest_checkpoint(self.store)
        assert newest is not None
        assert newest.prefix == Path(path).parent.name
        return seen


def commands(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the process that is asked for; return what the parent may order."""
    if config.get("reads"):
        return {"watch": Reader(config).watch}
    trainer = Trainer(config)
    return {name: getattr(trainer, name) for name in ("ready", "next_step", "flashckpt", "save", "close")}


if __name__ == "__main__":
    serve(commands)
