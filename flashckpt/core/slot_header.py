"""Slot headers: bytes in, bytes out. Byte tables are in docs/format.md."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from enum import IntEnum

from flashckpt.core.digest import digest
from flashckpt.core.snapshot_id import SnapshotId

HEADER_COPY_BYTES = 2048
"""Two copies per header page: A at +0, B at +2048."""
_HEADER = struct.Struct("<8sQQqIIiIqqQQQ")
_MAGIC = b"FCKSLOT1"
HEADER_BYTES = _HEADER.size + 8  # the checksum follows the fields
_PERSIST, _HAS_PARENT = 1, 2


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
        generation, step: The snapshot id.
        state: EMPTY, WRITING or COMPLETE.
        world_size, rank: Of the worker group that took it; global rank.
        persist: A persist step: the daemon writes it to storage.
        parent: (generation, step) this generation was restored from.
        manifest_bytes, manifest_digest: Of the manifest area; 0 unless COMPLETE.
        data_bytes: Used bytes of the data area; 0 unless COMPLETE.
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
    parent = h.parent or (0, 0)
    fields = _HEADER.pack(
        _MAGIC, h.sequence, h.generation, h.step, h.state, h.world_size, h.rank, flags, *parent,
        h.manifest_bytes, h.manifest_digest, h.data_bytes,
    )  # fmt: skip
    return fields + struct.pack("<Q", digest(fields))


@functools.lru_cache(maxsize=64)  # a rank reads its own few headers several times per snapshot
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
    )


def newest_copy(page: bytes) -> tuple[SlotHeader, int]:
    """Return the valid header with the highest sequence and the copy (0 or 1) to overwrite next."""
    copies = [decode_header(page[at : at + HEADER_BYTES]) for at in (0, HEADER_COPY_BYTES)]
    a, b = (-1 if c is None else c.sequence for c in copies)
    best = copies[0] if a >= b else copies[1]
    if best is None:
        return SlotHeader(), 0
    return best, 1 if a >= b else 0
