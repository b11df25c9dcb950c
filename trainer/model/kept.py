"""What a forward keeps for its backward: computed again by operator, or moved to host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KEPT_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
    }
)
"""Products, attention and collectives: what costs most to compute again. Norms, turns and SwiGLU are made again."""


def selective() -> Callable[[], Any]:
    """Return `context_fn` of torch's checkpoint that keeps the results of `KEPT_OPERATORS`."""

    def policy(_context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


@contextmanager
def moved_to_host(module: nn.Module) -> Iterator[None]:
    """Let autograd keep a copy in host memory of what the forward inside saves, but for parameters of `module`.

    torch's `save_on_cpu` would move weights too, and a tensor again for every operator that saves it. On a CPU it is a
    copy, and saves nothing.
    """
    # parameters as FSDP gathered them for this forward; linear layers save views of them
    own = {_local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
    copies = _HostCopies()

    def pack(tensor: Tensor) -> Any:
        local = _local(tensor)
        if not tensor.is_floating_point() or local.untyped_storage().data_ptr() in own:
            return tensor
        packed = copies.of(local), local.shape, local.stride(), local.device
        if not isinstance(tensor, DTensor):
            return *packed, None
        return *packed, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, shape, stride, device, spec = packed
        moved: Tensor = host.to(device, non_blocking=True)
        moved = moved.as_strided(shape, stride) if moved.dim() == 1 else moved
        if spec is None:
            return moved
        mesh, placements, shape, stride = spec
        return DTensor.from_local(moved, mesh, placements, run_check=False, shape=shape, stride=stride)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _HostCopies:
    """Copies of what one forward saves: of what several operators save, and views of it, one."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Any, int, Tensor]] = {}

    def of(self, local: Tensor) -> Tensor:
        """Return the bytes of a tensor in host memory: in one dimension, as they lie; of one with gaps as it is."""
        if local.dim() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(local):
            return _copied(local)
        storage = local.untyped_storage()
        key = (storage._cdata, local.storage_offset(), local.numel(), local.dtype)  # noqa: SLF001 -- which memory it is
        owner, version, copy = self._known.get(key, (None, -1, local))
        # memory that was freed may have been given out again, and what is the same memory may have been written since
        if owner is None or owner() is not storage or version != local._version:  # noqa: SLF001 -- as autograd asks
            copy = _copied(local.as_strided((local.numel(),), (1,), local.storage_offset()))
            self._known[key] = (weakref.ref(storage), local._version, copy)  # noqa: SLF001 -- as above
        return copy


def _copied(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
    return host.copy_(tensor, non_blocking=not tensor.is_cpu)


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; a result that is still on its way is waited for."""
    detached: Any = tensor.detach()
    local: Any = detached.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
