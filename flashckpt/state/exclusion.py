"""Which state of tracked modules no snapshot holds, since the user asked for it: `track(exclude=)`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import torch
from torch import nn

from flashckpt.errors import ConfigError
from flashckpt.state.placement import boxes_of, dtensor

_WILD = frozenset("*?[")


class Exclusion:
    """Patterns over the names of module state.

    A pattern matches a name with or without its track name: "base.*" and "model.base.*" are the same where the module
    is tracked as `model`.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._patterns: list[str] = []
        self._known: dict[str, bool] = {}

    def add(self, patterns: str | Iterable[str]) -> None:
        """Add patterns; a name without `*`, `?` and `[` stands for itself, and there may be many.

        Raises:
            ConfigError: One is not a text, or is empty.
        """
        more = [patterns] if isinstance(patterns, str) else list(patterns)
        for one in more:
            if not isinstance(one, str) or not one:
                raise ConfigError(
                    "exclude= is not a pattern over names",
                    found=repr(one),
                    expected='a text as "base.*", or a list of them',
                    state="Nothing was tracked.",
                )
        self._names.update(one for one in more if not _WILD & set(one))
        self._patterns += [one for one in more if _WILD & set(one)]
        self._known = {}

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def __call__(self, name: str) -> bool:
        """Whether a name, with its track name, is left out."""
        if not self:
            return False
        if (known := self._known.get(name)) is None:
            both = {name, _short(name)}
            known = self._known[name] = not both.isdisjoint(self._names) or any(
                fnmatch.fnmatchcase(one, pattern) for pattern in self._patterns for one in both
            )
        return known

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        known = {one for name in names for one in (name, _short(name))}
        patterns = (p for p in self._patterns if not any(fnmatch.fnmatchcase(one, p) for one in known))
        return [*sorted(self._names - known), *patterns]


def _short(name: str) -> str:
    return name.partition(".")[2]


def refuse_trained(name: str, tensor: torch.Tensor) -> None:
    """Refuse to leave out what training changes.

    Raises:
        ConfigError: The tensor takes gradients.
    """
    if tensor.requires_grad:
        raise ConfigError(
            f"{name!r} is left out by exclude= and is trained",
            found="requires_grad is true: a restart would begin with the weights of before training",
            expected="frozen parameters and constant buffers",
            state="No snapshot was taken of it.",
            remedy="call requires_grad_(False) on it before track(), or narrow the pattern",
        )


# -- A few elements of each parameter that `track(exclude=)` leaves out: enough to notice that a restart has others
#
# An adapter that continues on another base model trains without an error, and is worth nothing. A snapshot does
# not hold the base model, so it holds up to 8 elements of each of its parameters, at fixed places of the whole
# tensor: ranks that have other shards of it compare those that both have.

KEY = ".excluded"
"""What stands before "@" in the key of the value; no tracked name has a dot."""
_ELEMENTS = 8


def sample(left_out: Mapping[str, torch.Tensor]) -> bytes:
    """Return elements of the frozen parameters among `left_out`, for `differing`.

    Buffers may change in training, tensors of other classes may be packed in another way each time, and what is on the
    meta device has no elements yet: these are left out.
    """
    plain = torch.Tensor, nn.Parameter, dtensor()
    found: dict[str, list[Any]] = {}
    for name, tensor in left_out.items():
        if isinstance(tensor, nn.Parameter) and type(tensor) in plain and not tensor.is_meta:
            found[name] = [str(tensor.dtype), list(tensor.shape), _elements(name, tensor)]
    packed: bytes = msgpack.packb(found)
    return packed


def differing(ours: bytes, theirs: Any) -> list[str]:
    """Return the parameters of which two samples say something else.

    Args:
        ours: `sample` of the live parameters.
        theirs: What a snapshot holds; anything that is no sample says nothing.
    """
    if type(theirs) is not bytes:
        return []
    here, there = msgpack.unpackb(ours, strict_map_key=False), msgpack.unpackb(theirs, strict_map_key=False)
    return sorted(name for name in here.keys() & there.keys() if _differ(here[name], there[name]))


def _differ(here: list[Any], there: list[Any]) -> bool:
    (_, shape, elements), (_, other_shape, others) = here, there
    if here[0] != there[0] or shape != other_shape:
        return True
    return any(elements[place] != others[place] for place in elements.keys() & others.keys())


def _elements(name: str, tensor: torch.Tensor) -> dict[int, bytes]:
    """Return place in the whole, flattened tensor -> bytes of the element, of those that this rank has."""
    local = tensor._local_tensor if isinstance(tensor, dtensor()) else tensor  # noqa: SLF001 -- to_local() makes a view
    places, own = [], []
    for place in sorted({(2 * k + 1) * tensor.numel() // (2 * _ELEMENTS) for k in range(_ELEMENTS)}):
        if place < tensor.numel() and (at := _local_place(name, tensor, place)) is not None:
            places.append(place)
            own.append(at)
    if not places:
        return {}
    dims = tuple(torch.tensor(dim, device=local.device) for dim in zip(*own, strict=True))
    picked = local.detach()[dims] if dims else local.detach().reshape(1)
    raw = picked.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    size = len(raw) // len(places)
    return {place: raw[k * size : (k + 1) * size] for k, place in enumerate(places)}


def _local_place(name: str, tensor: torch.Tensor, place: int) -> tuple[int, ...] | None:
    """Return where an element of the whole tensor is in the local one; None where it is on other ranks."""
    index = []
    for length in reversed(tensor.shape):
        place, at = divmod(place, length)
        index.append(at)
    index.reverse()
    for box in boxes_of(name, tensor):
        inside = [at - first for at, first in zip(index, box.offsets, strict=True)]
        if all(0 <= at < length for at, length in zip(inside, box.lengths, strict=True)):
            return tuple(start + at for start, at in zip(box.starts, inside, strict=True))
    return None
