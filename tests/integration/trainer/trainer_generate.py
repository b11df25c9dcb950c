"""`make test-trainer`: `generate` from a root of any layout, from the memory of a job, and from a run with a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.dcp import direct_writer
from flashckpt.errors import ConfigError, DamagedError, NoCheckpointError, ShardGapError
from flashckpt.restore.sources import MemorySource
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.__main__ import main
from flashckpt.trainer.config import from_values, to_toml, to_values
from flashckpt.trainer.generate.prompts import read_prompts
from flashckpt.trainer.hub.memory import LiveWeights
from flashckpt.trainer.hub.source import CheckpointWeights
from flashckpt.trainer.prepare.shards import prepare


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()


def asked(capsys: Any, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def train_and_stay(rank: int, config_values: Any, steps: int, waits: int) -> Any:
    """Train with a snapshot after each step; end as if killed: what lies in memory stays there."""
    from flashckpt.trainer.parallel.distributed import process_group
    from flashckpt.trainer.train.loop import Trainer, prepare

    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer._restore()
        for _ in range(steps):
            trainer.one_step()
        assert trainer.ckpt is not None
        assert trainer.ckpt._session is not None
        if waits:
            trainer.ckpt.wait(100)
        trainer.ckpt._session._stager.finish()
        return rank


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Path:
    """Train 2 x 2 x 2 for two steps; the second is in memory and on storage."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "memory").mkdir()
    config = run_config(
        folder,
        parallel={"pp": 2, "tp": 2},
        train={"seq_len": 32},
        data={"source": write_corpus(folder / "text")},
        checkpoint={"root": str(folder / "root"), "snapshot_every": 1, "persist_every": 2, "job": "talks"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHCKPT_SHM_DIR", str(folder / "memory"))
        assert values(run_ranks(train_and_stay, 8, to_values(config), 2, 1, timeout_s=100)) == list(range(8))
    return Path(folder)


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(trained / "memory"))
    return trained


def test_a_root_of_any_layout_and_the_memory_of_a_job_are_asked(run: Path, capsys: Any) -> None:
    root = str(run / "root")
    words = ("The ", "--max-tokens", "9", "--seed", "4")
    found = asked(capsys, root, *words)
    assert len(found["tokens"]) == 9
    assert (found["prompt_tokens"], found["stopped"]) == (list(b"The "), "length")
    assert asked(capsys, root, *words) == found
    assert asked(capsys, root, *words, "--step", "2") == found
    assert asked(capsys, "file://" + root, *words)["tokens"] == found["tokens"]
    assert asked(capsys, root, *words[:-1], "5")["tokens"] != found["tokens"]
    live = asked(capsys, "talks", *words)
    assert "step 2 in memory (job talks)" in live["source"]
    assert live["tokens"] == found["tokens"]
    assert asked(capsys, root, *words, "--live") == live
    assert asked(capsys, root, "x" * 30, "--temperature", "0")["stopped"] == "context"
    capsys.readouterr()
    assert main(["generate", root, *words]) == 0
    assert capsys.readouterr().out == "The " + found["text"] + "\n"
    one, other = CheckpointWeights(root), LiveWeights("talks")
    for name, shape in one.shapes.items():
        assert (
            one.read(name, (0,) * len(shape), shape).tobytes() == other.read(name, (0,) * len(shape), shape).tobytes()
        )
    pinned = JobDirectory.open("talks", create=False)
    assert scan(pinned).complete()
    for weights in (one, other):
        weights.close()
    assert main(["generate", "talks", "x", "--step", "1"]) in (0, NoCheckpointError.exit_code)
    assert main(["generate", "talks", "x", "--step", "7"]) == NoCheckpointError.exit_code
    assert "holds no complete snapshot in memory of step 7" in capsys.readouterr().err


def test_a_node_without_a_stage_says_so(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    segments = JobDirectory.segments
    monkeypatch.setattr(
        JobDirectory, "segments", lambda directory: segments(directory)[:4]
    )  # the other stage is elsewhere
    assert main(["generate", "talks", "x"]) == ShardGapError.exit_code
    assert "this node holds only a part of the model: step 2 in memory (job talks)" in capsys.readouterr().err


def test_half_of_each_tensor_is_a_part_of_the_model(tmp_path: Path, capsys: Any) -> None:
    source = write_corpus(tmp_path / "text")
    config = run_config(
        tmp_path,
        data={"source": source},
        checkpoint={"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 100, "job": "half"},
    )
    values(run_ranks(train_and_stay, 2, to_values(config), 1, 0, timeout_s=100))
    directory = JobDirectory.open("half", create=False)
    assert asked(capsys, "half", "x", "--max-tokens", "2")["tokens"]
    directory.segments()[1].unlink()
    assert main(["generate", "half", "x"]) == ShardGapError.exit_code
    assert "this node holds only a part of the model: step 1 in memory (job half)" in capsys.readouterr().err


def test_the_average_of_the_weights_is_asked_where_a_run_keeps_one(tmp_path: Path, capsys: Any) -> None:
    config = run_config(
        tmp_path,
        data={"source": write_corpus(tmp_path / "text")},
        optim={"lr": 0.1, "warmup_steps": 0},
        ema={"decay": 0.7},
        checkpoint={"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 4, "job": "averaged"},
    )
    values(run_ranks(train_and_stay, 2, to_values(config), 4, 1, timeout_s=100))
    root, words = str(tmp_path / "root"), ("The ", "--max-tokens", "9", "--seed", "4")
    found = asked(capsys, root, *words, "--ema")
    assert found["tokens"] != asked(capsys, root, *words)["tokens"]
    assert asked(capsys, "averaged", *words, "--ema")["tokens"] == found["tokens"]
    assert main(["hub", "export", root, str(tmp_path / "hub"), "--ema"]) == 0
    assert asked(capsys, str(tmp_path / "hub"), *words)["tokens"] == found["tokens"]
    assert main(["generate", str(tmp_path / "hub"), "x", "--ema"]) == ConfigError.exit_code
    assert "a Hugging Face folder" in capsys.readouterr().err


def test_a_run_without_an_average_refuses_to_be_asked_for_it(run: Path, capsys: Any) -> None:
    for where in (str(run / "root"), "talks"):
        assert main(["generate", where, "x", "--ema"]) == ConfigError.exit_code
        assert "holds no average of the weights" in capsys.readouterr().err


def test_a_slot_that_is_overwritten_meanwhile_is_looked_for_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from flashckpt.trainer.hub import memory

    tries: list[int] = []
    pinning = MemorySource

    def late(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) in (3, 9):
            raise DamagedError("it was overwritten", found="")
        return pinning(*args, **options)

    monkeypatch.setattr(memory, "MemorySource", late)
    assert asked(capsys, "talks", "x", "--max-tokens", "1")
    assert len(tries) == 3 + 6 + 8  # twice one slot was gone, then all eight were there
    monkeypatch.setattr(memory, "MemorySource", lambda *_, **__: (_ for _ in ()).throw(DamagedError("gone", found="")))
    assert main(["generate", "talks", "x"]) == NoCheckpointError.exit_code
    assert "overwritten faster than they can be pinned" in capsys.readouterr().err


def test_a_bpe_run_samples_is_asked_and_exported(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tokenizers", reason="`make setup` installs it")
    write_corpus(tmp_path / "text")
    config = run_config(
        tmp_path,
        model={"vocab": 300},
        train={"steps": 2},
        data={
            "source": ["stdlib"],
            "bpe": 300,
            "sources": [{"kind": "text", "urls": [f"{tmp_path}/text/*/*.txt"], "channel": "text"}],
        },
        checkpoint={"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 2, "job": "bpe"},
        samples={"every": 1, "prompts": ["The value"], "max_tokens": 4},
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    prepare(config.data)
    codec, prompts = read_prompts(config)
    assert len(prompts[0]) < len("The value")
    command = [sys.executable, "-m", "flashckpt.trainer", "--config", str(tmp_path / "run.toml")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (tmp_path / "log" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"][0]["prompt"]) for line in lines] == [(1, "The value"), (2, "The value")]
    greedy = ["--temperature", "0", "--max-tokens", "4", "--json"]
    assert main(["generate", str(tmp_path / "root"), "The value", *greedy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == prompts[0]
    assert found["text"] == lines[1]["samples"][0]["text"]
    assert main(["hub", "export", str(tmp_path / "root"), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "hf"), "The value", *greedy]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == found["tokens"]
    assert codec.ends
