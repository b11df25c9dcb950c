"""The programs under benchmarks/ measure with their workers, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

PROGRAMS = ROOT / "benchmarks"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stall", ["--methods", "flashckpt,blocking", "--ranks", "2"]),
        ("persist", ["--ranks", "2"]),
        ("persist", ["--uplift"]),
    ],
)
def test_a_program_measures_with_its_workers_and_leaves_nothing(tmp_path: Path, name: str, words: list[str]) -> None:
    before, result = {*Path("/dev/shm").glob(f"flashckpt-{name}-*")}, tmp_path / "result.json"
    sizes = ["--gb", "0.004", "--seconds", "0", "--rounds", "2", "--dir", str(tmp_path), "--json", str(result)]
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / f"{name}.py"), *sizes, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(result.read_text())["results"]
    assert len(results) == 1
    assert not any("left_out" in one and one["left_out"] for one in results.values())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert {*Path("/dev/shm").glob(f"flashckpt-{name}-*")} <= before
