"""The losses of a router: their values where these are known, and gradients as if they were added to the loss of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.start import refuse_other_model
from flashckpt.trainer.model.moe import MixtureOfExperts
from flashckpt.trainer.model.router_loss import balance_loss, set_router_scale
from flashckpt.trainer.parallel.layout import resolve_layout

AUX, Z = 0.3, 0.2


def layer_of(**losses: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(ModelConfig(dim=8, ffn=16, experts=4, experts_per_token=2, **losses))
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return layer


def gradients(layer: MixtureOfExperts, loss: Tensor, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *layer.parameters()]))


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_router_trains_as_if_its_losses_were_added(recomputed: bool) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer, plain, scale = layer_of(router_aux_loss=AUX, router_z_loss=Z), layer_of(), 4.0
    set_router_scale([layer], scale)
    out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    logits = plain.router(x.reshape(-1, 8))
    chosen = torch.softmax(logits, -1).topk(2).indices
    share = torch.stack([(chosen == expert).sum() for expert in range(4)]) / 20
    added = AUX * 4 * (share * torch.softmax(logits, -1).mean(0)).sum() + Z * logits.logsumexp(-1).pow(2).mean()
    assert torch.equal(out, plain(x))
    for mine, theirs in zip(
        gradients(layer, scale * out.square().sum(), x),
        gradients(plain, scale * (plain(x).square().sum() + added), x),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_equal_loads_cost_one_and_a_single_expert_the_number_of_them() -> None:
    even, one = torch.zeros(6, 4), torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(6, 1)
    assert balance_loss(even, torch.full((4,), 0.25)).item() == pytest.approx(1.0)
    assert balance_loss(one, torch.tensor([1.0, 0.0, 0.0, 0.0])).item() == pytest.approx(4.0)


def test_evaluation_has_no_router_losses() -> None:
    layer = layer_of(router_aux_loss=AUX, router_z_loss=Z).eval()
    x = torch.randn(2, 5, 8, requires_grad=True)
    mine, theirs = (gradients(each, each(x).square().sum(), x) for each in (layer, layer_of().eval()))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("key", ["router_aux_loss", "router_z_loss"])
def test_router_losses_need_experts_and_full_batches(key: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{key} would have no effect"):
        from_values({"model": {key: 0.1}})
    with pytest.raises(ConfigError, match=f"model.{key} is too small"):
        from_values({"model": {key: -0.1, "experts": 4}})
    sections: dict[str, Any] = {"model": {key: 0.1, "experts": 4}, "train": {"global_batch": 6, "micro_batch": 4}}
    with pytest.raises(LayoutError, match="incompatible with a padded batch"):
        resolve_layout(from_values(sections), 4)


def test_weights_train_on_with_other_router_losses() -> None:
    refuse_other_model(ModelConfig(experts=4, router_aux_loss=AUX, router_z_loss=Z), ModelConfig(experts=4), "here")
    with pytest.raises(ConfigError):
        refuse_other_model(ModelConfig(experts=8), ModelConfig(experts=4), "here")
