"""The ways to take a snapshot that `stall.py` compares, as cases of `training_loop`; DLRover's are in `stall_dlrover`."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from training_loop import Blocking, Case, Loop, WarmCopy

from flashckpt import Checkpointer
from flashckpt.checkpoint.root_records import MANIFEST, prefix_of
from flashckpt.restore.destinations import Destinations
from flashckpt.restore.executor import execute_table
from flashckpt.restore.sources import MemorySource
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.shm.segment_file import address_of

PERSIST_EVERY = 1_000_000
"""Steps that divide by it are persisted; a round may count up to the next one."""


class Job:
    """One Checkpointer, which both cases of flashckpt share, as the two intervals of one job do.

    Attributes:
        skipped: Snapshots that were not taken since the job was ready.
        complete_at: When the newest snapshot was COMPLETE, digests included, on the clock of time.perf_counter.
    """

    def __init__(self, loop: Loop, root: Path, job: str, slots: int | None) -> None:
        self.root, self.step, self.complete_at, self.skipped = root, 0, 0.0, 0
        self._complete = threading.Event()
        self.ckpt = Checkpointer(
            str(root), snapshot_every=1, persist_every=PERSIST_EVERY, keep_last=1, job=job, slots=slots or "auto"
        )
        self.ckpt.on_snapshot = self._completed
        self.ckpt.on_failure = lambda _: self._complete.set()
        self.ckpt.track(model=loop.model, optimizer=loop.optimizer)
        self.ckpt.restore()
        self.directory = JobDirectory.open(job, create=False)
        record = self.directory.read_generation()
        assert record is not None
        self.generation = record.number
        for _ in range(slots or 3):  # until there is memory for snapshots on all ranks
            while not self._everywhere(self.take(self.step + 1)):
                self.finish()
            self.finish()
        self.skipped = 0

    def take(self, step: int) -> bool:
        """Take a snapshot; whether there was a slot for it."""
        self.step = step
        self._complete.clear()
        skipped = self.ckpt.stats.get("skipped", 0.0)
        self.ckpt.step(step)
        is_taken = self.ckpt.stats.get("skipped", 0.0) == skipped
        if not is_taken:
            self.skipped += 1
            self._complete.set()
        return is_taken

    def finish(self) -> float:
        """Wait for the snapshot under way; when it was COMPLETE."""
        self._complete.wait()
        return self.complete_at

    def _completed(self, step: int) -> None:
        del step
        self.complete_at = time.perf_counter()
        self._complete.set()

    @staticmethod
    def _everywhere(value: bool) -> bool:
        all_of_them = torch.tensor(int(value))
        dist.all_reduce(all_of_them, op=dist.ReduceOp.MIN)
        return bool(all_of_them)


class Flashckpt(Blocking):
    """`ckpt.step()`: into memory only, or with `persist` until the daemon has committed it."""

    def __init__(self, job: Job, *, persist: bool) -> None:
        super().__init__()
        self.job, self.persist, self.wanted = job, persist, job.root

    def call(self) -> None:
        """Take a snapshot of the next step that is (not) persisted."""
        step = self.job.step + 1
        if self.persist:
            step = -(-step // PERSIST_EVERY) * PERSIST_EVERY
        elif step % PERSIST_EVERY == 0:
            step += 1
        self.wanted = self.job.root / prefix_of(self.job.generation, step) / MANIFEST
        if not self.job.take(step) and self.persist:
            raise RuntimeError(f"the snapshot of step {step} was skipped: nothing would be persisted")

    def fence(self) -> None:
        """As the hook of the optimizer does."""
        self.job.ckpt.fence()

    def is_done(self) -> bool:
        """COMPLETE, or committed: MANIFEST is there."""
        return not self.persist or self.wanted.exists()

    def finish(self) -> float:
        """When it was COMPLETE, digests included, or when MANIFEST was made."""
        complete_at = self.job.finish()
        if not self.persist:
            return complete_at
        while not self.wanted.exists():
            time.sleep(0.001)
        return on_perf_counter(self.wanted.stat().st_mtime)

    def pids(self) -> list[int]:
        """The daemon."""
        status = self.job.directory.read_status()
        return [status.pid] if status is not None and status.pid else []

    def close(self) -> None:
        """End the job, and wait until its daemon has persisted the last snapshot and removed the job's memory."""
        if not self.persist:
            return
        path, end = self.job.directory.path, time.monotonic() + 120
        self.job.ckpt.close()
        while path.exists() and time.monotonic() < end:
            time.sleep(0.05)


