"""Every optimizer trains in every layout as in one process, and torch's own gives the same bits there."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus

from flashckpt.trainer.config import to_values
from flashckpt.trainer.train import loop  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s

STEPS = 4
BFLOAT16_INSIDE = 2e-4
"""Muon orthogonalises in bfloat16: a last bit of a gradient may move a rounding there."""
TOLERANCE = {"muon": BFLOAT16_INSIDE, "adafactor": 2e-6, "sgd": 2e-6, "adamw": 2e-6}
RATE = {"muon": 3e-3, "adafactor": 3e-2, "sgd": 1e-1, "adamw": 3e-3}
EXPERTS = {"experts": 4, "ffn": 32}
GROUPS = [{"match": "layers.1.*", "lr_mult": 0.5}, {"match": "*.weight", "lr_mult": 2.0, "weight_decay": 0.05}]
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2-tp2-sp": (4, {"tp": 2}, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}, {}),
    "ddp2": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, {}),
    "fsdp2-pp2-interleaved": (4, {"pp": 2, "schedule": "Interleaved1F1B"}, {}),
    "ep2-tp2": (4, {"tp": 2}, EXPERTS),
}
CASES = [(name, layout) for name in ("muon", "adafactor") for layout in LAYOUTS]
CASES += [("sgd", "fsdp2-tp2-sp"), ("sgd", "fsdp2-pp2-interleaved"), ("adamw", "fsdp2-tp2-sp")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("optimizers")
    return folder, write_corpus(folder / "text")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def train(corpus: Any) -> Any:
    cache: dict[str, Any] = {}

    def get(name: str, world: int, parallel: Any, model: Any) -> Any:
        key = str((name, world, parallel, model))
        if key not in cache:
            config = run_config(
                corpus[0],
                parallel=parallel,
                model={"layers": 2, **model} if parallel.get("schedule") is None else {"layers": 4, **model},
                train={"global_batch": 8, "micro_batch": 2},
                optim={"name": name, "lr": RATE[name], "groups": GROUPS},
                data={"source": corpus[1]},
            )
            cache[key] = values(run_ranks(train_rank, world, to_values(config), STEPS, timeout_s=100))
        return cache[key]

    return get


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_optimizer_trains_in_a_layout_as_in_one_process(name: str, layout: str, train: Any) -> None:
    world, parallel, model = LAYOUTS[layout]
    ranks = train(name, world, parallel, model)
    wanted = train(name, 1, {}, {**model, "layers": 4} if "schedule" in parallel else model)[0]
    assert floats(wanted["losses"])[-1] < floats(wanted["losses"])[0] - 0.02, "it trains"
    for rank in ranks:
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"])
    assert floats(ranks[0]["losses"]) == pytest.approx(floats(wanted["losses"]), abs=TOLERANCE[name])
    assert floats(ranks[0]["norms"]) == pytest.approx(floats(wanted["norms"]), abs=20 * TOLERANCE[name])
