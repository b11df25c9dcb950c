"""A failure that comes again at one step names the older checkpoints, and nothing where there are none."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.launcher import way_back as module
from flashckpt.daemon.launcher.budget import RestartDecision
from flashckpt.daemon.launcher.options import LaunchOutcome
from flashckpt.daemon.launcher.way_back import WayBack, way_back
from flashckpt.errors import StoreError

FIX = "fix the script; its traceback is above"


def job(root: Path) -> Any:
    return SimpleNamespace(
        path=root, read_config=lambda: SimpleNamespace(root=str(root), storage_options={}), read_generation=lambda: None
    )


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "scan", lambda *_: SimpleNamespace(complete=list, suspect=list))


def test_what_memory_holds_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [SnapshotId(1, step) for step in (39, 41, 42, 43)]  # the first is suspect
    monkeypatch.setattr(module, "scan", lambda *_: SimpleNamespace(complete=lambda: ids, suspect=lambda: ids[:1]))
    monkeypatch.setattr(
        module, "list_checkpoints", lambda _: [SimpleNamespace(step=one, suspects=one == 35) for one in (30, 35, 40)]
    )
    text = way_back(job(tmp_path), 43)
    commands = [line.split() for line in text.splitlines() if "--restore-step" in line]
    assert [(words[2], words[-1]) for words in commands] == [
        ("42", "memory)"),
        ("41", "memory)"),
        ("40", f"{tmp_path})"),
        ("30", f"{tmp_path})"),
    ]
    assert f"flashckpt keep {tmp_path} 40" in text


@pytest.mark.parametrize(
    ("held", "step", "named"),
    [
        ([], 43, []),
        ([43, 50], 43, []),
        ([20, 30, 40, 43], 43, [40, 30, 20]),
        ([30, 20], -1, []),
        (range(100), 60, [*range(59, 51, -1)]),
    ],
)
def test_steps_before_the_failing_one_are_named_newest_first(
    held: Any, step: int, named: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "list_checkpoints", lambda _: [SimpleNamespace(step=one, suspects=0) for one in held])
    text = way_back(job(tmp_path), step)
    assert text.startswith(FIX)
    if not named:
        assert text == FIX
        return
    assert [int(one) for one in re.findall(r"--restore-step (\d+)", text)] == named
    assert f"flashckpt keep {tmp_path} {named[0]}" in text
    assert text in str(LaunchOutcome(repeats="x", remedy=text).error())


@pytest.mark.parametrize(
    ("parent", "in_memory", "held", "found"),
    [(None, [5], [5], False), (20, [20, 30], [30, 20], False), (20, [19], [], True), (20, [], [20, 10], True)],
)
def test_an_older_state_is_one_before_what_the_generation_began_with(
    parent: int | None,
    in_memory: list[int],
    held: list[int],
    found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "list_checkpoints", lambda _: [SimpleNamespace(step=one, suspects=0) for one in held])
    ids = [SnapshotId(1, step) for step in in_memory]
    monkeypatch.setattr(module, "scan", lambda *_: SimpleNamespace(complete=lambda: ids, suspect=lambda: ids[:1]))
    record = Generation(number=2, parent=None if parent is None else SnapshotId(1, parent))
    here = job(tmp_path)
    here.read_generation = lambda: record
    assert module.has_older(here) == found


def test_what_is_left_out_stays_so_until_a_snapshot_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start that dies before its first snapshot has done nothing for those behind it."""
    now = {"began": 4, "snapshot": 4}
    here = job(tmp_path)
    here.read_generation = lambda: SimpleNamespace(number=now["began"])
    held = SimpleNamespace(complete=lambda: [SnapshotId(now["snapshot"], 7)])
    monkeypatch.setattr(module, "scan", lambda *_: held)
    way, found = WayBack(), []
    way.follow(RestartDecision(restart=True, reason="", back=2, leave_out=(9, 9)), here)
    for began, snapshot in ((4, 4), (5, 4), (6, 4), (7, 7)):
        now.update(began=began, snapshot=snapshot)
        way.follow(RestartDecision(restart=True, reason=""), here)
        found.append((way.back, way.leave_out))
    assert found == [(2, (9, 9)), (0, (9, 9)), (0, (9, 9)), (0, (0, 0))]


def test_on_another_root_nothing_is_left_to_do_of_the_one_before(tmp_path: Path) -> None:
    way = WayBack()
    way.follow(RestartDecision(restart=True, reason="", back=2, leave_out=(9, 9)), job(tmp_path / "a"))
    way.follow(None, job(tmp_path / "b"))
    assert (way.back, way.leave_out) == (0, (0, 0))


@pytest.mark.parametrize("how", ["no job", "unreachable", "hangs"])
def test_without_an_answer_the_message_is_as_before(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.05)

    def fail(_: object) -> Any:
        if how == "hangs":
            time.sleep(1.0)
        raise StoreError("away")

    monkeypatch.setattr(module, "list_checkpoints", fail)
    assert way_back(None if how == "no job" else job(tmp_path), 43) == FIX
