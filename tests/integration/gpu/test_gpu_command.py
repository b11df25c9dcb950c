"""`make gpu` without a GPU: what is carried along, that parts end in time, what is said of those that do not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dlrun import alive
from support.paths import ROOT
from support.ranks import wait_for

from flashckpt.native import implementation
from integration.gpu import run, wheels
from integration.gpu.goals import goals
from integration.gpu.parts import PARTS, Part


def part(script: str, *, seconds: int = 60, least: int = 0) -> Part:
    script = script.replace("{", "{{").replace("}", "}}")
    return Part(name="numbers: one", words=("-c", script, "{device}", "{json}"), seconds=seconds, least=least)


def results(tmp_path: Path, *parts: Part, seconds: float = 60.0) -> list[dict[str, object]]:
    return run.run_all(parts, device="cpu", seconds=seconds, out=tmp_path, work=tmp_path)


def test_a_part_gives_its_rows_and_results(tmp_path: Path) -> None:
    script = 'import json, sys; json.dump({"rows": [f"on {sys.argv[1]}"], "figure": 3}, open(sys.argv[2], "w"))'
    (found,) = results(tmp_path, part(script))
    assert (found["state"], found["rows"]) == ("passed", ["on cpu"])
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["results"]["parts"][0]["results"]["figure"] == 3
    assert "torch" in document["results"]["machine"]
    assert "on cpu" in run.table([found])


def test_a_part_that_fails_is_said_with_the_end_of_its_output(tmp_path: Path) -> None:
    (found,) = results(tmp_path, part("raise SystemExit('the bus is on fire')"))
    assert found["state"] == "failed"
    assert "the bus is on fire" in run.table([found])


def test_a_part_that_does_not_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_S", 0.0)
    (found,) = results(tmp_path, part("import time; time.sleep(600)", seconds=0))
    assert found["state"] == "cut off"


def test_what_a_part_has_started_ends_with_it_in_whatever_session(tmp_path: Path) -> None:
    pid, mark = tmp_path / "pid", f"GPU_TEST_PART={tmp_path.name}"
    script = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pid)!r}, "w").write(f"{{child.pid}} ")
time.sleep(600)
"""
    name, _, value = mark.partition("=")
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, name: value}, start_new_session=True)
    try:
        wait_for(lambda: pid.exists() and pid.read_text().endswith(" "), what="the child")
    finally:
        run.end(process, mark)
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(int(pid.read_text())), what="the child's end")


def test_what_there_is_no_time_for_is_a_row_that_says_so(tmp_path: Path) -> None:
    first, second = results(tmp_path, part("pass"), part("pass", least=1000), seconds=30)
    assert (first["state"], second["state"]) == ("passed", "skipped")
    assert "it needs 1000" in run.table([first, second])


def test_tests_are_counted_and_what_did_not_pass_is_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a" time="1"/><testcase name="b" time="0"><skipped message="no GPU"/>'
        '</testcase><testcase name="c" time="2"><failure message="assert 1 == 2&#10;more">text</failure></testcase>'
        "</testsuite></testsuites>"
    )
    assert run.tests_in(report)["rows"] == ["1 passed of 3", "skipped: b: no GPU", "failure: c: assert 1 == 2"]


def test_all_parts_fit_into_their_time_and_know_their_options() -> None:
    assert sum(found.seconds for found in PARTS) <= run.DEFAULT_S
    for found in PARTS:
        (file,) = [ROOT / word for word in found.words if word.endswith(".py")]
        assert file.exists()
        if file.parent.name == "benchmarks":
            for word in [*found.words, *found.on_cpu]:
                assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in file.read_text(), (file.name, word)


def test_what_the_package_needs_is_carried_along_or_the_machines_own() -> None:
    """s3fs is imported for s3:// alone, tomli below Python 3.11."""
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [", 1)[1].split("]", 1)[0]
    names = {wheels.normal(name) for name in re.findall(r'"([A-Za-z0-9_-]+)', text)}
    assert names - {wheels.normal(name) for name in wheels.NEEDED} == {"torch", "s3fs", "tomli"}
    assert set(wheels.pins()) == set(wheels.NEEDED)


def test_a_wheel_that_is_missing_here_and_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(wheels.NEEDED, "xxhash", "no_such_module")
    assert wheels.unpack(tmp_path, tmp_path / "site") == 1
    assert "make gpu-wheels" in capfd.readouterr().err
    assert not any((tmp_path / "site").iterdir())


