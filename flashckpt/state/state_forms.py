"""How a tensor of optimizer state lies beside its parameter: what a fresh optimizer needs to have it exactly as it was.

Most state has the shape, placement and device of its parameter, and is made by `allocate` without a word about it.
What is otherwise is recorded in the snapshot, by name: a form of two words, (kind, device).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from flashckpt.errors import UnsupportedStateError
from flashckpt.state.placement import local_of

REPLICATED = "replicated"
"""A DTensor on the parameter's mesh, equal on all of its ranks."""
LOCAL = "local"
"""A plain tensor beside a sharded parameter, of the shape of this rank's shard."""
PLAIN = "plain"
"""A plain tensor beside a sharded parameter, of another shape: it belongs to this rank alone, unless it is a scalar."""

Form = tuple[str, str]
USUAL: Form = ("", "")


def form_of(fqn: str, param: torch.Tensor, key: str, tensor: torch.Tensor, group: Mapping[str, Any]) -> Form:
    """Return the form of one state tensor; USUAL where `allocate` needs none.

    Raises:
        UnsupportedStateError: A DTensor that could not be recreated: on another mesh, or with another placement.
    """
    device = tensor.device.type
    usual_device = _device(param, key, tuple(tensor.shape), group).type
    return _kind(fqn, param, tensor), "" if device == usual_device else device


def _kind(fqn: str, param: torch.Tensor, tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        same_mesh = isinstance(param, DTensor) and tensor.device_mesh == param.device_mesh
        if same_mesh and tensor.shape == param.shape and tensor.placements == param.placements:  # type: ignore[attr-defined]  # same_mesh says so
            return ""
        if same_mesh and all(p.is_replicate() for p in tensor.placements):
            return REPLICATED
        raise UnsupportedStateError(
            f"{fqn!r} has a placement that cannot be recreated in a new optimizer",
            found=f"a DTensor of shape {tuple(tensor.shape)} and {tensor.placements} on {tensor.device_mesh}",
            expected="the shape and placements of its parameter, or Replicate on its mesh",
            remedy="redistribute it to Replicate inside the optimizer",
        )
    if not isinstance(param, DTensor) or not tensor.dim():
        return ""
    return LOCAL if tensor.shape == local_of(param).shape else PLAIN


def is_of_one_rank(param: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether state of a sharded parameter is this rank's alone: nothing says that it is equal anywhere else."""
    return not isinstance(tensor, DTensor) and isinstance(param, DTensor) and _kind("", param, tensor) == PLAIN


def allocate(
    param: torch.Tensor,
    key: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any],
    fqn: str,
    form: Form = USUAL,
) -> torch.Tensor:
    """Return an unfilled state tensor as the optimizer itself would make it; the restore overwrites it whole.

    Args:
        param: The parameter it belongs to.
        key: Its key in the parameter's state, e.g. "exp_avg".
        shape: Global shape recorded in the snapshot.
        dtype: Dtype recorded in the snapshot.
        group: The parameter's group: capturable and fused optimizers keep `step` on the device.
        fqn: Its name, for the error.
        form: Its form recorded in the snapshot.

    Raises:
        UnsupportedStateError: Sharded state that has not the parameter's shape and no form: where it lies is not known.
    """
    kind, device = form
    if kind == REPLICATED and isinstance(param, DTensor):
        local = torch.empty(shape, dtype=dtype, device=param.device)
        mesh = param.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if shape == tuple(param.shape) and shape and kind != PLAIN:
        like = local_of(param).detach() if kind == LOCAL else param
        made = _beside(like, dtype)
        return made.to(device) if device and not isinstance(made, DTensor) else made
    if isinstance(param, DTensor) and shape and kind != PLAIN:
        raise UnsupportedStateError(
            f"{fqn!r} has not the shape of its parameter, so its sharding is not known before the first step",
            found=str(shape),
            expected=str(tuple(param.shape)),
            remedy="take one optimizer step before restore(), so that the optimizer makes its state itself",
        )
    return torch.empty(shape, dtype=dtype, device=device or _device(param, key, shape, group))


def _beside(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an unfilled tensor of the shape, placement and device of another."""
    if type(like) is DTensor and local_of(like).device.type == like.device_mesh.device_type:
        # Of the local part: as an operation on a DTensor it would first have to be planned, per shape and placement.
        local = _beside(local_of(like).detach(), dtype)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return torch.empty_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def _device(param: torch.Tensor, key: str, shape: tuple[int, ...], group: Mapping[str, Any]) -> torch.device:
    """Return where torch's optimizers keep state of this key."""
    on_device = shape or key != "step" or group.get("capturable") or group.get("fused")
    return param.device if on_device else torch.device("cpu")
