# ruff: noqa: SLF001 -- torch has no public way to say which rank and groups a mesh means
"""A first step rehearsed before the ranks exist: they inherit its plans.

DTensor decides for each operator, shape, placement and mesh how it is carried out, and keeps the decision. A rank that
was restarted has none and decides all of them in its first step, beside all other ranks of the node. Decisions do
not depend on the rank: here they are made by a process that pretends to be one, in a process group whose collectives do
nothing, and every rank that is forked from it has them. `adopt` then makes the meshes that they hold mean the rank
that uses them.

CPU only: with a GPU, backward runs in threads of autograd, and a process with threads cannot be forked. It needs names
of torch that may change: `unsupported` compares the version with those it was tried with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

VERSIONS = ("2.13.",)
"""Releases of torch whose meshes and caches are as `adopt` expects; tests/unit/launcher/test_rehearsal.py shows it."""

_meshes: list[DeviceMesh] = []  # of all rehearsals: plans hold them


def unsupported() -> str:
    """Return why nothing can be rehearsed here, or ""."""
    if not torch.__version__.startswith(VERSIONS):
        return f"torch {torch.__version__} is not known to it ({', '.join(f'{v}x' for v in VERSIONS)} is)"
    if torch.accelerator.is_available():
        return "there is an accelerator: backward would start threads"
    return ""


@contextmanager
def pretend_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a process group whose collectives do nothing; restore the random generators afterwards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before, recorded, receive = torch.get_rng_state(), DeviceMesh.__init__, dist.recv
    numpy_before, python_before = np.random.get_state(), random.getstate()  # noqa: NPY002 -- the global one is restored

    def record(self: DeviceMesh, *args: Any, **options: Any) -> None:
        recorded(self, *args, **options)
        _meshes.append(self)

    DeviceMesh.__init__ = record  # type: ignore[method-assign]  # there is no other way to know them
    dist.recv = _receive_ones  # stages of a pipeline vote whether all of them know their shapes
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()  # of the whole world: names of later groups begin from 0 again
        DeviceMesh.__init__ = recorded  # type: ignore[method-assign]
        dist.recv = receive
        torch.set_rng_state(before)
        np.random.set_state(numpy_before)  # noqa: NPY002
        random.setstate(python_before)


def _receive_ones(tensor: torch.Tensor, *_: Any, **__: Any) -> int:
    tensor.fill_(1)
    return 0


def adopt(mesh: DeviceMesh) -> None:
    """Make the meshes inside the plans of a rehearsal mean this rank and the groups of `mesh`, its real one.

    Meshes of another layout stay as they are: they equal no mesh of this run, and so no plan of theirs is found.
    """
    for known in _meshes:
        if known is not mesh and _is_part(known, mesh):
            _rebind(known, mesh)


def leftovers(mesh: DeviceMesh) -> list[str]:
    """Return the dimension names of rehearsed meshes that `adopt` would not find in `mesh` (flattened ones)."""
    return [str(known.mesh_dim_names) for known in _meshes if not _is_part(known, mesh)]


def forget() -> None:
    """Forget all rehearsed meshes. Only for tests: the plans stay."""
    _meshes.clear()


def _is_part(known: DeviceMesh, mesh: DeviceMesh) -> bool:
    wanted = set(known.mesh_dim_names or ())
    return (
        known._flatten_rank_map == mesh._flatten_rank_map and bool(wanted) and wanted <= set(mesh.mesh_dim_names or ())
    )


def _rebind(known: Any, mesh: Any) -> None:
    at = [mesh.mesh_dim_names.index(name) for name in known.mesh_dim_names]
    known._rank = mesh._rank
    known._coordinate_on_dim = tuple(mesh._coordinate_on_dim[dim] for dim in at)
    known._dim_group_names = [mesh._dim_group_names[dim] for dim in at]
    known._pg_registry = {name: mesh._pg_registry[name] for name in known._dim_group_names}