def test_memory_of_a_part_that_was_cut_off_is_removed_where_it_was_made_for_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, cleared = tmp_path / "kept", tmp_path / "cleared"
    for folder in (kept, cleared):
        (folder / "job").mkdir(parents=True)
    monkeypatch.delenv("GPU_TEST_SHM", raising=False)
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(kept))
    results(tmp_path, part("pass"))
    monkeypatch.setenv("GPU_TEST_SHM", str(cleared))
    results(tmp_path, part("pass"))
    assert ((kept / "job").exists(), (cleared / "job").exists()) == (True, False)


def command(*words: str, **environment: str) -> tuple[int, str]:
    """Run the entry as a user does, from another folder; return (exit code, stderr)."""
    done = subprocess.run(
        ["bash", str(ROOT / "tests/integration/gpu.sh"), *words], check=False,
        env={**os.environ, "PYTHON": sys.executable, **environment}, capture_output=True, text=True, timeout=120, cwd="/",
    )  # fmt: skip
    return done.returncode, done.stderr


def test_what_cannot_begin_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    bare, old = tmp_path / "bare", tmp_path / "old"
    bare.write_text(f'#!/bin/sh\ncase "$2" in *torch*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\nexit 1\n')
    for script in (bare, old):
        script.chmod(0o755)
    out = {"OUT": str(tmp_path / "out")}
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        ((), {"PYTHON": str(tmp_path / "none")}, "not found: set PYTHON"),
        ((), {"PYTHON": str(old)}, "Python 3.10 or newer is needed, found Python 3.9.18"),
        ((), {"PYTHON": str(bare)}, "has no torch"),
        ((), {"OUT": str(file / "x")}, "cannot be written: set OUT"),
        (("--parts", "nonsense"), out, "no part is called 'nonsense'; there are: tests: staging; "),
        (("--device", "tpu"), out, "argument --device: invalid choice: 'tpu'"),
        (("--minutes", "0"), out, "--minutes must be more than 0"),
    ]
    for words, environment, says in cases:
        code, error = command(*words, **environment)
        assert (code, error.count("\n"), says in error) == (4, 1, True), (words, environment, error)


def test_a_wheel_of_another_python_is_not_unpacked(tmp_path: Path) -> None:
    minor = sys.version_info[1]
    names = {
        "a-1-py3-none-any.whl": True,
        f"a-1-cp3{minor}-cp3{minor}-manylinux_2_27_{os.uname().machine}.whl": True,
        f"a-1-cp3{minor - 1}-cp3{minor - 1}-manylinux_2_27_{os.uname().machine}.whl": False,
        f"a-1-cp3{minor - 1}-abi3-manylinux_2_27_{os.uname().machine}.whl": True,
        f"a-1-cp3{minor}-cp3{minor}-manylinux_2_27_riscv64.whl": False,
    }
    assert {name: wheels.fits(tmp_path / name) for name in names} == names


def test_tests_may_have_the_time_that_is_left_over_and_numbers_their_own() -> None:
    one, other = part("pass", seconds=10), part("pass", seconds=30)
    check = replace(one, name="tests: one")
    assert run.allowed_s(one, [other], 100.0, 1.0) == 10
    assert run.allowed_s(check, [other], 100.0, 1.0) == 70
    assert run.allowed_s(check, [other], 25.0, 1.0) == 10
    assert run.allowed_s(check, [other], 5.0, 1.0) == 5


def found(name: str, results: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "results": {"results": results}}


def test_goals_are_met_missed_or_unknown() -> None:
    rounds = [{"call_s": 1.0}, {"call_s": 0.0015}, {"call_s": 0.0019}]
    parts: list[dict[str, Any]] = [
        found("numbers: 1 GB", {"series": {"flashckpt": rounds}}),
        found("numbers: bus", {"rates_gb_per_s": {"tmpfs, registered": {"median": 44.0}}, "limit_gb_per_s": 50.0}),
        found("numbers: every 1, 5, 20", {"step_s": {"0": [0.5, 0.5], "5": [0.504, 0.503], "1": []}}),
        {"name": "numbers: restart", "state": "skipped"},
    ]
    rows = [goal.row for goal in goals(parts, device="cuda")]
    assert [row.partition(" ")[0] for row in rows] == ["met", "met", "missed", "unknown"]
    assert [row.rpartition(": ")[2] for row in rows] == ["1.70 ms", "+0.70 %", "88 %", "its part gave no figure"]
    assert {goal.state for goal in goals(parts, device="cpu")} == {"unknown"}


def test_the_table_says_what_it_was_measured_on() -> None:
    about = run.machine()
    line = run.headline(about, "cpu")
    assert torch.__version__ in line
    assert f"copied by {implementation()}" in line
