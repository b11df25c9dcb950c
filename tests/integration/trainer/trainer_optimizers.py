"""Runs with each optimizer and an average of the weights are killed and continue: same bits, and in another layout to rounding."""

from __future__ import annotations

import math
import shutil
import signal
from typing import Any

import pytest
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.errors import ConfigError
from flashckpt.interop import safetensors_files as st
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.demo.report import compare_traces, read_restores
from flashckpt.trainer.evaluate.command import evaluate
from flashckpt.trainer.hub.transfer import export_folder
from flashckpt.trainer.train import loop  # noqa: F401 -- the same
from flashckpt.trainer.train.metrics import read_trace

STEPS, KILL_AT, SNAPSHOT = 8, 6, 4
FIRST = {"pp": 2, "dp_shard": 2}
RATE = {"muon": 3e-3, "adafactor": 3e-2, "sgd": 1e-1}
TO_ROUNDING = {"muon": 2e-4, "adafactor": 1e-5, "sgd": 1e-5}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("optimizers")
    return folder, write_corpus(folder / "text")


def config_of(text: Any, run: str, name: str, parallel: Any, **more: Any) -> RunConfig:
    checkpoint = {"root": str(text[0] / run / "root"), "job": f"test-{run}", "snapshot_every": 4, "persist_every": 4}
    return run_config(
        text[0],
        parallel=parallel,
        model={"layers": 2},
        train={"steps": STEPS, "global_batch": 8},
        optim={"name": name, "lr": RATE[name]},
        ema={"decay": 0.9, "every": 3, "evaluate": True},
        eval={"every": 8, "batches": 1},
        data={"source": text[1]},
        checkpoint=checkpoint,
        log={"folder": str(text[0] / run)},
        **more,
    )


def train(text: Any, run: str, name: str, world: int = 4, parallel: Any = FIRST, **more: Any) -> Any:
    config = to_values(config_of(text, run, name, parallel, **more))
    assert values(run_ranks(run_rank, world, config, timeout_s=150)) == [0] * world
    return read_trace(text[0] / run / "trace.jsonl")


def kill(text: Any, run: str, name: str) -> None:
    config = to_values(config_of(text, run, name, FIRST))
    results = run_ranks(run_rank, 4, config, {"rank": 1, "step": KILL_AT}, timeout_s=150)
    assert results[1].signal == signal.SIGKILL


def exported(text: Any, run: str, *, average: bool) -> dict[str, bytes]:
    folder = text[0] / run / f"folder{average}"
    export_folder(str(text[0] / run / "root"), folder, average=average)
    return {one.name: bytes(one.read(0, 4 * math.prod(one.shape))) for one in st.read_folder(folder)}


@pytest.mark.parametrize("name", ["muon", "adafactor", "sgd"])
def test_a_killed_run_continues_with_the_same_bits_and_elsewhere_to_rounding(name: str, text: Any) -> None:
    whole, killed, moved = f"whole-{name}", f"killed-{name}", f"moved-{name}"
    unbroken = train(text, whole, name)
    kill(text, killed, name)
    result = compare_traces(unbroken, train(text, killed, name), STEPS)
    assert result.identical, result.first
    assert [restored.step for restored in read_restores(text[0] / killed)] == [SNAPSHOT]
    weights, average = (exported(text, killed, average=kind) for kind in (False, True))
    assert weights == exported(text, whole, average=False)
    assert average == exported(text, whole, average=True), "the average came back to the bit as well"
    assert weights.keys() == average.keys()
    assert weights != average
    assert (text[0] / whole / "eval.jsonl").read_text() == (text[0] / killed / "eval.jsonl").read_text()

    kill(text, moved, name)
    losses = [float.fromhex(line["loss"]) for line in train(text, moved, name, world=2, parallel={"tp": 2})]
    assert losses == pytest.approx([float.fromhex(line["loss"]) for line in unbroken], abs=TO_ROUNDING[name])
    assert [restored.step for restored in read_restores(text[0] / moved)] == [SNAPSHOT]
    shutil.rmtree(text[0] / moved)


def test_evaluation_uses_the_average_where_that_is_asked(text: Any) -> None:
    train(text, "scored", "sgd", world=1, parallel={})
    line = (text[0] / "scored" / "eval.jsonl").read_text()
    config = to_values(config_of(text, "scored", "sgd", {}))
    found = {}
    for use in (True, False):
        scores, _ = evaluate(from_values({**config, "ema": {**config["ema"], "evaluate": use}}))
        found[use] = scores.held_out["even"].loss
    assert found[True] != found[False]
    assert repr(found[True])[:8] in line, "the run itself scored its average"
    assert repr(found[False])[:8] not in line


def test_another_optimizer_cannot_take_the_state(text: Any) -> None:
    train(text, "other", "sgd", world=1, parallel={})
    config = config_of(text, "other", "adafactor", {})
    (result,) = run_ranks(run_rank, 1, to_values(config), timeout_s=60)
    assert ConfigError.__name__ in result.error
    assert "optim.name changed since the checkpoint" in result.error
