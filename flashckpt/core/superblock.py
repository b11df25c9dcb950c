"""The first 4 KiB of a segment: format, owner and shape. Pure. Byte tables are in docs/format.md."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from flashckpt.core.records import digest
from flashckpt.core.shard import ALIGN_LARGE, round_up
from flashckpt.core.snapshot_id import MAX_SLOTS, MIN_SLOTS, SnapshotId
from flashckpt.errors import ConfigError, DamagedError, FormatVersionError

PAGE = 4096
MAGIC = b"FCKSEGMT"
MAJOR, MINOR = 1, 0
OWNER_AT = 2048
_BLOCK = struct.Struct("<8sHHIiIQQQQQ16sH256s")
_OWNER = struct.Struct("<QQ")  # pid, nanoseconds since the epoch when it took the segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """Shape and identity of a segment.

    Attributes:
        job: Job id, at most 256 bytes of UTF-8.
        root_digest: u64 over the absolute root URL; another root under the same job id is rejected.
        rank: Global rank of the owner.
        slots: Snapshots it can hold, 2 to 8 (1 holds no previous snapshot while one is written).
        manifest_capacity: Bytes of each slot's manifest area, rounded up to pages.
        data_capacity: Bytes of each slot's data area, rounded up to pages.
        layout_hash: u64 of the shards it holds (`layout.layout_hash`).
        slot_bytes: Bytes of one slot: header page, manifest area, data area.
    """

    job: str
    root_digest: int
    rank: int
    slots: int
    manifest_capacity: int
    data_capacity: int
    layout_hash: int
    slot_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            expected = f"{MIN_SLOTS} to {MAX_SLOTS}"
            raise ConfigError("invalid number of slots", found=f"slots={self.slots}", expected=expected)
        if len(self.job.encode()) > 256:
            raise ConfigError("the job id is too long", found=f"{len(self.job.encode())} bytes", expected="up to 256")
        object.__setattr__(self, "manifest_capacity", round_up(self.manifest_capacity, PAGE))
        object.__setattr__(self, "data_capacity", round_up(self.data_capacity, ALIGN_LARGE))
        object.__setattr__(self, "slot_bytes", PAGE + self.manifest_capacity + self.data_capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return PAGE + self.slots * self.slot_bytes

    def header_at(self, slot: int) -> int:
        """Byte offset of the header page of a slot."""
        return PAGE + slot * self.slot_bytes

    def manifest_at(self, slot: int) -> int:
        """Byte offset of the manifest area of a slot."""
        return PAGE + slot * self.slot_bytes + PAGE

    def data_at(self, slot: int) -> int:
        """Byte offset of the data area of a slot, a multiple of 4096."""
        return PAGE + slot * self.slot_bytes + PAGE + self.manifest_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """A verified superblock: the spec, and where and when it was created."""

    spec: SegmentSpec
    uid: int
    boot_id: bytes
    created_ns: int


def encode_superblock(block: Superblock) -> bytes:
    """Return the first 2048 bytes of a segment."""
    spec, job = block.spec, block.spec.job.encode()
    fields = _BLOCK.pack(
        MAGIC, MAJOR, MINOR, spec.slots, spec.rank, block.uid, spec.layout_hash, spec.root_digest,
        spec.manifest_capacity, spec.data_capacity, block.created_ns, block.boot_id, len(job), job,
    )  # fmt: skip
    raw = fields.ljust(OWNER_AT - 8, b"\0")
    return raw + struct.pack("<Q", digest(raw))


@functools.lru_cache(maxsize=64)  # a persister reads those of its ranks at each of its turns
def decode_superblock(raw: bytes, *, path: str) -> Superblock:
    """Return the superblock in the first 2048 bytes of `raw`.

    Raises:
        DamagedError: Not a segment, or its checksum does not hold.
        FormatVersionError: Written by another major version.
    """
    if raw[:8] != MAGIC or len(raw) < OWNER_AT:
        raise DamagedError(f"{path} is not a segment", found=repr(raw[:8]), expected=repr(MAGIC))
    _, major, minor, slots, rank, uid, layout, root, m_cap, d_cap, created, boot, n, job = _BLOCK.unpack_from(raw)
    if major != MAJOR:
        raise FormatVersionError(
            f"segment {path} was written in a format this program does not read",
            found=f"format version {major}.{minor}",
            expected=f"format version {MAJOR}.x",
            state="It was left unchanged.",
            remedy="use the flashckpt release that wrote it, or remove it with flashckpt gc",
        )
    if digest(raw[: OWNER_AT - 8]) != struct.unpack_from("<Q", raw, OWNER_AT - 8)[0]:
        raise DamagedError(f"the superblock of segment {path} is damaged", state="It was left unchanged.")
    try:
        spec = SegmentSpec(
            job=job[:n].decode(),
            root_digest=root,
            rank=rank,
            slots=slots,
            manifest_capacity=m_cap,
            data_capacity=d_cap,
            layout_hash=layout,
        )
    except (UnicodeDecodeError, ConfigError) as error:
        raise DamagedError(
            f"the superblock of segment {path} contradicts itself",
            found=str(error).splitlines()[0],
            state="It was left unchanged.",
            remedy="remove the segment with flashckpt gc",
        ) from error
    return Superblock(spec=spec, uid=uid, boot_id=boot, created_ns=created)


def encode_owner(pid: int, since_ns: int) -> bytes:
    """Return the owner record: which process took the segment, for error texts only (the lock decides)."""
    fields = _OWNER.pack(pid, since_ns)
    return fields + struct.pack("<Q", digest(fields))


def decode_owner(raw: bytes) -> int:
    """Return the pid in the owner record, 0 if there is none."""
    fields = raw[: _OWNER.size]
    if len(raw) < _OWNER.size + 8 or digest(fields) != struct.unpack_from("<Q", raw, _OWNER.size)[0]:
        return 0
    return int(_OWNER.unpack(fields)[0])


# -- Slot headers: bytes in, bytes out. Byte tables are in docs/format.md ------------------------------------------

HEADER_COPY_BYTES = 2048
"""Two copies per header page: A at +0, B at +2048."""
_HEADER = struct.Struct("<8sQQqIIiIqqQQQ")
_MAGIC = b"FCKSLOT1"
HEADER_BYTES = _HEADER.size + 8  # the checksum follows the fields
_PERSIST, _HAS_PARENT, _SUSPECT, _OWN = 1, 2, 4, 8
_MARK_AT = 8


class SlotState(IntEnum):
    """State of a slot."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


