"""The control file of a job on one node: a header page and one 512-byte row per local rank, mapped by all ranks.

Ranks write their own row, the agent writes `stop_after`, the node's first rank what the whole job has acknowledged. Every field is one aligned 8-byte word in the machine's
byte order, written in one store (struct's native mode copies a word at once, its standard modes byte by byte);
the list of COMPLETE ids is bracketed by a counter (odd while it changes) and carries a digest, so that a
rank killed halfway leaves a row that reads as empty, never as wrong.

Ranks map the file, because `step()` must not make system calls; a process that truncates the file kills them (SIGBUS), and the
next start restores its size. Processes that supervise ranks must survive that and read with `ControlView`.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from flashckpt.core.records import digest
from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.faults import crash_point
from flashckpt.shm.private import open_file

MAGIC = b"FCKCTRL1"
PAGE, ROW_BYTES = 4096, 512
MAX_COMPLETE = 16
"""Identities published per rank (8 slots in each of two layouts); of more, the newest."""
CLOSED = 2
"""In `paused`."""
PHASES = ("data", "forward", "backward", "sync", "clip", "optimizer", "log", "snapshot")
"""Of a step; the last one is what training waited for snapshots."""
RESTORED_FROM = ("nothing", "memory", "peer", "storage")
"""Tiers, the nearest first."""
_STOP_AT = 16
_JOB_AT, _JOB_PAIRS = 512, 220
"""Of the header page: what the whole job has acknowledged, as a sealed list (`_write_list`)."""

_INT_FIELDS: dict[str, int] = {  # name -> byte offset in the row; signed 64-bit
    "rank": 0,
    "pid": 8,
    "generation": 16,
    "step": 24,
    "heartbeat_ns": 32,
    "paused": 40,
    "entered": 48,
    "initialised": 56,
    "restore_started": 64,
    "restored": 72,
    "first_step": 80,
    "restored_step": 88,
    "world_size": 96,
    "copied_by": 104,
    "restored_from": 112,
    **{f"{name}_ns": 424 + 8 * number for number, name in enumerate(PHASES[:-1])},  # behind the list
    "stage": 480,
    "snapshots": 496,
    "stall_ns": 504,
}
_LIST_AT = (
    128  # counter, number of pairs, digest, then the low watermark and up to MAX_COMPLETE pairs (generation, step)
)
_GENERATION_AT, _LIST_END = _INT_FIELDS["generation"], _LIST_AT + 24 + 16 * (1 + MAX_COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAcks:
    """What a rank has published about its snapshots.

    Attributes:
        complete: Ids it holds COMPLETE, newest first.
        low_watermark: It will never complete an id up to this one any more: what is up to here and not in
            `complete` was discarded, skipped or overwritten. (-1, -1) if it never took a snapshot.
    """

    complete: tuple[SnapshotId, ...]
    low_watermark: SnapshotId = NEVER

    @classmethod
    def of(cls, identities: Iterable[SnapshotId], low_watermark: SnapshotId | None = None) -> RankAcks:
        """Return the acknowledgement of the newest MAX_COMPLETE `identities`; `low_watermark` is at least the newest of them."""
        complete = tuple(sorted(identities, reverse=True))[:MAX_COMPLETE]
        return cls(
            complete=complete, low_watermark=max([NEVER, *complete, *([low_watermark] if low_watermark else [])])
        )

    def lacks(self, identity: SnapshotId) -> bool:
        """Return whether the rank does not hold `identity` and never will."""
        is_listed = len(self.complete) < MAX_COMPLETE or identity > self.complete[-1]  # a full list may be truncated
        return is_listed and identity <= self.low_watermark and identity not in self.complete


def encode_acks(what: RankAcks) -> bytes:
    """Return 16 bytes per pair: `low_watermark`, then the identities."""
    numbers = *what.low_watermark, *chain.from_iterable(what.complete)
    return struct.pack(f"<{len(numbers)}q", *numbers)


def decode_acks(raw: bytes) -> RankAcks:
    """Return what `encode_acks` wrote."""
    (g, s), *complete = struct.iter_unpack("<qq", raw)
    return RankAcks(low_watermark=SnapshotId(g, s), complete=tuple(map(SnapshotId._make, complete)))


class ControlRow:
    """One rank's row: plain attributes over shared memory.

    Attributes:
        rank, pid, generation, step, world_size: Of the process that owns this row; `step` is the last step done.
        heartbeat_ns, entered, initialised, restore_started, restored, first_step: CLOCK_MONOTONIC nanoseconds.
        paused: 1 while the loop is paused (evaluation, data preparation), CLOSED after the end of the session.
        restored_step: Step it was restored from; -1 on a fresh start.
        copied_by: What copies its snapshots, by its place in `native.IMPLEMENTATIONS`; 0 unknown.
        restored_from: The farthest source of its restore, by its place in RESTORED_FROM.
        snapshots, stall_ns: Snapshots begun, and nanoseconds that training waited for `step()` and its fence.
        data_ns and so on: Nanoseconds of each of PHASES that the loop has reported, see `phases`.
        stage: Of a pipeline: only ranks of one stage do the same work.
    """

    rank: int
    pid: int
    generation: int
    step: int
    heartbeat_ns: int
    paused: int
    entered: int
    initialised: int
    restore_started: int
    restored: int
    first_step: int
    restored_step: int
    world_size: int
    copied_by: int
    restored_from: int
    snapshots: int
    stall_ns: int
    stage: int
    _map: Any
    _at: int

    __slots__ = ("_at", "_map")

    def __init__(self, mapping: mmap.mmap | bytes, index: int) -> None:
        """Made by `Control.row`, and by `ControlView.rows` over a copy, which cannot be written."""
        object.__setattr__(self, "_map", mapping)
        object.__setattr__(self, "_at", PAGE + index * ROW_BYTES)

    def __getattr__(self, name: str) -> int:
        if name not in _INT_FIELDS:
            raise AttributeError(name)
        return int(struct.unpack_from("q", self._map, self._at + _INT_FIELDS[name])[0])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _INT_FIELDS:
            struct.pack_into("q", self._map, self._at + _INT_FIELDS[name], int(value))
        else:
            object.__setattr__(self, name, value)

    def spent(self, phase: str, seconds: float) -> None:
        """Add to the time of one of PHASES but "snapshot"; another name is a KeyError."""
        at = self._at + _INT_FIELDS[f"{phase}_ns"]
        struct.pack_into("q", self._map, at, struct.unpack_from("q", self._map, at)[0] + int(seconds * 1e9))

    def phases(self) -> tuple[int, ...]:
        """Return the nanoseconds of PHASES so far; of those that the loop does not tell 0."""
        found: tuple[int, ...] = struct.unpack_from(f"{len(PHASES) - 1}q", self._map, self._at + _INT_FIELDS["data_ns"])
        return (*found, self.stall_ns)

    @property
    def published(self) -> RankAcks | None:
        """What this rank last published; None if it never did, is doing so now, or belongs to another generation."""
        return published_in(_acks_bytes(self._map, self._at), self.generation)

    @property
    def complete(self) -> list[SnapshotId]:
        """Ids of this rank's COMPLETE snapshots, newest first; [] if unknown."""
        known = self.published
        return [] if known is None else list(known.complete)

    @complete.setter
    def complete(self, identities: Iterable[SnapshotId]) -> None:
        self.publish(RankAcks.of(identities))

    def publish(self, what: RankAcks) -> None:
        """Set what this rank holds. A digest ties it to the row's generation: set that one first."""
        _write_list(self._map, self._at + _LIST_AT, self.generation, encode_acks(what))

    def forget(self) -> None:
        """Withdraw the list: this rank's snapshots are unknown."""
        struct.pack_into("QQ", self._map, self._at + _LIST_AT + 8, 0, 0)

    def clear(self) -> None:
        """Clear the row for a new owner."""
        self.forget()
        unknown = {"rank", "generation", "step", "restored_step"}
        for name, at in _INT_FIELDS.items():
            struct.pack_into("q", self._map, self._at + at, -1 if name in unknown else 0)


