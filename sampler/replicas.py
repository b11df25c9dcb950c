"""Which data-parallel replica this process belongs to, and whether the ranks of one replica see the same samples."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import LayoutError, ReplicaMismatchError
from flashckpt.sampler.order.state import whole


def either(one: int | None, other: int | None) -> int | None:
    """Return the one of two names of an argument that was given; None if neither was.

    Raises:
        LayoutError: both were, and they differ.
    """
    if one is not None and other is not None and one != other:
        raise LayoutError(
            "two arguments give different data-parallel numbers", found=f"{one} and {other}", expected="one of the two"
        )
    return other if one is None else one


def resolve(dp_rank: int | None, dp_size: int | None, mesh: Any = None) -> tuple[int, int]:
    """Return (dp rank, dp size) from explicit numbers, from a device mesh, or of the process group.

    Args:
        dp_rank: Index of this replica; tensor- and pipeline-parallel ranks of one replica share it.
        dp_size: Number of replicas.
        mesh: A DeviceMesh with named dimensions; those whose name begins with "dp" count, outermost first.

    Raises:
        LayoutError: the numbers are missing, contradictory or out of range.
    """
    dp_rank, dp_size = whole("dp_rank", dp_rank), whole("dp_size", dp_size)
    if mesh is not None:
        if dp_rank is not None or dp_size is not None:
            raise LayoutError("give either a mesh or dp_rank and dp_size", found="both", expected="one of the two")
        return _from_mesh(mesh)
    if dp_rank is None and dp_size is None:
        return of_group()
    if dp_rank is None or dp_size is None or not 0 <= dp_rank < dp_size:
        raise LayoutError(
            "the data-parallel rank is not below the data-parallel size",
            found=f"rank {dp_rank}, size {dp_size}",
            expected="0 <= rank < size",
        )
    return dp_rank, dp_size


def _from_mesh(mesh: Any) -> tuple[int, int]:
    names = mesh.mesh_dim_names or ()
    rank, size = 0, 1
    for dimension, name in enumerate(names):
        if name.startswith("dp"):
            rank = rank * mesh.size(dimension) + mesh.get_local_rank(dimension)
            size *= mesh.size(dimension)
    if not any(name.startswith("dp") for name in names):
        raise LayoutError(
            "the mesh has no data-parallel dimension",
            found=f"dimensions {tuple(names)}",
            expected='names that begin with "dp" (dp, dp_replicate, dp_shard; size 1 is fine)',
        )
    return rank, size


def of_group() -> tuple[int, int]:
    """Return this process's rank of the default group, and its size; (0, 1) without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return int(distributed.get_rank()), int(distributed.get_world_size())


def check_same_samples(ids: npt.ArrayLike, group: Any = None, *, device: Any = None) -> None:
    """Compare a hash of sample ids over a process group: a debug check for the ranks of one replica.

    A collective: every rank of `group` calls it with the ids of its batch.

    Args:
        ids: Sample ids of this rank's batch, in order.
        group: The group whose ranks must see the same samples (tensor- and pipeline-parallel peers).
        device: Device of the tensors that the group's backend exchanges; default: host memory.

    Raises:
        ReplicaMismatchError: the ranks hold different ids; raised on every rank of the group.
    """
    import torch
    import torch.distributed as dist

    data = np.ascontiguousarray(ids, dtype="<i8").tobytes()
    own = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
    gathered = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, torch.tensor([own], dtype=torch.int64, device=device), group=group)
    hashes = [int(value.item()) for value in gathered]
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise ReplicaMismatchError(
            "ranks of one data-parallel replica hold different samples",
            found=f"ranks {different} of the group differ from its rank 0 (hashes {[f'{h:016x}' for h in hashes]})",
            expected="the same sample ids on every rank of the group",
            remedy="pass the data-parallel rank to the sampler (dp_rank= or mesh=), not the global rank",
        )
