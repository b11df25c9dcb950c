"""Context parallelism: each rank holds a part of every row, and trains and scores as one process with whole rows."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from support.live_bytes import LiveBytes
from support.ranks import run_ranks, values
from support.training import floats, parameter_digest, run_config, train_rank, write_corpus
from torch import Tensor

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.model import ring
from flashckpt.trainer.model.context import ContextSlice
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train import loop

STEPS, TOKENS = 3, 24
DDP = {"data_parallel": "ddp", "dp_shard": 1}
RING = {"cp_exchange": "ring"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "cp2, zero 0": (2, {"cp": 2, "zero": 0}),
    "cp2 x fsdp2, zero 3": (4, {"cp": 2, "dp_shard": 2, "zero": 3}),
    "cp2 x hsdp2x2": (8, {"cp": 2, "dp_replicate": 2, "dp_shard": 2}),
    "cp2 x ddp2": (4, {"cp": 2, "dp_replicate": 2, **DDP}),
    "cp4, recomputed": (4, {"cp": 4, "activation_checkpoint": "full"}),
    "cp2, selective": (2, {"cp": 2, "activation_checkpoint": "selective"}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2}),
    "cp2 x tp2, without sequence parallel": (4, {"cp": 2, "tp": 2, "sequence_parallel": False}),
    "cp2 x pp2": (4, {"cp": 2, "pp": 2}),
    "cp2 x pp2, interleaved": (4, {"cp": 2, "pp": 2, "schedule": "Interleaved1F1B"}),
    "cp2 x pp2, zero bubble V": (4, {"cp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
    "cp2 x tp2 x pp2, loss parallel": (8, {"cp": 2, "tp": 2, "pp": 2, "loss_parallel": True}),
    "ring 2": (2, {"cp": 2, **RING}),
    "ring 4 x fsdp2, zero 3": (8, {"cp": 4, "dp_shard": 2, "zero": 3, **RING}),
    "ring 2 x ddp2": (4, {"cp": 2, "dp_replicate": 2, **DDP, **RING}),
    "ring 4, recomputed": (4, {"cp": 4, "activation_checkpoint": "full", **RING}),
    "ring 2, selective": (2, {"cp": 2, "activation_checkpoint": "selective", **RING}),
    "ring 2, kept in host memory": (2, {"cp": 2, "activation_offload": True, **RING}),
    "ring 2 x tp2": (4, {"cp": 2, "tp": 2, **RING}),
    "ring 2 x pp2, interleaved": (4, {"cp": 2, "pp": 2, "schedule": "Interleaved1F1B", **RING}),
    "ring 2 x pp2, zero bubble V": (4, {"cp": 2, "pp": 2, "schedule": "ZBVZeroBubble", **RING}),
}
BATCH = {"global_batch": 8, "micro_batch": 2}


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setattr(JobDirectory, "ensure_daemon", lambda *_: None)  # restores here are from memory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("context")
    return folder, write_corpus(folder / "text")


def config_of(corpus: Any, parallel: dict[str, Any], **sections: Any) -> dict[str, Any]:
    folder, source = corpus
    return to_values(run_config(folder, parallel=parallel, data={"source": source}, **{"train": BATCH, **sections}))


def train(corpus: Any, world: int, parallel: dict[str, Any], **sections: Any) -> Any:
    ranks = values(run_ranks(train_rank, world, config_of(corpus, parallel, **sections), STEPS, timeout_s=200))
    for rank in ranks:  # every rank holds the same totals, bit for bit: decisions made from them agree
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"])
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    return reporter


def check_same(mine: Any, alone: Any, near: float = 2e-6) -> None:
    assert mine["samples"] == alone["samples"]
    assert floats(mine["losses"]) == pytest.approx(floats(alone["losses"]), abs=near)
    assert floats(mine["norms"]) == pytest.approx(floats(alone["norms"]), abs=near)
    for channels, wanted in zip(mine["channels"], alone["channels"], strict=True):
        assert channels == pytest.approx(wanted, abs=near)


@pytest.fixture(scope="module")
def alone(corpus: Any, tmp_path_factory: Any) -> Any:
    memory = pytest.MonkeyPatch()
    memory.setenv("FLASHCKPT_SHM_DIR", str(tmp_path_factory.mktemp("shm")))
    yield train(corpus, 1, {})
    memory.undo()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_with_parts_of_rows_train_as_one_process(name: str, corpus: Any, alone: Any) -> None:
    check_same(train(corpus, *LAYOUTS[name]), alone)


SECTIONS: dict[str, dict[str, Any]] = {
    "window": {"model": {"window": 5, "window_from": 1}},
    "one kv head, tied, normed": {"model": {"kv_heads": 1, "tied_embeddings": True, "qk_norm": True}},
    "experts": {"model": {"experts": 4, "ffn": 32, "shared_ffn": 32}},
    "pieces": {"train": {**BATCH, "loss_chunk": 5}},
    "padding": {"train": {"global_batch": 5, "micro_batch": 2}},
    "bfloat16": {"train": {**BATCH, "precision": "bfloat16"}},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_models_and_losses_of_each_kind_train_as_one_process(name: str, corpus: Any) -> None:
    near = 3e-3 if name == "bfloat16" else 2e-6
    alone = train(corpus, 1, {}, **SECTIONS[name])
    for more in ({}, RING):
        check_same(train(corpus, 4, {"cp": 2, "dp_shard": 2, **more}, **SECTIONS[name]), alone, near)


# -- keys and values that go round


def whole_attention(case: dict[str, Any]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return queries, keys and values of whole rows, what attention finds there, and a gradient of it."""
    torch.manual_seed(1)
    heads, shared = case["heads"]
    inputs = [torch.randn(2, count, TOKENS, 8, requires_grad=True) for count in (heads, shared, shared)]
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if case["window"]:
        mask = mask.triu(1 - case["window"])
    if case["documents"] is not None:
        documents = torch.tensor(case["documents"])
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    q, k, v = inputs
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != shared)
    grad = torch.randn_like(out)
    out.backward(grad)  # type: ignore[no-untyped-call]  # untyped in torch
    return inputs, out.detach(), grad


