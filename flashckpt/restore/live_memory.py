"""Live tensors as the destinations of a restore: their memory on host or device, or a buffer that is copied in afterwards."""

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
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.restore.requirements import Requirements
from flashckpt.state.placement import LocalBox, local_of

_is_host = operator.attrgetter("is_cpu")
_SHAPE, _NBYTES, _LENGTHS = (operator.attrgetter(name) for name in ("shape", "nbytes", "lengths"))


class Staged(NamedTuple):
    """A live tensor whose memory is not row-major, and the buffer that is copied to it afterwards."""

    fqn: str
    live: torch.Tensor
    buffer: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveMemory:
    """Where the rows of some requirements go.

    Attributes:
        in_values: The tensors that values consist of, by name.
        staged: What is copied to its place by `finish`.
        device_rows: Those of the destinations that lie on a device; None where none does.
    """

    destinations: Destinations
    in_values: dict[str, torch.Tensor]
    staged: list[Staged] = field(default_factory=list)
    device_rows: DeviceRows | None = None

    def settle(self) -> None:
        """Return when no copy to a device is under way any more: another candidate may write to the same tensors."""
        if self.device_rows is not None:
            self.device_rows.wait()

    def finish(self) -> None:
        """Copy the buffers to where they belong.

        Raises:
            UnsupportedStateError: A live tensor has one element where the snapshot has several that differ.
        """
        with torch.no_grad():
            for fqn, live, staged in self.staged:
                _copy_once(fqn, live, staged)
        self.staged.clear()


@dataclass(frozen=True)
class _OutOfPlace:
    """Live tensors that have no row-major memory of the host."""

    staged: list[Staged] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)


def allocate(required: Requirements) -> LiveMemory:
    """Make the state and buffers that are still missing; return where every row goes."""
    met = _OutOfPlace()
    live = required.live
    parts = _parts(live.fqns, live.tensors, live.boxes, met)
    for block in required.absent.blocks:
        for key, made in zip(block.keys, block.allocate(), strict=True):
            parts += _parts_of_key(key, made, met)
    in_values = {}
    for row, name in enumerate(required.in_values, len(parts)):
        shard = required.wanted.shard(row)
        in_values[name] = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
    parts += in_values.values()
    nbytes = required.wanted.nbytes
    sizes = np.fromiter(map(_NBYTES, parts), np.int64, len(parts))
    if len(wrong := np.flatnonzero(sizes != nbytes)):  # bytes are copied by address: never beyond what is there
        row = int(wrong[0])
        raise ValueError(f"memory of {required.wanted.fqn(row)!r}: {sizes[row]} bytes, its box has {nbytes[row]}")
    addresses = np.fromiter(map(torch.Tensor.data_ptr, parts), np.int64, len(parts))
    device_rows = _device_rows(parts, met.on_device)
    if device_rows is not None:
        addresses[list(device_rows.rows)] = 0
    return LiveMemory(
        destinations=Destinations(addresses=addresses, nbytes=nbytes, owners=parts, writer=device_rows),
        in_values=in_values,
        staged=met.staged,
        device_rows=device_rows,
    )


def _device_rows(parts: Sequence[torch.Tensor], on_device: Sequence[torch.Tensor]) -> DeviceRows | None:
    """Return what writes to those of `parts` that are in `on_device`; None where none has a byte."""
    if not on_device:
        return None
    known = {id(part) for part in on_device}
    rows = {row: part for row, part in enumerate(parts) if id(part) in known and part.nbytes}
    return (
        DeviceRows({row: part.detach().reshape(-1).view(torch.uint8) for row, part in rows.items()}) if rows else None
    )


def _parts_of_key(key: AbsentKey, made: list[torch.Tensor], met: _OutOfPlace) -> list[torch.Tensor]:
    """Return the same as `_parts` for tensors that were just made, all of one kind: box by box."""
    first = made[0]
    is_whole = type(first) is torch.Tensor and _is_host(first) and [first.shape] == [box.lengths for box in key.boxes]
    if is_whole and all(map(torch.Tensor.is_contiguous, made)):
        return made
    return [part for box in key.boxes for part in _parts(key.fqns, made, [box] * len(made), met)]


def _parts(
    fqns: Sequence[str], tensors: Sequence[torch.Tensor], boxes: Sequence[LocalBox], met: _OutOfPlace
) -> list[torch.Tensor]:
    """Return the row-major memory of one box of each live tensor, or a buffer for it."""
    whole = list(map(local_of, tensors))
    lacks = np.fromiter(map(operator.ne, map(_SHAPE, whole), map(_LENGTHS, boxes)), np.bool_, len(whole))
    for has in (_is_host, torch.Tensor.is_contiguous):
        lacks |= ~np.fromiter(map(has, whole), np.bool_, len(whole))
    for has_not in (torch.Tensor.is_conj, torch.Tensor.is_neg):
        lacks |= np.fromiter(map(has_not, whole), np.bool_, len(whole))
    for row in np.flatnonzero(lacks).tolist():
        whole[row] = _part(fqns[row], whole[row], boxes[row], met)
    return whole


def _part(fqn: str, part: torch.Tensor, box: LocalBox, met: _OutOfPlace) -> torch.Tensor:
    """Return the row-major memory of one box of a local tensor, or a buffer for it."""
    if part.shape != box.lengths:
        part = part.detach()
        for dim, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            part = part.narrow(dim, start, length)
    if part.is_contiguous() and not part.is_conj() and not part.is_neg():
        if not _is_host(part):
            met.on_device.append(part)
        return part
    buffer = torch.empty(part.shape, dtype=part.dtype)
    met.staged.append(Staged(fqn, part.detach(), buffer))
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
                f"{fqn!r} is an expanded (stride-0) tensor; the snapshot holds distinct elements",
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
