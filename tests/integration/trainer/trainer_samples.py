"""`make test-trainer`: samples in any layout say the same and change nothing; a job is asked while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks, values, wait_for
from support.training import run_config, run_rank, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.trainer.config import to_toml, to_values
from flashckpt.trainer.demo.report import compare_traces
from flashckpt.trainer.train.metrics import read_trace

PROMPTS = ["The ", "An expr", "é"]
SAMPLES: dict[str, Any] = {"every": 2, "prompts": PROMPTS, "max_tokens": 9, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("samples")
    return folder, write_corpus(folder / "text")


def train(text: Any, name: str, world: int, parallel: Any, **sections: Any) -> Any:
    folder, source = text
    config = run_config(
        folder,
        parallel=parallel,
        data={"source": source, "holdout_every": 4},
        log={"folder": str(folder / name)},
        **{"model": {"dropout": 0.0}, **sections},
    )
    assert values(run_ranks(run_rank, world, to_values(config), timeout_s=100)) == [0] * world
    return read_trace(folder / name / "trace.jsonl")


def said(text: Any, name: str) -> list[Any]:
    return [json.loads(line) for line in (text[0] / name / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(text: Any) -> list[Any]:
    train(text, "alone", 1, {}, samples=SAMPLES)
    return said(text, "alone")


def test_each_prompt_is_continued(alone: list[Any]) -> None:
    assert [line["step"] for line in alone] == [2, 4]
    for line in alone:
        assert [one["prompt"] for one in line["samples"]] == PROMPTS
        assert all(one["text"] for one in line["samples"])


LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2, loss parallel": (2, {"tp": 2, "loss_parallel": True}),
    "tp2, whole sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "pp2": (2, {"pp": 2}),
    "pp2, ZBVZeroBubble": (2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
    "ddp2": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}),
    "2x2x2": (8, {"pp": 2, "tp": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2 x pp2": (4, {"cp": 2, "pp": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_says_what_one_process_does_and_trains_as_without(text: Any, alone: Any, name: str) -> None:
    world, parallel = LAYOUTS[name]
    folder = name.replace(" ", "-")
    plain = train(text, f"{folder}-off", world, parallel)
    sampled = train(text, f"{folder}-on", world, parallel, samples=SAMPLES)
    assert compare_traces(plain, sampled, 4).identical
    assert said(text, f"{folder}-on") == alone


def test_drawn_samples_leave_random_states_and_dropout_alone(text: Any) -> None:
    drawn = {**SAMPLES, "temperature": 1.5, "top_p": 0.9, "seed": 5}
    for name, samples in (("drawn-off", {}), ("drawn-on", drawn), ("drawn-again", drawn)):
        train(text, name, 2, {"pp": 2}, model={"dropout": 0.1}, samples=samples)
    off, on = (read_trace(text[0] / name / "trace.jsonl") for name in ("drawn-off", "drawn-on"))
    assert compare_traces(off, on, 4).identical
    assert said(text, "drawn-on") == said(text, "drawn-again")


def test_experts_say_the_same_in_two_ranks(text: Any) -> None:
    for name, world in (("experts-1", 1), ("experts-2", 2)):
        train(text, name, world, {}, model={"experts": 4}, samples=SAMPLES)
    assert said(text, "experts-1") == said(text, "experts-2")


def ask_while_it_runs(job: Any, trace: Path) -> list[Any]:
    """Ask a job three times, or until it has ended and its memory with it; return the answers."""
    wait_for(lambda: len(read_trace(trace)) > 3, deadline_s=100, what="a few steps")
    answers: list[Any] = []
    while job.poll() is None and len(answers) < 3:
        command = [sys.executable, "-m", "flashckpt.trainer", "generate", "asked", "The ", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            answers.append(json.loads(done.stdout))
        else:
            assert job.wait(60) == 0, done.stderr
    return answers


@pytest.mark.timeout(300)  # two runs of 150 steps, and as many questions as fit beside the first
def test_a_job_is_asked_while_it_trains_and_trains_as_if_it_were_not(text: Any, tmp_path: Path) -> None:
    folder, source = text
    configs = {
        name: run_config(
            tmp_path,
            data={"source": source, "folder": str(folder / "tokens"), "holdout_every": 4},
            train={"steps": 150, "seq_len": 32},
            checkpoint={"root": str(tmp_path / name), "snapshot_every": 1, "persist_every": 40, "job": name},
            log={"folder": str(tmp_path / f"log-{name}")},
        )
        for name in ("asked", "alone")
    }
    answers: list[Any] = []
    for name, config in configs.items():
        (tmp_path / f"{name}.toml").write_text(to_toml(config))
        command = [sys.executable, "-m", "flashckpt.trainer", "--config", str(tmp_path / f"{name}.toml")]
        with subprocess.Popen(command) as job:
            if name == "asked":
                answers = ask_while_it_runs(job, tmp_path / "log-asked" / "trace.jsonl")
        assert job.returncode == 0
    assert answers, "the run ended before it was asked"
    assert all("in memory (job asked)" in one["source"] and one["tokens"] for one in answers)
    asked, alone = (read_trace(tmp_path / f"log-{name}" / "trace.jsonl") for name in ("asked", "alone"))
    assert compare_traces(alone, asked, 150).identical
