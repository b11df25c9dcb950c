"""Blocks by torch.compile: the same names, losses and gradients as without, recomputed blocks too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging  # before ranks are forked
import torch.distributed as dist
from support.ranks import run_ranks, values
from support.training import run_config
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.config.parallel import Recompute
from flashckpt.trainer.model.initial import fill, materialise
from flashckpt.trainer.model.moe import choose_products, described_products
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.apply import build_parallel, build_stage
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.optim import settle_gradients

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
    assert len(ran) == (4 if mode == "full" else 2), (
        "each of two blocks ran what was compiled, again where it is computed again"
    )
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


def loss_and_gradients(rank: int, values: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return loss, gradients and how many graphs there were, of plain and of compiled blocks, on all ranks."""
    graphs: list[str] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch.compile = partial(torch.compile, backend=compiler)  # this process ends with the test
    plain = from_values(values)
    layout, found = resolve_layout(plain, 2), []
    tokens = torch.arange(48).reshape(4, 12)
    documents = (torch.arange(12) // 5).expand(4, 12) if layout.cp > 1 else None
    with process_group(plain) as device:
        for config in (plain, replace(plain, train=replace(plain.train, compile=True))):
            parallel = build_parallel(config, layout, device)
            parallel.fill(config)
            mine = tokens if parallel.context is None else parallel.context.cut(tokens)
            out = parallel.parts[0](mine, documents)
            loss = out.float().square().mean()
            loss.backward()
            settle_gradients(parallel)
            gradients = {
                name: (grad.full_tensor() if isinstance(grad := value.grad, DTensor) else grad).tolist()  # type: ignore[union-attr]
                for name, value in parallel.parts[0].named_parameters()
            }
            found.append((loss.item(), gradients))
    return {"plain": found[0], "compiled": found[1], "graphs": graphs}


@pytest.mark.parametrize(
    ("degrees", "recompute"),
    [
        ({"tp": 2}, "ffn"),
        ({"tp": 2, "sequence_parallel": False}, "full"),
        ({"cp": 2}, "full"),
        ({"cp": 2, "cp_exchange": "ring"}, "none"),
    ],
    ids=["sequence", "tensor", "gather", "ring"],
)
def test_compiled_blocks_have_the_loss_and_the_gradients_of_plain_ones_on_two_ranks(
    degrees: dict[str, Any], recompute: str, tmp_path: Path
) -> None:
    run = run_config(tmp_path, model={"layers": 1}, parallel={**degrees, "activation_checkpoint": recompute})
    for rank in values(run_ranks(loss_and_gradients, 2, to_values(run), "aot_eager", timeout_s=100)):
        (loss, plain), (compiled_loss, compiled) = rank["plain"], rank["compiled"]
        assert len(rank["graphs"]) >= 1
        assert not any("masked_fill" in code for code in rank["graphs"]), "masks stay outside"
        assert compiled_loss == pytest.approx(loss, rel=1e-6)
        assert compiled.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(torch.tensor(compiled[name]), torch.tensor(value), rtol=1e-5, atol=1e-7)


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
