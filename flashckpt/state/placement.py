"""The place of a live tensor in its global tensor: boxes and replica numbers, computed without any communication.

Offsets of DTensors come from torch's own placement objects, never from `Shard` and a mesh coordinate by
hand: that formula is wrong for the strided shards of FSDP2 over tensor parallelism.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.errors import UnsupportedStateError
from flashckpt.planning.write_partition import ROW_BYTES, WriteShare, cut_dimension, split_rows

STAGE_DIMS = frozenset({"pp", "pipe", "pipeline", "stage", "diloco"})
"""Mesh dimensions whose ranks hold different tensors, so that they never make replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBox:
    """A box of a global tensor and where it starts in the local one (elements, per dimension).

    Attributes:
        replica: 0 if this rank's copy of the box is the one that is persisted.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How one kind of tensor is spread over ranks.

    Attributes:
        replicas: Number of ranks that hold equal copies of this rank's boxes.
        index: This rank's place among them.
        per_rank: True where the tensor belongs to this rank alone; its name then gets a suffix.
        over: What tells this replica set from others that this rank is in: tensors with equal `over` are
            shared out together. Every rank of a set has the same tensors in it.
    """

    replicas: int = 1
    index: int = 0
    per_rank: bool = False
    over: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks as this one sees them.

    Attributes:
        rank: Global rank.
        size: Ranks of the default group; 1 without one.
        mesh: The mesh given to `track()`, or None.
        replicated: Plain tensors are equal on all ranks (`replicated_over="world"`).
        group: Ranks that hold equal plain tensors (`replicated_over=` a list of ranks), or None.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    replicated: bool = False
    group: tuple[int, ...] | None = None

    @functools.cached_property
    def coordinates(self) -> dict[str, int]:
        """Mesh coordinate by dimension name; {} without a mesh."""
        if self.mesh is None or self.mesh.get_coordinate() is None:
            return {}
        names = self.mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(self.mesh.ndim))
        return dict(zip(names, (int(c) for c in self.mesh.get_coordinate() or ()), strict=True))

    @functools.cached_property
    def suffix(self) -> str:
        """What marks the name of state that belongs to this rank: `pp0.dp1.tp0`, or `rank3` without a mesh."""
        return ".".join(f"{name}{c}" for name, c in self.coordinates.items()) or f"rank{self.rank}"

    @functools.cached_property
    def stage(self) -> str:
        """The part of `suffix` that names the pipeline stage; empty where there is none."""
        return ".".join(f"{name}{c}" for name, c in self.coordinates.items() if name in STAGE_DIMS)


