"""The collectives of `restore()`: bytes of any length gathered over the default group, as uint8 tensors.

Object collectives would pickle. Without a process group every exchange is with oneself.
"""

from __future__ import annotations

from typing import Any

import msgpack
import torch
import torch.distributed as dist


def _device() -> torch.device:
    """Return the device whose tensors the default group can exchange; host memory where it can."""
    kinds = {torch.device(d).type for d in dist.group.WORLD._device_types}  # type: ignore[union-attr]  # noqa: SLF001 -- no public list of them
    return torch.device("cpu" if "cpu" in kinds else torch.accelerator.current_accelerator() or "cpu")


def is_alone() -> bool:
    """Return whether there is no process group, or one of a single rank."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's `data`, in rank order. A collective: all ranks call it."""
    if is_alone():
        return [data]
    device, world = _device(), dist.get_world_size()
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device))
    lengths = [int(size) for size in sizes]
    longest = max(1, *lengths)
    mine = torch.zeros(longest, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everything = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(everything, mine.to(device))
    return [part.cpu().numpy()[:n].tobytes() for part, n in zip(everything, lengths, strict=True)]


def all_gather(value: Any) -> list[Any]:
    """Return every rank's value (msgpack types; tuples come back as lists). A collective."""
    return [msgpack.unpackb(raw, strict_map_key=False) for raw in all_gather_bytes(msgpack.packb(value))]


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank (msgpack types). A collective; other ranks' `value` is ignored."""
    if is_alone():
        return value
    mine = msgpack.packb(value if dist.get_rank() == 0 else None)
    return msgpack.unpackb(all_gather_bytes(mine)[0], strict_map_key=False)
