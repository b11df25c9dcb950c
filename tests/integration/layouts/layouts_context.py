"""Context parallelism: each rank holds a part of every row, and trains and scores as one process with whole rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.documents import documents_run, write_documents
from support.ranks import run_ranks, values
from support.training import floats, run_config, run_rank, train_rank, write_corpus

import flashckpt.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train import loop

STEPS = 3
DDP = {"data_parallel": "ddp", "dp_shard": 1}
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
}
BATCH = {"global_batch": 8, "micro_batch": 2}
WINDOW = {"window": 5, "window_from": 1}


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
