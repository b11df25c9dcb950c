"""Blocks by torch.compile: the same names, losses and gradients as without, recomputed blocks too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.parallel import Recompute
from flashckpt.trainer.model.context import ContextSlice
from flashckpt.trainer.model.initial import fill, materialise
from flashckpt.trainer.model.moe import choose_products, described_products
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.apply import build_stage

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own look at a tensor's .grad


def built(mode: str, *, compiled: bool, **sizes: int) -> Transformer:
    run = from_values({"model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64, **sizes}})
    layout: Any = type("Layout", (), {"stage_layers": ((0, 1),), "stages": 1})
    model = build_stage(run, layout, 0)
    model.set_recompute(Recompute.parse(mode) or Recompute(mode="none"))
    if compiled:
        model.compile_blocks()
    materialise(model, torch.device("cpu"))
    fill(model, run.model, 3)
    return model


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_have_the_names_the_loss_and_the_gradients_of_plain_ones(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Any = []

    def backend(
        graph: Any, _inputs: Any
    ) -> Callable[..., Any]:  # what is compiled is run as it stands: equal but for how products are joined
        return lambda *words: (ran.append(1), graph(*words))[1]

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    tokens = torch.arange(24).reshape(2, 12)
    plain, compiled = built(mode, compiled=False), built(mode, compiled=True)
    losses = [model(tokens).float().square().mean() for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert len(ran) == 2, "each of two blocks ran what was compiled"
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    own, others = dict(plain.named_parameters()), dict(compiled.named_parameters())
    assert list(own) == list(others)
    for name, value in own.items():  # not to the bit: of a value used twice, gradients are added in another order
        torch.testing.assert_close(value.grad, others[name].grad, rtol=1e-5, atol=1e-8)


def test_blocks_are_compiled_under_ddp_with_buckets_smaller_than_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Any = []
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend=lambda graph, _: lambda *w: (ran.append(1), graph(*w))[1])
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(built("none", compiled=True), bucket_cap_mb=0.5)
        model(torch.arange(24).reshape(2, 12)).float().square().mean().backward()
        # torch's threads need the GIL to let go of the last all-reduce: a group that ends meanwhile waits for them with it
        dist.barrier()
        del model
    finally:
        dist.destroy_process_group()
    assert len(ran) == 2


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("uses_ring", [False, True], ids=["gather", "ring"])
def test_attention_over_parts_of_rows_stays_outside_of_what_is_compiled(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, uses_ring: bool
) -> None:
    graphs: Any = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    tokens = torch.arange(24).reshape(2, 12)
    documents = (torch.arange(12) // 5).expand(2, 12)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        models = [built(mode, compiled=False) for _ in range(2)]
        for model in models:
            model.context, model.uses_ring = ContextSlice(0, 1, dist.group.WORLD), uses_ring
        models[1].compile_blocks()
        for model in models:
            model(tokens, documents).float().square().mean().backward()
        dist.barrier()
        own, others = (dict(model.named_parameters()) for model in models)
    finally:
        dist.destroy_process_group()
    assert len(graphs) >= 2, "what is before and what is behind it"
    assert not any("all_gather" in code or "masked_fill" in code for code in graphs)
    for name, value in own.items():
        torch.testing.assert_close(value.grad, others[name].grad, rtol=1e-5, atol=1e-8)


def test_experts_are_compiled_although_the_compiler_does_not_know_their_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.13 computes the grouped product in float32, and refuses to compile it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tokens = torch.arange(24).reshape(2, 12)
    models = [built("none", compiled=compiled, experts=4) for compiled in (False, True)]
    for model in models:
        choose_products(model, torch.device("cpu"), torch.float32)
    if "grouped" not in described_products(models[0]):
        pytest.skip(described_products(models[0]))
    losses = [model(tokens).float().square().mean() for model in models]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    losses[1].backward()


def test_nothing_is_compiled_unless_asked_for() -> None:
    assert from_values({}).train.compile is False
