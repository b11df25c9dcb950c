"""Boxes and replicas of tensors on this rank, computed once per kind of tensor, not once per tensor.

A model has thousands of tensors and a handful of dtypes, shapes and placements. Everything that follows from those
(boxes, replicas, write partition) is computed for the first tensor of a kind and looked up for the others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from flashckpt.planning.write_partition import WriteShare
from flashckpt.state.placement import (
    LocalBox,
    Replication,
    box_bytes,
    boxes_of,
    dtensor,
    dtype_name,
    local_of,
    split_among_replicas,
)

FORM = operator.attrgetter("dtype", "shape", "device", "layout")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxSet:
    """The boxes of all tensors of one kind, cut as their replicas share them.

    Attributes:
        dtype: Name of the dtype.
        whole: This rank's boxes, before they are cut.
        boxes: The rows of the table, in order of their offsets.
        spread: How equal copies are spread over the ranks.
        shares: Which rank persists which rows of `whole`; () if one rank persists all of it.
        form: Dtype and shape of the local tensor.
        device: Device of the local tensor.
        is_sharded: The tensors are DTensors.
        is_inference: They were created in inference mode and have no version counter.
    """

    dtype: str
    whole: tuple[LocalBox, ...]
    boxes: tuple[LocalBox, ...]
    spread: Replication
    shares: tuple[WriteShare, ...]
    form: tuple[torch.dtype, torch.Size]
    device: torch.device
    is_sharded: bool
    is_inference: bool

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return box_bytes(self.dtype, self.whole)

    def name(self, fqn: str, suffix: str) -> str:
        """Return the global name of a tensor, with the rank's suffix if it belongs to this rank alone."""
        return f"{fqn}@{suffix}" if self.spread.per_rank else fqn


def first_alike(
    tensors: Sequence[torch.Tensor], *others: Sequence[Any], forms: Sequence[Any] | None = None
) -> list[int]:
    """Return for each tensor the index of the first one of its kind.

    Args:
        tensors: What is compared.
        *others: Further parts of the kind.
        forms: `FORM` of each, where the caller has it.
    """
    seen: dict[Any, int] = {}
    return list(map(seen.setdefault, _kinds_of(tensors, forms, *others), count()))


def _kinds_of(tensors: Sequence[torch.Tensor], forms: Iterable[Any] | None, *others: Sequence[Any]) -> Iterator[Any]:
    """Yield what tensors with equal boxes and form have in common, without what all of them have."""
    types = list(map(type, tensors))
    if any(issubclass(kind, dtensor()) for kind in set(types)):
        forms = map(_sharded_form, tensors)
    elif forms is None:
        forms = map(FORM, tensors)
    columns: list[Sequence[Any]] = [types, list(map(torch.Tensor.is_inference, tensors)), *others]
    differing = [column for column in columns if column and column.count(column[0]) != len(column)]
    return zip(forms, *differing, strict=True) if differing else iter(forms)


def _sharded_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, dtensor()):
        return tuple(FORM(tensor))
    local = local_of(tensor)
    return (*FORM(local), type(local), local.is_quantized, tensor.shape, tensor.placements, tensor.device_mesh)


class BoxSets:
    """All kinds of tensors in a structure; a tensor's kind is a number.

    Args:
        takes_meta: Tensors on the meta device are taken too: they have boxes, though no values.

    Attributes:
        known: The kinds, by number.
    """

    def __init__(self, *, takes_meta: bool = False) -> None:
        self._takes_meta = takes_meta
        self.known: list[BoxSet] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        spread: Replication,
        shares: tuple[WriteShare, ...] = (),
        *,
        whole: tuple[LocalBox, ...] | None = None,
    ) -> int:
        """Return the number of a tensor's kind; a new one for each call.

        Args:
            name: For the error.
            tensor: The first of its kind.
            spread: Its replicas.
            shares: Who persists which rows.
            whole: Its boxes, where the tensor itself does not tell.

        Raises:
            UnsupportedStateError: A tensor that cannot be held.
        """
        dtype = dtype_name(name, tensor, takes_meta=self._takes_meta)
        local = local_of(tensor)
        whole = boxes_of(name, tensor) if whole is None else whole
        cut = split_among_replicas(whole, dtype, spread, shares)
        self.known.append(
            BoxSet(
                dtype=dtype,
                whole=whole,
                boxes=tuple(sorted(cut, key=operator.attrgetter("offsets"))),
                spread=spread,
                shares=shares,
                form=(getattr(torch, dtype), local.shape),
                device=local.device,
                is_sharded=local is not tensor,
                is_inference=tensor.is_inference(),
            )
        )
        return len(self.known) - 1

    def shared(self, number: int, shares: tuple[WriteShare, ...]) -> int:
        """Return the number of the same kind of tensor, of which other ranks persist other rows."""
        key = number, shares
        if key not in self._numbers:
            before = self.known[number]
            boxes = split_among_replicas(before.whole, before.dtype, before.spread, shares)
            self.known.append(
                BoxSet(
                    dtype=before.dtype,
                    whole=before.whole,
                    boxes=tuple(sorted(boxes, key=operator.attrgetter("offsets"))),
                    spread=before.spread,
                    shares=shares,
                    form=before.form,
                    device=before.device,
                    is_sharded=before.is_sharded,
                    is_inference=before.is_inference,
                )
            )
            self._numbers[key] = len(self.known) - 1
        return self._numbers[key]
