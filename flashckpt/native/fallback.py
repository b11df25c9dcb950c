"""The same copy in Python: for machines where the C part was not built. Slower, above all with many small rows.

Copies and digests release the GIL; what lies between them does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.native import descriptors as d
from flashckpt.native.descriptors import Digests, Figures, Integers, Noted, Refusal, look

PIECE_BYTES = 256 << 10
"""Bytes copied at a time ahead of their digest: they stay in the second-level cache."""
_MOST = np.iinfo(np.int64).max
Flags = npt.NDArray[np.bool_]


def run(
    rows: Integers, first: Integers | None, digests: Digests | None, *, check: bool, noted: Noted | None = None
) -> Refusal:
    """Check the rows, then copy and digest them; return what the check found."""
    finding, first = checked(rows, first, digests, check=check)
    if not finding.problem:
        copy_rows(rows, first, digests, iter(range(len(rows))), noted)
    return finding


def checked(
    rows: Integers, first: Integers | None, digests: Digests | None, *, check: bool
) -> tuple[Refusal, Integers]:
    """Return what is wrong with the rows, and the first digest of each."""
    counts = -(-rows[:, 2] // CHUNK_BYTES)
    if first is None:
        first = np.cumsum(counts) - counts
    finding = check_rows(rows, first, None if digests is None else len(digests))
    if check and not finding.problem:
        finding = check_memory(rows)
    return finding, first


def copy_rows(
    rows: Integers, first: Integers, digests: Digests | None, numbers: Iterator[int], noted: Noted | None = None
) -> int:
    """Copy and digest the rows of these numbers, and note their figures, which other threads may take from too; return how many bytes.

    A range's iterator gives each number once, whatever the threads that ask it.
    """
    copied = 0
    listed, starts = rows.tolist(), [-1] * len(rows) if digests is None else first.tolist()
    for number in numbers:
        (source, target, nbytes), start = listed[number], starts[number]
        if start < 0 or digests is None:
            ctypes.memmove(target, source, nbytes)
        elif nbytes > PIECE_BYTES:
            _copy_row(source, target, nbytes, digests[start:])
        elif nbytes:
            if target:
                ctypes.memmove(target, source, nbytes)
            digests[start] = xxhash.xxh3_64_intdigest((ctypes.c_ubyte * nbytes).from_address(source))
        if noted is not None and start >= 0 and nbytes:
            _note(source, nbytes, int(noted.kinds[number]), noted.figures[start:])
        copied += nbytes
    return copied


def _note(source: int, nbytes: int, kind: int, figures: Figures) -> None:
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(source))
    for chunk, begin in enumerate(range(0, nbytes if kind else 0, CHUNK_BYTES)):
        figures[chunk] = look(kind, view[begin : begin + CHUNK_BYTES])


def _copy_row(source: int, target: int, nbytes: int, digests: Digests) -> None:
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(source))
    for chunk, begin in enumerate(range(0, nbytes, CHUNK_BYTES)):
        end = min(begin + CHUNK_BYTES, nbytes)
        hasher = xxhash.xxh3_64()
        for at in range(begin, end, PIECE_BYTES):
            size = min(PIECE_BYTES, end - at)
            if target:
                ctypes.memmove(target + at, source + at, size)
            hasher.update(view[at : at + size])
        digests[chunk] = hasher.intdigest()


# -- checks ------------------------------------------------------------------------------------------------------------


def check_rows(rows: Integers, first: Integers, room: int | None) -> Refusal:
    """Check sizes, addresses, indexes of digests (`room`: how many there are, None for none) and overlaps."""
    source, target, nbytes = rows.T
    used, digested = nbytes > 0, (first >= 0) & (room is not None)
    outside = (source < 0) | (target < 0) | (used & ((source == 0) | (nbytes > _MOST - np.maximum(source, target))))
    chunks = -(-nbytes // CHUNK_BYTES)
    problems = np.select(
        [
            nbytes < 0,
            outside,
            used & ~digested & (target == 0),
            used & digested & ((chunks > (room or 0)) | (first > (room or 0) - chunks)),
        ],
        [d.NEGATIVE_SIZE, d.BAD_ADDRESS, d.NOTHING_TO_DO, d.DIGEST_OUTSIDE],
        d.FINE,
    )
    if problems.any():
        row = int(np.flatnonzero(problems)[0])
        return Refusal(int(problems[row]), row, row)
    return _check_overlaps(source, target, nbytes)


def _check_overlaps(source: Integers, target: Integers, nbytes: Integers) -> Refusal:
    copied = np.flatnonzero((nbytes > 0) & (target != 0))
    copied = copied[np.argsort(target[copied], kind="stable")]
    starts, stops = target[copied], target[copied] + nbytes[copied]
    if (wrong := np.flatnonzero(starts[1:] < stops[:-1])).size:
        return Refusal(d.OVERLAP_TARGET, int(copied[wrong[0] + 1]), int(copied[wrong[0]]))
    used = np.flatnonzero(nbytes > 0)
    hits = np.searchsorted(stops, source[used], side="right")
    over = hits < len(stops)
    over[over] = starts[hits[over]] < (source + nbytes)[used[over]]
    if (wrong := np.flatnonzero(over)).size:
        return Refusal(d.OVERLAP_SOURCE, int(copied[hits[wrong[0]]]), int(used[wrong[0]]))
    return Refusal(d.FINE)


@dataclass(frozen=True, slots=True)
class _Mappings:
    """This process's memory: mappings by address, and where the run of mappings with a right ends that each is in."""

    starts: Integers
    stops: Integers
    has_file: Flags
    mapped_until: Integers
    readable_until: Integers
    writable_until: Integers


