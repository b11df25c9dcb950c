"""`plan` and the dry run: their bytes against ranks that are built, and against measured peaks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.built_rank import built_rank
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.dry_run.command import rank_kinds, slot_of
from flashckpt.trainer.model import transformer
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.model.recompute import parse_recompute
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.plan.activations import estimate
from flashckpt.trainer.plan.forecast import memory
from flashckpt.trainer.plan.held import held, stored_bytes

ODD: dict[str, Any] = {"dim": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "layers": 4, "head_dim": 8, "qkv_bias": True}
SPARSE = {**ODD, "qk_norm": True, "experts": 4, "ffn": 16, "shared_ffn": 24, "tied_embeddings": True}
PAGES = 8 * 4096
"""How far the room for a manifest may be off: it is made for the text of random states, among other values."""


def is_as_built(config: RunConfig, layout: Layout) -> None:
    """What is computed of each kind of rank is what one of them holds that is built, to the byte."""
    for kind in rank_kinds(config, layout):
        there = built_rank(config, layout, kind.example(layout))
        found = held(config, layout, kind.pp_ranks[-1], kind.shards[-1])
        assert (found.parameters, found.gradients, found.optimizer) == (
            there.parameters,
            there.gradients,
            there.optimizer,
        )
        assert (found.block, found.rest, found.whole) == (there.block, there.rest, there.whole)
        slot = slot_of(config, layout, kind)
        assert slot.data_capacity == there.slot_data
        assert abs(slot.slot_bytes - there.slot) <= PAGES


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [
        (3, {}, {**ODD, "vocab": 257}),
        (4, {"dp_replicate": 2, "tp": 2, "dp_shard": 1, "sequence_parallel": False}, ODD),
        (8, {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, SPARSE),
        (4, {"ep": 2}, SPARSE),
        (8, {"ep": 2, "dp_replicate": 2}, {**SPARSE, "experts": 2}),
        (8, {"ep": 2, "tp": 2, "dp_shard": 4}, {**SPARSE, "experts": 6}),
        (6, {"dp_replicate": 2, "dp_shard": 3, "sync_every": 4}, {**ODD, "vocab": 257}),
        (4, {"dp_replicate": 2, "tp": 2, "sync_every": 4, "outer_rate": 1.0, "outer_momentum": 0.0}, ODD),
    ],
)
def test_bytes_of_odd_layouts_are_those_of_ranks_that_are_built(world: int, parallel: Any, model: Any) -> None:
    config = from_values({"model": model, "parallel": parallel, "train": {"global_batch": 24}})
    is_as_built(config, resolve_layout(config, world))


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [{"ep": 2}, {"ep": 1}, {"ep": 2, "tp": 2}, {"ep": 4}, {}])
def test_what_is_gathered_of_experts_is_what_a_built_rank_gathers(parallel: Any) -> None:
    train = {"global_batch": 24, "precision": "float32"}
    config = from_values({"model": SPARSE, "parallel": parallel, "train": train})
    world = 4 * parallel.get("tp", 1)
    layout = resolve_layout(config, world)
    found = held(config, layout, 0)
    there = built_rank(config, layout, 0)
    assert (found.block, found.rest, found.whole) == (there.block, there.rest, there.whole)
    every = 4 * 3 * 4 * 16 * 24 // parallel.get("tp", 1)  # layers, weights, experts, their sizes
    assert found.experts == (0 if layout.ep == 4 else every // layout.ep)


THREE = {**SPARSE, "experts": 3}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("optim", "ema", "world", "parallel", "model"),
    [
        ({"name": "muon"}, {}, 3, {}, THREE),
        ({"name": "muon"}, {}, 4, {"tp": 2}, ODD),
        ({"name": "adafactor"}, {}, 3, {}, THREE),
        ({"name": "adafactor"}, {}, 4, {"tp": 2}, ODD),
        ({"name": "sgd"}, {"decay": 0.9}, 3, {}, ODD),
        ({"name": "sgd", "momentum": 0.0, "nesterov": False}, {}, 2, {"tp": 2}, ODD),
        ({"name": "adamw"}, {"decay": 0.9}, 3, {}, THREE),
    ],
)
def test_bytes_of_optimizers_and_of_an_average_are_those_of_ranks_that_are_built(
    optim: Any, ema: Any, world: int, parallel: Any, model: Any
) -> None:
    values = {"model": model, "parallel": parallel, "train": {"global_batch": 24}, "optim": optim, "ema": ema}
    config = from_values(values)
    is_as_built(config, resolve_layout(config, world))


# -- measured


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the bytes of tensors that operators make, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and _key(one) not in self._known | given:
                storage = one.untyped_storage()
                self._known.add(_key(one))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, _key(one), storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


MODES = ("none", "ffn", "every:2", "full", "groups:2", "selective")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "vocab", "chunk"),
    [*((mode, vocab, 0) for mode in MODES for vocab in (256, 4096)), ("none", 4096, 32), ("full", 4096, 64)],
)
def test_activations_are_within_a_tenth_of_a_measured_peak(mode: str, vocab: int, chunk: int) -> None:
    sizes = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": vocab}
    config = from_values({
        "model": sizes, "train": {"seq_len": 128, "micro_batch": 2, "global_batch": 2, "loss_chunk": chunk},
        "parallel": {"activation_checkpoint": mode},
    })  # fmt: skip
    model = Transformer(config.model, 128)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    model.set_recompute(parse_recompute(mode))
    tokens, targets = torch.randint(0, vocab, (2, 128)), torch.randint(0, vocab, (2, 128))

    def step() -> None:
        loss = model(tokens, targets=targets) if chunk else per_token_loss(model(tokens), targets)
        loss.mean().backward()

    model.loss_chunk = chunk
    step()  # tables of positions are made
    with LiveBytes() as live:
        step()
    found = estimate(config, resolve_layout(config, 1), 0, block=0, rest=0, whole=0, is_plain=True).activations
    assert found == pytest.approx(live.peak, rel=0.2 if mode == "selective" else 0.1)


class DeviceBytes(LiveBytes):  # type: ignore[no-untyped-call]  # as above
    """Counts those that are not copies in host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.on_host = self.most_on_host = self.device_peak = 0
        copied = transformer._copied

        def noting(tensor: Tensor) -> Tensor:
            host = copied(tensor)
            self.on_host += host.nbytes
            self.most_on_host = max(self.most_on_host, self.on_host)
            weakref.finalize(host.untyped_storage(), self._dropped, host.nbytes)
            return host

        hooks = torch.autograd.graph.saved_tensors_hooks
        monkeypatch.setattr(transformer, "_copied", noting)

        def noting_hooks(pack: Any, unpack: Any) -> Any:
            # what comes back is the copy itself on a CPU; on a device it is other memory
            return hooks(pack, lambda one: one if isinstance(one, Tensor) else unpack(one).clone())

        monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", noting_hooks)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.device_peak = max(self.device_peak, self.now - self.on_host)
        return out

    def _dropped(self, nbytes: int) -> None:
        self.on_host -= nbytes


