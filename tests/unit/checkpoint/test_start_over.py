"""Start over on purpose, and never by accident: `restore(fresh=True)`, `flashckpt forget`, a root that was emptied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir
from support.memory import killed_at
from support.one_rank import agent_of_the_test, crash, opened_as  # noqa: F401 -- fixtures
from support.ranks import run_ranks, values

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.cli import main as cli
from flashckpt.daemon.persister.service import Daemon
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.errors import ConfigError, RootError
from flashckpt.shm.agent_folder import note_missed
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.storage.factory import open_store

Captured = pytest.CaptureFixture[str]


def run(*words: str, capsys: Captured) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    out = capsys.readouterr()
    return int(str(caught.value.code)), out.out, out.err


def persisted(job: str, step: int) -> None:
    """Turn a daemon of the job until a step is committed."""
    directory = JobDirectory.open(job)
    lock = directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(directory, lock, DaemonTimeouts(linger_s=0.0))
    try:
        directory.request("persist-now")
        while daemon.persisting is None or (daemon.persisting.committed or (0, 0))[1] < step:
            daemon.turn()
    finally:
        daemon.close()
        directory.hold_live().close()


def trained(folder: Path, *steps: int, job: str = "t", **how: Any) -> int:
    """Begin as `how` says, take some steps, die; return the step that was restored."""
    ckpt = Checkpointer(folder, snapshot_every=1, persist_every=1000, job=job)
    ckpt.track(model=torch.nn.Linear(2, 2))
    report = ckpt.restore(**how)
    for step in steps:
        ckpt.step(step)
    crash(ckpt)
    return report.step if report else 0


def test_fresh_abandons_memory_and_storage_and_stays_begun(tmp_path: Path) -> None:
    trained(tmp_path / "r", 1, 2, 3)
    persisted("t", 3)
    assert trained(tmp_path / "r", fresh=True) == 0
    assert trained(tmp_path / "r") == 0, "it died before its first snapshot, and what it abandoned stays abandoned"
    assert trained(tmp_path / "r", 1, fresh=True) == 0
    assert trained(tmp_path / "r", 2) == 1, "the run that started over"
    shutil.rmtree(JobDirectory.open("t").path)
    assert trained(tmp_path / "r", job="u") == 0, "the claim on the root says so too"
    assert [i.step for i in list_checkpoints(open_store(tmp_path / "r"))] == [3], "nothing is deleted"
    assert trained(tmp_path / "r", job="v", step=3) == 3, "it can be chosen by name"


def test_a_restart_under_a_living_agent_goes_on_with_the_run_that_began_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "r", 1, 2, 3)
    assert trained(tmp_path / "r", 1, 2, fresh=True) == 0
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert trained(tmp_path / "r", 3, fresh=True) == 2, "the program is started with the same words"
    assert trained(tmp_path / "r", fresh=True) == 3
    monkeypatch.setenv("FLASHCKPT_RESTART", "0")
    assert trained(tmp_path / "r", fresh=True) == 0


def test_a_restart_goes_on_with_nothing_that_is_older_than_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of a new agent died before its generation began: memory is that of a run before."""
    assert trained(tmp_path / "r", 1, 2, 3) == 0
    agent_dir()
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert trained(tmp_path / "r", 1, fresh=True) == 0
    monkeypatch.setenv("FLASHCKPT_RESTART", "2")
    assert trained(tmp_path / "r", fresh=True) == 1, "a generation has begun under this agent"


def test_a_node_without_which_the_job_ran_meanwhile_asks_the_root_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare whose agent lived on: its memory covers the job, and is older than what others have committed."""
    agent_dir()
    assert trained(tmp_path / "r", 1, 2, job="here") == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as other:
        other.setenv("FLASHCKPT_SHM_DIR", str(elsewhere))
        other.setenv("FLASHCKPT_AGENT_DIR", "")
        agent_dir()
        assert trained(tmp_path / "r", 1, 2, 3, job="here") == 0
        persisted("here", 3)
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert trained(tmp_path / "r", job="here") == 2, "it took part in all rounds, as far as it knows"
    note_missed(Path(os.environ["FLASHCKPT_AGENT_DIR"]))
    assert trained(tmp_path / "r", 4, job="here", fresh=True) == 3, "no start of a job: nothing begins anew"
    shutil.rmtree(tmp_path / "r")
    assert trained(tmp_path / "r", job="here") == 4, "its memory is current again"


def test_a_start_that_died_behind_its_claim_is_known_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory says nothing of it: it would take the same number, what was rolled back, and never persist again."""
    agent_dir()
    assert trained(tmp_path / "r", 1, 2, 3, job="here") == 0
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    killed_at("generation.after-claim", lambda: trained(tmp_path / "r", job="here", step=2))
    assert trained(tmp_path / "r", 3, 4, job="here") == 2
    persisted("here", 4)
    shutil.rmtree(tmp_path / "r")
    assert trained(tmp_path / "r", job="here") == 4, "its memory is current again"


