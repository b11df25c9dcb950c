"""Replica segments: what this node keeps of the ranks of other nodes, in slots like a rank's own.

A snapshot that arrives is written into a slot that says WRITING, chunk by chunk, each verified against the digests of its
manifest; the header says COMPLETE after the last. A slot that still says WRITING for the same snapshot, because a connection
dropped or the persister was killed, is filled further: what of it is right is found by the digests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.manifest import Manifest, decode_manifest, encode_table
from flashckpt.core.records import CHUNK_BYTES, digest, mark_of
from flashckpt.core.shard_table import chunk_counts
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.core.superblock import SlotHeader
from flashckpt.errors import DamagedError, FlashckptError, FormatVersionError
from flashckpt.faults import crash_point
from flashckpt.native import digest_ranges
from flashckpt.shm.acks import choose_slot
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment, SegmentSpec, SlotPinned, SlotState, SlotWriter

REPLICA_SLOTS = 2
"""Slots per rank that is kept: the newest replica that is everywhere, and the one that arrives."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What may not be overwritten here (invariant M1).

    Attributes:
        generation: The current generation.
        identity: The id that every partner of every node holds, or what took its place (`RoundMemory.known`).
        presumed: What stays while that is None.
        superseded: The checkpoint on storage that the generation was restored from.
    """

    generation: Generation
    identity: SnapshotId | None = None
    presumed: SnapshotId | None = None
    superseded: SnapshotId | None = None

    def counts(self, header: SlotHeader) -> bool:
        """Whether a replica is whole, and not of another run that took the number of this generation."""
        is_other = header.generation == self.generation.number and header.mark not in (
            0,
            mark_of(self.generation.token),
        )
        return header.is_complete and not is_other

    def slot(self, headers: list[SlotHeader], pinned: Collection[int]) -> int | None:
        """Return the slot that a replica may overwrite; None if there is none.

        That is any but the one with what is kept. Of what is newer nothing can be everywhere: its sender offers something else.
        What another run left counts as empty.

        Args:
            headers: One per slot.
            pinned: Slots that are being read or written.
        """
        kept = self.identity or self.presumed
        complete = [header.identity for header in headers if self.counts(header)]
        newer = {i for i in complete if kept is None or i > kept}
        left = {i for i in complete if i != kept and is_rolled_back(i, [self.generation])}
        return choose_slot(
            [h if self.counts(h) or not h.is_complete else replace(h, state=SlotState.EMPTY) for h in headers],
            pinned=pinned,
            common=[kept] if kept is not None else [],
            unrecoverable=newer | left,
            superseded=self.superseded,
        )


class NoSlotError(Exception):
    """Every slot holds a replica that is still needed, or is being read: to be tried again later."""


@dataclass
class IncomingReplica:
    """One snapshot of one rank on its way into a replica slot.

    Attributes:
        manifest: Of the rows that arrive, at their places in the slot.
        raw: The same as bytes.
        arrived: np.bool_ per chunk: its bytes are in the slot, and match their digest.
    """

    manifest: Manifest
    raw: bytes
    writer: SlotWriter
    arrived: np.ndarray = field(init=False)
    _starts: np.ndarray = field(init=False)
    _sizes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._starts, self._sizes = chunk_ranges(self.manifest)
        self.arrived = np.zeros(len(self._starts), np.bool_)

    def look(self) -> None:
        """Find out which chunks are right already, of an earlier attempt."""
        self.arrived = self._digests(np.arange(len(self._starts))) == self.manifest.digests

    def take_in(self, chunk: int, data: memoryview) -> bool:
        """Take the bytes of one chunk; False where they do not match its digest."""
        if not 0 <= chunk < len(self._starts) or len(data) != self._sizes[chunk]:
            raise DamagedError("a chunk of a replica is not one of its manifest", found=f"chunk {chunk}")
        if digest(data) != int(self.manifest.digests[chunk]):
            return False
        start = int(self._starts[chunk])
        self.writer.data[start : start + len(data)] = data
        self.arrived[chunk] = True
        return True

    def commit(self) -> bool:
        """Verify every chunk where it lies now, and set the slot COMPLETE; False where one is missing or damaged."""
        if self.arrived.all():
            self.look()
        if not self.arrived.all():
            return False
        crash_point("replica.before-complete")
        ends = self.manifest.table.byte_offset + self.manifest.table.nbytes
        self.writer.commit(self.raw, data_bytes=int(ends.max(initial=0)), suspect=bool(self.manifest.suspects))
        return True

    def _digests(self, chunks: np.ndarray) -> np.ndarray:
        return digest_ranges(self.writer.data, self._starts[chunks], self._sizes[chunks])


def chunk_ranges(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Return where each chunk of a slot starts in its data area, and its bytes; in the order of the digests."""
    table = manifest.table
    counts = chunk_counts(table.nbytes)
    rows = np.repeat(np.arange(len(table)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    within = number * CHUNK_BYTES
    order = np.argsort(table.first_chunk[rows] + number, kind="stable")
    starts = table.byte_offset[rows] + within
    sizes = np.minimum(table.nbytes[rows] - within, CHUNK_BYTES)
    return starts[order].astype(np.int64), sizes[order].astype(np.int64)


class ReplicaSlots:
    """The replica segments of one job on this node; its process owns those that it writes.

    Args:
        directory: Of the job on this node.
        root_digest: Ties segments to the root.
    """

    def __init__(self, directory: JobDirectory, *, root_digest: int) -> None:
        self._directory, self._root_digest = directory, root_digest
        self._open: dict[Path, Segment] = {}
        self._lock = threading.Lock()

    def holds(self, rank: int, kept: Kept) -> list[SnapshotId]:
        """Return the ids of the COMPLETE replicas of a rank, ascending; of a generation with two runs those of `kept`'s."""
        found: set[SnapshotId] = set()
        for path in self._directory.replica_segments():
            if path.name.startswith(f"r{rank:05d}-"):
                found |= {header.identity for header in _headers(path) if kept.counts(header)}
        return sorted(found)

    def begin(self, raw: bytes, *, kept: Kept, persist: bool, ranks: Collection[int]) -> IncomingReplica | None:
        """Return where a replica goes; None where it is here already.

        Args:
            raw: Its manifest.
            kept: What may not be overwritten.
            persist: It is of a persist step.
            ranks: Those of the sender.

        Raises:
            NoSlotError: No slot is free.
            DamagedError: The manifest is none, or of another job.
            SharedMemoryError: There is too little memory.
        """
        manifest = decode_manifest(raw)
        if manifest.job != self._directory.job or manifest.rank not in ranks or manifest.objects:
            raise DamagedError("a replica is of another job", found=f"job {manifest.job!r}, rank {manifest.rank}")
        if manifest.identity in self.holds(manifest.rank, kept):
            return None
        with self._lock:
            segment = self._segment(manifest, len(raw))
            slot, is_begun = self._slot(segment, manifest.identity, kept)
            try:
                writer = segment.begin(slot, _request(manifest, persist=persist))
            except SlotPinned as error:
                raise NoSlotError(str(error)) from error
        crash_point("replica.after-begin")
        found = IncomingReplica(manifest, raw, writer)
        if is_begun:
            found.look()
        return found

    def retire(self, newest: SnapshotId) -> None:
        """Remove segments of nodes or rows that are kept here no more: all they hold is older than what is everywhere."""
        for path in self._directory.replica_segments():
            with contextlib.suppress(FlashckptError, OSError), self._lock:
                headers = _headers(path)
                if not headers or any(header.identity >= newest for header in headers):
                    continue
                segment = self._open.pop(path, None) or Segment.attach(path)
                with contextlib.closing(segment):
                    if not segment.busy():
                        segment.unlink()
                        _log.info("removed %s: newer replicas are everywhere", path.name)

    def close(self) -> None:
        """Give all segments up; files stay."""
        with self._lock:
            for segment in self._open.values():
                segment.close()
            self._open.clear()

    def _slot(self, segment: Segment, identity: SnapshotId, kept: Kept) -> tuple[int, bool]:
        headers, busy = segment.headers(), segment.busy()
        for slot, header in enumerate(headers):
            if header.identity == identity and header.state is SlotState.WRITING and slot not in busy:
                return slot, True
        free = kept.slot(headers, busy)
        if free is None:
            raise NoSlotError(f"every slot of {segment.path.name} holds a replica that is still needed")
        return free, False

    def _segment(self, manifest: Manifest, manifest_bytes: int) -> Segment:
        """Return the segment for replicas of these rows, owned by this process; made where there is none."""
        layout = digest(encode_table(manifest.table))
        for number in range(8):  # the second and later names serve when one has no room or is damaged
            path = self._directory.replica_path(manifest.rank, (layout + number) % (1 << 64))
            try:
                segment = self._open.get(path) or self._attach(path, manifest, manifest_bytes, layout)
            except (DamagedError, FormatVersionError) as error:
                _log.warning("%s is not used: %s", path, error)
                continue
            if segment.spec.manifest_capacity >= manifest_bytes and not segment.is_cut_short:
                self._open[path] = segment
                return segment
            self._open.pop(path, None)
            segment.close()
        raise NoSlotError("every replica segment of these rows is too small")

    def _attach(self, path: Path, manifest: Manifest, manifest_bytes: int, layout: int) -> Segment:
        segment = (
            Segment.attach(path, writable=True)
            if path.exists()
            else Segment.create(path, _spec(manifest, manifest_bytes, layout, self._root_digest))
        )
        try:
            segment.own()
            segment.reserve()  # also where an earlier process was killed before it had reserved all
        except BaseException:
            segment.close()
            raise
        return segment


def _spec(manifest: Manifest, manifest_bytes: int, layout: int, root_digest: int) -> SegmentSpec:
    ends = manifest.table.byte_offset + manifest.table.nbytes
    return SegmentSpec(
        job=manifest.job,
        root_digest=root_digest,
        rank=manifest.rank,
        slots=REPLICA_SLOTS,
        manifest_capacity=2 * manifest_bytes,  # values may grow
        data_capacity=int(ends.max(initial=1)),
        layout_hash=layout,
    )


def _request(manifest: Manifest, *, persist: bool) -> SnapshotRequest:
    return SnapshotRequest(
        id=manifest.identity,
        job=manifest.job,
        rank=manifest.rank,
        world_size=manifest.world_size,
        coordinates=manifest.coordinates,
        parent=manifest.parent,
        persist=persist,
        token=manifest.token,
    )


def _headers(path: Path) -> list[SlotHeader]:
    try:
        with contextlib.closing(Segment.attach(path)) as segment:
            return segment.headers()
    except (FlashckptError, OSError):
        return []
