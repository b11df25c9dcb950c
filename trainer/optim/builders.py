"""The optimizers of a run: which parameter is updated by which, in which group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flashckpt.trainer.config.optim import UNSET, OptimConfig, rule_of
from flashckpt.trainer.model.moe import EXPERT_WEIGHTS
from flashckpt.trainer.optim.local import LocalAdamW, LocalSGD
from flashckpt.trainer.optim.matrices import WholeAdafactor, WholeMuon
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
