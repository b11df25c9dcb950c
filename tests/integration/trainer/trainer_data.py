"""Whole runs over `[[data.sources]]`: prepared, killed and continued, refused when the data is another, ended by a read."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.trainer.trainer_resume import KILL_AT, SMALL, STEPS, Job, check_same
from support import warm
from support.ranks import run_ranks
from support.training import run_rank, write_corpus

from flashckpt.trainer.config import from_values, to_toml
from flashckpt.trainer.prepare.shards import prepare


def sources(folder: Path) -> dict[str, Any]:
    """Return the `[data]` of two sources of text."""
    two = [
        {"kind": "text", "urls": [f"{folder}/text/{name}/*.txt"], "channel": name, "weight": weight}
        for name, weight in (("a", 3), ("b", 1))
    ]
    return {"source": ["stdlib"], "folder": str(folder / "prepared"), "sources": two, "holdout_every": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    write_corpus(folder / "text")
    return folder


@pytest.fixture(scope="module")
def prepared(folder: Path) -> dict[str, Any]:
    data = sources(folder)
    prepare(from_values({"data": data}).data)
    return data


@pytest.fixture(scope="module")
def unbroken(folder: Path, prepared: dict[str, Any]) -> Any:
    return Job((folder, []), *SMALL, data=prepared).train("unbroken", data=prepared)


def test_a_killed_run_reads_on_where_it_was_in_its_layout_and_in_another(
    folder: Path, prepared: dict[str, Any], unbroken: Any
) -> None:
    job = Job((folder, []), *SMALL)
    job.kill("same", 0, data=prepared)
    check_same(unbroken, job.train("same", data=prepared))
    job.kill("other", 3, data=prepared)
    other = Job((folder, []), 2, {"dp_shard": 2}).train("other", data={**prepared, "read_ahead": 0})
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in other] == [line["samples"] for line in unbroken]


def command(folder: Path, name: str, *words: str, data: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the trainer's command on a small run in one process."""
    values = Job((folder, []), 1, {}).values(name, data=data, checkpoint={"snapshot_every": 2}, **more)
    (folder / f"{name}.toml").write_text(to_toml(from_values(values)))
    where = words if "prepare" in words else ()
    options = () if where else words
    return warm.run(["-m", "flashckpt.trainer", *where, "--config", str(folder / f"{name}.toml"), *options], folder)


def refused(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(re.findall(r"^\w+Error: ", done.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in done.stderr


def test_a_vocabulary_below_that_of_bytes_is_trained_and_scored_on_tokens_and_refused_on_bytes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    np.tile(np.arange(20), 500).astype("<u2").tofile(tmp_path / "t.bin")
    tokens = {"source": ["stdlib"], "sources": [{"kind": "tokens", "urls": [str(tmp_path / "t.bin")]}]}
    few = {"model": {"vocab": 20}, "eval": {"every": 4, "batches": 1}}
    done = command(tmp_path, "tokens", data=tokens, **few)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "tokens/trace.jsonl").read_text().splitlines()) == STEPS
    refused(command(tmp_path, "bytes", data={"source": [f"{tmp_path}/text/*/*.txt"]}, **few), 10, "256 or more")
    refused(command(tmp_path, "fewer", data=tokens, model={"vocab": 19}), 10, "0 to 18 (model.vocab)")


def test_prepare_train_change_and_be_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    data = sources(tmp_path)
    refused(command(tmp_path, "run", data=data), 12, "no prepared data")
    done = command(tmp_path, "run", "data", "prepare", data=data)
    assert done.returncode == 0, done.stderr
    assert "of a vocabulary of 256" in done.stdout
    first = command(tmp_path, "run", data=data, eval={"every": STEPS, "batches": 1})
    assert first.returncode == 0, first.stderr
    scores = json.loads((tmp_path / "run" / "eval.jsonl").read_text())["held_out"]
    assert scores.keys() == {"a", "b"}
    assert all(4.0 < one["loss"] < 6.0 < one["bits_per_byte"] for one in scores.values())
    with next((tmp_path / "text" / "a").iterdir()).open("a") as file:
        file.write("one more sentence")
    again = command(tmp_path, "run", "data", "prepare", data=data)
    assert again.returncode == 0, again.stderr
    assert "(1 reused)" in again.stderr
    refused(command(tmp_path, "run", "--train.steps", "12", data=data), 12, "its data is not that of the checkpoint")


def test_a_layout_with_documents_checks_itself(folder: Path, prepared: dict[str, Any]) -> None:
    done = command(folder, "check", "--check", data=prepared)
    assert done.returncode == 0, done.stderr
    assert "this layout trains as one process does" in done.stdout


def test_an_error_of_the_reading_thread_ends_the_run_with_one_message(tmp_path: Path) -> None:
    tokens = np.arange(4000) % 250
    tokens[2000] = 999
    tokens.astype("<u2").tofile(tmp_path / "flat.bin")
    data = {"source": ["stdlib"], "sources": [{"kind": "tokens", "urls": [str(tmp_path / "flat.bin")]}]}
    refused(command(tmp_path, "run", "--train.steps", "40", data=data), 10, "a token is outside the vocabulary")


def test_ranks_that_read_ahead_die_by_their_signal(folder: Path, prepared: dict[str, Any]) -> None:
    """The other ranks end too, with their threads: nothing waits for a batch that nobody takes."""
    values = Job((folder, []), *SMALL).values("killed", data={**prepared, "read_ahead": 8})
    results = run_ranks(run_rank, SMALL[0], values, {"rank": 1, "step": KILL_AT}, "", timeout_s=100)
    assert results[1].signal == signal.SIGKILL
