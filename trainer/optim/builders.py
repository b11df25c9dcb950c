"""The optimizers of a run: which parameter is updated by which, in which group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from flashckpt.trainer.config.optim import UNSET, OptimConfig, rule_of
from flashckpt.trainer.model.moe import EXPERT_WEIGHTS
from flashckpt.trainer.optim.matrices import WholeAdafactor, WholeMuon
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
