"""Losses of the routers train every layout as they train one process: loads are those of all data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus

from flashckpt.trainer.config import to_values
from flashckpt.trainer.train import loop  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s

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