@pytest.mark.parametrize("mode", ["none", "ffn"])
@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "kv_heads": 4}, {"vocab": 4096, "head_dim": 16}])
def test_what_is_moved_to_host_memory_is_the_formula_to_the_byte(
    mode: str, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 256, **more}
    config = from_values({
        "model": sizes, "train": {"seq_len": 128, "micro_batch": 2, "global_batch": 2},
        "parallel": {"activation_checkpoint": mode, "activation_offload": True},
    })  # fmt: skip
    model = Transformer(config.model, 128)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    model.set_recompute(parse_recompute(mode), offload=True)
    tokens, targets = (torch.randint(0, sizes["vocab"], (2, 128)) for _ in range(2))

    def step() -> None:
        torch.autograd.backward(per_token_loss(model(tokens), targets).mean())

    step()  # tables of positions are made
    with DeviceBytes(monkeypatch) as live:
        step()
    needed = memory(config, resolve_layout(config, 1), is_plain=True)
    assert needed.moved == live.most_on_host
    assert needed.host == needed.slots + live.most_on_host
    assert live.on_host == 0  # after the step nothing of it is left
    # one process has no gradients that are gathered: those of a feed-forward part, before they are added
    weights = 0 if sizes["vocab"] > 256 else 3 * sizes["dim"] * sizes["ffn"] * 4
    assert needed.activations + weights == pytest.approx(live.device_peak, rel=0.1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("optim", "more", "world", "parallel", "model"),
    [
        ({}, {}, 2, {"dp_replicate": 2, "dp_shard": 1, "sync_every": 4}, ODD),
        ({}, {}, 4, {"dp_replicate": 2, "tp": 2, "sync_every": 4, "outer_rate": 1.0, "outer_momentum": 0.0}, ODD),
        ({"name": "adamw"}, {"ema": {"decay": 0.9}}, 3, {}, THREE),
        ({"name": "muon"}, {}, 4, {"tp": 2}, ODD),
        ({"name": "adafactor"}, {"ema": {"decay": 0.9}}, 2, {}, ODD),
        ({"name": "sgd"}, {}, 8, {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, SPARSE),
        ({"name": "sgd", "momentum": 0.0, "nesterov": False}, {}, 2, {"tp": 2}, ODD),
    ],
)
def test_bytes_of_a_checkpoint_are_those_of_ranks_that_are_built(
    optim: Any, more: Any, world: int, parallel: Any, model: Any
) -> None:
    values = {"model": model, "parallel": parallel, "optim": optim, "train": {"global_batch": 24}, **more}
    config = from_values({**values, "checkpoint": {"root": "/unused"}})
    layout = resolve_layout(config, world)
    kinds = rank_kinds(config, layout)
    there = [(kind, built_rank(config, layout, kind.example(layout))) for kind in kinds]
    shared = {kind.pp_ranks: one.shared for kind, one in there}
    counted = sum(len(ranks) * nbytes for ranks, nbytes in shared.items())
    counted += sum(kind.count(layout) * one.own for kind, one in there)
    assert stored_bytes(config, layout) == counted


def test_scores_are_counted_where_a_gpu_keeps_them_and_none_with_flex() -> None:
    rows, tokens, layers = 2, 32, 4
    found = []
    for attention in ("sdpa", "flex"):
        config = from_values({
            "model": {**ODD, "layers": layers},
            "train": {"precision": "bfloat16", "micro_batch": rows, "seq_len": tokens, "attention": attention},
            "data": {"sources": [{"kind": "text", "urls": ["*.txt"]}]},
        })  # fmt: skip
        layout = resolve_layout(config, 1)
        found.append(estimate(config, layout, 0, block=0, rest=0, whole=0).activations)
    masks = rows * tokens * tokens
    assert found[0] - found[1] == masks + kept_scores(rows, tokens) * layers


def kept_scores(rows: int, tokens: int) -> int:
    """What torch's operator without a kernel keeps of scores: measured, for it is what a GPU takes with a mask and grouped heads."""
    heads, groups, size = ODD["heads"], ODD["kv_heads"], ODD["head_dim"]
    q, k, v = (torch.ones(rows, count, tokens, size, dtype=torch.bfloat16) for count in (heads, groups, groups))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == rows * heads * tokens * tokens:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool).tril()
    with sdpa_kernel(SDPBackend.MATH), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend = nn.functional.scaled_dot_product_attention
        out = attend(q.requires_grad_(), k, v, attn_mask=mask, enable_gqa=True)
    assert out.requires_grad
    return sum(kept.values())
