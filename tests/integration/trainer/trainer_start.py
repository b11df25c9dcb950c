"""What a run says and checks at its start: its layout, that it makes no checkpoints, a rate that jumps, its root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from support.paths import ROOT
from support.ranks import run_ranks, values
from support.s3 import Server, s3_server
from support.training import run_config, write_corpus

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.errors import ConfigError, RootError
from flashckpt.storage.factory import open_store
from flashckpt.trainer.config import from_values, read_config, to_toml
from flashckpt.trainer.parallel.distributed import check_root, is_first_start, process_group
from flashckpt.trainer.train.starting import recorded_config

CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("start")
    return folder, write_corpus(folder / "text")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


def train(corpus: Any, name: str, *words: str, env: Any = None, **sections: Any) -> subprocess.CompletedProcess[str]:
    folder, source = corpus
    sections = {"data": {"source": source}, "log": {"folder": str(folder / name), "every": 1000}, **sections}
    (folder / f"{name}.toml").write_text(to_toml(run_config(folder, **sections)))
    return warm.run(["-m", "flashckpt.trainer", "--config", str(folder / f"{name}.toml"), *words], folder, env=env)


def test_a_run_without_a_root_says_that_it_makes_no_checkpoints_and_what_its_layout_is(corpus: Any) -> None:
    done = train(corpus, "bare")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no checkpoints are made: checkpoint.root is empty") == 1
    assert done.stderr.count("DP 1 x TP 1 x PP 1, 8 micro-batches; float32 on cpu, fsdp") == 1


def test_a_longer_cosine_run_warns_that_the_rate_jumps_and_an_ended_one_says_so(corpus: Any) -> None:
    checkpoint = {"root": str(corpus[0] / "longer-root"), "job": "test-longer", "snapshot_every": 2}
    first = train(corpus, "longer", checkpoint=checkpoint)
    assert first.returncode == 0, first.stderr
    assert "no checkpoints are made" not in first.stderr
    assert "jumps" not in first.stderr
    again = train(corpus, "longer", checkpoint=checkpoint)
    assert "step 4 of 4 is already trained: nothing to do" in again.stderr
    longer = train(corpus, "longer", "--train.steps", "8", checkpoint=checkpoint)
    assert longer.returncode == 0, longer.stderr
    assert "the learning rate jumps at the restored step 4: 3.000e-04 under the recorded schedule" in longer.stderr
    assert "set optim.decay_steps = 2" in longer.stderr
    assert longer.stderr.count("jumps") == 1


def test_every_shipped_run_but_the_demos_makes_checkpoints_under_out() -> None:
    roots = {path.stem: read_config(path).checkpoint.root for path in CONFIGS.glob("*.toml")}
    assert roots.pop("demo") == ""  # the demo makes three runs and gives each its own
    assert roots
    assert all(root.startswith("out/") for root in roots.values()), roots


def test_a_run_on_another_endpoint_than_amazons_is_checked_checkpointed_and_resumed(
    corpus: Any, server: Server, default_client: str
) -> None:
    options = {name: value for name, value in server.options().items() if name not in ("key", "secret")}
    root, job = f"s3://{server.bucket}/{default_client}", f"test-{default_client}"
    checkpoint = {
        "root": root, "job": job, "snapshot_every": 2, "persist_every": 2, "storage_options": options,
    }  # fmt: skip
    env = {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
    first = train(corpus, job, checkpoint=checkpoint, env=env)
    assert first.returncode == 0, first.stderr
    store = open_store(root, **server.options())
    (newest, *_) = list_checkpoints(store)
    assert newest.step == 4
    assert not [info.key for info in store.list("probe/")]  # what the check wrote is gone
    recorded = recorded_config(root, job, server.options())
    assert recorded is not None
    assert "storage_options" not in recorded["checkpoint"]
    longer = train(corpus, job, "--train.steps", "6", checkpoint=checkpoint, env=env)
    assert longer.returncode == 0, longer.stderr
    assert "step 4" in longer.stderr


@pytest.mark.usefixtures("default_client")
def test_a_bucket_that_is_not_there_is_refused_before_anything_is_trained(corpus: Any, server: Server) -> None:
    checkpoint = {"root": "s3://no-such-bucket/run", "storage_options": server.options(retries=1)}
    done = train(corpus, "no-bucket", checkpoint=checkpoint)
    assert done.returncode == RootError.exit_code, done.stderr
    assert "no-such-bucket" in done.stderr
    assert not (corpus[0] / "no-bucket" / "trace.jsonl").exists()


@pytest.mark.usefixtures("default_client")
def test_an_endpoint_that_does_not_answer_is_an_error_of_the_root(server: Server, monkeypatch: Any) -> None:
    dead = server.options(endpoint_url="http://127.0.0.1:9", retries=1, timeout_s=2.0)
    with pytest.raises(RootError, match="cannot be written"):
        check_root("s3://bucket/run", dead)
    monkeypatch.setenv("RANK", "1")
    check_root("s3://bucket/run", dead)  # one rank asks for all
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    check_root("s3://bucket/run", dead)  # storage that fails later never stops training


def test_a_folder_that_cannot_be_written_and_options_it_does_not_take_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RootError):
        check_root(str(tmp_path / "file" / "root"), {})
    with pytest.raises(ConfigError, match="takes no storage options"):
        check_root(str(tmp_path / "root"), {"endpoint_url": "http://127.0.0.1:9"})
    check_root(str(tmp_path / "root"), {})
    assert not list((tmp_path / "root").rglob("*probe*"))


def test_a_device_that_is_not_there_is_refused(monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        pytest.raises(ConfigError, match="no CUDA device is available"),
        process_group(from_values({"train": {"device": "cuda"}})),
    ):
        pass


def first_starts(rank: int, restarted: int) -> bool:
    if rank == restarted:
        os.environ["FLASHCKPT_RESTART"] = "2"
    return is_first_start(torch.device("cpu"))


@pytest.mark.parametrize(("restarted", "is_first"), [(-1, True), (1, False)])
def test_a_node_that_joins_a_running_job_is_no_first_start(restarted: int, is_first: bool) -> None:
    """Its ranks would check a root that the others no longer need: storage that fails later never stops training."""
    assert values(run_ranks(first_starts, 2, restarted)) == [is_first] * 2
