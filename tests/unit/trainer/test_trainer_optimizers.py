"""Optimizers by name, groups by pattern, schedules and averages, in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig, from_values, read_config, to_toml
from flashckpt.trainer.config.changes import compare, recorded_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.optim import EmaConfig, GroupConfig, OptimConfig
from flashckpt.trainer.config.weights import parameter_names, weights
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.optim.average import WeightAverage
from flashckpt.trainer.optim.builders import apply_settings, build_optimizers, set_rate, settings_of
from flashckpt.trainer.train.phases import check_layouts, learning_rate, phases_of

SMALL = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 16, "vocab": 256}
MODELS: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True, "qk_norm": True},
    {"experts": 4, "shared_ffn": 8, "tied_embeddings": True},
]


def small(**more: Any) -> Transformer:
    torch.manual_seed(3)
    return Transformer(ModelConfig(**{**SMALL, **more}), 8)


def with_gradients(model: nn.Module) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter).sin()
    return model


@pytest.mark.parametrize("model", MODELS)
def test_the_names_that_patterns_are_checked_against_are_those_of_the_model(model: Any) -> None:
    config = from_values({"model": {**SMALL, **model}}).model
    built = {name: tuple(one.shape) for name, one in small(**model).named_parameters()}
    assert set(parameter_names(config)) == set(built)
    for place, where in ((-1, ""), (0, "layers.1."), (1, "")):
        listed = {where + weight.name: weight.shape for weight in weights(config, place)}
        assert listed.items() <= built.items()


def torchs_own(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What a user of torch would write for the same run, without weight decay groups."""
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and n.startswith("layers.")]
    rest = [p for n, p in named.items() if not (p.dim() == 2 and n.startswith("layers."))]
    if name == "muon":
        one = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        return [one, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if name == "adafactor":
        return [torch.optim.Adafactor(named.values(), lr=0.01, weight_decay=0.0)]
    if name == "sgd":
        return [torch.optim.SGD(named.values(), lr=0.01, momentum=0.95, nesterov=True)]
    return [torch.optim.AdamW(named.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_an_optimizer_by_name_is_torchs_own_bit_for_bit(name: str) -> None:
    mine, theirs = small(), small()
    ours = build_optimizers(OptimConfig(name=name, weight_decay=0.0), [mine])
    others = torchs_own(name, theirs)
    assert [type(one).__mro__[1] for one in ours] == [type(one) for one in others]
    for _ in range(3):
        set_rate(ours, 0.01)
        for one in (*ours, *others):
            with_gradients(mine if one in ours else theirs)
            one.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_groups_set_rate_and_decay_of_what_they_match_and_the_first_match_counts() -> None:
    groups = (
        GroupConfig(match="layers.0.*", lr_mult=0.5),
        GroupConfig(match="*.attention.*", weight_decay=0.3),
        GroupConfig(match="tok_embeddings.*", lr_mult=0.0, weight_decay=0.2),
    )
    model = small()
    optimizers = build_optimizers(OptimConfig(name="muon", groups=groups), [model])
    set_rate(optimizers, 0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[p]: (group["lr"], group["weight_decay"])
        for o in optimizers
        for group in o.param_groups
        for p in group["params"]
    }
    assert len(found) == len(names)
    assert found["layers.0.attention.wq.weight"] == (0.05, 0.1)
    assert found["layers.0.attention_norm.weight"] == (0.05, 0.0)
    assert found["layers.1.attention.wq.weight"] == (0.1, 0.3)
    assert found["layers.1.feed_forward.w1.weight"] == (0.1, 0.1)
    assert found["tok_embeddings.weight"] == (0.0, 0.2)
    assert found["output.weight"] == (0.1, 0.1)
    assert found["norm.weight"] == (0.1, 0.0)


def test_settings_of_the_run_replace_those_that_a_restore_brought() -> None:
    optimizers = build_optimizers(OptimConfig(weight_decay=0.3), [small()])
    settings = settings_of(optimizers)
    optimizers[0].param_groups[0].update(weight_decay=0.1, lr=7.0)
    apply_settings(optimizers, settings)
    assert optimizers[0].param_groups[0]["weight_decay"] == 0.3
    assert optimizers[0].param_groups[0]["lr"] == 7.0, "set in every step"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"optim": {"name": "lion"}}, "optim.name has no such choice"),
        ({"optim": {"name": "sgd", "beta2": 0.9}}, "optim.beta2 would have no effect"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum would have no effect"),
        ({"optim": {"name": "sgd", "muon_rate": "original"}}, "optim.muon_rate would have no effect"),
        ({"optim": {"decay_shape": "cosine"}}, "optim.decay_shape would have no effect"),
        ({"optim": {"name": "sgd", "momentum": 0.0}}, "optim.nesterov would have no effect"),
        ({"optim": {"groups": [{"match": "*.wq.*"}]}}, "would have no effect"),
        ({"optim": {"groups": [{"lr_mult": 2.0}]}}, "matches nothing"),
        ({"optim": {"groups": [{"match": "*.wz.*", "lr_mult": 2.0}]}}, "applies to no parameter"),
        (
            {"optim": {"groups": [{"match": "*", "lr_mult": 2.0}, {"match": "norm.*", "lr_mult": 3.0}]}},
            r"optim.groups\[1\] applies to no parameter",
        ),
        ({"optim": {"groups": [{"match": "*", "lr_mult": -2.0}]}}, "below zero"),
        ({"ema": {"every": 2}}, "ema.every would have no effect"),
        ({"ema": {"evaluate": True}}, "ema.evaluate would have no effect"),
        ({"ema": {"decay": 0.9, "evaluate": True}}, "ema.evaluate would have no effect"),
        ({"ema": {"decay": 1.0}}, "ema.decay is out of range"),
    ],
)
def test_settings_without_effect_are_refused(sections: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_values(sections)


def test_groups_survive_the_way_through_a_file(tmp_path: Any) -> None:
    config = from_values({"optim": {"name": "muon", "groups": [{"match": "*.wq.*", "lr_mult": 2.0}]}})
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_config(tmp_path / "run.toml") == config


@pytest.mark.parametrize("shape", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("schedule", ["whole", "wsd"])
def test_the_rate_is_what_the_formula_of_its_shape_says(shape: str, schedule: str) -> None:
    shapes: Any = {
        "cosine": lambda x: math.cos(x * math.pi / 2) ** 2,
        "linear": lambda x: 1 - x,
        "1-sqrt": lambda x: 1 - x**0.5,
    }
    formula = shapes[shape]
    given: Any = {"schedule": shape} if schedule == "whole" else {"schedule": "wsd", "decay_shape": shape}
    config = OptimConfig(lr=2.0, min_lr=0.5, warmup_steps=10, decay_steps=40, **given)
    start = 10 if schedule == "whole" else 60
    for step in range(1, 101):
        x = min(max((step - start) / 40, 0.0), 1.0)
        wanted = 2.0 * step / 10 if step <= 10 else 0.5 + 1.5 * formula(x)
        assert learning_rate(config, step, 100) == pytest.approx(wanted, abs=1e-12)


def test_an_average_follows_its_formula_and_gives_the_weights_back_to_the_bit() -> None:
    model = small()
    average = WeightAverage(EmaConfig(decay=0.75, every=2), [model])
    assert [n for n, _ in average.modules[0].named_parameters()] == [n for n, _ in model.named_parameters()]
    average.begin()
    wanted = [parameter.detach().double().clone() for parameter in model.parameters()]
    for step in range(1, 7):
        for number, parameter in enumerate(model.parameters()):
            parameter.data.add_(0.1 * step + number)
            if step % 2 == 0:
                wanted[number] = 0.75 * wanted[number] + 0.25 * parameter.detach().double()
        if average.is_due(step):
            average.update()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with average.as_weights():
        for parameter, one in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.double(), one, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_another_optimizer_or_a_new_average_cannot_resume() -> None:
    run = RunConfig()
    old = recorded_values(run)
    del old["optim"]["name"], old["ema"]  # recorded before there was a choice
    assert compare(old, run) == []
    other = replace(run, optim=OptimConfig(name="muon"), ema=EmaConfig(decay=0.9))
    assert {(one.key, one.severity) for one in compare(old, other)} == {("optim.name", "error"), ("ema.decay", "error")}


SOURCES = {"sources": [{"kind": "tokens", "urls": ["x.bin"], "channel": "a"}]}


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        ([{"seq_len": 32}], "needs one beginning"),
        ([{"from_step": 3, "from_tokens": 3, "seq_len": 32}], "needs one beginning"),
        ([{"from_step": 3}], "changes nothing"),
        ([{"from_step": 1, "seq_len": 32}], "does not begin within the run"),
        ([{"from_step": 101, "seq_len": 32}], "does not begin within the run"),
        ([{"from_step": 9, "seq_len": 32}, {"from_step": 9, "seq_len": 64}], "does not begin within the run"),
        ([{"from_step": 9, "seq_len": 1}], "seq_len is too small"),
        ([{"from_step": 9, "weights": {"c": 1}}], "names no channel"),
        ([{"from_step": 9, "weights": {"a": 0.5}}], "is no weight"),
        ([{"from_step": 9, "schedule": "steps"}], "has no such choice"),
        ([{"from_step": 9, "dropout": 0.5}], "unknown setting"),
    ],
)
def test_phases_that_cannot_be_are_refused(phases: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_values({"phase": phases, "data": SOURCES})


@pytest.mark.parametrize(
    "phase", [{"schedule": "constant", "decay_steps": 5}, {"lr": 0.1, "decay_shape": "linear"}, {"from_step": 99}]
)
def test_a_phase_whose_settings_would_have_no_effect_is_refused(phase: Any) -> None:
    phases = [{"from_step": 9, **phase}] if "from_step" not in phase else [{"from_tokens": 1 << 40, "seq_len": 32}]
    with pytest.raises(ConfigError, match=r"would have no effect|does not begin within the run"):
        phases_of(from_values({"phase": phases}))


def test_a_phase_whose_length_does_not_divide_is_refused_before_torch_is_imported() -> None:
    config = from_values({"phase": [{"from_step": 9, "seq_len": 33}], "parallel": {"tp": 2}})
    with pytest.raises(LayoutError, match=r"train\.seq_len \(sequence parallel\) is not divisible"):
        check_layouts(config, 2)
