"""The examples are programs people copy: they run, and they resume bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.timeout(300)  # three interpreters one after the other, on two cores that others use too

PLAIN = [sys.executable, "-u", str(ROOT / "examples" / "plain_loop.py")]


def losses(output: str) -> dict[int, str]:
    """Return step -> loss (hex) from what the example printed."""
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1]): words[3] for words in lines}


def test_plain_loop_killed_and_started_again_ends_with_the_same_loss(tmp_path: Path) -> None:
    """SIGKILL of an ordinary `python script.py`: the next start restores from memory and ends bit for bit equal."""
    whole = subprocess.run(
        [*PLAIN, str(tmp_path / "a"), "200"], capture_output=True, text=True, check=True, timeout=100
    )
    with subprocess.Popen([*PLAIN, str(tmp_path / "b"), "200"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("step 100 "):
                os.kill(first.pid, signal.SIGKILL)
                break
    again = subprocess.run(
        [*PLAIN, str(tmp_path / "b"), "200"], capture_output=True, text=True, check=True, timeout=100
    )
    assert "restored step" in again.stderr
    assert losses(again.stdout)[200] == losses(whole.stdout)[200]


def test_loop_of_the_readme_killed_and_started_again_prints_the_same_losses(tmp_path: Path) -> None:
    first_loop = [sys.executable, "-u", str(ROOT / "examples" / "first_loop.py")]

    def lines(folder: str, *, killed_at: str = "never") -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        printed = []
        with subprocess.Popen(first_loop, cwd=tmp_path / folder, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            for line in program.stdout:
                printed += [line] if line.startswith("epoch ") else []
                if killed_at in line:
                    program.kill()
                    break
        return printed

    whole = lines("whole")
    assert len(whole) == 7
    assert lines("killed", killed_at="step 150 ") == whole[:3]
    again = lines("killed")  # step 150 is printed again where the kill came before its snapshot was complete
    assert again in (whole[2:], whole[3:])