def _acks_bytes(mapping: Any, at: int) -> bytes:
    generation: bytes = mapping[at + _GENERATION_AT : at + _GENERATION_AT + 8]
    found: bytes = mapping[at + _LIST_AT : at + _LIST_END]
    return generation + found


@functools.lru_cache(maxsize=64)  # a matter of the bytes alone, which a relay reads at each of its turns
def published_in(acks_bytes: bytes, generation: int) -> RankAcks | None:
    """Return what a row with these `acks_bytes` has published; None as `ControlRow.published`, or if it is of another generation."""
    if int(struct.unpack_from("q", acks_bytes)[0]) != generation:
        return None
    pairs = _read_list(acks_bytes, 8, generation, at_most=1 + MAX_COMPLETE)
    return None if pairs is None else decode_acks(pairs)


class Control:
    """The mapped control file of one job on one node."""

    def __init__(self, mapping: mmap.mmap, rows: int) -> None:
        """Use `open`."""
        self._map, self.rows = mapping, rows

    @classmethod
    def open(cls, path: str | Path, *, rows: int | None = None) -> Control:
        """Map the control file, made or grown to `rows` rows if given.

        Raises:
            FileNotFoundError: It does not exist and `rows` is None.
            DamagedError: It is not a control file.
        """
        fd = open_file(path, os.O_RDWR | (os.O_CREAT if rows is not None else 0))
        try:
            if rows is not None:
                _grow(fd, rows)
            size = os.fstat(fd).st_size
            if size < PAGE or os.pread(fd, 8, 0) != MAGIC:
                raise DamagedError(f"{path} is not a control file", found=f"{size} bytes", remedy="flashckpt gc")
            return cls(mmap.mmap(fd, size), (size - PAGE) // ROW_BYTES)
        finally:
            os.close(fd)

    @property
    def stop_after(self) -> int:
        """Step after which every rank stops; -1 for none, or if the page is damaged."""
        return _stop_in(self._map)

    @stop_after.setter
    def stop_after(self, step: int) -> None:
        struct.pack_into("q", self._map, _STOP_AT, step)
        struct.pack_into("Q", self._map, _STOP_AT + 8, _check_of(step))

    def job_acks(self, generation: int) -> bytes | None:
        """Return what all ranks of a generation have acknowledged, as last published; None if nothing is known."""
        return _read_list(self._map, _JOB_AT, generation, at_most=_JOB_PAIRS)

    def publish_job_acks(self, generation: int, pairs: bytes) -> None:
        """Set what all ranks have acknowledged (16 bytes per pair); the first rank of the node alone calls this."""
        assert len(pairs) <= 16 * _JOB_PAIRS
        crash_point("acks.before-page")
        _write_list(self._map, _JOB_AT, generation, pairs)
        crash_point("acks.after-page")

    def row(self, index: int) -> ControlRow:
        """Return row `index` (the local rank).

        Raises:
            IndexError: No such row.
        """
        if not 0 <= index < self.rows:
            raise IndexError(index)
        return ControlRow(self._map, index)

    def acks_bytes(self, index: int) -> bytes:
        """Return all that `published` of a row depends on, as it is now."""
        return _acks_bytes(self._map, PAGE + index * ROW_BYTES)

    def close(self) -> None:
        """Unmap; rows handed out must not be used any more."""
        self._map.close()


class ControlView:
    """The control file for processes that must survive its truncation: read by system calls, never mapped.

    The path is opened for each call, so that a recreated file is found, and one that was truncated and restored
    by the next start works as before.
    """

    _TRIES = 8

    def __init__(self, path: str | Path) -> None:
        """Does not open the file."""
        self.path = Path(path)

    def rows(self) -> list[ControlRow]:
        """Return a copy of every row as it was at one moment.

        Raises:
            FileNotFoundError: There is none.
            DamagedError: It is no control file, or was truncated.
        """
        raw = self._read()
        return [ControlRow(raw, index) for index in range((len(raw) - PAGE) // ROW_BYTES)]

    def job_acks(self, generation: int) -> bytes | None:
        """As `Control.job_acks`; errors as `rows`."""
        return _read_list(self._read(), _JOB_AT, generation, at_most=_JOB_PAIRS)

    @property
    def stop_after(self) -> int:
        """As `Control.stop_after`; errors as `rows`."""
        return _stop_in(self._read())

    @stop_after.setter
    def stop_after(self, step: int) -> None:
        with self._open(os.O_RDWR) as fd:
            if os.fstat(fd).st_size < PAGE:  # writing would extend it to a file of a few bytes
                raise self._cut_short(os.fstat(fd).st_size)
            os.pwrite(fd, struct.pack("q", step), _STOP_AT)
            os.pwrite(fd, struct.pack("Q", _check_of(step)), _STOP_AT + 8)

    def _read(self) -> bytes:
        """Return the file. Read until two copies are equal: one may catch a rank in the middle of a write."""
        with self._open(os.O_RDONLY) as fd:
            before = b""
            for _ in range(self._TRIES):
                size = os.fstat(fd).st_size
                raw = os.pread(fd, size, 0)
                if raw == before:
                    break
                before = raw
        if len(raw) < PAGE + ROW_BYTES:
            raise self._cut_short(len(raw))
        if raw[:8] != MAGIC:
            raise DamagedError(f"{self.path} is not a control file", found=f"{len(raw)} bytes", remedy="flashckpt gc")
        return raw

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        fd = open_file(self.path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _cut_short(self, size: int) -> DamagedError:
        return DamagedError(
            f"the control file {self.path} was truncated by another process",
            found=f"{size} bytes",
            expected=f"at least {PAGE + ROW_BYTES} bytes",
            state="The snapshots in memory are intact; ranks that use the file die of SIGBUS.",
            remedy="find out which process writes there; the next start of the ranks restores the size of the file",
        )


def _write_list(mapping: Any, at: int, generation: int, pairs: bytes) -> None:
    """Write counter, number of pairs, digest and pairs: whoever reads meanwhile, or after a kill here, finds nothing."""
    counter = int(struct.unpack_from("Q", mapping, at)[0]) | 1
    struct.pack_into("Q", mapping, at, counter)
    mapping[at + 24 : at + 24 + len(pairs)] = pairs
    crash_point("acks.during-list")
    seal = digest(struct.pack("q", generation) + pairs)
    struct.pack_into("QQ", mapping, at + 8, len(pairs) // 16, seal)
    struct.pack_into("Q", mapping, at, (counter + 1) % 2**64)  # even over a damaged page


def _read_list(mapping: Any, at: int, generation: int, *, at_most: int) -> bytes | None:
    """Return what `_write_list` wrote for this generation; None if nothing, another one's, damaged or half of it is there."""
    raw = bytes(mapping[at : at + 24 + 16 * at_most])
    counter, count, expected = struct.unpack_from("QQQ", raw)
    if counter % 2 or not 0 < count <= at_most:
        return None
    pairs = raw[24 : 24 + 16 * count]
    return pairs if digest(struct.pack("q", generation) + pairs) == expected else None


def _stop_in(page: mmap.mmap | bytes) -> int:
    step, check = struct.unpack_from("qQ", page, _STOP_AT)
    return int(step) if check in (0, _check_of(step)) else -1  # 0: written before 1.2, or not written yet


def _grow(fd: int, rows: int) -> None:
    """Bring a new or smaller file to `rows` rows; idempotent, and safe between two that do it at once."""
    size = PAGE + rows * ROW_BYTES
    if os.fstat(fd).st_size < size:
        os.posix_fallocate(fd, 0, size)
    if os.pread(fd, 8, 0) != MAGIC:
        os.pwrite(fd, struct.pack("qQ", -1, _check_of(-1)), _STOP_AT)
        os.pwrite(fd, MAGIC, 0)  # last: a file with the magic is complete


def _check_of(step: int) -> int:
    """Return the word behind `stop_after` that confirms it: a damaged page must stop nobody. Never 0."""
    return digest(struct.pack("q", step)) | 1
