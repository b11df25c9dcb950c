"""A program forked from the warm interpreter sees and says what one started as usual does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import warm
from support.ranks import wait_for

PROGRAM = """
import atexit, json, logging, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(), "environment": dict(os.environ),
    "leads its session": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    "buffered": [sys.stdout.line_buffering, sys.stdout.write_through], "handlers": logging.getLogger().handlers,
    "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "open": sorted(os.path.realpath(f"/proc/self/fd/{n}") for n in (1, 2)),
}))
print("an error", file=sys.stderr)
atexit.register(print, "at exit")
if sys.argv[1] == "raise":
    raise ValueError("on purpose")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_program_sees_the_same_whether_forked_or_fresh(module: bool, tmp_path: Path) -> None:
    seen = []
    for fresh in (False, True):
        folder = tmp_path / f"fresh-{fresh}"
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        out, err = folder / "out", folder / "err"
        words = ["-m", "program"] if module else [str(folder / "program.py")]
        env = {**os.environ, "MINE": "a b"}
        program = warm.start([*words, "7", "b c"], out, cwd=folder, env=env, errors=err, fresh=fresh)
        assert isinstance(program, subprocess.Popen) == fresh
        assert program.wait(60) == 7
        text, rest = out.read_text().split("\n", 1)
        seen.append((json.loads(text.replace(str(folder), "FOLDER")), rest, err.read_text()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("raise", 1), ("kill", -signal.SIGKILL)])
def test_ends_are_told_as_subprocess_does(how: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = warm.run([str(tmp_path / "program.py"), how], tmp_path)
    assert done.returncode == code
    assert ("ValueError: on purpose" in done.stderr) == (how == "raise")
    assert ("at exit" in done.stdout) == (how != "kill")


def test_program_that_runs_is_waited_for_in_vain_and_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import signal\nopen({str(tmp_path / 'up')!r}, 'w').close()\nsignal.pause()\n")
    program = warm.start([str(script)], tmp_path / "log", cwd=tmp_path, env=dict(os.environ))
    wait_for((tmp_path / "up").exists, what="the program")
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.terminate()
    assert program.wait(60) == -signal.SIGTERM
    assert program.poll() == -signal.SIGTERM


def test_what_an_interpreter_reads_at_its_start_makes_it_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.flags.utf8_mode)")
    done = warm.run([str(tmp_path / "program.py")], tmp_path, env={"PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout) == (0, "1\n")