def check_memory(rows: Integers) -> Refusal:
    """Compare the rows with /proc/self/maps; a refusal must be seen twice, for other threads change the map meanwhile."""
    return _check_memory_once(rows) if _check_memory_once(rows).problem else Refusal(d.FINE)


def _check_memory_once(rows: Integers) -> Refusal:
    if (mappings := _read_mappings()) is None:
        return Refusal(d.FINE)
    used = np.full(len(mappings.starts), -1, np.int64)
    for column, until, unmapped, refused in (
        (0, mappings.readable_until, d.SOURCE_UNMAPPED, d.SOURCE_UNREADABLE),
        (1, mappings.writable_until, d.TARGET_UNMAPPED, d.TARGET_READ_ONLY),
    ):
        chosen = np.flatnonzero((rows[:, 2] > 0) & (rows[:, column] != 0))
        begin, end = rows[chosen, column], rows[chosen, column] + rows[chosen, 2]
        at = np.searchsorted(mappings.stops, begin, side="right")
        at_most = np.minimum(at, len(used) - 1)
        is_mapped = (at < len(used)) & (mappings.starts[at_most] <= begin) & (mappings.mapped_until[at_most] >= end)
        bad = np.flatnonzero(~(is_mapped & (until[at_most] >= end)))
        if bad.size:
            row = int(chosen[bad[0]])
            return Refusal(refused if is_mapped[bad[0]] else unmapped, row, row)
        _note_ends(mappings, at, end, used)
    return _try_ends(mappings, rows, used)


def _note_ends(mappings: _Mappings, at: Integers, end: Integers, used: Integers) -> None:
    """Remember per mapping where the last byte ends that rows use of it."""
    last = np.searchsorted(mappings.stops, end, side="left")
    np.maximum.at(used, last, end)
    for several in np.flatnonzero(last > at).tolist():  # all but the last mapping of a row are used whole
        whole = slice(int(at[several]), int(last[several]))
        used[whole] = mappings.stops[whole]


def _try_ends(mappings: _Mappings, rows: Integers, used: Integers) -> Refusal:
    """Let the kernel read the last byte used of each file: it answers where a load would end this process by SIGBUS."""
    ends = used[mappings.has_file & (used > 0)].tolist()
    if not ends:
        return Refusal(d.FINE)
    try:
        out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # no descriptor left: not known
        return Refusal(d.FINE)
    try:
        for end in ends:
            try:
                os.write(into, ctypes.c_char.from_address(end - 1))
                os.read(out, 1)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    return _whose(end - 1, rows)
        return Refusal(d.FINE)
    finally:
        os.close(out)
        os.close(into)


def _whose(address: int, rows: Integers) -> Refusal:
    for column, problem in ((0, d.SOURCE_CUT_SHORT), (1, d.TARGET_CUT_SHORT)):
        start = rows[:, column]
        if (found := np.flatnonzero((start <= address) & (address - start < rows[:, 2]))).size:
            return Refusal(problem, int(found[0]), int(found[0]))
    raise AssertionError("an address that no row has")


def _read_mappings() -> _Mappings | None:
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return None
    found: list[tuple[int, int, bool, bool, bool]] = []
    for line in lines:
        place, rights, _offset, _device, inode = line.split(None, 5)[:5]
        start, stop = (int(part, 16) for part in place.split(b"-"))
        start = max(start, found[-1][1]) if found else start  # one that grew meanwhile comes twice
        if start < stop < _MOST:  # the last one, of the kernel, is above
            found.append((start, stop, rights[:1] == b"r", rights[1:2] == b"w", inode != b"0"))
    starts, stops = (np.array([one[side] for one in found], np.int64) for side in (0, 1))
    readable, writable, has_file = (np.array([one[side] for one in found], np.bool_) for side in (2, 3, 4))
    every = np.ones(len(found), np.bool_)
    ends = [_run_ends(starts, stops, flags) for flags in (every, readable, writable)]
    return _Mappings(starts, stops, has_file, *ends)


def _run_ends(starts: Integers, stops: Integers, flags: Flags) -> Integers:
    """Return per mapping where the run of adjacent mappings with a flag ends that begins with it; its start without."""
    ends = np.where(flags, stops, starts)
    for one in range(len(starts) - 2, -1, -1):
        if flags[one] and flags[one + 1] and starts[one + 1] == stops[one]:
            ends[one] = ends[one + 1]
    return ends