def flashckpt_case(loop: Loop, root: Path, name: str, slots: int | None, *, persist: bool) -> Case:
    """Return one of the two cases; the first one made starts the job."""
    if name not in _jobs:
        _jobs[name] = Job(loop, root, name, slots)
    return Flashckpt(_jobs[name], persist=persist)


_jobs: dict[str, Job] = {}


def alone(case: Flashckpt, loop: Loop) -> dict[str, float]:
    """Take one snapshot and restore it from its slot with nothing beside, as multiples of a memcpy right before.

    The restore attaches and maps the segment, plans over columns as `restore()` does, verifies every byte, and goes to
    touched memory: the target of the memcpy.
    """
    memcpy, _ = loop.memcpy()
    started = time.perf_counter()
    case.call()
    case.fence()
    copied = time.perf_counter() - started
    complete = case.finish() - started
    found = {"copied_x": copied / memcpy, "complete_x": complete / memcpy}
    for name, threads in (("restored_1_thread_x", 1), ("restored_x", None)):
        memcpy, _ = loop.memcpy()
        started = time.perf_counter()
        _restore(case, loop, threads)
        found[name] = (time.perf_counter() - started) / memcpy
    return found


def _restore(case: Flashckpt, loop: Loop, threads: int | None) -> None:
    (path,) = [one for one in case.job.directory.segments() if one.name.startswith(f"r{loop.rank:05d}-")]
    with contextlib.closing(Segment.attach(path)) as segment:
        complete = {header.identity: slot for slot, header in enumerate(segment.headers()) if header.is_complete}
        source = MemorySource(segment, complete[max(complete)])
    with contextlib.closing(source):
        table = source.manifest.table
        ends = np.cumsum(table.nbytes)
        target = np.frombuffer(loop.target, np.uint8)
        assert ends[-1] <= len(target)
        addresses = address_of(target) + ends - table.nbytes
        destinations = Destinations(addresses=addresses, nbytes=table.nbytes, owners=[target])
        execute_table(table, destinations, [source], threads=threads)


def on_perf_counter(file_time: float) -> float:
    """Return a time of the file system's clock on the clock of time.perf_counter."""
    return time.perf_counter() - max(0.0, time.time() - file_time)


class TorchSave(Blocking):
    """torch.save by the training thread; the file is not synced."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__()
        self.loop, self.path = loop, folder / f"torch-save-{loop.rank}.pt"

    def call(self) -> None:
        """Write the file."""
        torch.save(self.loop.state(), self.path)
        self.called = time.perf_counter()

    def clean(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class AsyncSave:
    """dcp.async_save with the newest options that work without an accelerator.

    The stager is kept (its buffers are allocated once), stages off the caller, into shared memory for the process; plans
    are cached; the writer syncs its files.
    """

    def __init__(self, loop: Loop, folder: Path, kind: str) -> None:
        process = kind == "process"
        self.loop, self.folder = loop, folder / f"dcp-{kind}"
        self.type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=process,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        self.stager, self.planner = DefaultStager(options), DefaultSavePlanner(enable_plan_caching=True)
        self.count, self.ended = 0, 0.0
        self.response: Any = None

    def call(self) -> None:
        """Hand it over."""
        self.count += 1
        self.ended = 0.0
        writer = FileSystemWriter(self.folder / str(self.count))
        self.response = async_save(
            self.loop.state(),
            storage_writer=writer,
            planner=self.planner,
            async_checkpointer_type=self.type,
            async_stager=self.stager,
        )
        self.response.upload_completion.add_done_callback(self._stamp)

    def _stamp(self, _: object) -> None:
        self.ended = time.perf_counter()

    def fence(self) -> None:
        """Wait for the staging."""
        self.response.staging_completion.result()

    def is_done(self) -> bool:
        """Whether the write has ended."""
        return bool(self.response.upload_completion.done())

    def finish(self) -> float:
        """When the files were written."""
        self.response.upload_completion.result()
        return self.ended or time.perf_counter()

    def clean(self) -> None:
        """Remove the files."""
        dist.barrier()
        if self.loop.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Nobody but its child."""
        return []

    def close(self) -> None:
        """Free the stager's buffers."""
        self.stager.close()


def make(name: str, loop: Loop, folder: Path, *, job: str, slots: int | None) -> Case:
    """Return the case of a name in `stall.METHODS`."""
    if name.startswith("flashckpt"):
        return flashckpt_case(loop, folder / "root", job, slots, persist="persisted" in name)
    if name == "torch.save":
        return TorchSave(loop, folder)
    if name.startswith("dcp.async_save"):
        return AsyncSave(loop, folder, name.rpartition(" ")[2])
    return WarmCopy(loop)
