"""What evens out routers trains every layout as it trains one process: loads are those of all data-parallel ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, values
from support.training import digest_of, floats, run_config, train_rank, write_corpus

from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.hub.source import open_weights
from flashckpt.trainer.hub.weights import load
from flashckpt.trainer.model.initial import materialise
from flashckpt.trainer.model.moe import experts_of
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.optim.builders import whole_of
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.held import held
from flashckpt.trainer.train import loop

STEPS = 3
EXPERTS = {"experts": 4, "ffn": 32}
LOSSES = {"router_aux_loss": 0.5, "router_z_loss": 0.05}  # large: without one of them the norms are others
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, rows of a micro-batch on each, layout
    "2 ranks": (2, 2, {}),
    "HSDP 2x2, all recomputed": (4, 1, {"dp_replicate": 2, "activation_checkpoint": "full"}),
    "one of each, by operator": (1, 4, {"activation_checkpoint": "selective"}),
    "TP 2, sequence parallel": (2, 4, {"tp": 2}),
    "TP 2 x DP 2, feed-forward recomputed": (
        4, 2, {"tp": 2, "sequence_parallel": False, "activation_checkpoint": "ffn"},
    ),
    "PP 2 x DP 2, 1F1B": (4, 2, {"pp": 2, "activation_checkpoint": "groups:2"}),
    "CP 2": (2, 4, {"cp": 2}),
    "CP 2 x DP 2": (4, 2, {"cp": 2, "dp_shard": 2}),
    "4 ranks, experts over 2": (4, 1, {"ep": 2}),
    "4 ranks, experts over 1, zero 1": (4, 1, {"ep": 1, "zero": 1, "activation_checkpoint": "full"}),
    "HSDP 2x2, experts over 1, zero 3": (4, 1, {"dp_replicate": 2, "ep": 1, "zero": 3}),
    "TP 2 x DP 2, experts over 1": (4, 2, {"tp": 2, "ep": 1, "activation_checkpoint": "ffn"}),
    "TP 2 x HSDP 2x2, experts over 1": (8, 1, {"tp": 2, "dp_replicate": 2, "ep": 1}),
    "CP 2 x DP 2, experts over 2": (4, 2, {"cp": 2, "dp_shard": 2, "ep": 2}),
    "PP 2 x DP 2, experts over 1, 1F1B": (4, 2, {"pp": 2, "ep": 1}),
    "PP 2 x DP 2, experts over 1, ZBV": (4, 2, {"pp": 2, "ep": 1, "schedule": "ZBVZeroBubble"}),
    "PP 2, interleaved": (2, 4, {"pp": 2, "schedule": "Interleaved1F1B"}),
    "PP 2 x DP 2, InterleavedZeroBubble": (4, 2, {"pp": 2, "schedule": "InterleavedZeroBubble"}),
    "PP 2 x DP 2, ZBV": (4, 2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("experts")
    return folder, write_corpus(folder / "text")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))


def train(corpus: Any, world: int, rows: int, parallel: Any, model: Any, **settings: Any) -> Any:
    folder, source = corpus
    batch = {"global_batch": 16, "micro_batch": rows, **settings}
    config = run_config(folder, parallel=parallel, data={"source": source}, model={**EXPERTS, **model}, train=batch)
    return values(run_ranks(train_rank, world, to_values(config), STEPS, timeout_s=200))


@pytest.fixture(scope="module")
def alone(corpus: Any) -> Any:
    return train(corpus, 1, 4, {}, LOSSES)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_router_losses_train_every_layout_as_one_process(name: str, corpus: Any, alone: Any) -> None:
    world, rows, parallel = LAYOUTS[name]
    ranks = train(corpus, world, rows, parallel, LOSSES)
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    assert floats(reporter["losses"]) == pytest.approx(floats(alone["losses"]), abs=2e-6)
    assert floats(reporter["norms"]) == pytest.approx(floats(alone["norms"]), abs=4e-6)


@pytest.mark.parametrize("left_out", LOSSES)
def test_each_router_loss_changes_gradients_and_not_the_reported_loss(left_out: str, corpus: Any, alone: Any) -> None:
    without = train(corpus, 1, 4, {}, {**LOSSES, left_out: 0.0})[0]
    assert without["losses"][0] == alone["losses"][0]
    assert abs(float.fromhex(without["norms"][0]) - float.fromhex(alone["norms"][0])) > 1e-4


def test_router_losses_are_scaled_with_the_loss_in_float16(corpus: Any, alone: Any) -> None:
    half = train(corpus, 1, 4, {}, LOSSES, precision="float16")[0]
    assert floats(half["norms"]) == pytest.approx(floats(alone["norms"]), rel=2e-2)


# -- the bias


BIAS = {"router_bias_rate": 0.02, "router_aux_loss": 0.1}
BIAS_LAYOUTS = (
    "2 ranks",
    "4 ranks, experts over 2",
    "HSDP 2x2, all recomputed",
    "TP 2, sequence parallel",
    "CP 2 x DP 2",
    "PP 2 x DP 2, ZBV",
)


def train_with_bias(rank: int, config_values: Any, steps: int) -> dict[str, Any]:
    """Restore, train to a step and return what this rank has then; nothing is written at the end."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began, restored = trainer.done, biases(trainer)
        records = [trainer.one_step() for _ in range(steps - began)]
        if trainer.ckpt is not None:
            trainer.ckpt.wait(100)
            trainer.ckpt.close()
        trainer.data.close()
        return {
            "began": began,
            "restored": restored,
            "losses": [record.loss.hex() for record in records],
            "experts": [record.experts for record in records],
            "biases": biases(trainer),
            "weights": digest_of(trainer.parallel.parameters()),
        }


