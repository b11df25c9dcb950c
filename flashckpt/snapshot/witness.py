"""Samples of live state, read in `step()`: they show writes that torch does not count, as through `.data`, numpy or a kernel.

Version counters prove that nobody wrote by torch's own ways while a snapshot was copied. Averaged weights that are swapped
in through `.data` for an evaluation are none of these, and a snapshot of them would be committed and verify. So blocks of
the state are read in `step()`, at places that move from snapshot to snapshot, and compared with what the copy found there,
and with what is live once it is done: a difference discards the snapshot. Blocks are spread evenly over the bytes, so
whatever was changed as a whole is seen; a few elements that are changed alone may not be.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.core.schema import TensorFigures
from flashckpt.native import copy_and_digest, is_native
from flashckpt.native.copying import CounterPath, read_counters
from flashckpt.report import guarded
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError, source_of
from flashckpt.snapshot.runs import HostRuns
from flashckpt.state.state_layout import StateLayout

# -- The version counters of very many tensors: what proves that nothing was written while it was copied -----------
#
# torch has them as an attribute, `_version`, which takes 0.1 to 0.4 microseconds per tensor, nearly all of it
# waiting for three places in memory one after the other. The C part reads the same memory, and waits for many
# tensors at once. Where a counter lies is torch's own matter: it is found by trying, on tensors whose counters
# are known, and what was found is compared with the attribute again for every tensor of every plan. Where either
# fails the attribute is read, as it is without C.

_VERSION = operator.attrgetter("_version")  # the only way that torch has
_BODY = operator.attrgetter("_cdata")  # address of what torch's C++ knows as the tensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_POINTER, _COUNTER = struct.Struct("P"), struct.Struct("I")
_BODY_BYTES, _COUNTER_BYTES = 256, 64
"""How far the addresses of the counter, and the counter, are looked for; torch has them in the first 100 and 16 bytes."""
_TRIED = (3, 29, 67)  # small numbers are met by chance, and every probe must agree

Counts = npt.NDArray[np.uint32] | list[int]


class VersionCounters:
    """The counters of the same tensors, read again and again.

    Args:
        tensors: Held as long as this is.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        # a class of somebody else's may have another form behind the object: memory is not read to find that out
        self._path = counter_path() if is_native() and _PLAIN.issuperset(map(type, self._tensors)) else None
        self._is_proven = False

    def read(self) -> Counts:
        """Return all counters; those of two calls say which tensors were written in between."""
        found = read_counters(self._tensors, self._path) if self._path is not None else None
        return found if found is not None else list(map(_VERSION, self._tensors))

    def changed(self, before: Counts) -> list[int]:
        """Return the places of the tensors whose counters differ from what `read` returned.

        The first time they are read as the attribute: had C read anything else before, that snapshot is discarded, and the
        attribute is read from then on.
        """
        now = self.read() if self._is_proven else list(map(_VERSION, self._tensors))
        if isinstance(before, list) or isinstance(now, list):
            before, now = (one if isinstance(one, list) else one.tolist() for one in (before, now))
            places = [] if now == before else [at for at, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
        else:
            places = np.flatnonzero(now != before).tolist()
        if not self._is_proven and places:
            self._path = None
        self._is_proven = True
        return places


@functools.cache
def counter_path() -> CounterPath | None:
    """Return where this torch keeps version counters; None where that cannot be found out without doubt.

    Memory is read through the kernel, which refuses what is not mapped: nothing here can end the process.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        probes = list(_probes())
        bodies = _places_of_bodies(memory, probes)
        found = [_paths(memory, probes, to_body) for to_body in bodies]
    except (OSError, RuntimeError, AttributeError, TypeError, struct.error):  # another torch, or one in another mode
        return None
    finally:
        os.close(memory)
    paths = set().union(*found)
    return paths.pop() if len(paths) == 1 else None


def _probes() -> Iterator[torch.Tensor]:
    """Yield tensors of several kinds, each with another counter."""
    with torch.inference_mode(mode=False), torch.no_grad():
        for times in _TRIED:
            plain = torch.zeros(2, 3, device="cpu")
            kinds = plain, torch.nn.Parameter(torch.zeros(4, device="cpu")), torch.zeros(1, 1, 1, 1, 1, 2, device="cpu")
            for more, tensor in enumerate(kinds):
                for _ in range(times + 7 * more):
                    tensor.zero_()
                yield tensor
            yield plain.view(6)
            yield plain.detach()


def _places_of_bodies(memory: int, probes: Sequence[torch.Tensor]) -> list[int]:
    """Return where in each probe's object the address of what torch's C++ knows as the tensor may lie."""
    size = torch._C.TensorBase.__basicsize__  # noqa: SLF001 -- the class that has these objects' form
    places = set(range(0, size - _POINTER.size + 1, _POINTER.size))
    for tensor in probes:
        raw = os.pread(memory, size, id(tensor))
        places = {at for at in places if _POINTER.unpack_from(raw, at)[0] == _BODY(tensor)}
    return sorted(places)


def _paths(memory: int, probes: Sequence[torch.Tensor], to_body: int) -> set[CounterPath]:
    """Return the paths that lead to the counter of every probe."""
    pairs = [(a, b) for a in range(0, _BODY_BYTES, _POINTER.size) for b in range(0, _COUNTER_BYTES, _COUNTER.size)]
    for tensor in probes:
        body, version = os.pread(memory, _BODY_BYTES, _BODY(tensor)), _VERSION(tensor)
        near = {at: _read(memory, _POINTER.unpack_from(body, at)[0]) for at in {a for a, _ in pairs}}
        pairs = [(a, b) for a, b in pairs if near[a] and _COUNTER.unpack_from(near[a], b)[0] == version]
    return {CounterPath(to_body, *pair) for pair in pairs}


def _read(memory: int, address: int) -> bytes:
    """Return as many bytes as a counter may be away from there; none where the memory does not reach that far."""
    try:
        found = os.pread(memory, _COUNTER_BYTES, address)
    except (OSError, OverflowError):
        return b""
    return found if len(found) == _COUNTER_BYTES else b""


_log = guarded(logging.getLogger("flashckpt"))
Ints = npt.NDArray[np.int64]
_Items = Callable[[Ints], list[Item]]
_Turns = tuple["HostSamples | None", list[Item]]
_Some = TypeVar("_Some", Ints, list[Item])
BLOCKS, BLOCK_BYTES = 128, 1024
"""Read of host memory per snapshot: 0.1 to 0.2 ms of the training thread, most of it to find the tensors' memory."""
FEW, FEW_BYTES = 16, 4096
"""The same of tensors on an accelerator, and of those that are no run of memory: each costs some operators of torch."""
_MOST_KEPT = 64
_GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly over [0, 1) however many there are


class HostSamples:
    """Blocks of up to BLOCKS tensors, each a run of host memory; read again for each snapshot, one at a time.

    Args:
        items: With `start` >= 0 and bytes.
        memory: uint8[2, BLOCKS * BLOCK_BYTES] to read them into.
    """

    def __init__(self, items: Sequence[Item], memory: npt.NDArray[np.uint8]) -> None:
        self._items, self._runs = items, HostRuns(items)
        columns = [(item.start, item.offset, item.nbytes) for item in items]
        self._start, self._offset, self._nbytes = np.array(columns, np.int64).reshape(-1, 3).T
        each = max(BLOCKS // max(len(items), 1), 1)
        self._is_whole = self._nbytes <= each * BLOCK_BYTES
        counts = np.where(self._is_whole, 1, each)
        self._item = np.repeat(np.arange(len(items)), counts)
        part = np.arange(len(self._item)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._size = np.where(self._is_whole, self._nbytes, BLOCK_BYTES)[self._item]
        room = (self._nbytes / counts)[self._item]  # each block moves in an equal part of its tensor
        self._first, self._slack = part * room, np.maximum(room - self._size, 0)
        ends = np.cumsum(self._size)
        self._places = ends - self._size
        self._before, self._after = memory[:, : int(ends[-1]) if len(ends) else 0]
        self._at, self._rows = np.zeros_like(self._item), np.column_stack((self._places, self._places, self._size))

    def take(self, phase: float) -> bool:
        """Read the blocks at a place in [0, 1) of their parts; False where memory is gone: the copy will say why."""
        self._at = (self._first + phase * self._slack).astype(np.int64)
        addresses = self._runs.addresses_now()
        if addresses is None:
            return False
        self._read(addresses + self._start, self._before)
        return True

    def changed(self, buffer: Buffer) -> list[str]:
        """Return the names of tensors of which a block in the slot, or a live one now, is not as it was read.

        Raises:
            StalePlanError: As `HostRuns.copy`.
        """
        names = self._differing(self._read(buffer.address + self._offset, self._after))
        if not names:
            held = self._runs.hold()
            names = self._differing(self._read(held.addresses + self._start, self._after))
            self._runs.refuse_lost(held)
        return names

    def _read(self, starts: Ints, into: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        self._rows[:, 0], self._rows[:, 1] = starts[self._item] + self._at, self._places + into.ctypes.data
        copy_and_digest(self._rows, digest=False, check=False, level=self._runs.level)
        return into

    def _differing(self, found: npt.NDArray[np.uint8]) -> list[str]:
        if np.array_equal(found, self._before):
            return []
        first = np.flatnonzero(found != self._before)
        blocks = np.unique(np.searchsorted(self._places, first, side="right") - 1)
        return [self._items[number].fqn for number in dict.fromkeys(self._item[blocks].tolist())]


class LooseSamples:
    """Blocks of tensors in host memory that are no runs of it, for one snapshot.

    Args:
        blocks: As of `block_of`.
    """

    def __init__(self, blocks: Sequence[Item]) -> None:
        self._blocks, self._before = blocks, [_bytes_of(block) for block in blocks]

    def changed(self, buffer: Buffer) -> list[str]:
        """As of `HostSamples`."""
        pairs = list(zip(self._blocks, self._before, strict=True))
        return [
            block.fqn
            for block, before in pairs
            if not (torch.equal(before, _bits(buffer.tensor(block))) and torch.equal(before, _bytes_of(block)))
        ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # clone: of one element the strides may be any, which `contiguous` leaves
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes_of(block: Item) -> torch.Tensor:
    return _bits(source_of(block))


def block_of(item: Item, phase: float) -> Item:
    """Return a few neighbouring elements of an item as an item: from a place in [0, 1) of its elements on."""
    lengths, size = item.box.lengths, item.dtype.itemsize
    rest = element = min(int(phase * math.prod(lengths)), math.prod(lengths) - 1)
    index = list[int]()
    for length in reversed(lengths):  # in the training thread: numpy's unravel_index costs more than all of this
        rest, at = divmod(rest, length)
        index.insert(0, at)
    run = min(lengths[-1] - index[-1], FEW_BYTES // size) if lengths else 1
    starts = tuple(start + at for start, at in zip(item.box.starts, index, strict=True))
    box = replace(item.box, starts=starts, lengths=(*(1 for _ in lengths[:-1]), *((run,) if lengths else ())))
    return item._replace(box=box, offset=item.offset + element * size, nbytes=run * size, start=-1)


class Witness:
    """What was read in `step()` for one snapshot.

    Attributes:
        on_device: Blocks that are read in the order of each device's stream: the caller gathers and compares them.
    """

    def __init__(self, samples: Sequence[HostSamples | LooseSamples], on_device: Sequence[Item]) -> None:
        self._samples, self.on_device = samples, on_device

    def changed(self, buffer: Buffer) -> list[str]:
        """Return the names of tensors in host memory that were written meanwhile, as far as the samples show it."""
        return [name for one in self._samples for name in one.changed(buffer)]


class Sampler:
    """Chooses what is read for the snapshots of one plan: up to BLOCKS tensors each time, in turn.

    Args:
        fenced, device: Rows of the plan, of host memory and of accelerators.
        items: Returns rows as items.
    """

    def __init__(self, fenced: Ints, device: Ints, items: _Items) -> None:
        self._items, self._rows = items, (fenced, device)
        self._turns: dict[int, _Turns] = {}
        self._number, self._is_warned = 0, False
        self._memory = np.empty((2, BLOCKS * BLOCK_BYTES), np.uint8)  # of one snapshot at a time

    def take(self) -> Witness | None:
        """Read this snapshot's samples, in the training thread."""
        self._number += 1
        phase = self._number * _GOLDEN % 1
        try:
            runs, loose = self._host()
            samples: list[HostSamples | LooseSamples] = [runs] if runs is not None and runs.take(phase) else []
            if loose:
                samples.append(LooseSamples([block_of(item, phase) for item in self._few(loose)]))
            device = self._items(self._few(self._rows[1])) if len(self._rows[1]) else []
            return Witness(samples, [block_of(item, phase) for item in device if item.nbytes])
        except StalePlanError:
            return None  # the copy finds it too, and says what it is
        except Exception:  # noqa: BLE001 -- training does not end for a look at it
            if not self._is_warned:
                _log.warning("writes that torch does not count are not looked for", exc_info=True)
            self._is_warned = True
            return None

    def _few(self, among: _Some) -> _Some:
        """Return FEW of them, others each time."""
        first = min(self._number * FEW % max(len(among), 1), max(len(among) - FEW, 0))
        return among[first : first + FEW]

    def _host(self) -> _Turns:
        """Return runs of host memory and other tensors of this turn; looked up once, unless there are very many turns."""
        rows, turns = self._rows[0], -(-len(self._rows[0]) // BLOCKS)
        turn = self._number % max(turns, 1)
        if (known := self._turns.get(turn)) is not None:
            return known
        found = [item for item in self._items(rows[turn * BLOCKS : (turn + 1) * BLOCKS]) if item.nbytes]
        runs = [item for item in found if item.start >= 0]
        made = HostSamples(runs, self._memory) if runs else None, [item for item in found if item.start < 0]
        if turns <= _MOST_KEPT:
            self._turns[turn] = made
        return made


# -- Which parameters, and state of optimizers, became non-finite: what was so from the beginning is so by design (a
#    mask of -inf), and what a restored snapshot says of its tensors counts as their beginning


JUMP = 1000.0
"""From one snapshot to the next the largest number of a tensor of parameters or optimizer state hardly grows by this factor."""


class NumbersWatch:
    """Looks at the figures of every snapshot of one run.

    Args:
        by_design: Tensors that were not finite in the restored snapshot, and not suspect; None where nothing is known:
            then the first snapshot says it.

    Attributes:
        is_own: Some of what is suspect in the last one no other rank holds.
        grown: A tensor whose largest number grew JUMP times since the one before, from what, to what; None else.
    """

    def __init__(self, by_design: Collection[str] | None = None) -> None:
        self._by_design = None if by_design is None else set(by_design)
        self._unsaid, self.is_own = "", False
        self._known: Sequence[str] | None = None
        self._before: tuple[StateLayout, npt.NDArray[np.float32]] | None = None
        self.grown: tuple[str, float, float] | None = None

    def look(self, layout: StateLayout, figures: TensorFigures) -> TensorFigures:
        """Return the figures of a snapshot with what is suspect in them."""
        table = layout.table
        fenced = layout.structure.fenced[layout.row_tensors]
        rows = np.flatnonzero(fenced & np.isinf(figures.largest)).tolist()
        names = {table.fqn(row) for row in rows}
        if self._by_design is None:
            self._by_design, self._unsaid = set(names), min(names, default="")
        if self._known is not None and self._known is not layout.structure.names:  # what is new was never finite
            self._by_design |= names.difference(self._known)
        self._known = layout.structure.names
        self._by_design &= names  # one that was finite meanwhile is like any other from now on
        bad = [row for row in rows if table.fqn(row) not in self._by_design]
        figures.suspect[bad] = True
        sets = layout.structure.sets[layout.row_tensors[bad]].tolist()
        self.grown = self._find_grown(layout, fenced, figures.largest)
        self.is_own = any(layout.structure.box_sets[number].spread.replicas == 1 for number in sets)
        return figures

    def _find_grown(
        self, layout: StateLayout, fenced: npt.NDArray[np.bool_], largest: npt.NDArray[np.float32]
    ) -> tuple[str, float, float] | None:
        """A bit that flipped in an exponent shows in the largest number; norms of large tensors are those of samples."""
        before, self._before = self._before, (layout, largest)
        if before is None or before[0] is not layout:
            return None
        grown = np.flatnonzero(fenced & (before[1] > 0) & np.isfinite(largest) & (largest / JUMP > before[1]))
        if not grown.size:
            return None
        row = int(grown[np.argmax(largest[grown] / before[1][grown])])
        return layout.table.fqn(row), float(before[1][row]), float(largest[row])

    def report(self) -> str:
        """Return, once, the name of a tensor that was not finite in the first snapshot; "" else."""
        name, self._unsaid = self._unsaid, ""
        return name
