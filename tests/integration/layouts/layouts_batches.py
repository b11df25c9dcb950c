"""A global batch that does not divide trains in every layout as in one process, and a run moves 6 -> 5 -> 6 with it.

The run is a mixture of two channels whose windows hold several documents each: padding must count for none of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents import documents_run, write_documents
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.demo.run import stop_daemon
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.model.initial import fill
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.optim.builders import build_optimizers
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE, resolve_layout
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.phases import learning_rate

STEPS = 3
BATCH = 7
EXPERTS = {"experts": 4, "ffn": 32, "shared_ffn": 32}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "alone": (1, {}, 2),
    "fsdp3": (3, {}, 2),
    "hsdp2x2": (4, {"dp_replicate": 2}, 2),
    "ddp3": (3, {"dp_replicate": 3, "dp_shard": 1, "data_parallel": "ddp"}, 1),
    "fsdp2 x tp2, loss parallel": (4, {"tp": 2, "loss_parallel": True}, 2),
    "fsdp2 x pp2, recomputed": (4, {"pp": 2, "activation_checkpoint": "full"}, 2),
    "ddp2 x pp2, interleaved": (
        4, {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp", "schedule": "Interleaved1F1B"}, 1,
    ),
    **{schedule: (2, {"pp": 2, "schedule": schedule}, 3) for schedule in (*SINGLE_STAGE, *MULTI_STAGE)},
}  # fmt: skip
"""Ranks, layout, most rows of a micro-batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("batches")
    write_documents(folder)
    return folder


def train(folder: Any, world: int, parallel: Any, micro: int, *, batch: int = BATCH, **sections: Any) -> Any:
    sections["train"] = {"global_batch": batch, "micro_batch": micro, **sections.get("train", {})}
    config = documents_run(folder, parallel, sections={"optim": {"clip_norm": 0.5}, **sections})
    return values(run_ranks(train_rank, world, to_values(config), STEPS, timeout_s=100))


def check_alike(ranks: Any, alone: Any, tolerance: float = 2e-6) -> None:
    """Losses, losses per channel and norms, before and after optimizer steps with clipped gradients."""
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    assert all((rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]) for rank in ranks)
    assert reporter["samples"] == alone["samples"]
    assert floats(reporter["losses"]) == pytest.approx(floats(alone["losses"]), abs=tolerance)
    assert floats(reporter["norms"]) == pytest.approx(floats(alone["norms"]), abs=10 * tolerance)
    for mine, theirs in zip(reporter["channels"], alone["channels"], strict=True):
        assert mine == pytest.approx(theirs, abs=10 * tolerance)


@pytest.fixture(scope="module")
def alone(folder: Any) -> Any:
    """One process, a row at a time: nothing is padded."""
    found = train(folder, 1, {}, 1)[0]
    assert all(norm > 0.5 for norm in floats(found["norms"])), "clipped in every step"
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_batch_that_does_not_divide_trains_as_in_one_process(name: str, folder: Any, alone: Any) -> None:
    check_alike(train(folder, *LAYOUTS[name]), alone)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), (4, {"dp_replicate": 2}), (4, {"pp": 2, "schedule": "InterleavedZeroBubble"})],
    ids=["ep2", "hsdp2x2-ep2", "ep2-pp2"],
)
def test_experts_get_gradients_of_samples_alone(world: int, parallel: Any, folder: Any) -> None:
    wanted = train(folder, 1, {}, 1, model=EXPERTS)[0]
    check_alike(train(folder, world, parallel, 2, model=EXPERTS), wanted)


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=["fsdp", "pp2"])
def test_ranks_beyond_the_batch_take_part_with_padding_alone(parallel: Any, folder: Any) -> None:
    wanted = train(folder, 1, {}, 1, batch=2)[0]
    check_alike(train(folder, 4 * parallel.get("pp", 1), parallel, 1, batch=2), wanted)


def test_bfloat16_weighs_padding_nothing(folder: Any) -> None:
    wanted = train(folder, 1, {}, 1, train={"precision": "bfloat16"})[0]
    check_alike(train(folder, 3, {}, 2, train={"precision": "bfloat16"}), wanted, tolerance=2e-3)


def score_rank(_rank: int, config_values: Any) -> Any:
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        evaluator = Evaluator(config, trainer.parallel)
        found = [score.loss for score in evaluator.scores().held_out.values()]
        trainer.one_step()
        return found + [score.loss for score in evaluator.scores().held_out.values()]


@pytest.mark.parametrize(("world", "parallel"), [(3, {}), (4, {"pp": 2, "schedule": "ZBVZeroBubble"})])
def test_held_out_text_is_scored_between_steps_that_do_not_divide(world: int, parallel: Any, folder: Any) -> None:
    sections = {"train": {"global_batch": BATCH}}
    (wanted,) = values(run_ranks(score_rank, 1, to_values(documents_run(folder, {}, sections=sections)), timeout_s=100))
    config = documents_run(folder, parallel, sections=sections)
    for rank in values(run_ranks(score_rank, world, to_values(config), timeout_s=100)):
        assert rank == pytest.approx(wanted, abs=2e-6)


# -- where it divides, the loss is what it has always been


