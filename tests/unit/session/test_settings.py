"""The rules for settings, roots and step numbers: each wrong value is one clear error in the constructor or in `step()`."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import agent_of_the_test, crash, finished, opened  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.core.settings import MAX_STEP, Settings, next_step
from flashckpt.core.snapshot_id import MAX_SLOTS
from flashckpt.errors import ConfigError
from flashckpt.report import RestoreReport
from flashckpt.session.durability import Wanted
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.storage.factory import local_path, open_store, root_url
from flashckpt.storage.posix import PosixStore
from flashckpt.stores.s3_roots import S3_OPTIONS
from flashckpt.trainer import config as trainer_config
from flashckpt.trainer.train import starting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WRONG = [
    *[
        ("compression", v)
        for v in ("zst", "zstd:", "zstd:0", "zstd:20", "zstd:99", "zstd:²", "ZSTD", "", None, 5, b"off")
    ],
    *[("keep_last", v) for v in (0, -1, 1.5, "3", True, 10**20, np.float64(3))],
    *[("keep_every", v) for v in (0, -1, 1.5, "x", False, 10**20)],
    *[("slots", v) for v in (0, 1, MAX_SLOTS + 1, 64, "3", "Auto", None, 2.0, True)],
    *[("snapshot_every", v) for v in (0, -5, 2.5, "5", None, True, 10**20)],
    *[("persist_every", v) for v in (0, 1.0, "250", "all", torch.tensor(5))],
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
        {"persist_every": None, "replicate_rate": None},
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


def test_a_checkpoint_that_is_never_due_by_its_number_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    settings = Settings(snapshot_every=2, persist_every=None)
    assert [n for n in range(1, 600) if settings.is_persist(n)] == []
    assert [n for n in range(1, 8) if settings.is_due(n)] == [2, 4, 6]
    assert settings.newest_persist(10**9) == 0
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, persist_every=None, job="t")
    ckpt.track(model=torch.nn.Linear(2, 2))
    ckpt.restore()
    assert ckpt._session is not None
    found: dict[int, bool] = {}
    for step in (1, 2, 3):
        ckpt.step(step, persist=step == 2)
        finished(ckpt)
        segment = ckpt._session.memory.segment
        assert segment is not None
        found |= {header.identity.step: header.persist for header in segment.headers() if header.is_complete}
    crash(ckpt)
    assert found == {1: False, 2: True, 3: False}
    config = JobDirectory.open("t", create=False).read_config()
    assert config is not None
    assert config.persist_every is None


def test_what_a_restart_finds_in_memory_is_not_owed_where_no_step_is_due(tmp_path: Path) -> None:
    report = RestoreReport(step=500, generation=1, life=2, tier_bytes={"memory": 1})
    for every, due in ((250, 500), (300, 300), (None, 0)):
        wanted = Wanted(generation=2)
        wanted.began_with(report, settings=Settings(persist_every=every), marked=False)
        assert wanted.due == due


def test_trainer_sets_every_setting_of_the_engine_by_its_name_and_hands_it_on(tmp_path: Path) -> None:
    values = {
        "root": f"file://{tmp_path}", "job": "mine", "snapshot_every": 2, "persist_every": "never", "keep_last": "all", "keep_every": 100,
        "slots": 4, "storage_options": {}, "compression": "zstd:3", "replicate": 1, "replicate_every": 3, "replicate_rate": 5,
    }  # fmt: skip
    assert set(values) == {one.name for one in fields(Settings)}
    words = [word for key, value in values.items() if value != {} for word in (f"--checkpoint.{key}", str(value))]
    run = trainer_config.read_config(None, words)
    assert run == trainer_config.from_values({"checkpoint": values})
    assert run == trainer_config.from_values(tomllib.loads(trainer_config.to_toml(run)))
    parallel: Any = SimpleNamespace(mesh=None, parts=None)
    ckpt = starting.checkpointer(run, parallel, None, ema=None)
    assert ckpt._settings == run.checkpoint
    assert (ckpt._settings.persist_every, ckpt._settings.keep_last) == (None, None)
    bare = trainer_config.from_values({"checkpoint": {"root": str(tmp_path)}})
    ckpt = starting.checkpointer(bare, parallel, None, ema=None)
    assert replace(ckpt._settings, root="", job="") == Settings()


def test_signature_and_docstring_of_the_class_name_every_setting_with_its_default() -> None:
    given = inspect.signature(Checkpointer).parameters
    for one in fields(Settings):
        assert re.search(rf"^ +{one.name}: ", Checkpointer.__doc__ or "", re.MULTILINE)
        if one.name not in ("root", "job", "storage_options"):
            assert given[one.name].default == one.default


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
        ("persist_every", "sometimes"),
        ("keep_last", "never"),
        ("slots", 1),
        ("compression", "zip"),
        ("root", "s3://"),
        ("root", "~nouser-here/x"),
        ("job", "a b"),
    ],
)
def test_the_trainers_section_is_held_to_the_same_rules(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_config.from_values({"checkpoint": {key: value}})
    assert key in ("root", "job") or caught.value.problem == f"invalid checkpoint.{key}"


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


@pytest.mark.parametrize(
    ("value", "steps", "seconds"),
    [
        ("30s", 2, 30),
        ("10min", 2, 600),
        ("2 h", 2, 7200),
        ("1d", 2, 86400),
        ("continuous", 2, 0),
        (50, 50, 0),
        (None, None, 0),
    ],
)
def test_a_checkpoint_is_due_by_steps_by_time_or_whenever_none_is_written(value: Any, steps: Any, seconds: int) -> None:
    settings = Settings(snapshot_every=2, persist_every=value)
    found = settings.for_persister()
    assert (found["persist_every"], found["persist_s"]) == (steps, seconds)
    assert settings.is_persist(4) == (steps == 2)
    assert Settings(**{**settings.plain(), "snapshot_every": 2}).persist_every == value


def test_what_is_kept_by_time_is_told_to_the_persister_in_seconds(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, persist_every="10min", keep_last="7d", keep_every="1h", snapshot_every=3, job="t")
    ckpt.track(model=torch.nn.Linear(2, 2))
    ckpt.restore()
    crash(ckpt)
    config = JobDirectory.open("t", create=False).read_config()
    assert config is not None
    found = (
        config.persist_every,
        config.persist_s,
        config.keep_last,
        config.keep_last_s,
        config.keep_every,
        config.keep_every_s,
    )
    assert found == (3, 600, 1, 7 * 86400, None, 3600)


@pytest.mark.parametrize("value", ["0s", "s", "1.5h", "-1min", "10 minutes", "10m", "12345678s", "1h\n", "Continuous"])
def test_a_time_that_cannot_be_read_is_refused_with_examples(value: str, tmp_path: Path) -> None:
    for name in ("persist_every", "keep_last", "keep_every"):
        with pytest.raises(ConfigError) as caught:
            Checkpointer(tmp_path, **{name: value})  # type: ignore[arg-type]
        assert '"10min"' in caught.value.expected
