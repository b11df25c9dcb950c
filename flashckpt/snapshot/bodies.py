"""What torch keeps behind a tensor's Python object, read in C where asking torch would cost 0.1 microseconds per tensor and question.

Nearly all of that time goes into waiting for places in memory one after the other. The C part reads the same memory, and
waits for many tensors at once. Where something lies is torch's own matter: it is found by trying, on tensors of which it is
known, and compared with torch's own answers again for every plan. Where either fails torch is asked, as it is without C.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashckpt.native import is_native
from flashckpt.native.copying import Bodies, BodyPath, CounterPath

VERSION = operator.attrgetter("_version")  # the only way that torch has
_BODY = operator.attrgetter("_cdata")  # address of what torch's C++ knows as the tensor, or the storage
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_POINTER, _COUNTER = struct.Struct("P"), struct.Struct("I")
_BODY_BYTES, _COUNTER_BYTES = 256, 64
"""How far the addresses of the counter, and the counter, are looked for; torch has them in the first 100 and 16 bytes."""
_TRIED = (3, 29, 67)  # small numbers are met by chance, and every probe must agree
_WORDS = struct.Struct(f"{_BODY_BYTES // 8}Q")
_MOST_DIMS = 5
"""Sizes and strides of tensors of more dimensions torch keeps elsewhere."""
_FAILURES = (OSError, RuntimeError, AttributeError, TypeError, ValueError, struct.error)
"""Of another torch, or of one in another mode."""


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are of torch's own classes: others may have another form behind the object, and are not read to find out."""
    return _PLAIN.issuperset(map(type, tensors))


# -- version counters


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
    except _FAILURES:
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


def _places_of_bodies(memory: int, probes: Sequence[torch.Tensor] | Sequence[torch.UntypedStorage]) -> list[int]:
    """Return where in each probe's object the address of what torch's C++ knows it as may lie."""
    kind = torch._C.TensorBase if isinstance(probes[0], torch.Tensor) else torch._C.StorageBase  # noqa: SLF001
    size = kind.__basicsize__  # of the class that has these objects' form
    places = set(range(0, size - _POINTER.size + 1, _POINTER.size))
    for probe in probes:
        raw = os.pread(memory, size, id(probe))
        places = {at for at in places if _POINTER.unpack_from(raw, at)[0] == _BODY(probe)}
    return sorted(places)


def _paths(memory: int, probes: Sequence[torch.Tensor], to_body: int) -> set[CounterPath]:
    """Return the paths that lead to the counter of every probe."""
    pairs = [(a, b) for a in range(0, _BODY_BYTES, _POINTER.size) for b in range(0, _COUNTER_BYTES, _COUNTER.size)]
    for tensor in probes:
        body, version = os.pread(memory, _BODY_BYTES, _BODY(tensor)), VERSION(tensor)
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


# -- forms: of a tensor whose memory there is what it was, shape, dtype, strides, place and storage are what they were


class FormPaths(NamedTuple):
    """Where the form of a tensor lies, and the memory of a storage."""

    tensor: BodyPath
    storage: BodyPath


@functools.cache
def form_paths() -> FormPaths | None:
    """Return where this torch keeps the form of a tensor; as `counter_path`."""
    counters = counter_path()
    if counters is None:
        return None
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            tries = [_tensor_path(memory, counters.to_body) for _ in range(2)]  # by chance a neighbour's bytes fit too
            return FormPaths(min(tries), _storage_path(memory))
    except _FAILURES:
        return None
    finally:
        os.close(memory)


def _words(memory: int, body: int) -> tuple[int, ...]:
    return _WORDS.unpack(os.pread(memory, _BODY_BYTES, body))


def _behind_references(memory: int, body: int, hold: Callable[[], object]) -> int:
    """Return the byte behind the count of who holds a body: the first word that differs while `hold` makes somebody hold it."""
    before = _words(memory, body)
    held = hold()
    after = _words(memory, body)
    del held
    return 8 * (1 + min(at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b))


_FORMS: tuple[Callable[[], torch.Tensor], ...] = (
    lambda: torch.zeros(3, 5, dtype=torch.int32, device="cpu"),
    lambda: torch.zeros(5, 3, device="cpu"),
    lambda: torch.zeros(5, 3, device="cpu").t(),
    lambda: torch.zeros(16, device="cpu")[1:].view(3, 5),
    lambda: torch._neg_view(torch.zeros(3, 5, device="cpu")),  # noqa: SLF001 -- a bit of what comes last
    lambda: torch.zeros(3, 5, dtype=torch.complex64, device="cpu").conj(),
)
"""Tensors that differ in one thing or two from a float32[3, 5]."""