def biases(trainer: Any) -> dict[str, list[str]]:
    """Return the bias of each layer that this rank holds, as float.hex()."""
    named = [pair for part in trainer.parallel.parts for pair in part.named_buffers()]
    return {name: [value.hex() for value in bias.tolist()] for name, bias in named}


def in_a_model_of(root: Any) -> dict[str, list[str]]:
    """Return the biases that a model has whose weights are those of the newest checkpoint, as `generate` reads it."""
    source = open_weights(str(root))
    with torch.device("meta"):
        part = Transformer(source.model, 16)
    materialise(part, torch.device("cpu"))
    load([part], source)
    source.close()
    return {name: [value.hex() for value in bias.tolist()] for name, bias in part.named_buffers()}


def bias_run(folder: Any, corpus: Any, world: int, rows: int, parallel: Any, steps: int, *, job: str = "") -> Any:
    data, source = corpus
    settings: dict[str, Any] = {
        "parallel": parallel, "model": {**EXPERTS, **BIAS}, "train": {"global_batch": 16, "micro_batch": rows, "steps": 8},
        "data": {"source": source, "folder": str(data / "tokens")}, "optim": {"schedule": "constant"},
    }  # fmt: skip
    if job:
        settings["checkpoint"] = {"root": str(folder / job), "job": job, "snapshot_every": 1, "persist_every": 1}
    config = run_config(folder, **settings)
    return values(run_ranks(train_with_bias, world, to_values(config), steps, timeout_s=200))


def whole(ranks: Any, key: str = "biases") -> dict[str, list[str]]:
    """Return the biases of all ranks together; those that hold the same hold the same bits."""
    found: dict[str, list[str]] = {}
    for rank in ranks:
        for name, bias in rank[key].items():
            assert found.setdefault(name, bias) == bias
    return found


@pytest.fixture(scope="module")
def balanced(corpus: Any, tmp_path_factory: Any) -> Any:
    return bias_run(tmp_path_factory.mktemp("balanced"), corpus, 1, 4, {}, STEPS)[0]


@pytest.mark.parametrize("name", BIAS_LAYOUTS)
def test_every_layout_counts_and_moves_biases_as_one_process(
    name: str, corpus: Any, balanced: Any, tmp_path: Any
) -> None:
    world, rows, parallel = LAYOUTS[name]
    ranks = bias_run(tmp_path, corpus, world, rows, parallel, STEPS)
    for rank in ranks:
        assert rank["experts"] == balanced["experts"]
    assert whole(ranks) == balanced["biases"]
    assert len(balanced["biases"]) == 4
    assert len({value for bias in balanced["biases"].values() for value in bias}) > 1
    assert [sum(tokens) for tokens in balanced["experts"][0]] == [16 * 16 * 2] * 4  # rows, tokens, choices


