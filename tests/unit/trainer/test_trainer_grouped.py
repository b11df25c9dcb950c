"""Experts as one grouped product: the numbers of one product after another, and where it is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model import moe
from flashckpt.trainer.model.moe import Experts, MixtureOfExperts, choose_products, described_products, obstacle

CPU = torch.device("cpu")


def experts_of(dtype: torch.dtype, *, ffn: int = 24) -> Experts:
    torch.manual_seed(0)
    experts = Experts(ModelConfig(dim=16, ffn=ffn, experts=4))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return experts.to(dtype)


def results(experts: Experts, x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    out = experts(x, torch.tensor(counts))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *experts.parameters()], grad)]


@pytest.mark.parametrize("counts", [[3, 2, 4, 1], [0, 10, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_grouped_experts_give_what_a_loop_gives(dtype: torch.dtype, near: float, counts: list[int]) -> None:
    experts = experts_of(dtype)
    x = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    looped = results(experts, x, counts)
    experts.choose_product(CPU, dtype)
    assert experts.obstacle == ""
    for mine, theirs in zip(results(experts, x, counts), looped, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


def test_a_grouped_product_is_one_operator_for_all_experts(monkeypatch: Any) -> None:
    calls: list[int] = []
    product = torch.nn.functional.grouped_mm

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return product(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    experts = experts_of(torch.float32)
    x = torch.randn(10, 16)
    experts(x, torch.tensor([3, 2, 4, 1]))
    assert not calls
    experts.choose_product(CPU, torch.float32)
    experts(x, torch.tensor([3, 2, 4, 1]))
    assert len(calls) == 3


def test_sizes_that_are_not_aligned_are_computed_one_after_another() -> None:
    assert obstacle(CPU, torch.float32, (16, 24)) == ""
    assert "rows of 10 elements of 4 bytes" in obstacle(CPU, torch.float32, (16, 10))
    assert "rows of 12 elements of 2 bytes" in obstacle(CPU, torch.bfloat16, (12, 16))
    assert obstacle(torch.device("meta"), torch.float32, (16, 16))
    layer = MixtureOfExperts(ModelConfig(dim=16, ffn=10, experts=4))
    choose_products(layer, CPU, torch.float32)
    assert described_products(layer).startswith("experts are computed one after another: rows of 10")
    layer(torch.randn(1, 5, 16)).sum().backward()


@pytest.mark.parametrize("failure", ["none", "wrong"])
def test_a_torch_without_the_product_or_with_a_wrong_one_is_not_used(failure: str, monkeypatch: Any) -> None:
    def product(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        if failure == "none":
            raise NotImplementedError("no such kernel")
        return x @ weights[0]

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", product)
    moe._tried.cache_clear()
    try:
        found = obstacle(CPU, torch.float32, (16, 24))
        assert ("no such kernel" if failure == "none" else "other results") in found
    finally:
        moe._tried.cache_clear()


def test_the_run_says_how_experts_are_computed() -> None:
    layer = MixtureOfExperts(ModelConfig(dim=16, ffn=16, experts=4))
    state = torch.get_rng_state()
    choose_products(layer, CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert described_products(layer) == "experts are computed as grouped products"
    assert described_products(torch.nn.Linear(2, 2)) == ""
