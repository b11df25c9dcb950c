"""Where a DeepSpeed engine keeps what it trains: this rank's share of each parameter, by kind of optimizer.

DeepSpeed flattens parameters into groups, pads them and deals equal pieces to the ranks (ZeRO 1 and 2), or flattens, pads
and deals each parameter (ZeRO 3). Padding is no state and belongs to no fragment.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from flashckpt.state.parts import TensorPart, cut


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fragment:
    """This rank's share of one trained parameter.

    Attributes:
        name: Of the parameter in the module.
        shape: Of the whole parameter.
        group: Place of its group in the optimizer.
        owner: The tensor that the optimizer updates, and whose state it keeps: the fp32 weights of several parameters as a
            rule.
        at: Where the fragment begins in `owner`.
        start: Its first element in the flattened parameter.
        count: Elements; 0 where this rank has no share.
        ranks: Ranks that hold an equal copy; () where none does.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    owner: torch.Tensor
    at: int
    start: int
    count: int
    ranks: tuple[int, ...] = ()

    def parts(self, tensor: torch.Tensor) -> tuple[TensorPart, ...]:
        """Return the fragment of `owner`, or of state that lies beside it."""
        tensor = tensor.detach()
        if tuple(tensor.shape) == self.shape and self.count == tensor.numel():
            whole = (0,) * len(self.shape)
            return (
                TensorPart(tensor=tensor, global_shape=self.shape, offsets=whole, ranks=self.ranks, is_fenced=True),
            )
        flat = tensor.view(-1)[self.at : self.at + self.count]
        return cut(flat, self.start, self.shape, ranks=self.ranks, is_fenced=True)


class _Place(TypedDict):
    """What differs between the kinds of optimizers."""

    at: int
    start: int
    count: int
    ranks: tuple[int, ...]


Names = dict[int, str]


def fragments_of(engine: Any, names: Names) -> list[Fragment]:
    """Return this rank's share of every trained parameter.

    Args:
        engine: One that `refuse_unsupported` let pass.
        names: id(parameter) -> its name in the module.
    """
    return list(_FRAGMENTS.get(type(engine.optimizer).__name__, _plain)(engine.optimizer, names))


def all_ranks() -> tuple[int, ...]:
    """Return the ranks of the job, where there are several."""
    size = dist.get_world_size()
    return tuple(range(size)) if size > 1 else ()


def _of_partition(flat: torch.Tensor, rank: int, offset: int, numel: int) -> _Place:
    """Return the common elements of a parameter and of one of the equal pieces of its group."""
    first = rank * flat.numel()
    start, stop = max(offset, first), min(offset + numel, first + flat.numel())
    return {"at": max(0, start - first), "start": max(0, start - offset), "count": max(0, stop - start), "ranks": ()}


def _zero_1_and_2(optimizer: Any, names: Names) -> Iterator[Fragment]:
    columns = zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for group, (flat, params, offsets, ranks) in enumerate(columns):
        for param, offset in zip(params, offsets, strict=True):
            place = _of_partition(flat, dist.get_rank(ranks), offset, param.numel())
            yield Fragment(name=names[id(param)], shape=tuple(param.shape), group=group, owner=flat, **place)


def _zero_3(optimizer: Any, names: Names) -> Iterator[Fragment]:
    columns = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for sub_group, (params, flat) in enumerate(columns):
        at = 0
        for param in params:
            yield Fragment(
                name=names[id(param)],
                shape=tuple(param.ds_shape),
                group=optimizer.sub_group_to_group_id[sub_group],
                owner=flat,
                **_Place(at=at, **share_of_partitioned(param), ranks=()),
            )
            at += param.ds_tensor.ds_numel


class HeldElements(TypedDict):
    """Elements of a parameter that this rank has, at the beginning of its piece."""

    start: int
    count: int


def share_of_partitioned(param: Any) -> HeldElements:
    """Return this rank's share of a parameter of ZeRO 3."""
    size = param.ds_tensor.ds_numel
    start = min(dist.get_rank(param.ds_process_group) * size, param.ds_numel)
    return {"start": start, "count": min(size, param.ds_numel - start)}


def _bf16(optimizer: Any, names: Names) -> Iterator[Fragment]:
    columns = zip(
        optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, optimizer.real_dp_process_group, strict=True
    )
    for group, (flat, params, ranks) in enumerate(columns):
        offsets = itertools.accumulate((param.numel() for param in params), initial=0)
        for param, offset in zip(params, offsets, strict=False):
            place = _of_partition(flat, dist.get_rank(ranks), offset, param.numel())
            yield Fragment(name=names[id(param)], shape=tuple(param.shape), group=group, owner=flat, **place)


def _fused(optimizer: Any, names: Names) -> Iterator[Fragment]:
    ranks = all_ranks()
    for group, (params, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        offsets = itertools.accumulate((param.numel() for param in params), initial=0)
        for param, at in zip(params, offsets, strict=False):
            place = _Place(at=at, start=0, count=param.numel(), ranks=ranks)
            yield Fragment(name=names[id(param)], shape=tuple(param.shape), group=group, owner=flat, **place)


def _unfused(optimizer: Any, names: Names) -> Iterator[Fragment]:
    for group, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for param, master in zip(params, masters, strict=True):
            yield _whole(names[id(param)], master, group)


def _plain(optimizer: Any, names: Names) -> Iterator[Fragment]:
    for place, group in enumerate(optimizer.param_groups):
        for param in filter(operator.attrgetter("requires_grad"), group["params"]):
            yield _whole(names[id(param)], param, place)


def _whole(name: str, owner: torch.Tensor, group: int) -> Fragment:
    place = _Place(at=0, start=0, count=owner.numel(), ranks=all_ranks())
    return Fragment(name=name, shape=tuple(owner.shape), group=group, owner=owner, **place)


_FRAGMENTS: dict[str, Callable[[Any, Names], Iterator[Fragment]]] = {
    "DeepSpeedZeroOptimizer": _zero_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _zero_3,
    "BF16_Optimizer": _bf16,
    "FP16_Optimizer": _fused,
    "FP16_UnfusedOptimizer": _unfused,
}
"""By class of `engine.optimizer`; a torch optimizer updates the parameters themselves."""


def refresh_weights(engine: Any) -> None:
    """Copy the fp32 weights into the parameters that the model computes with. Collective."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    with torch.no_grad():
        if kind in {"DeepSpeedZeroOptimizer", "BF16_Optimizer"}:
            optimizer.update_lp_params()
            optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001 -- for DeepSpeed's own safe_get_full_optimizer_state
        elif kind == "DeepSpeedZeroOptimizer_Stage3":
            optimizer.checkpoint_event_prologue()
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001 -- as its step() does
            optimizer.checkpoint_event_epilogue()
        elif kind == "FP16_Optimizer":
            for low, flat in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
                low.copy_(flat)
        elif kind == "FP16_UnfusedOptimizer":
            for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
