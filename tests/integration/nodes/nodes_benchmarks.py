"""The benchmarks that need nodes run at a tiny size (make test-nodes; root): they end, and what they count is right.

No figure of seconds is asserted: that is what the programs are run for elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]


def results_of(name: str, folder: Path, *words: object) -> Any:
    """Run a program under benchmarks/; return the results of its one configuration."""
    where = ["--dir", folder, "--json", folder / "result.json"]
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *where, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == ["result.json"]
    (found,) = json.loads((folder / "result.json").read_text())["results"].values()
    return found


def test_a_lost_node_is_measured_and_its_rows_come_from_the_replica(tmp_path: Path) -> None:
    sizes = ["--gb", 0.003, "--rounds", 1, "--ways", "replicas", "--step-s", 0.05, "--persist-every", 4]
    (row,) = results_of("node_loss", tmp_path, *sizes)["rows"]["replicas"]
    assert row["bytes"]["storage"] == 0
    assert row["bytes"]["replica"] > 0
    assert row["seconds"] >= sum(row["phases"].values()) - 1e-6


def test_steps_beside_replicas_are_measured_and_a_cut_link_is_shown(tmp_path: Path) -> None:
    sizes = [
        "--gb",
        0.01,
        "--mbit",
        80,
        "--busy",
        0.2,
        "--step-s",
        0.05,
        "--every",
        40,
        "--reduced-kb",
        1,
        "--cycles",
        1,
    ]
    found = results_of("replication", tmp_path, *sizes)
    assert set(found["rows"][0]["rates_mbit"]) == {"replicas", "raw"}
    status, metrics = found["cut"]["status"], found["cut"]["metrics"]
    assert status["lag_steps"] == metrics["flashckpt_replica_lag_steps"] > 0