def plain_rank(_rank: int, config_values: Any, steps: int) -> Any:
    """Train with a loop of a few lines: the mean over each micro-batch, and their mean."""
    config = from_values(config_values)
    loop.prepare(config, 1)
    with process_group(config) as device:
        data = loop.Trainer(config, resolve_layout(config, 1), device).data
        model = Transformer(config.model, config.train.seq_len)
        fill(model, config.model, config.train.seed)
        (optimizer,) = build_optimizers(config.optim, [model])
        losses = []
        for step in range(1, steps + 1):
            batch, count = data.next(), config.train.global_batch // config.train.micro_batch
            total = 0.0
            optimizer.zero_grad()
            for tokens, targets in zip(batch.tokens.chunk(count), batch.targets.chunk(count), strict=True):
                each = per_token_loss(model(tokens), targets[:, :-1])
                (each.mean() / count).backward()  # type: ignore[no-untyped-call]  # untyped in torch
                total += each.detach().double().view(len(tokens), -1).sum(1).sum().item()
            square = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)
            losses.append((total / batch.tokens.numel(), float(square) ** 0.5))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optim, step, config.train.steps)
            optimizer.step()
            data.sampler.commit()
        return losses


def test_where_the_batch_divides_the_loss_is_that_of_a_plain_loop_to_the_bit(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "text")
    train = {"global_batch": 6, "micro_batch": 2}
    config = to_values(run_config(tmp_path, train=train, optim={"clip_norm": 0.0}, data={"source": source[:1]}))
    (mine,) = values(run_ranks(train_rank, 1, config, STEPS, timeout_s=100))
    (plain,) = values(run_ranks(plain_rank, 1, config, STEPS, timeout_s=100))
    assert floats(mine["losses"]) == [loss for loss, _ in plain]
    assert floats(mine["norms"]) == pytest.approx([norm for _, norm in plain], rel=1e-6)


# -- a run moves: 6 -> 5 -> 6 ranks

JOURNEYS: dict[str, tuple[int, dict[str, Any], tuple[tuple[int, int, int], ...]]] = {
    "6 5 6": (12, {}, ((6, 10, 0), (5, 6, 8), (6, 6, 0))),
    "3 2 3 x pp2": (6, {"pp": 2}, ((6, 6, 0), (4, 4, 2), (6, 4, 0))),
}
"""Samples of a step, layout, and of each leg: ranks, steps, rows of padding in each step."""


def run_leg(_rank: int, config_values: Any, steps: int) -> Any:
    """Restore and train some steps; it ends without closing, as if killed."""
    config = from_values(config_values)
    layout = loop.prepare(config, torch.distributed.get_world_size())
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began = trainer.done
        leads = trainer.parallel.coordinate("pp") == trainer.parallel.coordinate("tp") == 0
        trained = [(trainer.data.next().ids.tolist(), trainer.one_step()) for _ in range(steps)]
        assert trainer.ckpt is not None
        trainer.ckpt.wait(100)
        return {
            "began": began,
            "padding": layout.padding,
            "ids": [ids if leads else [] for ids, _ in trained],
            "losses": [record.loss for _, record in trained],
            "norms": [record.norm for _, record in trained],
            "channels": [record.channels for _, record in trained],
            "tokens": [record.tokens for _, record in trained],
        }


@pytest.fixture
def memory(monkeypatch: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="flashckpt-batches-", dir="/dev/shm") as tier:
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", tier)
        try:
            yield
        finally:
            for job in ("batches-moved", "batches-alone"):
                stop_daemon(JobDirectory.open(job))


def leg(folder: Path, root: Path, name: str, batch: int, parallel: Any, world: int, steps: int) -> Any:
    checkpoint = {"root": str(root / name), "job": f"batches-{name}", "snapshot_every": 2, "persist_every": 100}
    train = {"steps": 1000, "global_batch": batch, "micro_batch": 1 if world == 1 else 2}
    optim = {"clip_norm": 0.5}
    config = documents_run(folder, parallel, sections={"train": train, "optim": optim, "checkpoint": checkpoint})
    return values(run_ranks(run_leg, world, to_values(config), steps, timeout_s=200))


@pytest.mark.parametrize("name", JOURNEYS)
def test_run_shrinks_and_grows_with_the_batch_data_and_loss_of_one_process(
    name: str, folder: Path, tmp_path: Path, memory: None
) -> None:
    batch, parallel, journey = JOURNEYS[name]
    total = sum(steps for _, steps, _ in journey)
    (alone,) = leg(folder, tmp_path, "alone", batch, {}, 1, total)
    done = 0
    for world, steps, padding in journey:
        ranks = leg(folder, tmp_path, "moved", batch, parallel, world, steps)
        for rank in ranks:
            assert (rank["began"], rank["padding"]) == (done, padding)
            assert rank["losses"] == pytest.approx(alone["losses"][done : done + steps], abs=1e-5)
            # 8e-4 apart at step 16, in layouts in which the batch divides too
            assert rank["norms"] == pytest.approx(alone["norms"][done : done + steps], rel=1e-3)
            assert rank["tokens"] == alone["tokens"][done : done + steps]
            for mine, theirs in zip(rank["channels"], alone["channels"][done : done + steps], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
        for step in range(steps):
            ids = [number for rank in ranks for number in rank["ids"][step]]
            assert sorted(ids) == sorted(alone["ids"][done + step])  # each once: no padding, nothing left out
            assert len(ids) == batch
        done += steps
