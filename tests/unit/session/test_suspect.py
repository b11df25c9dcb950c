"""A snapshot in which numbers became non-finite: marked, left aside by a restore, and known after it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.agents import pretend_agent
from support.one_rank import agent_of_the_test, crash, finished, step_kept  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.commands.ls import ls
from flashckpt.commands.status import describe, status
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.session.session import FORGET
from flashckpt.shm.agent_folder import bad_steps, end_suspects
from flashckpt.shm.inventory import scan

NAN = float("nan")


class Run:
    """One life of a small training program."""

    def __init__(self, root: Path, step: int | None = None) -> None:
        self.model = torch.nn.Linear(8, 8, bias=False)
        self.model.register_buffer("mask", torch.full((8,), -math.inf))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
        self.ckpt.track(model=self.model, optimizer=self.optimizer)
        self.report = self.ckpt.restore() if step is None else self.ckpt.restore(step=step)

    def step(self, number: int, value: float) -> None:
        """Snapshot a step with one weight of this value."""
        with torch.no_grad():
            self.model.weight.fill_(number)[3, 5] = value
        step_kept(self.ckpt, number)
        finished(self.ckpt)

    def suspects(self) -> set[SnapshotId]:
        """Return the snapshots in memory that are marked."""
        assert self.ckpt._session is not None
        return {one.header.identity for one in scan(self.ckpt._session.directory).slots if one.header.suspect}


def test_ls_and_status_show_which_snapshots_are_suspect(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, 1.0)
    run.step(2, NAN)
    assert run.ckpt._session is not None
    assert describe(run.ckpt._session.directory)["suspect"] == [SnapshotId(1, 2)]
    assert "in memory 2.g1 (suspect)" in CliRunner().invoke(status, []).stdout
    shown = CliRunner().invoke(ls, [str(tmp_path), "--json"])
    rows = {row["step"]: row["suspect"] for row in json.loads(shown.stdout)["checkpoints"]}
    assert rows == {1: False, 2: True}
    table = CliRunner().invoke(ls, [str(tmp_path)]).stdout
    assert ["suspect" in line for line in table.splitlines() if "snapshot" in line] == [True, False]
    crash(run.ckpt)


def test_a_restore_prefers_the_older_clean_snapshot_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flashckpt")
    run = Run(tmp_path)
    run.step(1, 1.0)
    run.step(2, NAN)
    assert run.suspects() == {SnapshotId(1, 2)}
    crash(run.ckpt)
    again = Run(tmp_path)
    assert again.report is not None
    assert (again.report.step, again.model.weight[3, 5].item()) == (1, 1.0)
    assert ["step 2" in one and "restore(step=2)" in one for one in again.report.passed_over] == [True]
    (said,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "[gen 1 | rank 0 | step 2] numbers became NaN or infinite in 'model.weight'" in said.getMessage()


def test_a_suspect_snapshot_is_restored_where_it_is_asked_for_or_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, 1.0)
    run.step(2, NAN)
    crash(run.ckpt)
    again = Run(tmp_path, step=2)
    assert math.isnan(again.model.weight[3, 5].item())
    crash(again.ckpt)


def test_after_a_restore_the_first_bad_snapshot_is_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, 1.0)
    crash(run.ckpt)
    again = Run(tmp_path)
    again.step(2, NAN)
    assert again.suspects() == {SnapshotId(2, 2)}
    again.step(3, NAN)
    again.step(4, 4.0)
    assert SnapshotId(2, 3) in again.suspects()
    assert SnapshotId(2, 4) not in again.suspects()
    crash(again.ckpt)


def test_what_comes_later_and_was_never_finite_is_so_by_design(tmp_path: Path) -> None:
    """A maximum that begins at -inf, in the state of parameters that are unfrozen in the middle of a run."""
    run = Run(tmp_path)
    run.step(1, 1.0)
    run.step(2, 2.0)
    state = run.optimizer.state[run.model.weight]
    state["largest"] = torch.full((8,), -math.inf)
    run.step(3, 3.0)
    run.step(4, 4.0)
    assert run.suspects() == set()
    state["largest"].fill_(1.0)
    run.step(5, 5.0)
    state["largest"].fill_(math.inf)
    run.step(6, 6.0)
    assert run.suspects() == {SnapshotId(1, 6)}
    crash(run.ckpt)


def test_what_was_never_finite_stays_unsuspected_over_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, -math.inf)
    crash(run.ckpt)
    again = Run(tmp_path)
    again.step(2, -math.inf)
    assert again.suspects() == set()
    again.step(3, 3.0)
    again.step(4, -math.inf)
    assert again.suspects() == {SnapshotId(2, 4)}
    crash(again.ckpt)


def test_a_number_that_grows_a_thousandfold_is_named_and_prefers_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of an exponent: the tensor stays finite. The agent knows the step, in case that training fails of it."""
    (tmp_path / "agent").mkdir()
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path / "agent"))
    run = Run(tmp_path)
    for step, value in enumerate((1.0, 500.0, 2.0**30, 4.0), 1):
        run.step(step, value)
    (said,) = [one.getMessage() for one in caplog.records if "grew from" in one.getMessage()]
    assert "step 3] the largest number of 'model.weight' grew from 500 to 1.07e+09" in said
    assert bad_steps(tmp_path / "agent") == (3, 3)
    for step in range(5, 3 + FORGET + 1):
        assert bad_steps(tmp_path / "agent") == (3, 3)
        run.step(step, 4.0)
    end_suspects(tmp_path / "agent", 0, -1)
    assert bad_steps(tmp_path / "agent") is None
    assert run.suspects() == set()
    crash(run.ckpt)
    again = Run(tmp_path)
    assert again.report is not None
    assert again.report.step == 3 + FORGET
    crash(again.ckpt)
