"""The optimizers of a run: which parameter is updated by which, in which group.

Muon and Adafactor look at a matrix as a whole: each one is gathered for its own update, one after the other. Every rank that
holds a part of it computes the same whole update and applies its part. So a layout gives what one process does, and a rank
needs memory for one whole matrix (a few times) beyond its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.sgd import sgd

from flashckpt.trainer.config.optim import UNSET, OptimConfig, rule_of
from flashckpt.trainer.model.moe import EXPERT_WEIGHTS
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.tied import is_tied_head

_MATRICES, _DECAYED, _PLAIN, _EXPERTS = range(4)
"""Kinds of parameters. Experts are on another mesh, and a group is one operator."""


def build_optimizers(
    config: OptimConfig, parts: Iterable[nn.Module], *, tied: bool = False
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the local model parts: one of each part, two under Muon.

    Norms, biases and embeddings (and a head tied to them) are not decayed, where `optim.groups` do not say otherwise.
    """
    return [optimizer for part in parts for optimizer in _build(config, part, tied=tied)]


def _build(config: OptimConfig, part: nn.Module, *, tied: bool) -> list[torch.optim.Optimizer]:
    buckets: dict[tuple[int, int], list[nn.Parameter]] = {}
    for name, parameter in part.named_parameters():
        plain = name.removeprefix("module.")
        kind = _kind(config, plain, parameter, tied=tied)
        buckets.setdefault((kind, rule_of(config.groups, plain)), []).append(parameter)
    groups = [
        (kind, _group(config, kind, rule, params)) for (kind, rule), params in sorted(buckets.items(), key=_first)
    ]
    matrices = [group for kind, group in groups if kind == _MATRICES]
    rest = [group for kind, group in groups if kind != _MATRICES]
    built: list[torch.optim.Optimizer] = [_muon(config, matrices)] if matrices else []
    return [*built, _of_name(config, rest)] if rest else built


def _first(bucket: tuple[tuple[int, int], Any]) -> tuple[int, int]:
    return bucket[0]


def _kind(config: OptimConfig, name: str, parameter: nn.Parameter, *, tied: bool) -> int:
    if name.endswith(EXPERT_WEIGHTS):
        return _EXPERTS
    if parameter.dim() < 2 or "tok_embeddings" in name or (tied and is_tied_head(name)):
        return _PLAIN
    return _MATRICES if config.name == "muon" and name.startswith("layers.") else _DECAYED


def _group(config: OptimConfig, kind: int, rule: int, params: list[nn.Parameter]) -> dict[str, Any]:
    decay, factor = 0.0 if kind == _PLAIN else config.weight_decay, 1.0
    if rule >= 0:
        given = config.groups[rule]
        factor = given.lr_mult
        decay = decay if given.weight_decay == UNSET else given.weight_decay
    return {"params": params, "weight_decay": decay, "lr_mult": factor}


def _muon(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return WholeMuon(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, adjust_lr_fn=config.muon_rate
    )


def _of_name(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.name == "adafactor":
        return WholeAdafactor(groups, lr=config.lr)
    if config.name == "sgd":
        return LocalSGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    return LocalAdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one operator per group
    )


def set_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group: `rate`, times the factor of the group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]


Settings = list[list[dict[str, Any]]]
"""Per optimizer and group what a run sets, without parameters and rate."""


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    """Return the settings of every group, to be set again after a restore: that brings those of the recorded run."""
    return [
        [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def apply_settings(optimizers: Iterable[torch.optim.Optimizer], settings: Settings) -> None:
    """Set the settings of every group."""
    for optimizer, groups in zip(optimizers, settings, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates local shards; its state stays DTensors, which know their global offsets.

    `settle_gradients` has placed every gradient like its parameter, so DTensor has nothing to decide. Its dispatch would
    still plan each list of tensors: a quarter of the first step after a restart.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]  # untyped in torch
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


class LocalSGD(torch.optim.SGD):
    """SGD that updates local shards, as `LocalAdamW`. The momentum begins at zero, which is what torch's first step makes of it."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in moving]
            sgd(
                [local_tensor(parameter) for parameter in moving],
                [local_tensor(parameter.grad) for parameter in moving],
                [None if buffer is None else local_tensor(buffer) for buffer in buffers],
                has_sparse_grad=False,
                foreach=True,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )


class WholeMuon(torch.optim.Muon):
    """torch's Muon for matrices that may be sharded: the momentum is, the orthogonalised update is of the whole matrix."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called. Collective."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the caller has looked"
        local, grad = local_tensor(parameter), local_tensor(parameter.grad)
        momentum, buffer = group["momentum"], local_tensor(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(grad, 1 - momentum)
        update = whole_of(grad.lerp(buffer, momentum) if group["nesterov"] else buffer, parameter)
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(part_of(update, parameter), alpha=-rate)


class WholeAdafactor(torch.optim.Adafactor):
    """torch's Adafactor for tensors that may be sharded: it scales by means over rows, columns and the whole tensor.

    Its state is a row and a column per matrix, small enough to be whole on every rank.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(_factors(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called. Collective."""
        for group in self.param_groups:
            settings = {key: group[key] for key in ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach")}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, settings)

    def _update(self, parameter: Tensor, settings: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the caller has looked"
        whole = whole_of(local_tensor(parameter).detach(), parameter)
        whole.grad = whole_of(local_tensor(parameter.grad), parameter)
        one = torch.optim.Adafactor([whole], **settings)  # torch's own arithmetic, on our state
        one.state[whole] = {key: local_tensor(value) for key, value in self.state[parameter].items()}
        one.step()  # type: ignore[no-untyped-call]  # untyped in torch
        if isinstance(parameter, DTensor):
            local_tensor(parameter).copy_(part_of(whole, parameter))


def _factors(parameter: Tensor) -> dict[str, Tensor]:
    """Return the first state of a parameter, whole also where that is sharded."""
    shape = tuple(parameter.shape)
    shapes = {"variance": shape}
    if len(shape) > 1:
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    made = {key: torch.zeros(size, dtype=parameter.dtype, device=parameter.device) for key, size in shapes.items()}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        made = {
            key: DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            for key, value in made.items()
        }
    return {"step": torch.tensor(0.0), **made}


def whole_of(local: Tensor, like: Tensor) -> Tensor:
    """Return the whole tensor of which each rank has a part, placed as `like` is; itself where nothing is sharded.

    Collective over the ranks that hold parts: a sum in which each element is added to zeros, so nothing is rounded.
    """
    if not isinstance(like, DTensor):
        return local
    whole = torch.zeros(like.shape, dtype=local.dtype, device=local.device)
    whole[_box(like)] = local
    for dimension, placement in enumerate(like.placements):
        if not placement.is_replicate() and like.device_mesh.size(dimension) > 1:
            dist.all_reduce(whole, group=like.device_mesh.get_group(dimension))
    return whole


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of `like`; no communication."""
    return whole[_box(like)] if isinstance(like, DTensor) else whole


def _box(like: DTensor) -> tuple[slice, ...]:
    lengths, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
