"""Evaluation changes nothing, and `--check` tells a right layout from a wrong one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

from flashckpt.errors import LayoutError
from flashckpt.trainer import check as check_module
from flashckpt.trainer.check import check, compare_records
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.demo_report import compare_traces
from flashckpt.trainer.metrics import StepRecord, read_trace


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("evaluate")
    return folder, write_corpus(folder / "text")


def train(text: Any, name: Any, world: Any, parallel: Any, **sections: Any) -> Any:
    folder, source = text
    config = run_config(
        folder,
        model={"dropout": 0.1},
        parallel=parallel,
        data={"source": source, "holdout_every": 4},
        log={"folder": str(folder / name)},
        **sections,
    )
    assert values(run_ranks(run_rank, world, to_values(config), timeout_s=100)) == [0] * world
    return read_trace(folder / name / "trace.jsonl")


@pytest.mark.parametrize(("world", "parallel"), [(2, {"pp": 2}), (2, {})], ids=["pp2", "fsdp2"])
def test_evaluating_every_step_leaves_the_trace_as_it_is(text: Any, world: Any, parallel: Any) -> None:
    name = f"eval{len(parallel)}"
    plain = train(text, f"{name}-off", world, parallel)
    scored = train(text, f"{name}-on", world, parallel, eval={"every": 1, "batches": 1})
    assert compare_traces(plain, scored, 4).identical
    lines = [json.loads(line) for line in (text[0] / f"{name}-on" / "eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["held_out"].keys() == {"even", "odd"}
        for score in line["held_out"].values():
            assert 4.0 < score["loss"] < 6.0
            assert score["perplexity"] == pytest.approx(math.exp(score["loss"]), rel=1e-4)
            assert score["bits_per_byte"] == pytest.approx(score["loss"] / math.log(2), rel=1e-4)


def test_two_layouts_score_the_same(text: Any) -> None:
    first, second = ((text[0] / f"eval{i}-on" / "eval.jsonl").read_text().splitlines() for i in (1, 0))
    one, two = (json.loads(lines[0])["held_out"] for lines in (first, second))
    for channel in one:  # dropout differs between the layouts while training, by less than this after one step
        assert one[channel]["loss"] == pytest.approx(two[channel]["loss"], abs=5e-2)


def check_rank(_rank: Any, config_values: Any, wrong: Any) -> Any:
    if wrong:  # the reference has other weights than the layout: it runs, and is silently wrong
        alone = check_module.single_process
        check_module.single_process = lambda config: alone(replace(config, train=replace(config.train, seed=99)))
    try:
        result = check(from_values(config_values))
    except LayoutError as error:
        return f"refused: {error.problem}"
    return None if result is None else result.agrees


@pytest.mark.parametrize("wrong", [False, True])
def test_check_accepts_a_right_layout_and_refuses_a_wrong_one(text: Any, wrong: Any) -> None:
    folder, source = text
    config = run_config(folder, parallel={"pp": 2}, data={"source": source, "holdout_every": 4})
    first, second = values(run_ranks(check_rank, 2, to_values(config), wrong, timeout_s=100))
    assert second is None
    assert first is True if not wrong else first.startswith("refused: this layout does not train as one process does")


def test_a_loss_that_is_not_a_number_never_agrees() -> None:
    record: dict[str, Any] = {"norm": 1.0, "rate": 0.1, "tokens": 1, "samples": "", "seconds": 1.0, "step": 1}
    good, bad = StepRecord(loss=1.0, **record), StepRecord(loss=math.nan, **record)
    assert compare_records([good], [good], 1e-6).agrees
    assert not compare_records([bad], [good], 1e-6).agrees
