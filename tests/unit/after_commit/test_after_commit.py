"""Exports and copies beside training: of the right checkpoints, whole or not there whoever is killed, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.daemons import daemon_of, steps, turn_until
from support.memory_tier import FakeJob, content
from support.paths import ROOT
from support.ranks import wait_for
from unit.cli.test_keep import logged
from unit.console.test_copying import make
from unit.trainer.test_trainer_generate import LENGTH, MODELS, write_folder

from flashckpt import Checkpointer
from flashckpt.after_commit import extension
from flashckpt.after_commit.__main__ import MOST_DUE, Assignment, Worker
from flashckpt.after_commit.tasks import read_tasks
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.marks import keep_as, names_of
from flashckpt.checkpoint.retention import Policy, leased_prefixes, prune
from flashckpt.checkpoint.root_records import claim_generation, prefix_of
from flashckpt.commands.verify import verify_checkpoint
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.launcher import cli as launcher
from flashckpt.daemon.machine.process import has_ended
from flashckpt.environment import Environment
from flashckpt.errors import ConfigError
from flashckpt.interop import safetensors_files as st
from flashckpt.storage.factory import open_store
from flashckpt.trainer.hub.transfer import import_folder

SHAPES = {"model.w": (50, 40), "model.b": (7,), "optimizer.m": (50, 40)}
EXPORT = "export --every 20 --only 'model.*' --strip model. --max-shard-size 1KB --to"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"), shapes=SHAPES)
    yield fake
    fake.die()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "AGAIN_S", 0.0)
    monkeypatch.setattr(extension, "LOOK_S", 0.0)


def assert_exported(folder: Path, identity: tuple[int, int]) -> None:
    """The folder is whole, of that checkpoint, and holds the weights bit for bit."""
    assert st.origin_of(folder) == identity
    found = {one.name: one for one in st.read_folder(folder)}
    assert found.keys() == {"w", "b"}
    for name, one in found.items():
        raw = one.read(0, one.shard(name).nbytes)
        assert np.array_equal(
            np.frombuffer(raw, np.float32), content(f"model.{name}", one.shape, *identity).reshape(-1)
        )


def others(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("."))


def _has(job: FakeJob, step: int) -> bool:
    return step in steps(job)


def test_each_kth_checkpoint_is_exported_and_no_other(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", f"{EXPORT} {tmp_path}/out/w-{{step}}-{{generation}}")
    caplog.set_level(logging.INFO)
    with daemon_of(job) as daemon:
        for step in (10, 20, 30, 40):
            job.step(step, persist=True)
            turn_until(daemon, partial(_has, job, step), "the commit")
        turn_until(daemon, (tmp_path / "out" / "w-40-1").exists, "the second export")
        turn_until(daemon, lambda: any("w-40-1 is made" in one for one in caplog.messages), "the report")
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["w-20-1", "w-40-1"]
    for step in (20, 40):
        assert_exported(tmp_path / "out" / f"w-{step}-1", (1, step))
    assert len(list((tmp_path / "out" / "w-20-1").glob("*.safetensors"))) == 2, "of that most bytes each"
    assert not leased_prefixes(open_store(job.root))


@pytest.mark.parametrize("point", ["export.before-rename", "export.exchanged", "after-commit.before-report"])
def test_killed_at_any_stage_no_half_export_is_seen_and_the_next_process_makes_it(
    job: FakeJob, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out" / "w-20"
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", f"{EXPORT} {tmp_path}/out/w-{{step}}")
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", point)
    if point == "export.exchanged":  # there is one to be replaced
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(b"of another run")
    job.step(20, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: any("ended by signal 9" in one for one in caplog.messages), "the kill")
        if point == "export.before-rename":
            assert not target.exists()
        else:
            assert_exported(target, (1, 20))
        monkeypatch.delenv("FLASHCKPT_CRASH_AT")
        after = daemon.extensions.each["after-commit"]
        assert isinstance(after, extension.AfterCommit)
        turn_until(daemon, lambda: after._done and after._child is None, "the next process")
    assert_exported(target, (1, 20))
    if point == "export.before-rename":
        assert not others(tmp_path / "out"), "what the killed one left is swept"


@pytest.mark.parametrize("point", ["copy.during-pack", "copy.before-manifest", "copy.after-manifest"])
def test_a_kept_checkpoint_is_copied_whoever_is_killed(
    job: FakeJob, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", f"cp --kept {tmp_path}/archive")
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", point)
    archive = open_store(tmp_path / "archive")
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the first commit")
        job.step(20, persist=True)
        turn_until(daemon, lambda: steps(job) == [10, 20], "the second commit")
        keep_as(open_store(job.root), prefix_of(1, 10), "best")
        turn_until(daemon, lambda: any("ended by signal 9" in one for one in caplog.messages), "the kill")
        assert bool(list_checkpoints(archive)) == (point == "copy.after-manifest")
        monkeypatch.delenv("FLASHCKPT_CRASH_AT")
        turn_until(daemon, lambda: list_checkpoints(archive), "the copy")
    (info,) = list_checkpoints(archive, whole=True)
    assert info.step == 10
    assert verify_checkpoint(archive, info, lambda _: None)["damaged"] == []


def test_a_job_that_ends_leaves_what_was_due_made(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", f"{EXPORT} {tmp_path}/out/w-{{step}}")
    job.step(20, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [20], "the commit")
        job.directory.request("ended")
        job.die()
        assert wait_for(daemon.turn, what="the end of the daemon")
    assert_exported(tmp_path / "out" / "w-20", (1, 20))


def test_a_persister_that_is_stopped_leaves_it_to_the_next_one(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", f"{EXPORT} {tmp_path}/out/w-{{step}}")
    job.step(20, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [20], "the commit")
        after = daemon.extensions.each["after-commit"]
        assert isinstance(after, extension.AfterCommit)
        process = after._child
        assert process is not None
    assert process.poll() is not None
    with daemon_of(job) as daemon:
        turn_until(daemon, (tmp_path / "out" / "w-20").exists, "the export")


def test_the_process_dies_with_its_persister(tmp_path: Path) -> None:
    """Its standard input stays open, so that its end alone could not be the reason."""
    read, write = os.pipe()
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-m', 'flashckpt.after_commit', str(os.getpid())]); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        wait_for(lambda: has_ended(pid), what="the end of the process", deadline_s=60)
    finally:
        parent.kill()
        parent.communicate()
        os.close(read)
        os.close(write)


# -- the process alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert claim_generation(open_store(tmp_path / "root"), Generation(number=1, token="first", world_size=1))
    return tmp_path / "root"


def worker_of(root: Path, command: str, **order: object) -> Worker:
    tasks = read_tasks(Environment({"FLASHCKPT_AFTER_COMMIT": command}).FLASHCKPT_AFTER_COMMIT)
    fields = {"root": str(root), "options": {}, "is_first": False, "done": {}, **order}
    return Worker(Assignment(**fields), tasks)  # type: ignore[arg-type]  # by name


def run(worker: Worker, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, str]]:
    """Return what became of each place."""
    worker.look()
    while worker.work():
        pass
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(one["what"], Path(one["place"]).name, one["why"]) for one in found if one["what"] != "looked"]


def test_retention_waits_for_what_is_due_and_of_too_many_the_oldest_are_left_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(root)
    prefixes = [make(store, step) for step in range(1, MOST_DUE + 3)]
    worker = worker_of(root, f"export --every 1 --to {tmp_path}/{{step}}")
    worker.look()
    assert leased_prefixes(store) == set(prefixes[2:])
    prune(store, Policy(keep_last=1))
    assert len(list_checkpoints(store)) == MOST_DUE
    found = run(worker, capsys)
    assert [(what, place) for what, place, _ in found] == [
        ("left out", "1"),
        ("left out", "2"),
        *(("made", str(step)) for step in range(3, MOST_DUE + 3)),
    ]
    assert not leased_prefixes(store)


def test_the_best_of_each_kth_is_kept_although_retention_leaves_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it is not known whether a checkpoint is the best, a lease keeps it."""
    store, command = open_store(root), "keep --best val --every 10 --name sharpest"
    curve: dict[int, float] = {}
    for step, value in ((10, 0.9), (20, 0.5), (25, 0.6), (30, 0.7)):
        make(store, step)
        curve[step] = value
        logged(store, val=curve)
        worker = worker_of(root, command, is_first=True)
        worker.look()
        prune(store, Policy(keep_last=1))
        found = run(worker, capsys)
        assert [what for what, *_ in found] == ["made"]
    assert names_of(store)["sharpest"] == (prefix_of(1, 20), 0.5)
    assert [one.step for one in list_checkpoints(store)] == [30, 20]


