"""Live tensors as the destinations of a restore: their host memory, or a buffer that is copied in afterwards."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from flashckpt.errors import UnsupportedStateError
from flashckpt.restore.absent_state import AbsentKey
from flashckpt.restore.destinations import Destinations
from flashckpt.restore.requirements import Requirements
from flashckpt.state.placement import LocalBox, local_of

_SHAPE, _IS_CPU, _NBYTES = (operator.attrgetter(name) for name in ("shape", "is_cpu", "nbytes"))
_LENGTHS = operator.attrgetter("lengths")


class Staged(NamedTuple):
    """A live tensor that has no row-major host memory, and the buffer that is copied to it afterwards."""

    fqn: str
    live: torch.Tensor
    buffer: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveMemory:
    """Where the rows of some requirements go.

    Attributes:
        destinations: Of all rows.
        in_values: The tensors that values consist of, by name.
        staged: What is copied to its place by `finish`.
    """

    destinations: Destinations
    in_values: dict[str, torch.Tensor]
    staged: list[Staged] = field(default_factory=list)

    def finish(self) -> None:
        """Copy the buffers to where they belong.

        Raises:
            UnsupportedStateError: A live tensor has one element where the snapshot has several that differ.
        """
        with torch.no_grad():
            for fqn, live, staged in self.staged:
                _copy_once(fqn, live, staged)
        self.staged.clear()


def allocate(required: Requirements) -> LiveMemory:
    """Make the state and buffers that are still missing; return where every row goes."""
    staged: list[Staged] = []
    live = required.live
    parts = _parts(live.fqns, live.tensors, live.boxes, staged)
    for block in required.absent.blocks:
        for key, made in zip(block.keys, block.allocate(), strict=True):
            parts += _parts_of_key(key, made, staged)
    in_values = {}
    for row, name in enumerate(required.in_values, len(parts)):
        shard = required.wanted.shard(row)
        in_values[name] = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
    parts += in_values.values()
    nbytes = required.wanted.nbytes
    addresses = np.fromiter(map(torch.Tensor.data_ptr, parts), np.int64, len(parts))
    sizes = np.fromiter(map(_NBYTES, parts), np.int64, len(parts))
    if len(wrong := np.flatnonzero(sizes != nbytes)):  # bytes are copied by address: never beyond what is there
        row = int(wrong[0])
        raise ValueError(f"memory of {required.wanted.fqn(row)!r}: {sizes[row]} bytes, its box has {nbytes[row]}")
    return LiveMemory(
        destinations=Destinations(addresses=addresses, nbytes=nbytes, owners=parts), in_values=in_values, staged=staged
    )


def _parts_of_key(key: AbsentKey, made: list[torch.Tensor], staged: list[Staged]) -> list[torch.Tensor]:
    """Return the same as `_parts` for tensors that were just made, all of one kind: box by box."""
    first = made[0]
    is_whole = type(first) is torch.Tensor and first.is_cpu and [first.shape] == [box.lengths for box in key.boxes]
    if is_whole and all(map(torch.Tensor.is_contiguous, made)):
        return made
    return [part for box in key.boxes for part in _parts(key.fqns, made, [box] * len(made), staged)]


def _parts(
    fqns: Sequence[str], tensors: Sequence[torch.Tensor], boxes: Sequence[LocalBox], staged: list[Staged]
) -> list[torch.Tensor]:
    """Return the row-major host memory of one box of each live tensor, or a buffer for it."""
    whole = list(map(local_of, tensors))
    lacks = np.fromiter(map(operator.ne, map(_SHAPE, whole), map(_LENGTHS, boxes)), np.bool_, len(whole))
    for has in (_IS_CPU, torch.Tensor.is_contiguous):
        lacks |= ~np.fromiter(map(has, whole), np.bool_, len(whole))
    for has_not in (torch.Tensor.is_conj, torch.Tensor.is_neg):
        lacks |= np.fromiter(map(has_not, whole), np.bool_, len(whole))
    for row in np.flatnonzero(lacks).tolist():
        whole[row] = _part(fqns[row], whole[row], boxes[row], staged)
    return whole


def _part(fqn: str, part: torch.Tensor, box: LocalBox, staged: list[Staged]) -> torch.Tensor:
    """Return the row-major host memory of one box of a local tensor, or a buffer for it."""
    if part.shape != box.lengths:
        part = part.detach()
        for dim, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            part = part.narrow(dim, start, length)
    if part.is_cpu and part.is_contiguous() and not part.is_conj() and not part.is_neg():
        return part
    buffer = torch.empty(part.shape, dtype=part.dtype)
    staged.append(Staged(fqn, part.detach(), buffer))
    return buffer


def _copy_once(fqn: str, live: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy; of an expanded tensor, whose elements are one in memory along some dimensions, each element once."""
    if live.numel() and 0 in live.stride():
        whole = staged
        for dim, stride in enumerate(live.stride()):
            if not stride and live.shape[dim] > 1:
                live, staged = live.narrow(dim, 0, 1), staged.narrow(dim, 0, 1)
        if bytes(bytes_of(staged.expand(whole.shape).contiguous())) != bytes(bytes_of(whole)):
            raise UnsupportedStateError(
                f"{fqn!r} is an expanded tensor here, which has one value where the snapshot has several",
                found=f"strides {live.stride()} for shape {tuple(whole.shape)}",
                state="Live state is a mixture and must not be trained on.",
                remedy="build the tensor as the run that took the snapshot did: .clone() or .contiguous()",
            )
    live.copy_(staged)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous host tensor of any dtype."""
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
