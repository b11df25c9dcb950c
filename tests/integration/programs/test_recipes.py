"""The recipes for other frameworks, where these are installed: killed and started again, they end bit for bit equal."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


def losses(output: str) -> dict[int, str]:
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1]): words[3] for words in lines}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("example", "package"), [("hf_trainer.py", "transformers"), ("lightning_fit.py", "lightning")])
def test_recipe_killed_in_an_epoch_goes_on_with_the_losses_of_an_unbroken_run(
    tmp_path: Path, example: str, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}, in an environment of its own")
    command = [sys.executable, "-u", str(ROOT / "examples" / example)]

    def run(root: str) -> str:
        return subprocess.run(
            [*command, str(tmp_path / root), "90"], capture_output=True, text=True, check=True, timeout=280
        ).stdout

    with subprocess.Popen([*command, str(tmp_path / "b"), "90"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("step 35 "):
                os.kill(first.pid, signal.SIGKILL)
                break
    again = losses(run("b"))
    assert 31 <= min(again) <= 50, (
        "not restored, or not from a snapshot just before the kill"
    )  # it runs on until it is killed
    whole = losses(run("a"))
    assert {step: whole[step] for step in again} == again
