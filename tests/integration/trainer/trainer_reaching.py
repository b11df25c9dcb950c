"""Whole runs under dlrun whose data is on a server that is away: for a while, and for good."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.trainer.trainer_resume import STEPS, Job
from support.dlrun import dlrun
from support.http_server import Server

from flashckpt.trainer.config import from_values, to_toml
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.prepare.vocabulary import train_bpe
from flashckpt.trainer.train.metrics import read_trace

IMPATIENT = """
import sys
from flashckpt.sampler.datasets import reaching
from flashckpt.trainer.__main__ import main

reaching.PATIENCE_S = float(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    np.random.default_rng(5).integers(0, 250, 20_000_000).astype("<u2").tofile(tmp_path / "t.bin")
    (tmp_path / "wrapped.py").write_text(IMPATIENT)
    served = Server(tmp_path)
    yield served
    served.close()


def written(folder: Path, name: str, url: str) -> Path:
    """Write the configuration of a run on two ranks, every batch of which needs other blocks of the data."""
    data = {"source": ["stdlib"], "sources": [{"kind": "tokens", "urls": [f"{url}/t.bin"]}], "read_ahead": 1}
    values: Any = Job((folder, []), 2, {}).values(
        name, data=data, checkpoint={"snapshot_every": 2, "job": f"test-reach-{name}"}
    )
    path = folder / f"{name}.toml"
    path.write_text(to_toml(from_values(values)))
    return path


@pytest.mark.timeout(400)
def test_a_run_waits_for_its_data_with_the_same_samples_and_a_restart_is_left_if_it_stays_away(
    tmp_path: Path, server: Server
) -> None:
    def start(name: str, patience_s: float, *options: str) -> Any:
        words = ("--nproc-per-node", 2, *options, tmp_path / "wrapped.py", patience_s)
        return dlrun(tmp_path, *words, "--config", written(tmp_path, name, server.url))

    with start("plain", 0.0) as launch:
        assert launch.wait() == 0, launch.output
    plain = read_trace(tmp_path / "plain" / "trace.jsonl")
    assert len(plain) == STEPS

    server.away_after = server.asked + 35
    with start("blip", 300.0, "--hang-timeout", "1") as launch:
        launch.until(lambda: launch.output.count("trying again in") >= 4, "a few tries")
        server.away_after, server.away = 0, ""
        assert launch.wait() == 0, launch.output
        assert "hang" not in launch.output.lower()
    trace = read_trace(tmp_path / "blip" / "trace.jsonl")
    assert [(line["samples"], line["loss"]) for line in trace] == [(line["samples"], line["loss"]) for line in plain]

    server.away_after = server.asked + 35
    with start("gone", 1.0, "--max-restarts", "1") as launch:
        code = launch.wait()
        assert "cannot be reached" in launch.output
        assert "is permanent" not in launch.output
        assert code not in (0, 12), launch.output


PROBE = {"prompt": "q", "choices": [" a", " b"], "answer": 0}


def beside(server: Server, what: str) -> dict[str, Any]:
    """Return the settings of a run that reads a tokenizer or a probe from the server at its start."""
    folder = server.folder
    (folder / "text").mkdir()
    texts = [f"text {number} " + "lorem ipsum " * 20 for number in range(40)]
    (folder / "text/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data: dict[str, Any] = {
        "source": ["stdlib"], "folder": str(folder / "prepared"),
        "sources": [{"kind": "jsonl", "urls": [f"{folder}/text/a.jsonl"]}],
    }  # fmt: skip
    more: dict[str, Any] = {"data": data}
    (folder / "t.json").write_text(json.dumps(PROBE) + "\n")
    if what == "tokenizer":
        pytest.importorskip("tokenizers")
        (folder / "t.json").write_bytes(train_bpe(texts, 260))
        data["tokenizer"], more["model"] = f"{server.url}/t.json", {"vocab": 260}
    else:
        more["eval"] = {
            "every": 5,
            "batches": 1,
            "held_out": False,
            "probes": [{"name": "p", "url": f"{server.url}/t.json"}],
        }
    prepare(from_values({"data": data, "model": more.get("model", {})}).data)
    return more


@pytest.mark.timeout(400)
@pytest.mark.parametrize("what", ["tokenizer", "probe"])
def test_a_tokenizer_or_probe_that_is_away_is_waited_for_and_a_wrong_one_ends_the_job_at_once(
    what: str, tmp_path: Path, server: Server
) -> None:
    more = beside(server, what)

    def start(name: str) -> Any:
        values = Job((tmp_path, []), 2, {}).values(name, checkpoint={"job": f"test-beside-{what}-{name}"}, **more)
        path = tmp_path / f"{name}.toml"
        path.write_text(to_toml(from_values(values)))
        return dlrun(
            tmp_path, "--nproc-per-node", 2, "--max-restarts", 5, tmp_path / "wrapped.py", 300.0, "--config", path
        )

    server.away = "503"
    with start("away") as launch:
        launch.until(lambda: "trying again in" in launch.output, "a try")
        server.away = ""
        assert launch.wait() == 0, launch.output
    assert len(read_trace(tmp_path / "away" / "trace.jsonl")) == STEPS
    with (tmp_path / "t.json").open("a") as file:
        file.write("\n[]\n")
    with start("wrong") as launch:
        assert launch.wait() == 12, launch.output
        assert "is permanent" in launch.output
        assert launch.output.count("failed first") == 1
