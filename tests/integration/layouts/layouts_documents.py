"""A mixture of sources with a mask of documents trains and scores in every layout as in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.documents import documents_run, write_documents
from support.ranks import run_ranks, values
from support.training import floats, train_rank

from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE
from flashckpt.trainer.train import loop

STEPS = 3
DDP = {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "ddp2": (2, DDP),
    "tp2, loss parallel": (2, {"tp": 2, "loss_parallel": True}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 x pp2, loss parallel": (4, {"tp": 2, "pp": 2, "loss_parallel": True}),
    "ddp2 x pp2, interleaved": (4, {**DDP, "pp": 2, "schedule": "Interleaved1F1B"}),
    "fsdp2 x pp2, recomputed": (4, {"pp": 2, "activation_checkpoint": "full"}),
    **{schedule: (2, {"pp": 2, "schedule": schedule}) for schedule in (*SINGLE_STAGE, *MULTI_STAGE)},
    "cp4": (4, {"cp": 4}),
    "ring of 4": (4, {"cp": 4, "cp_exchange": "ring"}),
    "cp2 x ddp2": (4, {**DDP, "cp": 2}),
    "cp2 x tp2 x pp2": (8, {"cp": 2, "tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Any) -> Any:
    return values(run_ranks(train_rank, 1, to_values(documents_run(folder, {})), STEPS, timeout_s=100))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_are_masked_alike_in_every_layout(name: str, folder: Any, alone: Any) -> None:
    world, parallel = LAYOUTS[name]
    ranks = values(run_ranks(train_rank, world, to_values(documents_run(folder, parallel)), STEPS, timeout_s=100))
    (reporter,) = (rank for rank in ranks if rank["reporter"])
    assert reporter["samples"] == alone["samples"]
    assert floats(reporter["losses"]) == pytest.approx(floats(alone["losses"]), abs=2e-6)
    assert floats(reporter["norms"]) == pytest.approx(floats(alone["norms"]), abs=2e-6)
    for mine, theirs in zip(reporter["channels"], alone["channels"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-6)


def test_the_mask_is_what_makes_the_losses(folder: Any, alone: Any) -> None:
    config = documents_run(folder, {}, document_mask=False)
    (without,) = values(run_ranks(train_rank, 1, to_values(config), STEPS, timeout_s=100))
    assert without["samples"] == alone["samples"]
    assert floats(without["losses"]) != pytest.approx(floats(alone["losses"]), abs=1e-3)


def score_rank(_rank: int, config_values: Any) -> Any:
    """Return the held-out losses before and after a step."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        evaluator = Evaluator(config, trainer.parallel)
        losses = [score.loss for score in evaluator.scores().held_out.values()]
        trainer.one_step()
        return losses + [score.loss for score in evaluator.scores().held_out.values()]


@pytest.mark.parametrize(
    "name", ["ddp2", "tp2 x pp2, loss parallel", "ZBVZeroBubble", "DualPipeV", "cp4", "cp2 x tp2 x pp2"]
)
def test_held_out_documents_score_alike_in_every_layout(name: str, folder: Any) -> None:
    world, parallel = LAYOUTS[name]
    (wanted,) = values(run_ranks(score_rank, 1, to_values(documents_run(folder, {})), timeout_s=100))
    assert len(wanted) == 4
    for rank in values(run_ranks(score_rank, world, to_values(documents_run(folder, parallel)), timeout_s=100)):
        assert rank == pytest.approx(wanted, abs=2e-6)
