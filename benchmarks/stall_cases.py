"""The ways to take a snapshot that `stall.py` compares, as cases of `training_loop`; DLRover's are in `stall_dlrover`."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from training_loop import Blocking, Case, Loop, WarmCopy

from flashckpt import Checkpointer
from flashckpt.checkpoint.writer import MANIFEST, prefix_of
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import MemorySource
from flashckpt.shm.segment import Segment

PERSIST_EVERY = 1_000_000
"""Steps that divide by it are persisted; a round may count up to the next one."""


class Flashckpt(Blocking):
    """`ckpt.step()`: into memory only, or with `persist` until the daemon has committed it.

    Both cases share one Checkpointer, as the two intervals of one job do.
    """

    def __init__(self, ckpt: Checkpointer, root: Path, *, persist: bool) -> None:
        super().__init__()
        self.ckpt, self.root, self.persist = ckpt, root, persist
        life = ckpt._life
        assert life is not None
        self.life, self.wanted = life, root

    def call(self) -> None:
        """Take a snapshot of the next step that is (not) persisted."""
        step = self.life._row.step + 1
        if self.persist:
            step = -(-step // PERSIST_EVERY) * PERSIST_EVERY
        elif step % PERSIST_EVERY == 0:
            step += 1
        self.wanted = self.root / prefix_of(self.life.outcome.record.number, step) / MANIFEST
        self.ckpt.step(step)

    def fence(self) -> None:
        """As the hook of the optimizer does."""
        self.ckpt.fence()

    def is_done(self) -> bool:
        """COMPLETE, or committed: MANIFEST is there."""
        return not self.persist or self.wanted.exists()

    def finish(self) -> float:
        """When it was COMPLETE, digests included, or when MANIFEST was made."""
        self.life._stager.finish()
        if not self.persist:
            return _complete_at[self.ckpt]
        while not self.wanted.exists():
            time.sleep(0.001)
        return on_perf_counter(self.wanted.stat().st_mtime)

    def pids(self) -> list[int]:
        """The daemon."""
        status = self.life.directory.read_status()
        return [status.pid] if status is not None and status.pid else []

    def close(self) -> None:
        """End the job, and wait until its daemon has persisted the last snapshot and removed the job's memory."""
        if not self.persist:
            return
        path, end = self.life.directory.path, time.monotonic() + 120
        self.ckpt.close()
        while path.exists() and time.monotonic() < end:
            time.sleep(0.05)


def flashckpt_case(loop: Loop, root: Path, job: str, slots: int | None, *, persist: bool) -> Case:
    """Return one of the two cases; the first one made starts the Checkpointer."""
    if (ckpt := _checkpointers.get(job)) is None:
        ckpt = Checkpointer(
            str(root), snapshot_every=1, persist_every=PERSIST_EVERY, keep_last=1, job=job, slots=slots or "auto"
        )
        ckpt.track(model=loop.model, optimizer=loop.optimizer)
        ckpt.restore()
        assert ckpt._life is not None
        assert ckpt._life.memory.wait_ready()
        _checkpointers[job] = ckpt
        ckpt.on_snapshot = lambda _, made=ckpt: _complete_at.update({made: time.perf_counter()})
    return Flashckpt(ckpt, root, persist=persist)


_checkpointers: dict[str, Checkpointer] = {}
_complete_at: dict[Checkpointer, float] = {}


def alone(case: Flashckpt, loop: Loop) -> dict[str, float]:
    """Take one snapshot and restore it from its slot with nothing beside, as multiples of a memcpy right before.

    The restore attaches and maps the segment, verifies every byte, and goes to touched memory: the target of the memcpy.
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
    held = case.life.memory.segment
    assert held is not None
    newest = max((h for h in held.headers() if h.is_complete), key=lambda h: h.identity)
    slot = [h.identity if h.is_complete else None for h in held.headers()].index(newest.identity)
    with contextlib.closing(Segment.attach(held.path)) as segment:
        source = MemorySource(segment, slot)
    with contextlib.closing(source):
        view, at, targets = memoryview(loop.target), 0, []
        for row in range(len(source.manifest.table)):
            shard = source.manifest.table.shard(row)
            targets.append(Target(shard=shard, buffer=view[at : at + shard.nbytes]))
            at += shard.nbytes
        execute_reads(targets, [source], threads=threads)


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
