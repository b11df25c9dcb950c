"""Evaluation changes nothing, and `--check` tells a right layout from a wrong one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import Any

import pytest
from support.evaluation import write_evaluation
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.demo.report import compare_traces
from flashckpt.trainer.evaluate import check as check_module
from flashckpt.trainer.evaluate.check import check, compare_records
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE
from flashckpt.trainer.scored.sets import prepare_sets
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.metrics import StepRecord, read_trace


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


SPLIT = {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2}


def evaluated(text: Any, parallel: Any) -> Any:
    """Return the trace of two ranks that evaluate after every step, and the lines of their scores; trained once per module."""
    folder, source = text
    name, evaluation = f"eval{len(parallel)}-on", write_evaluation(folder / "evaluation")
    if (folder / name).exists():
        trace = read_trace(folder / name / "trace.jsonl")
    else:
        prepare_sets(run_config(folder, data={"source": source, "holdout_every": 4}, eval=evaluation))
        trace = train(text, name, 2, parallel, eval=evaluation)
    return trace, [json.loads(line) for line in (folder / name / "eval.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parallel", [{"pp": 2}, {}, SPLIT], ids=["pp2", "fsdp2", "zbv"])
def test_evaluating_every_step_leaves_the_trace_as_it_is(text: Any, parallel: Any) -> None:
    plain = train(text, f"eval{len(parallel)}-off", 2, parallel)
    scored, lines = evaluated(text, parallel)
    assert compare_traces(plain, scored, 4).identical
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["held_out"].keys() == {"even", "odd"}
        for score in line["held_out"].values():
            assert 4.0 < score["loss"] < 6.0
            assert score["perplexity"] == pytest.approx(math.exp(score["loss"]), rel=1e-4)
            assert score["bits_per_byte"] == pytest.approx(score["loss"] / math.log(2), rel=0.01)  # bytes, but for ends
        assert line["sets"].keys() == {"stories", "flat"}
        assert line["sets"]["flat"]["bits_per_byte"] is None
        assert line["probes"].keys() == {"probability", "pairs", "choice", "one text"}
        assert line["probes"]["choice"]["questions"] == 5


def test_two_layouts_score_the_same(text: Any) -> None:
    one, two = (evaluated(text, parallel)[1][0]["held_out"] for parallel in ({"pp": 2}, {}))
    for channel in one:  # dropout differs between the layouts while training, by less than this after one step
        assert one[channel]["loss"] == pytest.approx(two[channel]["loss"], abs=5e-2)


PIPELINES = {
    **{schedule: (2, {"pp": 2, "schedule": schedule}) for schedule in (*SINGLE_STAGE, *MULTI_STAGE)},
    "fsdp2 x DualPipeV": (4, {"pp": 2, "schedule": "DualPipeV"}),
    "tp2 x ZBVZeroBubble, loss parallel": (4, {"tp": 2, "pp": 2, "loss_parallel": True, "schedule": "ZBVZeroBubble"}),
    "ddp2 x 1F1B": (4, {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp"}),
}


def evaluate_rank(_rank: int, config_values: Any) -> Any:
    """Evaluate before, between and after two steps: the losses of each, and of the steps."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        evaluator, losses = Evaluator(config, trainer.parallel), []
        for number in range(3):
            losses += [score.loss for score in evaluator.scores().held_out.values()]
            losses += [trainer.one_step().loss] if number < 2 else []
        return losses


def evaluate_in(text: Any, world: int, parallel: Any, precision: str = "float32") -> Any:
    folder, source = text
    data = {"source": source, "holdout_every": 4}
    train = {"precision": precision}
    config = run_config(folder, parallel=parallel, train=train, data=data, eval={"every": 1, "batches": 2})
    ranks = values(run_ranks(evaluate_rank, world, to_values(config), timeout_s=100))
    assert all(rank == ranks[0] for rank in ranks)  # to the bit
    return ranks[0]


@pytest.fixture(scope="module")
def evaluated_alone(text: Any) -> Any:
    return evaluate_in(text, 1, {})


@pytest.mark.parametrize("name", PIPELINES)
def test_every_schedule_scores_as_one_process_does(name: str, text: Any, evaluated_alone: Any) -> None:
    assert evaluate_in(text, *PIPELINES[name]) == pytest.approx(evaluated_alone, abs=2e-6)


@pytest.mark.parametrize("data_parallel", ["fsdp", "ddp"])
def test_a_pipeline_scores_in_bfloat16(data_parallel: str, text: Any) -> None:
    """What stages hand on is of another type under each of the two."""
    parallel = {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": data_parallel}
    alone = evaluate_in(text, 1, {}, "bfloat16")
    assert evaluate_in(text, 4, parallel, "bfloat16") == pytest.approx(alone, abs=1e-3)


def check_rank(_rank: Any, config_values: Any, wrong: Any) -> Any:
    if wrong:  # the reference has other weights than the layout: it runs, and is silently wrong
        alone = check_module.single_process
        check_module.single_process = lambda config: alone(replace(config, train=replace(config.train, seed=99)))
    try:
        result = check(from_values(config_values))
    except LayoutError as error:
        return f"refused: {error.problem}"
    return None if result is None else result.agrees


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"tp": 2, "loss_parallel": True}),
        (2, {"pp": 2, "schedule": "DualPipeV", "stages_per_rank": 2}),
        (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}),
    ],
    ids=["tp2", "dualpipev", "ddp2"],
)
def test_check_takes_what_has_no_effect_in_one_process_out_of_the_reference(
    text: Any, world: Any, parallel: Any
) -> None:
    wrong = False
    folder, source = text
    data = {"source": source, "holdout_every": 4}
    config = run_config(folder, parallel=parallel, train={"precision": "bfloat16"}, data=data)
    assert values(run_ranks(check_rank, world, to_values(config), wrong, timeout_s=100)) == [True, None]


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