def test_a_start_from_storage_that_died_before_its_first_snapshot_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of long ago cover the job, and are older than the checkpoint that the generation began with."""
    agent_dir()
    assert trained(tmp_path / "r", 1, 2, job="here") == 0
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as other:
        other.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "elsewhere"))
        other.setenv("FLASHCKPT_AGENT_DIR", "")
        agent_dir()
        assert trained(tmp_path / "r", 1, 2, 3, job="here") == 0, "nothing was committed"
        persisted("here", 3)
    assert trained(tmp_path / "r", job="here") == 3
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert trained(tmp_path / "r", job="here") == 3


@pytest.mark.parametrize("more", [{"step": 3}, {"generation": 1}, {"root": "/tmp/x"}, {"only": "model.*"}], ids=str)
def test_fresh_with_something_to_restore_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fresh=True"):
        trained(tmp_path / "r", fresh=True, **more)


def begin(rank: int, root: str, how: list[dict[str, Any]]) -> str:
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=1000, job="t")
    ckpt.track(model=torch.nn.Linear(2, 2))
    try:
        report = ckpt.restore(**how[rank % len(how)])
    except Exception as error:  # noqa: BLE001 -- what it is, is what is looked at
        return f"{type(error).__name__}: {error}"
    first = report.step + 1 if report else 1
    for step in range(first, first + 3):
        ckpt.step(step)
        torch.distributed.barrier()
    crash(ckpt)
    return str(first - 1)


def test_all_ranks_start_over_or_none_does(tmp_path: Path) -> None:
    root = str(tmp_path / "r")
    assert values(run_ranks(begin, 2, root, [{}])) == ["0", "0"]
    apart = values(run_ranks(begin, 2, root, [{"fresh": True}, {}]))
    assert all("DisagreementError" in one and "fresh=True" in one for one in apart)
    assert values(run_ranks(begin, 2, root, [{}])) == ["3", "3"], "nothing was changed by that"
    assert values(run_ranks(begin, 2, root, [{"fresh": True}])) == ["0", "0"]
    persisted("t", 3)
    shutil.rmtree(root)
    told = values(run_ranks(begin, 2, root, [{}]))
    assert all("RootError" in one and "flashckpt forget" in one for one in told)


def test_an_emptied_root_is_an_error_that_names_both_ways_out(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "r"
    trained(root, 1, 2, 3)
    persisted("t", 3)
    assert trained(root, 4) == 3, "memory and root agree"
    shutil.rmtree(root)
    for again in range(2):
        if again:
            root.mkdir()
        with pytest.raises(RootError, match="although some of this job were committed") as caught:
            trained(root)
        assert "step 3 of generation 1" in caught.value.expected
        assert "in memory step 4 of generation 2" in caught.value.found
        for way in ("restore(fresh=True)", "flashckpt forget ROOT --apply", "--keep-memory"):
            assert way in caught.value.remedy
    assert run("forget", str(root), "--keep-memory", "--apply", capsys=capsys)[0] == 0
    assert trained(root, 5) == 4, "on from memory"
    persisted("t", 5)
    assert trained(root) == 5


def test_an_emptied_root_and_forget_is_a_fresh_start(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "r"
    trained(root, 1, 2, 3)
    persisted("t", 3)
    shutil.rmtree(root)
    code, out, _ = run("forget", str(root), "--json", capsys=capsys)
    assert (code, [one["job"] for one in json.loads(out)["jobs"]]) == (0, ["t"])
    with pytest.raises(RootError):
        trained(root)  # nothing was done without --apply
    assert "would be forgotten" in run("forget", str(root), capsys=capsys)[1]
    assert run("forget", str(root), "--apply", capsys=capsys)[0] == 0
    assert trained(root) == 0
    assert "nothing of this root" in run("forget", str(tmp_path / "other"), "--apply", capsys=capsys)[1]


def test_an_emptied_root_and_fresh_is_a_fresh_start_that_stays_one(tmp_path: Path) -> None:
    root = tmp_path / "r"
    trained(root, 1, 2, 3)
    persisted("t", 3)
    shutil.rmtree(root)
    assert trained(root, 1, fresh=True) == 0
    assert trained(root) == 1, "what was committed before it started over is not missed"


def test_memory_of_which_nothing_was_ever_persisted_needs_no_root(tmp_path: Path) -> None:
    trained(tmp_path / "r", 1, 2, 3)
    shutil.rmtree(tmp_path / "r")
    assert trained(tmp_path / "r") == 3


def test_a_root_with_only_damaged_checkpoints_is_not_empty(tmp_path: Path) -> None:
    root = tmp_path / "r"
    trained(root, 1, 2, 3)
    persisted("t", 3)
    for manifest in root.glob("step-*/MANIFEST"):
        manifest.write_bytes(b"x" * 100)
    assert trained(root) == 3


def test_forget_refuses_what_is_alive_and_names_what_it_does_not_know(tmp_path: Path, capsys: Captured) -> None:
    ckpt = Checkpointer(tmp_path / "r", snapshot_every=1, job="t")
    ckpt.track(model=torch.nn.Linear(2, 2))
    ckpt.restore()
    ckpt.step(1)
    for words in (
        ("forget", str(tmp_path / "r"), "--apply"),
        ("forget", "--job", "t"),
        ("forget", "--job", "t", "--keep-memory", "--apply"),
    ):
        code, _, err = run(*words, capsys=capsys)
        assert (code, "is alive" in err) == (15, True)
    crash(ckpt)
    assert run("forget", "--job", "nobody", "--apply", capsys=capsys)[0] == 30
    assert run("forget", "--job", "../t", "--apply", capsys=capsys)[0] == 10
    assert run("forget", capsys=capsys)[0] == 10
    assert opened_as(tmp_path / "r", "t", model=torch.nn.Linear(2, 2)) == 1
