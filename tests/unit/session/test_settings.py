"""The rules for settings, roots and step numbers: each wrong value is one clear error in the constructor or in `step()`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.core.superblock import MAX_SLOTS
from flashckpt.errors import ConfigError
from flashckpt.settings import MAX_STEP, Settings, next_step
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.job_id import root_url
from flashckpt.shm.roots import local_path
from flashckpt.storage.factory import S3_OPTIONS, open_store
from flashckpt.storage.posix import PosixStore
from flashckpt.trainer import config as trainer_config

WRONG = [
    *[
        ("compression", v)
        for v in ("zst", "zstd:", "zstd:0", "zstd:20", "zstd:99", "zstd:²", "ZSTD", "", None, 5, b"off")
    ],
    *[("keep_last", v) for v in (0, -1, 1.5, "3", True, 10**20, np.float64(3))],
    *[("keep_every", v) for v in (0, -1, 1.5, "x", False, 10**20)],
    *[("slots", v) for v in (0, 1, MAX_SLOTS + 1, 64, "3", "Auto", None, 2.0, True)],
    *[("snapshot_every", v) for v in (0, -5, 2.5, "5", None, True, 10**20)],
    *[("persist_every", v) for v in (0, 1.0, "250", None, torch.tensor(5))],
    *[("job", v) for v in ("", 5, "a b", "../x", ".x", "x" * 129, "x\n", True)],
    *[("storage_options", v) for v in (5, [("a", 1)], {1: 2}, {"session": object()}, {"n": 10**30}, {"anon": True})],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_wrong_setting_is_refused_in_the_constructor_by_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpointer(str(tmp_path), **{name: value})
    assert name.replace("job", "job=").replace("storage_options", "storage") in str(caught.value).replace(
        "_options", ""
    )
    assert caught.value.found
    assert caught.value.expected or caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "zstd:19", "keep_last": None, "keep_every": 100, "slots": MAX_SLOTS},
        {"keep_last": np.int64(2), "snapshot_every": np.int32(1), "slots": np.uint8(2), "compression": "auto"},
    ],
    ids=str,
)
def test_right_settings_become_plain_values(settings: dict[str, Any], tmp_path: Path) -> None:
    made = Settings(root="file:///r", job="j", **settings)
    for name, value in settings.items():
        assert getattr(made, name) == value
        assert type(getattr(made, name)) in (int, str, type(None))
    Checkpointer(tmp_path, **settings)


def test_credentials_are_not_shown_where_an_option_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpointer("s3://bucket/run", storage_options={"secret": "hush", "session": object()})
    assert "hush" not in str(caught.value)


BAD_ROOTS = [
    "", "  ", None, 5, b"/tmp/x", "s3://", "s3:///x", "gs://", "s3:/bucket/run", Path("s3://bucket/run"), "file://",
    "file://host/x", "~nouser-here/x", "/tmp/a\nb", "/tmp/\x1b[31mred", "/tmp/a\x00b", "/tmp/\udcff", "s3://b/\x07",
    "/tmp/" + "n" * 256, "/tmp/" + "é" * 128, "/" + "d/" * 2000, "s3://b/" + "k" * 1000, "s3://b/run#1", "s3://b/run?v=1",
    "http://host/x", "zip://a::s3://b/c",
]  # fmt: skip


@pytest.mark.parametrize("root", BAD_ROOTS, ids=ascii)
def test_what_cannot_be_a_root_is_refused_and_nothing_is_made(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (Checkpointer, Checkpointer.readonly, root_url, open_store):
        with pytest.raises(ConfigError) as caught:
            make(root)
        assert "root" in caught.value.problem
        assert caught.value.problem.isprintable()
        assert len(str(caught.value)) < 2000
    assert list(tmp_path.iterdir()) == []


def test_a_root_has_one_form_and_every_path_is_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "run#1", "run?2", "run%41", "my run", "ünïcode", "s3", "a[b]", "C:"):
        url = root_url(name)
        assert root_url(url) == url
        assert local_path(url) == str(tmp_path / name)
        store = open_store(url)
        assert isinstance(store, PosixStore)
        assert store.root == tmp_path / name
    assert root_url(tmp_path / "run") == root_url("file://localhost" + str(tmp_path / "run")) == root_url("run/")
    assert root_url("file:///a%20b") == "file:///a b"
    assert root_url("s3://bucket/run/") == "s3://bucket/run"


def test_the_daemons_config_is_held_to_the_same_rules() -> None:
    directory = JobDirectory.open("t")
    wrong: dict[str, Any] = {"keep_last": 0, "keep_every": "x", "compression": None, "storage_options": 5}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(name)):
            directory.write_config(JobConfig(job="t", root="file:///r", **{name: value}))
    assert directory.read_config() is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("keep_last", 0),
        ("snapshot_every", -1),
        ("persist_every", 0),
        ("root", "s3://"),
        ("root", "~nouser-here/x"),
        ("job", "a b"),
    ],
)
def test_the_trainers_section_is_held_to_the_same_rules(key: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        trainer_config.from_values({"checkpoint": {key: value}})


WRONG_STEPS = [
    torch.tensor(4), torch.tensor([4]), 2.0, "2", None, True, np.True_, np.float32(3), np.array(4), -1, 0, 2**63,
    MAX_STEP + 1, b"4", [4], float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("step", WRONG_STEPS, ids=repr)
def test_what_is_no_step_number_is_refused_at_once_and_nothing_is_counted(step: Any, tmp_path: Path) -> None:
    class Sampler:
        commits = 0

        def commit(self, samples: int | None) -> None:
            Sampler.commits += 1

        def state_dict(self) -> dict[str, int]:
            return {"commits": Sampler.commits}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    ckpt = opened(tmp_path, model=torch.nn.Linear(2, 2), sampler=Sampler())
    with pytest.raises(ConfigError, match="invalid step number"):
        ckpt.step(step)
    assert Sampler.commits == 0
    assert "snapshots" not in ckpt.stats
    ckpt.step(1)
    crash(ckpt)


def test_numbers_of_numpy_count_and_become_plain_ones() -> None:
    assert type(next_step(np.int64(3), last=2)) is int


def test_a_number_that_does_not_rise_is_refused_and_says_how_to_count(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    ckpt.step(5)
    for step in (5, 4, 1):
        with pytest.raises(ConfigError, match=f"step {step} comes after step 5") as caught:
            ckpt.step(step)
        assert "epoch" in caught.value.remedy
    ckpt.step(6)
    crash(ckpt)


def test_after_a_restore_numbers_go_on_behind_the_restored_step_and_a_rollback_begins_again_there(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = opened(tmp_path, model=model)
    for step in (1, 2, 3):
        ckpt.step(step)
    crash(ckpt)
    for lost in (3, 2):  # restored again and again inside one process, each time to an older step
        again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
        again.track(model=model)
        report = again.restore(step=lost)
        assert report is not None
        with pytest.raises(ConfigError, match=f"step {lost} comes after step {lost}"):
            again.step(lost)
        again.step(lost + 1)
        crash(again)


def test_a_part_of_a_checkpoint_begins_a_lineage_that_counts_from_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = opened(tmp_path, model=model)
    for step in (1, 2, 3):
        ckpt.step(step)
    crash(ckpt)
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.track(model=model)
    again.restore(only="model.weight")
    again.step(1)
    crash(again)


@pytest.mark.parametrize(
    ("root", "options", "words"),
    [
        ("s3://bucket/run", {"endpoint": "http://x"}, "endpoint_url"),
        ("s3://bucket/run", {"acces_key": "x", "key": "y"}, "acces_key"),
        ("nosuch://bucket/run", {}, "nosuch://"),
    ],
)
def test_an_option_or_protocol_that_nobody_knows_is_refused_at_once(
    root: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpointer(root, job="t", storage_options=options)


def test_the_options_of_s3_are_those_of_its_client() -> None:
    """A name that s3fs adds is missed here; one that it drops would be accepted and do nothing."""
    import inspect

    import s3fs

    theirs = set(inspect.signature(s3fs.S3FileSystem.__init__).parameters) - {"self", "kwargs", "asynchronous", "loop"}
    assert theirs | {"conditional", "retries", "timeout_s", "backend"} == S3_OPTIONS
