"""The torchx component of docs/launching.md by torchx itself, with its local scheduler. Part of `make test-others`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

PAGE = ROOT / "docs" / "launching.md"
SCRIPT = """
import os
print("starts:", os.environ["FLASHCKPT_RESTART"], "rank:", os.environ["RANK"], "of:", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1" and os.environ["FLASHCKPT_RESTART"] == "0":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(180)
@pytest.mark.skipif(importlib.util.find_spec("torchx") is None, reason="needs torchx")
def test_the_component_of_the_page_starts_dlrun(tmp_path: Path) -> None:
    """And dlrun restarts the rank that is killed, which torchrun does not without --max-restarts."""
    (component,) = re.findall(r"```python\n(from torchx import.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "dlrun_ddp.py").write_text(component)
    (tmp_path / "train.py").write_text(SCRIPT)
    programs = tmp_path / "bin"
    programs.mkdir()
    dlrun = programs / "dlrun"
    dlrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m flashckpt.daemon.run "$@"\n')
    dlrun.chmod(0o755)
    command = re.search(r"`torchx (run[^`]*)`", PAGE.read_text())
    assert command is not None
    words = [sys.executable, "-m", "torchx.cli.main", *command[1].split()]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=150)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for start in "01":
        assert f"starts: {start} rank: 0 of: 2" in said
