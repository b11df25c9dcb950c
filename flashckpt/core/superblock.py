"""The first 4 KiB of a segment: format, owner and shape. Pure. Byte tables are in docs/format.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from flashckpt.core.digest import digest
from flashckpt.core.shard import ALIGN_LARGE, round_up
from flashckpt.errors import ConfigError, DamagedError, FormatVersionError

PAGE = 4096
MAGIC = b"FCKSEGMT"
MAJOR, MINOR = 1, 0
MIN_SLOTS, MAX_SLOTS = 2, 8
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
    """

    job: str
    root_digest: int
    rank: int
    slots: int
    manifest_capacity: int
    data_capacity: int
    layout_hash: int

    def __post_init__(self) -> None:
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            expected = f"{MIN_SLOTS} to {MAX_SLOTS}"
            raise ConfigError("invalid number of slots", found=f"slots={self.slots}", expected=expected)
        if len(self.job.encode()) > 256:
            raise ConfigError("the job id is too long", found=f"{len(self.job.encode())} bytes", expected="up to 256")
        object.__setattr__(self, "manifest_capacity", round_up(self.manifest_capacity, PAGE))
        object.__setattr__(self, "data_capacity", round_up(self.data_capacity, ALIGN_LARGE))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: header page, manifest area, data area."""
        return PAGE + self.manifest_capacity + self.data_capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return PAGE + self.slots * self.slot_bytes

    def header_at(self, slot: int) -> int:
        """Byte offset of the header page of a slot."""
        return PAGE + slot * self.slot_bytes

    def manifest_at(self, slot: int) -> int:
        """Byte offset of the manifest area of a slot."""
        return self.header_at(slot) + PAGE

    def data_at(self, slot: int) -> int:
        """Byte offset of the data area of a slot, a multiple of 4096."""
        return self.manifest_at(slot) + self.manifest_capacity


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
