"""The version counters of very many tensors: what proves that nothing was written while it was copied.

torch has them as an attribute, `_version`, which takes 0.1 to 0.4 microseconds per tensor, nearly all of it waiting for
three places in memory one after the other. The C part reads the same memory, and waits for many tensors at once. Where a
counter lies is torch's own matter: it is found by trying, on tensors whose counters are known, and what was found is
compared with the attribute again for every tensor of every plan. Where either fails the attribute is read, as it is without C.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.native import is_native
from flashckpt.native.objects import CounterPath, read_counters

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