def test_biases_continue_bit_for_bit_and_in_another_layout(corpus: Any, balanced: Any, tmp_path: Any) -> None:
    unbroken = bias_run(tmp_path, corpus, 2, 2, {}, 4, job="unbroken")
    first = bias_run(tmp_path, corpus, 2, 2, {}, 2, job="broken")
    again = bias_run(tmp_path, corpus, 2, 2, {}, 4, job="broken")
    assert [rank["began"] for rank in again] == [2, 2]
    assert whole(again, "restored") == whole(first)
    for before, after in zip(unbroken, again, strict=True):
        for key in ("biases", "weights"):
            assert before[key] == after[key]
        for key in ("losses", "experts"):
            assert before[key][2:] == after[key]
    other = bias_run(tmp_path, corpus, 4, 2, {"pp": 2}, 4, job="broken")  # restored where the others ended
    assert [rank["began"] for rank in other] == [4] * 4
    assert whole(other, "restored") == whole(unbroken)
    assert in_a_model_of(tmp_path / "broken") == whole(other)


def test_a_run_with_a_bias_ends_with_even_loads(corpus: Any, tmp_path: Any) -> None:
    def last(rate: float) -> float:
        model = {**EXPERTS, "router_bias_rate": rate}
        train_settings = {"global_batch": 16, "micro_batch": 16, "steps": 40}
        config = run_config(tmp_path, data={"source": corpus[1]}, model=model, train=train_settings, optim={"lr": 1e-3})
        (only,) = values(run_ranks(train_with_bias, 1, to_values(config), 40, timeout_s=200))
        loads = [max(layer) * len(layer) / sum(layer) for step in only["experts"][-5:] for layer in step]
        return float(sum(loads) / len(loads))

    assert last(0.003) < 0.85 * last(0.0)  # 1.46 and 1.98 times the mean


# -- experts over fewer ranks than dp_shard


@pytest.mark.parametrize("optim", ["muon", "adafactor", "sgd"])
def test_experts_that_are_cut_are_updated_as_in_one_process(optim: str, corpus: Any) -> None:
    folder, source = corpus
    ranks = {}
    for world, parallel in ((1, {}), (4, {"ep": 2, "tp": 1})):
        config = run_config(
            folder, parallel=parallel, data={"source": source}, model={**EXPERTS, "experts": 2},
            train={"global_batch": 16, "micro_batch": 4}, optim={"name": optim}, ema={"decay": 0.5},
        )  # fmt: skip
        ranks[world] = values(run_ranks(train_rank, world, to_values(config), STEPS, timeout_s=200))[0]
    near = 2e-4 if optim == "muon" else 4e-6  # its iteration in bfloat16 magnifies rounding
    for key in ("losses", "norms"):
        assert floats(ranks[4][key]) == pytest.approx(floats(ranks[1][key]), abs=near)


def whole_state(trainer: Any) -> dict[str, str]:
    """Return digests of whole weights, averages and moments by name. Collective over the ranks that hold parts."""
    found = {}
    assert trainer.average is not None
    averages = iter(trainer.average.held)
    for part in trainer.parallel.parts:
        for name, parameter in part.named_parameters():
            whole = {"": parameter, " average": next(averages)}
            for optimizer in trainer.optimizers:
                state = optimizer.state.get(parameter, {})
                whole |= {f" {key}": value for key, value in state.items() if value.dim()}
            for key, tensor in whole.items():
                digest = digest_of([whole_of(local_tensor(tensor).detach(), tensor)])
                found[f"{name}{key} {tuple(tensor.shape)}"] = digest
    return found


