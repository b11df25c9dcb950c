"""Linear layers of one input, computed jointly on a CPU, give the values and gradients of the single operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model import joint
from flashckpt.trainer.model.joint import Linear
from flashckpt.trainer.model.moe import FeedForward
from flashckpt.trainer.model.positions import make_positions, with_documents
from flashckpt.trainer.model.transformer import Attention
from flashckpt.trainer.parallel.apply import _build_part
from flashckpt.trainer.parallel.layout import resolve_layout

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=64)
LAYERS = (Attention, FeedForward, Linear)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.fixture(params=["onednn", "torch"], autouse=True)
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all products, of a few rows too, by one library."""
    if request.param == "onednn" and not joint.has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(joint, "onednn_is_faster", lambda: request.param == "onednn")
    monkeypatch.setattr(joint, "_LEAST_ROWS", 1)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def results(module: nn.Module, *inputs: Any) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters, all with a random gradient of the output."""
    x = inputs[0].clone().requires_grad_()
    module.zero_grad()
    out = module(x, *inputs[1:])
    out.backward(random(*out.shape))
    grads = [parameter.grad for parameter in module.parameters()]
    return [out.detach(), *(grad for grad in (x.grad, *grads) if grad is not None)]


def filled(module: nn.Module) -> Any:
    torch.manual_seed(5)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def assert_the_same(module: Any, *inputs: Any) -> None:
    found = results(module, *inputs)
    for part in module.modules():
        if isinstance(part, LAYERS):
            part.joint = False
    expected = results(module, *inputs)
    assert len(found) == len(expected) == 2 + len(list(module.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 6, 32), (5, 32)])
def test_the_feed_forward_part_is_the_same(shape: tuple[int, ...]) -> None:
    assert_the_same(filled(FeedForward(32, 48)), random(*shape))


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_attention_is_the_same(documents: Tensor | None) -> None:
    positions = make_positions(CONFIG, 8, "cpu")
    if documents is not None:
        positions = with_documents(positions, documents)
    assert_the_same(filled(Attention(CONFIG, has_window=False)), random(2, 6, 32), positions)


def test_an_input_that_is_not_contiguous_is_the_same() -> None:
    positions = make_positions(CONFIG, 8, "cpu")
    assert_the_same(filled(Attention(CONFIG, has_window=False)), random(6, 2, 32).transpose(0, 1), positions)
    assert_the_same(filled(FeedForward(32, 48)), random(6, 2, 32).transpose(0, 1))


def test_the_joint_operators_are_those_that_run() -> None:
    part = FeedForward(32, 48)
    assert "_FeedForward" in part(random(5, 32)).grad_fn.name()
    attention = Attention(CONFIG, has_window=False)
    q, _, _ = attention._projected(random(2, 6, 32), make_positions(CONFIG, 8, "cpu"))
    assert q.grad_fn is not None
    assert "_TurnedProjections" in q.grad_fn.name()


def test_a_backward_leaves_what_it_was_given() -> None:
    """Written over is only what is made in backward: the same graph can be gone through twice."""
    part = filled(FeedForward(32, 48))
    out, grad = part(random(5, 32)), random(5, 32)
    kept = grad.clone()
    first = torch.autograd.grad(out, list(part.parameters()), grad, retain_graph=True)
    second = torch.autograd.grad(out, list(part.parameters()), grad)
    assert torch.equal(grad, kept)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_other_layers_are_not_joined() -> None:
    x, plain = random(5, 32), nn.Linear(32, 8, bias=False)
    assert joint.joins(x, plain)
    assert not joint.joins(x, plain, nn.Linear(32, 8))  # a bias
    assert not joint.joins(x.bfloat16(), plain)
    assert not joint.joins(x, plain.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not joint.joins(x, nn.Linear(32, 8, bias=False))


def test_a_norm_of_queries_comes_before_they_are_turned() -> None:
    attention = Attention(replace(CONFIG, qk_norm=True), has_window=False)
    x, positions = random(2, 6, 32), make_positions(CONFIG, 8, "cpu")
    q, _, _ = attention._projected(x, positions)
    assert q.grad_fn is not None
    assert "_Turn" in q.grad_fn.name()
    assert "_TurnedProjections" not in q.grad_fn.name()


@pytest.mark.parametrize(("schedule", "joined"), [("Interleaved1F1B", True), ("ZBVZeroBubble", False)])
def test_layers_are_split_where_the_backward_is(schedule: str, joined: bool) -> None:
    """A joint operator gives both gradients at once: such a schedule would compute everything twice."""
    values = {"model": {"layers": 4}, "parallel": {"pp": 2, "schedule": schedule}, "train": {"micro_batch": 1}}
    config = from_values(values)
    layout, device = resolve_layout(config, 2), torch.device("meta")
    part = _build_part(config, layout, None, device, 0)  # type: ignore[arg-type]  # without data parallelism no mesh is used
    found = [module.joint for module in part.modules() if isinstance(module, LAYERS)]
    assert found
    assert set(found) == {joined}
