"""Every parallel layout trains as one process does: same samples, same losses and norms to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus

from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train import loop  # imported before the fork, so that ranks start in 0.2 s

STEPS = 3
LAYOUTS = {
    "fsdp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "ddp3": (3, {"dp_replicate": 3, "dp_shard": 1, "data_parallel": "ddp"}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2-sp-loss-parallel": (2, {"tp": 2, "loss_parallel": True}),
    "pp2-1f1b": (2, {"pp": 2}),
    "pp2-gpipe-full-recompute": (2, {"pp": 2, "schedule": "gpipe", "activation_checkpoint": "full"}),
    "pp2-interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}),
    "pp2-looped-bfs": (2, {"pp": 2, "schedule": "LoopedBFS"}),
    "pp2-interleaved-zero-bubble": (2, {"pp": 2, "schedule": "InterleavedZeroBubble"}),
    "pp2-zbv": (2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
    "pp2-dualpipev": (2, {"pp": 2, "schedule": "DualPipeV"}),
    "ddp2-pp2-interleaved": (
        4,
        {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp", "schedule": "Interleaved1F1B"},
    ),
    "fsdp2-pp2-dualpipev": (4, {"pp": 2, "schedule": "DualPipeV"}),
    "fsdp2-pp2-ffn-recompute": (4, {"pp": 2, "activation_checkpoint": "ffn"}),
    "fsdp2-tp2-sp-pp2": (8, {"pp": 2, "tp": 2, "activation_checkpoint": "every:2"}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, write_corpus(folder / "text")


def train(corpus: Any, world: Any, parallel: Any, **sections: Any) -> Any:
    folder, source = corpus
    config = run_config(folder, parallel=parallel, data={"source": source}, **sections)
    return values(run_ranks(train_rank, world, to_values(config), STEPS, timeout_s=100))


def batch_for(name: Any) -> Any:
    """Every rank accumulates over two micro-batches or more; under TP one costs as much Python as ten of the others."""
    if "tp2" in name:
        return {"global_batch": 8 if "fsdp2" in name else 4, "micro_batch": 2}
    return {"global_batch": 12, "micro_batch": 2} if name == "ddp3" else {}


@pytest.fixture(scope="module")
def one_process(corpus: Any, request: Any) -> Any:
    cache = {}

    def get(name: Any) -> Any:
        key = str(batch_for(name))
        if key not in cache:
            cache[key] = train(corpus, 1, {}, train=batch_for(name))[0]
        return cache[key]

    return get


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_process(name: Any, corpus: Any, one_process: Any) -> None:
    world, parallel = LAYOUTS[name]
    ranks = train(corpus, world, parallel, train=batch_for(name))
    wanted = one_process(name)
    for rank in ranks:  # every rank holds the same totals, bit for bit: decisions made from them agree
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"])
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    assert reporter["samples"] == wanted["samples"]
    assert floats(reporter["losses"]) == pytest.approx(floats(wanted["losses"]), abs=2e-6)
    assert floats(reporter["norms"]) == pytest.approx(floats(wanted["norms"]), abs=2e-6)
    for mine, theirs in zip(reporter["channels"], wanted["channels"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-6)


EXPERTS = {"experts": 4, "ffn": 32}


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), (4, {"dp_replicate": 2, "activation_checkpoint": "full"}), (4, {"pp": 2, "schedule": "Interleaved1F1B"})],
    ids=["ep2", "hsdp2x2-ep2", "ep2-pp2"],
)
def test_experts_spread_over_ranks_train_as_in_one_process(world: Any, parallel: Any, corpus: Any) -> None:
    wanted = train(corpus, 1, {}, model=EXPERTS)[0]
    ranks = train(corpus, world, parallel, model=EXPERTS)
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    assert floats(reporter["losses"]) == pytest.approx(floats(wanted["losses"]), abs=2e-6)
    assert floats(reporter["norms"]) == pytest.approx(floats(wanted["norms"]), abs=2e-6)


BFLOAT16 = {
    "fsdp2": (2, {}, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}, {}),
    "ddp2": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, {}),
    "ddp2-full-recompute": (
        2,
        {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp", "activation_checkpoint": "full"},
        {},
    ),
    "ddp2-pp2": (4, {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp"}, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}, {}),
    "tp2-sp-pp2-loss-parallel": (4, {"tp": 2, "pp": 2, "loss_parallel": True}, {}),
    "pp2-zbv": (2, {"pp": 2, "schedule": "ZBVZeroBubble"}, {}),
    "ep2": (2, {}, EXPERTS),
}


@pytest.fixture(scope="module")
def bfloat16_alone(corpus: Any) -> Any:
    cache: dict[str, Any] = {}

    def get(model: Any, batch: Any) -> Any:
        key = str((model, batch))
        if key not in cache:
            precisions: tuple[dict[str, str], ...] = ({"precision": "bfloat16"}, {})
            cache[key] = [train(corpus, 1, {}, model=model, train={**batch, **each})[0] for each in precisions]
        return cache[key]

    return get


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_is_bfloat16_in_every_layout(name: Any, corpus: Any, bfloat16_alone: Any) -> None:
    world, parallel, model = BFLOAT16[name]
    batch = batch_for(name)
    same, single = bfloat16_alone(model, batch)
    ranks = train(corpus, world, parallel, model=model, train={**batch, "precision": "bfloat16"})
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    losses = floats(reporter["losses"])
    assert losses == pytest.approx(floats(same["losses"]), abs=1e-3)  # rounding of another order of sums
    assert losses == pytest.approx(floats(single["losses"]), abs=2e-2)
    far = max(abs(a - b) for a, b in zip(losses, floats(single["losses"]), strict=True))
    assert far > 1e-5  # float32 in another layout differs by less than 2e-6


def test_ddp_in_bfloat16_computes_in_it_and_keeps_everything_else_in_float32(corpus: Any) -> None:
    folder, source = corpus
    parallel = {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}
    config = run_config(folder, parallel=parallel, train={"precision": "bfloat16"}, data={"source": source})
    for kinds in values(run_ranks(kinds_of, 2, to_values(config), timeout_s=100)):
        assert kinds == {
            "products": ["torch.bfloat16"],
            "gradients": ["torch.float32"],
            "parameters": ["torch.float32"],
            "moments": ["torch.float32"],
        }


FAMILIES: dict[str, dict[str, Any]] = {
    "tied, scaled": {"tied_embeddings": True, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_context": 8},
    "qk-norm, wide heads, window": {"qk_norm": True, "head_dim": 16, "window": 5, "window_from": 2},
    "biases, experts, a shared one, tied": {
        **EXPERTS, "qkv_bias": True, "shared_ffn": 48, "normalize_experts": False, "tied_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_model_trains_in_three_dimensions_as_in_one_process(name: str, corpus: Any) -> None:
    same_as_alone(corpus, 8, {"pp": 2, "tp": 2}, FAMILIES[name])


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
        (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}),
        (4, {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp"}),
        (2, {"tp": 2, "sequence_parallel": False}),
    ],
    ids=["both ends on one rank", "ddp", "ddp-pp", "tp"],
)
def test_tied_embeddings_are_the_same_at_both_ends(world: Any, parallel: Any, corpus: Any) -> None:
    same_as_alone(corpus, world, parallel, {"tied_embeddings": True})


def test_experts_without_sequence_parallel(corpus: Any) -> None:
    same_as_alone(corpus, 4, {"tp": 2, "sequence_parallel": False}, FAMILIES["biases, experts, a shared one, tied"])


def same_as_alone(corpus: Any, world: int, parallel: Any, model: Any) -> None:
    batch = {"global_batch": 8, "micro_batch": 2}
    wanted = train(corpus, 1, {}, model=model, train=batch)[0]
    ranks = train(corpus, world, parallel, model=model, train=batch)
    assert all((rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]) for rank in ranks)
    assert floats(ranks[0]["losses"]) == pytest.approx(floats(wanted["losses"]), abs=2e-6)
    assert floats(ranks[0]["norms"]) == pytest.approx(floats(wanted["norms"]), abs=2e-6)
    ends: dict[str, set[str]] = {}
    for rank in ranks:
        for name, digest in rank["ends"].items():
            ends.setdefault(name.partition(" ")[2], set()).add(digest)
    alike = 1 if model.get("tied_embeddings") else 2
    assert ends
    assert {len(digests) for digests in ends.values()} == {alike}  # to the bit, moments included


def kinds_of(_rank: int, config_values: Any) -> Any:
    """Return the types met in one step."""
    config = from_values(config_values)
    layout = loop.prepare(config, 2)
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        met: dict[str, set[str]] = {name: set() for name in ("products", "gradients", "parameters", "moments")}
        for module in trainer.parallel.parts[0].modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda _m, _x, out: met["products"].add(str(out.dtype)))
        trainer.one_step()
        for parameter in trainer.parallel.parameters():
            met["parameters"].add(str(parameter.dtype))
            met["gradients"].add(str(parameter.grad.dtype))  # type: ignore[union-attr]  # after a backward
            state = trainer.optimizers[0].state[parameter]
            met["moments"] |= {str(state[name].dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {name: sorted(kinds) for name, kinds in met.items()}


def test_same_run_twice_is_the_same_bit_for_bit_and_another_seed_is_not(corpus: Any) -> None:
    first, second = (train(corpus, 2, {"pp": 2}, model={"dropout": 0.1}) for _ in range(2))
    other = train(corpus, 2, {"pp": 2}, model={"dropout": 0.1}, train={"seed": 2})
    assert first == second
    assert other[1]["losses"] != first[1]["losses"]


def gradients(_rank: int, world: int, config_values: dict[str, Any]) -> list[float]:
    """Return this rank's gradients of the first step."""
    config = from_values(config_values)
    layout = loop.prepare(config, world)
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        trainer.train_step.backward(trainer.data.next())
        found = [local_tensor(one.grad).flatten() for one in trainer.parallel.parameters() if one.grad is not None]
        trainer.data.close()
        return [float(one) for one in torch.cat(found)]


ADDED_UP: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "ddp2": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}),
    "ddp4": (4, {"dp_replicate": 4, "dp_shard": 1, "data_parallel": "ddp"}),
}


@pytest.mark.parametrize("name", ADDED_UP)
def test_gradients_added_up_in_bfloat16_are_off_by_its_rounding(corpus: Any, name: str) -> None:
    world, parallel = ADDED_UP[name]
    found = {}
    for dtype in ("float32", "bfloat16"):
        config = run_config(corpus[0], parallel={**parallel, "reduce_dtype": dtype}, data={"source": corpus[1]})
        found[dtype] = torch.tensor(values(run_ranks(gradients, world, world, to_values(config), timeout_s=100)))
    error = (found["bfloat16"] - found["float32"]).norm() / found["float32"].norm()
    assert 1e-4 < error < 2**-8
