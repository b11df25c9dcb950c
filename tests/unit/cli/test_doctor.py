"""`flashckpt doctor`: each thing that would stop a job is found before it does, with what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from importlib import metadata
from pathlib import Path

import pytest

from flashckpt.cli import main as cli
from flashckpt.console import doctor
from flashckpt.shm.block import Capacity
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore

Captured = pytest.CaptureFixture[str]


def checked(*arguments: str, capsys: Captured) -> tuple[int, dict[str, tuple[str, str, str]]]:
    """Return the exit code, and state, found and remedy by check."""
    with pytest.raises(SystemExit) as done:
        cli.main(["doctor", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)["checks"]
    return int(done.value.code or 0), {one["check"]: (one["state"], one["found"], one["remedy"]) for one in found}


def test_a_sound_root_is_left_as_it_was(tmp_path: Path, capsys: Captured) -> None:
    code, found = checked(str(tmp_path / "root"), capsys=capsys)
    assert code == 0
    assert {found[name][0] for name in ("root", "commits", "clock", "torch", "flashckpt")} == {"ok"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_too_little_memory_for_the_state_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(doctor, "capacities", lambda path: [Capacity(nbytes=5 * 10**9, limit="a cgroup")])
    assert checked("--state", "1GB", capsys=capsys)[1]["shared memory"][0] == "ok"
    code, found = checked("--state", "2GB", capsys=capsys)
    assert (code, found["shared memory"][0]) == (10, "failed")
    assert "6.0 GB needed" in found["shared memory"][1]
    assert "--shm-size" in found["shared memory"][2]
    assert checked("--state", "2GB", "--slots", "2", capsys=capsys)[0] == 0


def test_a_disk_in_place_of_a_tmpfs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Captured, shm_dir: Path) -> None:
    monkeypatch.setattr(doctor, "_file_system", lambda path: "ext4")
    first, second = doctor.memory(None)
    assert (first.state, second.state) == ("warning", "ok")
    assert "unset FLASHCKPT_SHM_DIR" in first.remedy


def test_limits_of_files_are_named_with_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert [(one.state, one.remedy[:6]) for one in doctor.limits()] == [("warning", "ulimit"), ("warning", "ulimit")]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))
    assert [one.state for one in doctor.limits()] == ["ok", "ok"]


def test_a_port_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("FLASHCKPT_METRICS_PORT", str(taken.getsockname()[1]))
        (found,) = doctor.ports()
    assert (found.state, found.remedy[:9]) == ("warning", "ss -ltnp ")


@pytest.mark.parametrize(("version", "state"), [("2.10.1", "failed"), ("2.11.0+cpu", "ok"), ("3.0.0a0", "ok")])
def test_a_torch_that_is_too_old_is_a_failure(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert [one.state for one in doctor.versions()] == ["ok", state]


def test_a_root_that_cannot_be_used_ends_with_its_own_exit_code(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    code, found = checked(str(tmp_path / "file/root"), capsys=capsys)
    assert (code, found["root"][0]) == (13, "failed")
    assert "cores" in found, "the rest is said all the same"
    assert checked("memory://x", capsys=capsys)[0] == 10


def test_commits_that_are_not_exclusive_and_a_clock_that_is_off_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixStore, "is_conditional", False)
    found, code = doctor.of_root(str(tmp_path), ())
    assert ([one.state for one in found], code) == (["ok", "warning", "ok"], 0)
    assert doctor.clock(open_store(tmp_path), lambda: time.time() - 3000).state == "warning"


def test_the_page_names_each_remedy_below_its_check(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("WARNING  cores"))
    assert lines[at + 1].strip().startswith("-> one rank per core leaves none")
