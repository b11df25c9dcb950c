"""Tokens per expert and the bias that evens them out: what is counted, what is chosen, and how the bias moves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.changes import compare, recorded_values, refuse_changes
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.hub.start import refuse_other_model
from flashckpt.trainer.model.moe import MixtureOfExperts
from flashckpt.trainer.model.router_loss import choose, move_bias
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.watch.figures import Figures, curves, progress_text


def layer_of(**settings: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(ModelConfig(dim=8, ffn=16, experts=4, experts_per_token=2, **settings))
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return layer


def tokens(**options: Any) -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), **options)


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_choice_of_a_step_is_counted_once(recomputed: bool) -> None:
    layer, x = layer_of(), tokens(requires_grad=True)
    chosen = torch.softmax(layer.router(x.reshape(-1, 8)), -1).topk(2).indices.flatten()
    for _ in range(2):  # two micro-batches
        out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        out.square().sum().backward()
    with torch.no_grad():  # the trial of a pipeline
        layer(x)
    layer.eval()(x)
    counts = layer.router_load.take()
    assert counts is not None
    assert counts.tolist() == (2 * torch.bincount(chosen, minlength=4)).tolist()
    assert layer.router_load.take() is None


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]], requires_grad=True)
    weight, chosen = choose(scores, 2, torch.tensor([0.0, 0.0, 0.0, 0.5]))
    assert chosen.tolist() == [[3, 0]]
    assert torch.equal(weight, scores[:, [3, 0]])
    (grad,) = torch.autograd.grad(weight.sum(), scores)
    assert grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    plain, with_zero = choose(scores, 2, None), choose(scores, 2, torch.zeros(4))
    assert all(torch.equal(one, other) for one, other in zip(plain, with_zero, strict=True))


def test_a_bias_goes_up_below_the_share_and_down_above() -> None:
    bias = torch.tensor([0.25, 0.25, 0.25, 0.25])
    move_bias(bias, [5, 2, 1, 0], 0.125)  # the share is 2
    assert bias.tolist() == [0.125, 0.25, 0.375, 0.375]
    move_bias(bias, [1, 1, 1, 1], 0.125)
    move_bias(bias, [0, 0, 0, 0], 0.125)
    assert bias.tolist() == [0.125, 0.25, 0.375, 0.375]


def test_a_bias_evens_out_the_load_of_a_router() -> None:
    layer = layer_of(router_bias_rate=0.002)
    assert layer.router_bias is not None
    with torch.no_grad():
        layer.router.weight[0] += 1.0  # one expert is preferred
    x, loads = torch.rand(16, 16, 8, generator=torch.Generator().manual_seed(1)), []
    for _ in range(300):
        layer(x)
        counts = layer.router_load.take()
        assert counts is not None
        loads.append(max(counts.tolist()) * 4 / sum(counts.tolist()))
        move_bias(layer.router_bias, counts.tolist(), 0.002)
    assert loads[0] > 1.8
    assert sum(loads[-10:]) / 10 < 1.2


def test_without_a_rate_there_is_no_bias_in_the_state() -> None:
    assert not [name for name in layer_of().state_dict() if "bias" in name]
    assert "router_bias" in layer_of(router_bias_rate=0.1).state_dict()


def test_a_bias_needs_experts_and_full_batches() -> None:
    key = "router_bias_rate"
    with pytest.raises(ConfigError, match=f"model.{key} would have no effect"):
        from_values({"model": {key: 0.1}})
    with pytest.raises(ConfigError, match=f"model.{key} is too small"):
        from_values({"model": {key: -0.1, "experts": 4}})
    sections: dict[str, Any] = {"model": {key: 0.1, "experts": 4}, "train": {"global_batch": 6, "micro_batch": 4}}
    with pytest.raises(LayoutError, match="incompatible with a padded batch"):
        resolve_layout(from_values(sections), 4)


def test_a_run_resumes_with_another_rate_but_not_without_its_bias() -> None:
    def run(rate: float) -> RunConfig:
        return from_values({"model": {"experts": 4, "router_bias_rate": rate}})

    refuse_changes(compare(recorded_values(run(0.1)), run(0.2)))
    older = recorded_values(run(0.0))
    del older["model"]["router_bias_rate"]
    refuse_changes(compare(older, run(0.0)))
    for before, now in ((recorded_values(run(0.1)), run(0.0)), (older, run(0.1))):
        with pytest.raises(ConfigError, match="router_bias_rate changed since the checkpoint"):
            refuse_changes(compare(before, now))


def test_weights_with_a_bias_are_neither_exported_nor_trained_without_it() -> None:
    plain, biased = ModelConfig(experts=4), ModelConfig(experts=4, router_bias_rate=0.1)
    refuse_other_model(biased, plain, "here")
    with pytest.raises(ConfigError, match="router_bias_rate"):
        refuse_other_model(plain, biased, "here")
    with pytest.raises(ConfigError, match="has a bias in its routers"):
        to_hub(biased, 16, "float32")


def test_a_record_has_the_load_of_each_layer_and_every_expert_when_asked() -> None:
    record = StepRecord(
        step=1, loss=1.0, norm=1.0, rate=0.1, tokens=8, samples="", seconds=1.0, experts=[[2, 2, 2, 2], [5, 1, 2, 0]]
    )
    line = json.loads(record.to_line())
    assert line["expert_load"] == [1.0, 2.5]
    assert "expert_tokens" not in line
    assert json.loads(record.to_line(each_expert=True))["expert_tokens"] == record.experts
    points = curves(record, Figures(tokens_per_s=1.0), 1)
    assert points["experts/layer 0 load, max over mean"] == 1.0
    assert points["experts/load, max over mean"] == points["experts/layer 1 load, max over mean"] == 2.5
    assert "load 2.50" in progress_text(record, Figures(tokens_per_s=1.0), steps=2, left_s=1.0)
    dense = StepRecord(step=1, loss=1.0, norm=1.0, rate=0.1, tokens=8, samples="", seconds=1.0)
    assert "expert_load" not in json.loads(dense.to_line(each_expert=True))
    assert "load" not in progress_text(dense, Figures(tokens_per_s=1.0), steps=2, left_s=1.0)
