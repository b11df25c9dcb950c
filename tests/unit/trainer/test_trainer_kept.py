"""What forward keeps for backward: equal losses and gradients whatever is chosen, and the bytes that each choice is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.live_bytes import LiveBytes
from torch import Tensor

from flashckpt.trainer.config import from_values
from flashckpt.trainer.model.initial import fill, materialise
from flashckpt.trainer.model.operators import chunked_losses, per_token_loss
from flashckpt.trainer.model.transformer import Transformer, _HostCopies
from flashckpt.trainer.parallel.switches import recompute_of
from flashckpt.trainer.train.optim import local_square_sum

MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64}


def built(mode: str = "none", *, offload: bool = False) -> Transformer:
    run = from_values({"model": MODEL, "parallel": {"activation_checkpoint": mode, "activation_offload": offload}})
    with torch.device("meta"):
        model = Transformer(run.model, 64)
    model.set_recompute(recompute_of(run.parallel), offload=offload)
    materialise(model, torch.device("cpu"))
    fill(model, run.model, 3)
    return model


def trained(mode: str, *, offload: bool = False) -> tuple[int, float, list[Tensor]]:
    """Return the bytes alive after forward, the loss and the gradients."""
    model = built(mode, offload=offload)
    tokens = torch.arange(128).reshape(2, 64)
    model(tokens)  # tables of positions are made once
    with LiveBytes() as live:
        loss = model(tokens).float().square().mean()
        held = live.now
        loss.backward()
    return held, loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


MODES = ("none", "ffn", "every:2", "full", "groups:2", "groups:4", "groups:3", "selective")


def test_recomputing_changes_no_loss_and_no_gradient_and_holds_less() -> None:
    results = {mode: trained(mode) for mode in MODES}
    _, loss, gradients = results["none"]
    for mode, (_, other, others) in results.items():
        # selective leaves layers apart that are one operator elsewhere: the same but for rounding
        assert other == (pytest.approx(loss, rel=1e-6) if mode == "selective" else loss), mode
        assert len(others) == len(gradients)
        for mine, theirs in zip(gradients, others, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    held = {mode: result[0] for mode, result in results.items()}
    stream = 2 * 64 * MODEL["dim"] * 4  # what enters a layer
    assert held["none"] > held["every:2"] > held["full"] > held["groups:2"] > held["groups:4"]
    assert all(held["none"] > held[mode] > held["full"] for mode in ("ffn", "selective"))
    # of a group only what enters its first layer is kept: of 4 layers in groups of 2 and 4, two and three inputs less
    assert held["full"] - held["groups:2"] == pytest.approx(2 * stream, rel=0.1)
    assert held["full"] - held["groups:4"] == pytest.approx(3 * stream, rel=0.1)


def test_what_is_moved_to_host_memory_is_all_that_blocks_save_but_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loss, gradients = trained("none")
    moved: list[int] = []
    stayed: list[tuple[int, ...]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def noting(pack: Any, unpack: Any) -> Any:
        def packed(tensor: Tensor) -> Any:
            result = pack(tensor)
            if isinstance(result, Tensor):
                stayed.append(tuple(tensor.shape))
            else:
                moved.append(tensor.nbytes)
            return result

        return hooks(packed, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", noting)
    _, other, others = trained("none", offload=True)
    assert other == loss
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, others, strict=True))
    weights = {shape for p in built().layers.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
    assert stayed
    turns = (64, 1, MODEL["dim"] // MODEL["heads"] // 2)  # the table of positions, one for all layers
    assert set(stayed) <= {*weights, turns}
    assert sum(moved) > 4 * 2 * 64 * 4 * (
        2 * MODEL["dim"] + 2 * MODEL["ffn"]
    )  # per layer: both inputs, gate and its partner


def test_memory_is_copied_once_until_it_is_written_or_given_out_again() -> None:
    copies = _HostCopies()
    one = torch.arange(24.0).view(2, 3, 4)
    first = copies.of(one)
    assert copies.of(one.transpose(0, 1)) is first
    assert copies.of(one.view(6, 4)) is first
    assert torch.equal(first, one.flatten())
    assert copies.of(one[:1]) is not first
    gaps = copies.of(one[:, :1])
    assert torch.equal(gaps, one[:, :1])
    one.add_(1)
    assert torch.equal(copies.of(one), one.flatten())
    assert not torch.equal(first, one.flatten())
    for value in range(8):  # the allocator gives the same memory again
        again = torch.full((64,), float(value))
        assert torch.equal(copies.of(again), again)
        del again


@pytest.mark.parametrize("chunk", [1000, 32, 7])
def test_losses_by_pieces_are_those_of_whole_logits_with_their_gradients(chunk: int) -> None:
    torch.manual_seed(1)
    head, hidden = torch.nn.Linear(16, 96, bias=False), torch.randn(2, 50, 16, requires_grad=True)
    targets = torch.randint(0, 96, (2, 50))
    targets[0, :5] = -100
    found = []
    for whole_logits in (True, False):
        hidden.grad = head.weight.grad = None
        value = per_token_loss(head(hidden), targets).view(2, 50) if whole_logits else None
        value = chunked_losses(head, hidden, targets, chunk) if value is None else value
        torch.autograd.backward(value.mean())
        found.append((value.detach(), hidden.grad, head.weight.grad))
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-7)
    assert found[0][0][0, :5].tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_by_pieces_the_logits_of_all_tokens_never_exist(kind: torch.dtype) -> None:
    head = torch.nn.Linear(16, 4096, bias=False, dtype=kind)
    hidden = torch.randn(4, 64, 16, dtype=kind, requires_grad=True)
    targets = torch.randint(0, 4096, (4, 64))
    whole = 4 * 64 * 4096 * 4
    with LiveBytes() as with_all:
        torch.autograd.backward(per_token_loss(head(hidden), targets).mean())
    head.weight.grad = None
    with LiveBytes() as by_pieces:
        torch.autograd.backward(chunked_losses(head, hidden, targets, 16).mean())
    assert with_all.peak >= whole
    assert by_pieces.largest <= max(whole // 16, 2 * head.weight.nbytes)
    assert by_pieces.peak < whole // 2


def test_the_gradient_norm_makes_no_float64_copy_of_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    weight.grad = torch.ones(512, 512)
    parallel: Any = SimpleNamespace(
        device=torch.device("cpu"), layout=SimpleNamespace(groups=1), replica=0, counted_parameters=lambda: [weight]
    )
    with LiveBytes() as live:
        assert local_square_sum(parallel).item() == pytest.approx(512 * 512)
    assert live.peak < weight.grad.nbytes // 16