def current_world(mesh: DeviceMesh | None = None, replicated_over: Any = None) -> World:
    """Return the World of this process.

    Args:
        mesh: Mesh of all ranks with named dimensions, or None.
        replicated_over: None, "world", a process group, or a sequence of global ranks.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    group: tuple[int, ...] | None = None
    if isinstance(replicated_over, dist.ProcessGroup):
        group = tuple(dist.get_process_group_ranks(replicated_over))
    elif replicated_over is not None and not isinstance(replicated_over, str):
        group = tuple(int(r) for r in replicated_over)
    return World(rank=rank, size=size, mesh=mesh, replicated=replicated_over == "world", group=group)


def spread_of_plain(world: World, ddp_ranks: Sequence[int] | None = None) -> Replication:
    """Return how a tensor that is no DTensor is spread; `ddp_ranks` are the ranks of its DDP wrapper."""
    if world.size == 1:
        return Replication()
    ranks = ddp_ranks if ddp_ranks is not None else world.group
    if ranks is None and world.replicated:
        ranks = range(world.size)
    if ranks is not None:
        return Replication(replicas=len(ranks), index=list(ranks).index(world.rank), over=tuple(ranks))
    if world.mesh is not None:
        return _over_dims(world.mesh, lambda name: name not in STAGE_DIMS)
    return Replication(per_rank=True)


def spread_of_dtensor(tensor: DTensor, world: World) -> Replication:
    """Return how equal copies of the local shard of `tensor` are spread: over its replicated mesh dimensions.

    With a mesh given to `track()`, dimensions of it that the tensor's own mesh lacks count as replicas too,
    except pipeline stages.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    count, index = 1, 0
    own = set(mesh.mesh_dim_names or ())
    equal = tuple(dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    for dim in equal:
        count, index = count * mesh.size(dim), index * mesh.size(dim) + int(coordinate[dim])
    over: tuple[Any, ...] = _ranks_over(mesh, equal)
    if world.mesh is not None and own <= set(world.mesh.mesh_dim_names or ()):
        other = _over_dims(world.mesh, lambda name: name not in STAGE_DIMS and name not in own)
        count, index = count * other.replicas, index * other.replicas + other.index
        over += other.over
    return Replication(replicas=count, index=index, over=over)


@functools.lru_cache(maxsize=64)
def _ranks_over(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one in mesh dimensions `dims` only."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    at = tuple(slice(None) if dim in dims else int(coordinate[dim]) for dim in range(mesh.ndim))
    return tuple(int(rank) for rank in mesh.mesh[at].flatten().tolist())


def _over_dims(mesh: DeviceMesh, wanted: Any) -> Replication:
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    count, index = 1, 0
    names = tuple(name for name in mesh.mesh_dim_names or () if wanted(name))
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if name in names:
            count, index = count * mesh.size(dim), index * mesh.size(dim) + int(coordinate[dim])
    return Replication(replicas=count, index=index, over=names)


def boxes_of(name: str, tensor: torch.Tensor) -> tuple[LocalBox, ...]:
    """Return the boxes that this rank holds of `tensor`; one, except for strided shards that lie in pieces.

    Raises:
        UnsupportedStateError: A partial sum, or a local shape that its placements do not give.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return (LocalBox(global_shape=shape, offsets=(0,) * len(shape), lengths=shape, starts=(0,) * len(shape)),)
    if any(p.is_partial() for p in tensor.placements):
        raise UnsupportedStateError(
            f"tensor {name!r} is a partial sum over ranks, which has no value on its own",
            found=str(tensor.placements),
            expected="Shard or Replicate placements",
            remedy="redistribute it before it is tracked",
        )
    shape = tuple(tensor.shape)
    local = tuple(tensor._local_tensor.shape)  # noqa: SLF001 -- to_local() makes a new autograd view each time
    runs = [_runs(tensor, dim) for dim in range(len(shape))]
    if tuple(sum(n for _, n in dim) for dim in runs) != local and 0 not in local:
        raise UnsupportedStateError(
            f"the local shard of {name!r} has a shape that its placements do not give",
            found=f"{local} of {shape} with {tensor.placements}",
            expected=str([sum(n for _, n in dim) for dim in runs]),
        )
    if 0 in local:
        return (LocalBox(global_shape=shape, offsets=(0,) * len(shape), lengths=local, starts=(0,) * len(shape)),)
    boxes = []
    for piece in itertools.product(*([(start, o, n) for start, (o, n) in _numbered(dim)] for dim in runs)):
        starts, offsets, lengths = zip(*piece, strict=True) if piece else ((), (), ())
        boxes.append(LocalBox(global_shape=shape, offsets=offsets, lengths=lengths, starts=starts))
    return tuple(boxes)


def _numbered(runs: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    starts = itertools.accumulate((n for _, n in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    """Return (global offset, length) of the contiguous pieces of dimension `dim` that this rank holds."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    if not any(isinstance(p, _StridedShard) and p.dim == dim for p in tensor.placements):
        lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        return [(int(offsets[dim]), int(lengths[dim]))]
    index = torch.arange(tensor.shape[dim]).reshape([1] * dim + [-1])
    for i, placement in enumerate(tensor.placements):
        if (placement.is_shard() or isinstance(placement, _StridedShard)) and placement.dim == dim:  # type: ignore[attr-defined]  # Shard kinds have it
            pieces = placement._split_tensor(index, mesh.size(i), with_padding=False)[0]  # type: ignore[attr-defined]  # noqa: SLF001 -- torch's own cut is the definition
            index = pieces[int(coordinate[i])]
    return contiguous_runs(index.flatten().tolist())


def contiguous_runs(index: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, length) of the runs of consecutive numbers in `index`, e.g. 0,1,4,5,6 -> (0,2), (4,3)."""
    runs: list[tuple[int, int]] = []
    for i in index:
        if runs and i == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return runs or [(0, 0)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's bytes (the local shard of a DTensor), without autograd history."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 -- as in boxes_of


def dtype_name(name: str, tensor: torch.Tensor, *, takes_meta: bool = False) -> str:
    """Return the dtype's name; refuse by key what has no plain bytes (meta, sparse, quantised, unknown subclasses)."""
    local, dtype = local_of(tensor), str(tensor.dtype).removeprefix("torch.")
    kind = ""
    if local.is_meta and not takes_meta:
        kind = "a tensor on the meta device, which has no values yet"
    elif local.is_nested:
        kind = "a nested tensor"
    elif local.layout is not torch.strided or local.is_quantized or dtype not in ITEMSIZE:
        kind = f"a tensor of layout {local.layout} and dtype {local.dtype}"
    elif type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not _is_plain(local):
        kind = f"a tensor of class {type(local).__name__}, whose bytes flashckpt does not know"
    if kind:
        raise UnsupportedStateError(
            f"{name!r} cannot be held in a snapshot",
            found=kind,
            expected="a strided tensor with values, or a DTensor of one",
            state="Nothing was tracked.",
            remedy="materialise it, or leave it out of track()",
        )
    return dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a subclass only renames a plain tensor (no custom dispatch, so its bytes are its values)."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def split_among_replicas(
    boxes: Sequence[LocalBox], dtype: str, spread: Replication, shares: Sequence[WriteShare] = ()
) -> tuple[LocalBox, ...]:
    """Return the rows of one tensor: its boxes, cut where its replicas persist parts of it, none above ROW_BYTES.

    Args:
        boxes: What this rank holds of it.
        dtype: Name of its dtype.
        spread: Its replicas.
        shares: Who persists which rows of its one box (`balance.deal`); where they are of a tensor of another
            shape (a scalar of the optimizer) or there are several boxes, all goes to the writer of the first.
    """
    if len(boxes) == 1 and not shares and spread.replicas == 1 and box_bytes(dtype, boxes) <= ROW_BYTES:
        return tuple(boxes)  # nearly always
    (first, *_) = shares or (WriteShare(start=0, stop=0, writer=0),)
    dim = cut_dimension(boxes[0].lengths)
    rows = boxes[0].lengths[dim] if boxes[0].lengths else 1
    if len(boxes) == 1 and len(shares) > 1 and shares[-1].stop == rows:
        mine = [(_part(boxes[0], dim, share.start, share.stop), share.writer) for share in shares]
    else:
        mine = [(box, first.writer) for box in boxes]
    return tuple(
        replace(piece, replica=(spread.index - writer) % spread.replicas)
        for box, writer in mine
        for piece in _split(box, ITEMSIZE[dtype], cut_dimension(box.lengths))
    )


def _part(box: LocalBox, dim: int, start: int, stop: int) -> LocalBox:
    """Return rows `start` to `stop` of dimension `dim` of a box."""
    return replace(
        box,
        offsets=(*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
        lengths=(*box.lengths[:dim], stop - start, *box.lengths[dim + 1 :]),
        starts=(*box.starts[:dim], box.starts[dim] + start, *box.starts[dim + 1 :]),
    )


def _split(box: LocalBox, itemsize: int, dim: int) -> list[LocalBox]:
    """Return a box in pieces of at most ROW_BYTES, cut along `dim` and, where one row is larger, along the next."""
    nbytes = math.prod(box.lengths) * itemsize
    if nbytes <= ROW_BYTES or dim >= len(box.lengths):
        return [box]
    parts = [_part(box, dim, start, stop) for start, stop in split_rows(box.lengths[dim], nbytes)]
    return [piece for part in parts for piece in _split(part, itemsize, dim + 1)]


def shard_of(fqn: str, dtype: str, box: LocalBox, replica: int | None = None) -> Shard:
    """Return the table row of one box, of another replica number where one is given."""
    return Shard(
        fqn=fqn,
        dtype=dtype,
        global_shape=box.global_shape,
        offsets=box.offsets,
        lengths=box.lengths,
        replica=box.replica if replica is None else replica,
    )


def box_bytes(dtype: str, boxes: Sequence[LocalBox]) -> int:
    """Return the bytes of all boxes."""
    return sum([math.prod(box.lengths) for box in boxes]) * ITEMSIZE[dtype]


@contextlib.contextmanager
def trainable(parts: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Leave torch's inference mode where modules can be trained: state made in it could never be changed outside."""
    is_inside = torch.is_inference_mode_enabled()
    if not is_inside or any(param.is_inference() for part in parts for param in part.parameters()):
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