_STATES = frozenset(SlotState)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """One valid header of a slot.

    Attributes:
        sequence: Counts every header written to this slot; 0 for one never written.
        state: EMPTY, WRITING or COMPLETE.
        world_size, rank: Of the worker group that took it; global rank.
        persist: A persist step: the daemon writes it to storage.
        parent: (generation, step) this generation was restored from.
        manifest_bytes, manifest_digest: Of the manifest area; 0 unless COMPLETE.
        data_bytes: Used bytes of the data area; 0 unless COMPLETE.
        suspect: Some tensor in it holds numbers that are not finite, and did not before: 1; 2 if no other rank holds it.
        mark: Of the token of its generation, as `core.digest.mark_of` makes it; 0 where an earlier release wrote it.
    """

    sequence: int = 0
    generation: int = 0
    step: int = 0
    state: SlotState = SlotState.EMPTY
    world_size: int = 0
    rank: int = 0
    persist: bool = False
    parent: SnapshotId | None = None
    manifest_bytes: int = 0
    manifest_digest: int = 0
    data_bytes: int = 0
    suspect: int = 0
    mark: int = 0

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)

    @property
    def is_complete(self) -> bool:
        """Whether the slot holds a whole snapshot."""
        return self.state is SlotState.COMPLETE


def encode_header(h: SlotHeader) -> bytes:
    """Return one header copy, its checksum at the end."""
    flags = (_PERSIST if h.persist else 0) | (_HAS_PARENT if h.parent is not None else 0)
    flags |= (0, _SUSPECT, _SUSPECT | _OWN)[h.suspect] | h.mark << _MARK_AT
    parent = h.parent or (0, 0)
    fields = _HEADER.pack(
        _MAGIC, h.sequence, h.generation, h.step, h.state, h.world_size, h.rank, flags, *parent,
        h.manifest_bytes, h.manifest_digest, h.data_bytes,
    )  # fmt: skip
    return fields + struct.pack("<Q", digest(fields))


@functools.lru_cache(
    maxsize=256
)  # a rank reads its own few headers several times per snapshot, a persister those of all ranks
def decode_header(raw: bytes) -> SlotHeader | None:
    """Return the header in one copy, or None if it is torn, damaged or was never written: a matter of its bytes alone."""
    fields, checksum = raw[: _HEADER.size], raw[_HEADER.size : HEADER_BYTES]
    if len(checksum) != 8 or digest(fields) != struct.unpack("<Q", checksum)[0]:
        return None
    magic, sequence, generation, step, state, world, rank, flags, p_gen, p_step, m_bytes, m_digest, data = (
        _HEADER.unpack(fields)
    )
    if magic != _MAGIC or state not in _STATES:
        return None
    return SlotHeader(
        sequence=sequence,
        generation=generation,
        step=step,
        state=SlotState(state),
        world_size=world,
        rank=rank,
        persist=bool(flags & _PERSIST),
        parent=SnapshotId(p_gen, p_step) if flags & _HAS_PARENT else None,
        manifest_bytes=m_bytes,
        manifest_digest=m_digest,
        data_bytes=data,
        suspect=bool(flags & _SUSPECT) + bool(flags & _OWN),
        mark=flags >> _MARK_AT,
    )


def newest_copy(page: bytes) -> tuple[SlotHeader, int]:
    """Return the valid header with the highest sequence and the copy (0 or 1) to overwrite next."""
    first = decode_header(page[:HEADER_BYTES])
    second = decode_header(page[HEADER_COPY_BYTES : HEADER_COPY_BYTES + HEADER_BYTES])
    if second is not None and (first is None or second.sequence > first.sequence):
        return second, 0
    return (SlotHeader(), 0) if first is None else (first, 1)
