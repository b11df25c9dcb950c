"""The collectives of `restore()`: bytes of any length between the ranks, as uint8 tensors.

Object collectives would pickle. Without a process group every exchange is local.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flashckpt.errors import DamagedError
from flashckpt.framing import LENGTH, frame

MOST_BYTES = 4 << 30
"""Most bytes that one rank may announce to another: many times the manifests of a large job, or a round of a restore."""

_HEAD = 1024
"""Bytes of the first exchange with each rank: a length, and what there is room for."""
_MOST_GATHERED = 1 << 20
"""Bytes of all ranks up to which gathering and comparing takes less time than a reduction."""


def _device() -> torch.device:
    """Return the device whose tensors the default group can exchange; host memory if possible."""
    kinds = {torch.device(d).type for d in dist.group.WORLD._device_types}  # type: ignore[union-attr]  # noqa: SLF001 -- no public list of them
    return torch.device("cpu" if "cpu" in kinds else torch.accelerator.current_accelerator() or "cpu")


def is_alone() -> bool:
    """Return whether there is no process group, or one of a single rank."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def rank() -> int:
    """Return this rank, 0 without a process group."""
    return 0 if is_alone() else int(dist.get_rank())


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's `data`, in rank order. A collective: all ranks must call it.

    The first exchange carries the lengths and the beginnings; what is short needs no second one.
    """
    if is_alone():
        return [data]
    heads = _all_gather(np.frombuffer(frame(data)[:_HEAD].ljust(_HEAD, b"\0"), np.uint8))
    lengths = _bounded([LENGTH.unpack_from(head)[0] for head in heads])
    parts = [head[8 : 8 + n].tobytes() for head, n in zip(heads, lengths, strict=True)]
    if max(lengths) > _HEAD - 8:
        mine = np.zeros(max(lengths), np.uint8)
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        parts = [whole[:n].tobytes() for whole, n in zip(_all_gather(mine), lengths, strict=True)]
    parts[dist.get_rank()] = data  # whoever passed it on: this rank knows best what it said
    return parts


def _all_gather(mine: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return every rank's bytes, equally many of each, as rows. A collective.

    gloo gathers for all in a ring: n * (n - 1) messages, one after another. To one rank and from there to all it is 2 * (n - 1).
    """
    device, world = _device(), dist.get_world_size()
    sent, everything = (
        torch.from_numpy(mine.copy()).to(device),
        torch.empty(world, len(mine), dtype=torch.uint8, device=device),
    )
    if device.type == "cpu":
        dist.gather(sent, list(everything) if dist.get_rank() == 0 else None, dst=0)
        dist.broadcast(everything, src=0)
    else:
        dist.all_gather(list(everything), sent)
    return everything.cpu().numpy()


def all_gather(value: Any) -> list[Any]:
    """Return every rank's value (msgpack types; tuples come back as lists). A collective."""
    return [msgpack.unpackb(raw, strict_map_key=False) for raw in all_gather_bytes(msgpack.packb(value))]


def bytes_from_rank_0(data: bytes) -> bytes:
    """Return rank 0's `data` on every rank. A collective; other ranks' `data` is ignored. Each rank holds it once, whatever the world size."""
    if is_alone():
        return data
    device, is_first = _device(), dist.get_rank() == 0
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_first and data else None
    if buffer is None:
        buffer = torch.empty(*_bounded([int(size)]), dtype=torch.uint8)
    if not buffer.numel():
        return b""
    buffer = buffer.to(device)
    dist.broadcast(buffer, src=0)
    return data if is_first else bytes(buffer.cpu().numpy().data)


def _bounded(lengths: list[int]) -> list[int]:
    """Return what ranks have announced to send, before memory is taken for it. Raises DamagedError."""
    for n in lengths:
        if not 0 <= n <= MOST_BYTES:
            raise DamagedError(
                "a rank announced a message of an impossible length",
                found=f"{n} bytes",
                expected=f"at most {MOST_BYTES} bytes",
                state="Nothing of it was received.",
                remedy="start the job again; if it happens again, look for a rank that is not of this job (SECURITY.md)",
            )
    return lengths


def maximum(data: np.ndarray) -> bytes:
    """Return the maximum over all ranks of each byte; all pass equally many. A collective."""
    if is_alone():
        return data.tobytes()
    if data.nbytes * dist.get_world_size() <= _MOST_GATHERED:
        return bytes(_all_gather(np.ascontiguousarray(data, np.uint8)).max(axis=0))
    mine = torch.from_numpy(np.ascontiguousarray(data, np.uint8)).to(_device())
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.cpu().numpy().tobytes()


def total(value: int) -> int:
    """Return the sum of every rank's value. A collective."""
    if is_alone():
        return value
    found = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.all_reduce(found)
    return int(found)


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank (msgpack types). A collective; other ranks' `value` is ignored."""
    if is_alone():
        return value
    return msgpack.unpackb(bytes_from_rank_0(msgpack.packb(value)), strict_map_key=False)


class HostGroup:
    """All ranks, over a backend that exchanges host memory: the default group, or a gloo group until this is closed.

    Creating, using and closing it are collectives.
    """

    def __init__(self) -> None:
        """Join; adds a gloo group if the default group exchanges device memory only."""
        self._own = None if _device().type == "cpu" else dist.new_group(backend="gloo")
        self.ranks = dist.get_world_size()

    def total(self, value: int) -> int:
        """Return the sum of every rank's value. A collective."""
        total = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(total, group=self._own)
        return int(total)

    def all_to_all(self, parts: Sequence[Sequence[Any]]) -> list[memoryview]:
        """Give each rank its part and return what each rank gave to this one. A collective.

        Args:
            parts: Per receiving rank the buffers that make up its part; they are copied once, one after another.

        Returns:
            Per sending rank its part: views of one buffer, so that peak memory is the bytes sent plus the bytes received.
        """
        sizes = [sum(memoryview(b).nbytes for b in part) for part in parts]
        arriving = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_to_all_single(arriving, torch.tensor(sizes, dtype=torch.int64), group=self._own)
        counts = _bounded([int(n) for n in arriving])
        leaving = torch.empty(sum(sizes), dtype=torch.uint8)
        into, at = leaving.numpy(), 0
        for buffer in (b for part in parts for b in part):
            raw = np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else into[:0]
            into[at : at + len(raw)] = raw  # releases the GIL; assignment to a memoryview would not
            at += len(raw)
        received = torch.empty(sum(counts), dtype=torch.uint8)
        dist.all_to_all_single(received, leaving, counts, sizes, group=self._own)
        raw_bytes: Any = received.numpy()
        whole, ends = memoryview(raw_bytes), [0]
        for n in counts:
            ends.append(ends[-1] + n)
        return [whole[a:b] for a, b in itertools.pairwise(ends)]

    def send(self, data: npt.NDArray[Any], to: int) -> Callable[[], object]:
        """Begin to send bytes to a rank that receives as many; return what waits until they have left. The order is kept."""
        work = dist.isend(torch.from_numpy(data.view(np.uint8)), to, group=self._own)
        assert work is not None  # this rank is in the group
        return work.wait

    def receive(self, out: npt.NDArray[Any], rank: int) -> None:
        """Fill `out` with what a rank sends to this one."""
        dist.recv(torch.from_numpy(out.view(np.uint8)), rank, group=self._own)

    def close(self) -> None:
        """Leave; destroys the group that `__init__` created."""
        if self._own is not None:
            dist.destroy_process_group(self._own)
            self._own = None