def attend_in_a_ring(rank: int, case: dict[str, Any]) -> dict[str, float]:
    """Return how far this rank's part is from that of whole rows: outputs and gradients."""
    if not case["kernel"]:
        ring._has_kernel = lambda q: False  # as on a GPU, in a process of its own
    inputs, out, grad = whole_attention(case)
    held = ContextSlice(rank, dist.get_world_size(), dist.group.WORLD)
    places = held.index(TOKENS // held.ranks)
    mine = [each.detach()[:, :, places].requires_grad_() for each in inputs]
    documents = None if case["documents"] is None else torch.tensor(case["documents"])
    attention = ring.RingAttention(held, window=case["window"], documents=documents)
    found = attention.attend(*mine, has_window=case["window"] > 0)
    found.backward(grad[:, :, places])
    far = {"out": (found - out[:, :, places]).abs().max().item()}
    for name, part, whole in zip("qkv", mine, inputs, strict=True):
        assert part.grad is not None
        assert whole.grad is not None
        far[name] = (part.grad - whole.grad[:, :, places]).abs().max().item()
    return far


DOCUMENTS = [[0] * 7 + [1] * 17, [0] * 12 + [1] * 2 + [2] * 10]


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "products"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("ranks", "heads"), [(2, (4, 2)), (3, (4, 4)), (4, (4, 1))])
def test_a_ring_finds_and_learns_what_attention_of_whole_rows_does(
    ranks: int, heads: Any, window: int, documents: Any, kernel: bool
) -> None:
    case = {"heads": heads, "window": window, "documents": documents, "kernel": kernel}
    for far in values(run_ranks(attend_in_a_ring, ranks, case, timeout_s=100)):
        assert max(far.values()) < 1e-5


# -- a kill in the middle of a step


def leg(rank: int, config_values: dict[str, Any], folder: str, name: str) -> None:
    """Restore, train to step 4 and write down what that gave; the leg "killed" dies in step 5, whose snapshot is of step 2."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began = trainer.done
        losses = {}
        while trainer.done < 4:
            if trainer.done == 2 and name == "killed":
                kept, trainer.ckpt = trainer.ckpt, None  # from here on nothing is recorded
                assert kept is not None
                kept.wait(100)
            record = trainer.one_step()
            losses[record.step] = record.loss.hex()
        noted = {"began": began, "losses": losses, "parameters": parameter_digest(trainer)}
        Path(folder, f"{name}-{rank}").write_text(json.dumps(noted))
        if name == "killed":
            trainer._apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]  # dies there
            trainer.one_step()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_killed_in_a_step_continue_bit_for_bit(name: str, corpus: Any, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[name]
    checkpoint = {"root": str(tmp_path / "root"), "job": "context", "snapshot_every": 1, "persist_every": 1000}
    config = config_of(corpus, parallel, model={"dropout": 0.1}, checkpoint=checkpoint)
    ended = run_ranks(leg, world, config, str(tmp_path), "killed", timeout_s=200)
    assert {rank.signal for rank in ended} == {signal.SIGKILL}, ended[0].error
    values(run_ranks(leg, world, config, str(tmp_path), "resumed", timeout_s=200))
    for rank in range(world):
        killed, resumed = (json.loads((tmp_path / f"{one}-{rank}").read_text()) for one in ("killed", "resumed"))
        assert (killed["began"], resumed["began"]) == (0, 2)
        assert resumed["losses"] == {step: killed["losses"][step] for step in ("3", "4")}
        assert resumed["parameters"] == killed["parameters"]


# -- what a rank holds


def held_for_backward(_rank: int, config_values: dict[str, Any]) -> int:
    """Return the bytes that forward keeps until backward begins, the logits included."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        trainer.one_step()  # tables of positions are made once
        held: list[int] = []
        step: Any = trainer.train_step
        loss = step._loss

        with LiveBytes() as live:

            def noting(*args: Any) -> Any:
                held.append(live.now)
                return loss(*args)

            step._loss = noting
            trainer.one_step()
        return held[0]


def test_a_rank_keeps_its_part_of_the_activations_and_the_keys_and_values_of_all(corpus: Any) -> None:
    rows, length, layers, kv_width = 2, 256, 4, 16
    sections = {"train": {"seq_len": length, "global_batch": rows, "micro_batch": rows, "loss_chunk": 64}}
    held = {}
    for ranks in (1, 2, 4):
        parallel: dict[str, Any] = {"cp": ranks, "zero": 0}
        counts = values(run_ranks(held_for_backward, ranks, config_of(corpus, parallel, **sections), timeout_s=200))
        assert max(counts) - min(counts) < max(counts) // 50  # the load is balanced
        held[ranks] = max(counts)
    gathered = layers * 2 * rows * length * kv_width * 4
    for ranks in (2, 4):
        mask = 4 * length**2 * (2 * ranks + 1) // (4 * ranks**2)
        assert gathered < held[ranks] < held[1] / ranks + gathered + mask + held[1] // 20
        parallel = {"cp": ranks, "zero": 0, **RING}
        counts = values(run_ranks(held_for_backward, ranks, config_of(corpus, parallel, **sections), timeout_s=200))
        assert max(counts) < held[1] / ranks + held[1] // 20  # its part of all, and of nobody's else