def train_cut(rank: int, config_values: Any, steps: int, kill_at: int) -> dict[str, Any]:
    """Restore, train to a step, and return the losses, whole state and bytes; at `kill_at` die in the middle of a step instead."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began, restored = trainer.done, whole_state(trainer)
        losses = {}
        while trainer.done < steps:
            if trainer.done == kill_at:
                assert trainer.ckpt is not None
                trainer.ckpt.wait(100)
                trainer._apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]  # dies there
            record = trainer.one_step()
            losses[record.step] = record.loss.hex()
        if trainer.ckpt is not None:
            trainer.ckpt.wait(100)
            trainer.ckpt.close()
        trainer.data.close()
        mine = [local_tensor(parameter) for parameter in trainer.parallel.parameters()]
        states = [value for each in trainer.optimizers for state in each.state.values() for value in state.values()]
        states += [] if trainer.average is None else trainer.average.held
        return {
            "began": began,
            "losses": losses,
            "restored": restored,
            "state": whole_state(trainer),
            "bytes": (sum(one.nbytes for one in mine), sum(local_tensor(one).nbytes for one in states)),
        }


def cut_run(
    corpus: Any, root: Any, world: int, parallel: Any, steps: int, *, kill_at: int = -1, model: Any = None
) -> Any:
    folder, source = corpus
    config = run_config(
        folder, parallel=parallel, data={"source": source}, model={**EXPERTS, "dropout": 0.0, **(model or {})},
        train={"global_batch": 16, "micro_batch": 2, "steps": 8}, ema={"decay": 0.5},
        checkpoint={"root": str(root), "job": root.name, "snapshot_every": 1, "persist_every": 1},
    )  # fmt: skip
    return config, run_ranks(train_cut, world, to_values(config), steps, kill_at, timeout_s=200)


@pytest.mark.parametrize(
    ("ep", "experts"), [(2, 4), (2, 2), (1, 4)]
)  # cut by experts, by rows of each, nobody sends tokens
def test_a_run_killed_with_experts_cut_continues_bit_for_bit(ep: int, experts: int, corpus: Any, tmp_path: Any) -> None:
    model = {"experts": experts, "dropout": 0.1}
    unbroken = values(cut_run(corpus, tmp_path / "unbroken", 4, {"ep": ep}, 4, model=model)[1])
    _, killed = cut_run(corpus, tmp_path / "broken", 4, {"ep": ep}, 4, kill_at=2, model=model)
    assert {rank.signal for rank in killed} == {signal.SIGKILL}, killed[0].error
    again = values(cut_run(corpus, tmp_path / "broken", 4, {"ep": ep}, 4, model=model)[1])
    for before, after in zip(unbroken, again, strict=True):
        assert after["began"] == 2
        assert after["losses"] == {step: before["losses"][step] for step in ("3", "4")}
        assert after["state"] == before["state"]


def test_a_checkpoint_continues_with_any_number_of_ranks_for_experts_and_every_rank_holds_what_a_plan_says(
    corpus: Any, tmp_path: Any
) -> None:
    layouts: list[tuple[int, dict[str, Any]]] = [
        (4, {}), (4, {"ep": 2}), (4, {"ep": 1}), (4, {"tp": 2, "ep": 1}), (8, {"dp_replicate": 2, "ep": 2}), (1, {}),
    ]  # fmt: skip
    state: dict[str, str] = {}
    for number, (world, parallel) in enumerate(layouts):
        config, ended = cut_run(corpus, tmp_path / "job", world, parallel, number + 1)
        ranks = values(ended)
        layout = resolve_layout(config, world)
        for rank, one in enumerate(ranks):
            assert one["began"] == number
            assert one["restored"] == (state or one["restored"])
            shard = rank // layout.tp % layout.dp_shard
            plan = held(config, layout, rank // (world // layout.pp), shard)
            assert one["bytes"] == [plan.parameters, plan.optimizer]
        state = ranks[0]["state"]
    assert len([name for name in state if name.endswith("experts.w1 (4, 32, 32)")]) == 4


def seen_weights(_rank: int, config_values: Any) -> list[Any]:
    """Return the shapes of the experts' weights that this rank multiplies with, and what it holds of them afterwards."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        (experts, *_) = experts_of(trainer.parallel.parts[0])
        seen = []
        experts.register_forward_pre_hook(lambda module, _: seen.append(tuple(local_tensor(module.w1).shape)))
        trainer.one_step()
        return [seen[0], tuple(local_tensor(experts.w1).shape)]


@pytest.mark.parametrize(
    ("parallel", "experts", "multiplied", "held_after"),
    [
        ({"ep": 2}, 4, (2, 32, 32), (1, 32, 32)),
        ({"ep": 2}, 2, (1, 32, 32), (1, 16, 32)),
        ({"ep": 1}, 4, (4, 32, 32), (1, 32, 32)),
        ({}, 4, (1, 32, 32), (1, 32, 32)),
    ],
)
def test_a_rank_multiplies_with_its_experts_and_holds_its_part_of_them(
    parallel: Any, experts: int, multiplied: Any, held_after: Any, corpus: Any
) -> None:
    folder, source = corpus
    config = run_config(folder, parallel=parallel, data={"source": source}, model={**EXPERTS, "experts": experts})
    for seen, after in values(run_ranks(seen_weights, 4, to_values(config), timeout_s=200)):
        assert (tuple(seen), tuple(after)) == (multiplied, held_after)
