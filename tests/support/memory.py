"""Snapshots at the level of segments: known bytes per (rank, step), taken and verified without torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashckpt import faults
from flashckpt.core.manifest import Manifest, ShardTable, encode_manifest
from flashckpt.core.records import CHUNK_BYTES, chunk_digests, digest
from flashckpt.core.shard import Shard, layout_hash, place
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.core.superblock import SlotHeader
from flashckpt.shm.lease import Pin
from flashckpt.shm.segment import Segment, SegmentSpec

SIZES = (3 * CHUNK_BYTES + 17, 70_000, 100, 0, 8)  # several chunks, one page-aligned, small, empty, scalar


def shards_of(rank: int, sizes: tuple[int, ...] = SIZES) -> list[Shard]:
    return [
        Shard(fqn=f"rank{rank}.t{i}", dtype="uint8", global_shape=(n,), offsets=(0,), lengths=(n,))
        for i, n in enumerate(sizes)
    ]


def bytes_of(rank: int, step: int, sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    """The true state of one rank after `step`: what a restore must give back bit for bit."""
    rng = np.random.default_rng((rank, step))
    return [rng.integers(0, 256, n, np.uint8) for n in sizes]


def spec_of(rank: int = 0, *, slots: int = 2, job: str = "job", sizes: tuple[int, ...] = SIZES) -> SegmentSpec:
    shards = shards_of(rank, sizes)
    return SegmentSpec(
        job=job,
        root_digest=7,
        rank=rank,
        slots=slots,
        manifest_capacity=64 << 10,
        data_capacity=place(shards).total,
        layout_hash=layout_hash(shards),
    )


def request_of(
    generation: int,
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    parent: SnapshotId | None = None,
    persist: bool = False,
) -> SnapshotRequest:
    return SnapshotRequest(
        id=SnapshotId(generation, step), job="job", rank=rank, world_size=world_size, coordinates={}, parent=parent,
        persist=persist,
    )  # fmt: skip


def take(
    segment: Segment,
    slot: int,
    step: int,
    *,
    generation: int = 1,
    world_size: int = 1,
    parent: SnapshotId | None = None,
    persist: bool = False,
    sizes: tuple[int, ...] = SIZES,
    truth: list[np.ndarray] | None = None,
) -> SlotHeader:
    """Take one snapshot as the copy threads do: chunk by chunk, each digest right behind its copy."""
    rank = segment.spec.rank
    request = request_of(generation, step, rank=rank, world_size=world_size, parent=parent, persist=persist)
    writer = segment.begin(slot, request)
    shards, digests = shards_of(rank, sizes), []
    placement = place(shards)
    target = np.frombuffer(writer.data, np.uint8)
    for data, at in zip(
        truth if truth is not None else bytes_of(rank, step, sizes), placement.offsets.tolist(), strict=True
    ):
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            target[at + start : at + start + len(chunk)] = chunk
            digests.append(digest(target[at + start : at + start + len(chunk)]))
            faults.crash_point("slot.during-copy")
    manifest = Manifest(
        job=segment.spec.job,
        generation=generation,
        step=step,
        parent=parent,
        world_size=world_size,
        rank=rank,
        writers=list(range(world_size)),
        coordinates={},
        table=ShardTable.from_shards(shards, placement.offsets),
        digests=np.array(digests, np.uint64),
        values={"step": step},
    )
    del target
    return writer.commit(encode_manifest(manifest))


def verified(pin: Pin, truth: list[np.ndarray] | None = None) -> int:
    """Return the step whose true bytes the pinned slot holds; fail on any byte of another step."""
    manifest = pin.manifest()
    sizes = tuple(int(n) for n in manifest.table.nbytes)
    wanted = truth if truth is not None else bytes_of(manifest.rank, manifest.step, sizes)
    assert len(wanted) == len(manifest.table)
    for row, data in enumerate(wanted):
        at, n = int(manifest.table.byte_offset[row]), int(manifest.table.nbytes[row])
        found = np.frombuffer(pin.data[at : at + n], np.uint8)
        assert np.array_equal(found, data), f"row {row} of step {manifest.step} is torn"
        first = int(manifest.table.first_chunk[row])
        expected = manifest.digests[first : first + -(-n // CHUNK_BYTES)]
        assert np.array_equal(chunk_digests(found), expected)
    assert manifest.values["step"] == manifest.step
    assert manifest.identity == pin.header.identity
    return manifest.step


def restorable(path: Path) -> list[int]:
    """Return the steps that a fresh reader finds whole in a segment, verified byte by byte, ascending."""
    segment = Segment.attach(path)
    steps = []
    for slot in range(segment.spec.slots):
        pin = segment.pin(slot)
        if pin is not None:
            with pin:
                steps.append(verified(pin))
    segment.close()
    return sorted(steps)


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked child that ends with 0, or 1 after an exception; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time-out belongs to the parent
            work()
            code = 0
        except BaseException:  # noqa: BLE001 -- the parent asserts the exit code; the traceback goes to stderr
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(point: str, work: Callable[[], object]) -> None:
    """Run `work` in a child that is SIGKILLed at a named point; fail if it never comes there."""

    def armed() -> None:
        faults.arm(point)
        work()

    assert ended(fork(armed)) == -signal.SIGKILL, f"{point} was never reached"
