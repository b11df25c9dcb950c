"""The operators that are written out for CPUs give torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor

from flashckpt.trainer.model import operators
from flashckpt.trainer.train.optim import _square_sum

TARGETS = torch.tensor([3, -100, 0, 6, 6])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def torchs_turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


ANGLES = random(6, 1, 4)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "norm": (
        lambda x, w: operators.rms_norm(x, w, 1e-5),
        lambda x, w: torch.rms_norm(x, w.shape, w, 1e-5),
        [random(2, 3, 8), random(8)],
    ),
    "norm of a view": (
        lambda x, w: operators.rms_norm(x.transpose(0, 1), w, 1e-5),
        lambda x, w: torch.rms_norm(x.transpose(0, 1), w.shape, w, 1e-5),
        [random(2, 3, 4, 8), random(8)],
    ),
    "swiglu": (operators.swiglu, lambda a, b: F.silu(a) * b, [random(5, 7), random(5, 7)]),
    "turn": (
        lambda x: operators.turn(x, ANGLES.cos(), ANGLES.sin()),
        lambda x: torchs_turn(x, ANGLES.cos(), ANGLES.sin()),
        [random(2, 6, 3, 8)],
    ),
    "loss": (
        lambda x: operators.token_losses(x, TARGETS),
        lambda x: F.cross_entropy(x, TARGETS, reduction="none"),
        [random(5, 7)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_those_of_torch(case: str) -> None:
    ours, torchs, inputs = CASES[case]
    found: list[Any] = []
    for function in (ours, torchs):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = function(*leaves)
        found.append([out, *torch.autograd.grad((out * random(*out.shape)).sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_written_out_operator_is_what_runs_on_a_cpu(case: str) -> None:
    ours, _, inputs = CASES[case]
    node = ours(*(value.clone().requires_grad_() for value in inputs)).grad_fn
    assert node is not None
    assert node.name().startswith("_"), "an autograd.Function of this module"


def test_a_loss_without_target_has_no_gradient() -> None:
    logits = random(5, 7).requires_grad_()
    losses = operators.token_losses(logits, TARGETS)
    losses.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert losses[1] == 0
    assert logits.grad is not None
    assert logits.grad[1].abs().max() == 0
    assert logits.grad[0].abs().max() > 0


def test_a_second_backward_through_the_loss_is_an_error_and_no_wrong_gradient() -> None:
    loss = operators.token_losses(random(5, 7).requires_grad_(), TARGETS).sum()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # untyped in torch
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_a_square_sum_that_is_not(value: float) -> None:
    grad = random(3, 300)
    assert abs(_square_sum(grad).item() - grad.double().square().sum().item()) < 1e-4
    grad[1, 7] = value
    assert not _square_sum(grad).isfinite()
