"""Tensors in parts: state of named tensors that a framework keeps flattened, padded and cut over the ranks in its own way.

An object that is tracked may have `flashckpt_parts()`: by the global name of a tensor (`model.layers.0.weight`, whatever the
object is tracked as), what this rank holds of it. The parts are held and restored in place, like the tensors of a module,
and are boxes of the tensor as it would be whole, so that they reshard. What is left of the object's state, `state_dict()`
returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashckpt.core.shard import Box
from flashckpt.planning.write_partition import WritePart, WriteShare, cut_dimension, partition_writes
from flashckpt.state.box_sets import FORM, BoxSets
from flashckpt.state.placement import LocalBox, Replication, World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """One box of a tensor.

    Attributes:
        tensor: Of the shape of the box; restored in place.
        global_shape: Of the whole tensor.
        offsets: First element of the box, per dimension.
        ranks: Ranks that hold an equal copy; () where no other one does.
        is_fenced: It changes only between `Checkpointer.fence()` and the next `step()`.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    is_fenced: bool = False


Parts = Sequence[Mapping[str, Sequence[TensorPart]]]
"""Of each object that has some: by name, in the order of the elements."""


def parts_of(objects: Iterable[Any]) -> list[dict[str, Sequence[TensorPart]]]:
    """Return the parts of each object that has some."""
    return [thing.flashckpt_parts() for thing in objects if hasattr(thing, "flashckpt_parts")]


def cut(
    flat: torch.Tensor, start: int, shape: Sequence[int], *, ranks: tuple[int, ...] = (), is_fenced: bool = False
) -> tuple[TensorPart, ...]:
    """Return the parts that a flat tensor makes, which is elements `start` and following of a tensor of this shape.

    Args:
        flat: One-dimensional and contiguous, without padding.
        start: Place of its first element, in row-major order.
        shape: Of the whole tensor.
        ranks: As in `TensorPart`.
        is_fenced: As in `TensorPart`.
    """
    parts, at = [], 0
    for box in Box((0,) * len(shape), tuple(shape)).flat(start, start + flat.numel()):
        piece = flat[at : at + box.elements].view(box.lengths)
        at += box.elements
        parts.append(
            TensorPart(tensor=piece, global_shape=tuple(shape), offsets=box.offsets, ranks=ranks, is_fenced=is_fenced)
        )
    return tuple(parts)


class PartSets:
    """The kinds of boxes of all parts: a number for each part.

    Args:
        parts: By name, of each object.
        world: The ranks.
        box_sets: The kinds of tensors in the structure; grows.
    """

    def __init__(self, parts: Parts, world: World, box_sets: BoxSets) -> None:
        self._world, self._box_sets = world, box_sets
        self._numbers: dict[Any, int] = {}
        self._shares = _shares(parts)

    def number(self, name: str, part: TensorPart) -> int:
        """Return the number of a part's box in the structure; equal boxes have one.

        Raises:
            UnsupportedStateError: A tensor that cannot be held.
        """
        shares = self._shares.get(name, ())
        key = (*FORM(part.tensor), part.tensor.is_inference(), part.global_shape, part.offsets, part.ranks, shares)
        if key not in self._numbers:
            lengths = tuple(part.tensor.shape)
            box = LocalBox(
                global_shape=part.global_shape, offsets=part.offsets, lengths=lengths, starts=(0,) * len(lengths)
            )
            self._numbers[key] = self._box_sets.add(name, part.tensor, self._spread(part), shares, whole=(box,))
        return self._numbers[key]

    def _spread(self, part: TensorPart) -> Replication:
        if len(part.ranks) < 2:
            return Replication()
        index = part.ranks.index(self._world.rank)
        return Replication(replicas=len(part.ranks), index=index, over=part.ranks)


def _shares(parts: Parts) -> dict[str, tuple[WriteShare, ...]]:
    """Return which of the ranks with equal copies persists which rows of each tensor, equally many bytes each.

    What is not fenced (a buffer: ranks may not agree on it) stays with the first one, and is not among them.
    """
    equal: dict[int, list[WritePart]] = {}
    for by_name in parts:
        for name, own in by_name.items():
            if own and own[0].is_fenced and len(own[0].ranks) > 1:
                lengths, nbytes = tuple(own[0].tensor.shape), sum(part.tensor.nbytes for part in own)
                rows = lengths[cut_dimension(lengths)] if lengths and len(own) == 1 else 1
                part = WritePart(name=name, rows=rows, nbytes=nbytes, weight=nbytes)
                equal.setdefault(len(own[0].ranks), []).append(part)
    return {name: shares for count, own in equal.items() for name, shares in partition_writes(own, count).items()}