def test_what_was_rolled_back_is_replaced_by_what_was_trained_instead(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, command = open_store(root), f"export --every 20 --to {tmp_path}/w-{{step}}"
    make(store, 10), make(store, 20), make(store, 40)
    assert [place for _, place, _ in run(worker_of(root, command), capsys)] == ["w-20", "w-40"]
    claim_generation(store, Generation(number=2, token="second", parent=SnapshotId(1, 10), world_size=1))
    make(store, 20, generation=2)
    assert run(worker_of(root, command), capsys)[0][:2] == ("made", "w-20")
    assert st.origin_of(tmp_path / "w-20") == (2, 20)
    assert st.origin_of(tmp_path / "w-40") == (1, 40), "nothing takes its place yet"


def test_a_name_that_moves_takes_its_export_along(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, command = open_store(root), f"export --kept --to {tmp_path}/{{name}}"
    first, second = make(store, 10), make(store, 20)
    done: dict[str, list[int]] = {}
    for prefix, step in ((first, 10), (second, 20), (first, 10)):
        keep_as(store, prefix, "best")
        assert [(what, place) for what, place, _ in run(worker_of(root, command, done=done), capsys)] == [
            ("made", "best")
        ]
        assert st.origin_of(tmp_path / "best") == (1, step)
        done = {str(tmp_path / "best"): [1, step]}
    assert run(worker_of(root, command, done=done), capsys) == []


def test_a_persister_that_is_started_again_makes_none_that_was_moved_away(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, command = open_store(root), f"export --every 20 --to {tmp_path}/w-{{step}}"
    make(store, 20), make(store, 40)
    run(worker_of(root, command), capsys)
    make(store, 60)
    shutil.rmtree(tmp_path / "w-20")
    found = run(worker_of(root, command, is_first=True), capsys)
    assert [one[:2] for one in found] == [("there", "w-20"), ("there", "w-40"), ("made", "w-60")]


def test_a_failure_is_told_and_costs_no_other(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(open_store(root), 20)
    (tmp_path / "a-20").mkdir()
    (tmp_path / "a-20" / "notes.txt").write_text("a user's")
    found = run(
        worker_of(root, f"export --every 20 --to {tmp_path}/a-{{step}}; cp --every 20 {tmp_path}/other"), capsys
    )
    assert [(what, place) for what, place, _ in found] == [("failed", "a-20"), ("made", prefix_of(1, 20))]
    assert "holds files that no export wrote" in found[0][2]
    assert (tmp_path / "a-20" / "notes.txt").exists()


def test_a_checkpoint_of_the_trainer_becomes_a_folder_for_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_folder(tmp_path / "given", replace(MODELS["plain"], context=LENGTH))
    import_folder(given, str(tmp_path / "root"), step=20)
    found = run(worker_of(tmp_path / "root", f"hub export --every 20 {tmp_path}/hf-{{step}} --dtype bf16"), capsys)
    assert [one[:2] for one in found] == [("made", "hf-20")]
    assert st.origin_of(tmp_path / "hf-20") == (1, 20)
    assert json.loads((tmp_path / "hf-20" / "config.json").read_text())["architectures"]
    assert run(worker_of(tmp_path / "root", f"hub export --every 20 {tmp_path}/hf-{{step}}"), capsys)[0][0] == "there"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export --to /x/{step}", "command 1, export, has neither"),
        ("cp --kept /x; cp --every 5 --kept -t secret=hush", "command 2, cp, has both"),
        ("mv --every 5 /x", "command 1 is 'mv'"),
        ("export --every 0 --to /x", "command 1, export, has neither"),
        ("cp --every", "command 1, cp, has neither"),
        ("cp --kept /x;", "command 2 is ''"),
        (";", "command 1 is ''"),
        ("cp --kept /x -t secret='hush", "28 characters"),
    ],
)
def test_a_text_that_is_no_list_of_commands_is_refused_before_a_job_starts(text: str, found: str) -> None:
    """By the command that is wrong; what stands behind its name may be a key, and is not shown."""
    with pytest.raises(ConfigError, match="FLASHCKPT_AFTER_COMMIT") as refused:
        Environment({"FLASHCKPT_AFTER_COMMIT": text}).check("dlrun")
    assert refused.value.found.endswith(found)
    assert "hush" not in str(refused.value)


STARTS: dict[str, Callable[[Path], object]] = {
    "rank": lambda folder: Checkpointer(str(folder / "root")),
    "dlrun": lambda folder: launcher.main([str(folder / "no-such-script.py")]),
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export --kept --to weights/{step}", "no absolute path"),
        ("export --kept --to /weights", "tells exports apart"),
        ("export --kept --to /w/{step} --format dcp", "safetensors alone"),
        ("export --kept --to /w/{step} --step 5", "set by the persister"),
        ("export --kept --to /w/{step} --what", "No such option"),
        ("cp --kept memory://x", "no absolute path"),
        ("hub export --kept", "Missing argument"),
        ("export --kept", "Missing option '--to'"),
        ("keep --every 5", "--best METRIC"),
        ("keep --best val --kept", "--best METRIC"),
        ("keep --best val --every 5 --remove", "--best METRIC"),
    ],
)
@pytest.mark.parametrize("start", STARTS)
def test_a_command_that_cannot_be_run_is_refused_where_a_job_starts(
    start: str, text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process would say so behind the first commit, in the persister's log alone."""
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", text)
    with pytest.raises(ConfigError) as refused:
        STARTS[start](tmp_path)
    assert found in refused.value.found
    assert not list(tmp_path.iterdir())


def test_a_rank_leaves_that_to_its_dlrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_AFTER_COMMIT", "export --kept")
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", str(tmp_path))
    Checkpointer(str(tmp_path / "root"))
