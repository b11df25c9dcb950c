"""Whole runs on a terminal: the live display alone and under dlrun, Ctrl-C, a closed window, a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ranks import wait_for
from support.screen import Terminal, terminal
from support.training import run_config, write_corpus

from flashckpt.trainer.config import to_toml
from flashckpt.trainer.train.metrics import read_trace

DEADLINE_S = 100.0
STEPS, FEWER = 800, 200
"""More than a fast machine trains before the first commit, which takes a second or two; and before it is drawn."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("display")
    return folder, write_corpus(folder / "text")


def words(corpus: Any, name: str, steps: int, **sections: Any) -> list[str]:
    folder, source = corpus
    config = run_config(
        folder,
        data={"source": source, "holdout_every": 4},
        checkpoint={"root": str(folder / name / "root"), "job": f"test-display-{name}", "persist_every": 10},
        log={"folder": str(folder / name), "every": 1},
        train={"steps": steps, "micro_batch": 8},
        **sections,
    )
    (folder / f"{name}.toml").write_text(to_toml(config))
    return ["-m", "flashckpt.trainer", "--config", str(folder / f"{name}.toml")]


@contextmanager
def running(at: Terminal, command: list[str], **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with this terminal as its controlling one, as a shell starts it."""
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environ}
    for name in ("CI", "NO_COLOR"):
        environment.pop(name, None)
    program = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, sys.executable, *command],
        stdin=at.end, stdout=at.end, stderr=at.end, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(at: Terminal, process: Any, condition: Any, what: str) -> None:
    def met() -> bool:
        at.read(0.02)
        assert process.poll() is None or condition(), f"ended with {process.poll()}:\n" + "\n".join(at.screen.lines)
        return bool(condition())

    wait_for(met, deadline_s=DEADLINE_S, what=what)


def ended(at: Terminal, process: Any) -> int:
    def has_ended() -> bool:
        at.read(0.02)
        return process.poll() is not None

    wait_for(has_ended, deadline_s=DEADLINE_S, what="the end")
    at.read(0.1)
    return int(process.returncode)


def steps_of(corpus: Any, name: str) -> list[int]:
    return [line["step"] for line in read_trace(corpus[0] / name / "trace.jsonl")]


def is_drawn(at: Terminal) -> bool:
    return any(line.startswith("snapshot ") for line in at.screen.lines[-9:])


def clean_end(at: Terminal, last: str) -> None:
    """The display has gone, one line about the last step is left, and the cursor is below it."""
    assert not any(line.startswith(("snapshot ", "host ")) for line in at.screen.lines), at.screen.lines
    assert any(line.startswith(last) for line in at.screen.lines), at.screen.lines
    assert at.screen.column == 0
    assert "\x1b[?25l" not in at.written


def test_a_run_on_a_terminal_is_shown_live_and_leaves_one_line(corpus: Any, shm_dir: Any) -> None:
    with terminal(100, 30) as at, running(at, words(corpus, "alone", STEPS)) as process:
        until(at, process, lambda: is_drawn(at), "the display")
        at.resize(50, 12)
        until(at, process, lambda: any("checkpoint of generation" in line for line in at.screen.lines), "a commit")
        assert ended(at, process) == 0
        clean_end(at, f"step {STEPS}/{STEPS}  loss ")
        assert sum(line.startswith("step ") for line in at.screen.lines) == 1  # no line per step
    assert steps_of(corpus, "alone") == [*range(1, STEPS + 1)]


def test_a_run_that_is_interrupted_leaves_a_clean_terminal(corpus: Any, shm_dir: Any) -> None:
    with terminal(200, 30) as at, running(at, words(corpus, "interrupted", 100_000)) as process:
        until(at, process, lambda: is_drawn(at), "the display")
        at.type(b"\x03")
        assert ended(at, process) != 0
        clean_end(at, "step ")
        assert at.screen.lines[-1].endswith("KeyboardInterrupt")


def test_a_run_survives_its_window(corpus: Any, shm_dir: Any) -> None:
    with terminal(100, 30) as at, running(at, words(corpus, "closed", FEWER)) as process:
        until(at, process, lambda: is_drawn(at), "the display")
        done = len(steps_of(corpus, "closed"))
        at.close()
        assert process.wait(DEADLINE_S) == 0
    assert done < FEWER
    assert steps_of(corpus, "closed") == [*range(1, FEWER + 1)]


def drawing_rank(corpus: Any, name: str) -> int:
    """Return the pid of the rank that reports, which is the last one of a pipeline."""
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if text.startswith("rank 1: flashckpt.trainer") and f"{name}.toml" in text:
            return int(entry.name)
    raise AssertionError("no such rank")


def test_dlrun_gives_its_terminal_to_the_rank_that_reports(corpus: Any, shm_dir: Any) -> None:
    """That rank is killed while it draws; the next generation draws below what dlrun has to say."""
    command = [
        "-m",
        "flashckpt.daemon.run",
        "--nproc-per-node",
        "2",
        *words(corpus, "dlrun", 100_000, parallel={"pp": 2}),
    ]
    with terminal(150, 40) as at, running(at, command) as process:
        until(at, process, lambda: is_drawn(at) and len(steps_of(corpus, "dlrun")) > 12, "the display")
        os.kill(drawing_rank(corpus, "dlrun"), signal.SIGKILL)
        until(at, process, lambda: any("failed first at step" in line for line in at.screen.lines), "dlrun's report")
        until(at, process, lambda: any(line.endswith("restarts 1") for line in at.screen.lines), "the next generation")
        assert sum(line.startswith("snapshot ") for line in at.screen.lines) == 1  # the killed one's display has gone
        (report,) = (line for line in at.screen.lines if "failed first at step" in line)
        assert report.startswith("[dlrun] rank 1 (local 1, pid ")
        at.type(b"\x03")
        assert ended(at, process) == 75
        clean_end(at, "step ")
    restored = [json.loads(line) for line in (corpus[0] / "dlrun" / "restores.jsonl").read_text().splitlines()]
    assert {line["generation"] for line in restored} == {2}


@pytest.mark.parametrize("way", ["plain", "NO_COLOR"])
def test_plain_lines_where_they_are_requested(corpus: Any, shm_dir: Any, way: str) -> None:
    command = words(corpus, way, 3)
    with terminal(200, 30) as at:
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1" if way == "NO_COLOR" else ""}
        more = ["--log.display", "plain"] if way == "plain" else []
        process = subprocess.Popen([sys.executable, *command, *more], stdout=at.end, stderr=at.end, env=environment)
        assert process.wait(DEADLINE_S) == 0
        written = os.read(at._ours, 65536).decode()
    assert "\r\x1b[Kstep 3/3  loss" in written
    assert "snapshot " not in written.replace("snapshots", "")