def _plain() -> torch.Tensor:
    return torch.zeros(3, 5, device="cpu")


def _tensor_path(memory: int, to_body: int) -> BodyPath:
    """Return the path to all that makes a tensor's form; ValueError where that is not all within reach, and at its place."""
    leaf, grid = torch.nn.Parameter(torch.zeros(2, device="cpu")), torch.zeros(2, 3, 5, 7, 11, device="cpu")

    def save() -> torch.Tensor:
        with torch.enable_grad():
            return leaf * leaf  # keeps it for its gradient

    start = _behind_references(memory, _BODY(leaf), save)
    words, last = _words(memory, _BODY(grid)), 0
    sizes = [at for at in range(len(words)) if words[at : at + 10] == (*grid.shape, *grid.stride())]
    if 8 * words.index(_BODY(grid.untyped_storage())) < start or len(sizes) != 1:
        raise ValueError("torch keeps the storage, or sizes, elsewhere")
    for make in _FORMS:
        # made in this order, what lies next to a body, and is no part of it, is not alike for all of a side
        made = [(side, (make if side else _plain)()) for side in (0, 1, 1, 0, 1, 0, 0, 1, 1, 0)]
        read = [(side, os.pread(memory, _BODY_BYTES, _BODY(one))) for side, one in made]
        here, there = ([raw for side, raw in read if side == which] for which in (0, 1))
        columns = enumerate(zip(zip(*here, strict=True), zip(*there, strict=True), strict=True))
        own = [
            at for at, (a, b) in columns if len({*a}) == len({*b}) == 1 and a[0] != b[0]
        ]  # bytes: others may be anything
        if min(own) < start:
            raise ValueError("a form lies before the counts of references")
        last = max(last, *own)
    return BodyPath(to_body, start, last // 8 * 8 + 8)


def _storage_path(memory: int) -> BodyPath:
    """Return the path to address and size of a storage's memory; as `_tensor_path`."""
    tensors = [torch.zeros(count, device="cpu") for count in _TRIED]
    storages = [tensor.untyped_storage() for tensor in tensors]
    (to_body,) = _places_of_bodies(memory, storages)
    start = _behind_references(memory, _BODY(storages[0]), lambda: tensors[0].view(-1))
    addresses, sizes = set(range(len(_words(memory, _BODY(storages[0]))))), set(range(_BODY_BYTES // 8))
    for storage in storages:
        words = _words(memory, _BODY(storage))
        addresses = {at for at in addresses if words[at] == storage.data_ptr()}
        sizes = {at for at in sizes if words[at] == storage.nbytes()}
    if 8 * min(*addresses, *sizes) < start:
        raise ValueError("torch keeps the memory's address elsewhere")
    return BodyPath(to_body, start, 8 * (1 + max(*addresses, *sizes)))


def _are_not_known(objects: list[Any], first: int = 0) -> bool:  # noqa: ARG001 -- as `Bodies.are_behind`
    return False


class Forms:
    """Tells whether tensors and their storages are what they were when somebody had looked at each of them.

    Args:
        tensors: Whose forms; not held.

    Attributes:
        are_known: Whether some were learnt.
        holds: Returns whether tensors, from number `first` on, have the form that was learnt; False where none was.
        holds_storages: Returns whether storages, from number `first` on, have the memory that was learnt; as `holds`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        can = is_native() and are_plain(tensors) and all(tensor.ndim <= _MOST_DIMS for tensor in tensors)
        self._paths = form_paths() if can else None
        self._forget()

    def _forget(self) -> None:
        self.are_known = False
        self.holds = self.holds_storages = _are_not_known

    def learn(
        self, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage], look: Callable[[], bool]
    ) -> None:
        """Take note of how all is now, where `look` says that it is as it should be and nothing changed meanwhile."""
        self._forget()
        if self._paths is None:
            return
        now, memory = Bodies(tensors, self._paths.tensor), Bodies(storages, self._paths.storage)
        found = [list(map(_BODY, of)) for of in (tensors, storages, map(torch.Tensor.untyped_storage, tensors))]
        pointers = [list(raw[:, :8].copy().view("u8").ravel()) for raw in (now.raw, memory.raw)]
        is_right = found == [*pointers, pointers[1]] and look()
        if is_right and now.are_behind(tensors) and memory.are_behind(storages):
            self.are_known, self.holds, self.holds_storages = True, now.are_behind, memory.are_behind
