"""What commands, metrics and the page show of a checkpoint's numbers: magnitudes, norms, what became NaN, what jumped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from support.daemons import daemon_of, turn_until
from support.one_rank import agent_of_the_test, crash, finished, step_kept  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.commands.verify import verify
from flashckpt.console.diff import diff
from flashckpt.console.inspect import inspect
from flashckpt.dashboard.gather import PageSource
from flashckpt.storage.factory import open_store

SIZES = {1: 2.0, 2: 400.0, 3: math.nan}


@pytest.fixture
def persisted(tmp_path: Path) -> Iterator[tuple[str, dict[int, dict[str, float]]]]:
    """Three checkpoints of a weight of 16 numbers, all of one size; the metrics after each."""
    root = str(tmp_path / "root")
    model = torch.nn.Linear(4, 4, bias=False)
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=1, keep_last=None, job="numbers")
    ckpt.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    ckpt.restore()
    directory, metrics, store = ckpt._alive().directory, dict[int, dict[str, float]](), open_store(root)
    with daemon_of(cast("Any", SimpleNamespace(directory=directory))) as daemon:
        for step, size in SIZES.items():
            with torch.no_grad():
                model.weight.fill_(size)
            step_kept(ckpt, step)
            finished(ckpt)
            turn_until(daemon, lambda at=step: at in {one.step for one in list_checkpoints(store)}, f"step {step}")  # type: ignore[misc]
            turn_until(daemon, lambda at=step: daemon.numbers().get("committed_step") == at, "the metrics")  # type: ignore[misc]
            metrics[step] = dict(daemon.numbers())
        yield root, metrics
    crash(ckpt)


def shown(command: Any, *words: str) -> tuple[Any, str]:
    document = CliRunner().invoke(command, [*words, "--json"]).stdout
    return json.loads(document), CliRunner().invoke(command, [*words], env={"COLUMNS": "200"}).stdout


def test_inspect_diff_and_verify_show_magnitudes_norms_that_jumped_and_what_became_nan(persisted: Any) -> None:
    root = persisted[0]
    document, text = shown(inspect, root, "--step", "2", "--tensors")
    (weight,) = [one for one in document["tensors"] if one["fqn"] == "model.weight"]
    assert weight["numbers"] == {"largest": 400.0, "norm": 1600.0, "suspect": False}
    assert "up to 400, norm 1.6e+03" in text
    assert "NOT FINITE, and was before" in shown(inspect, root, "--step", "3", "--tensors")[1]
    document, text = shown(diff, root, "1", "2")
    assert document["numbers"] == [{"fqn": "model.weight", "norm": [8.0, 1600.0], "suspect": False}]
    assert ["model.weight" in line and "1.6e+03" in line for line in text.splitlines()].count(True) == 1
    assert shown(diff, root, "2", "3")[0]["numbers"] == [
        {"fqn": "model.weight", "norm": [1600.0, None], "suspect": True}
    ]
    found, text = shown(verify, root, "--step", "2", "--numbers")
    (jumped,) = found["checkpoints"][0]["numbers"]
    assert (jumped["tensor"], jumped["norm_before"], jumped["step_before"]) == ("model.weight", 8.0, 1)
    assert "model.weight: up to 400, norm 1.6e+03, 8 in step 1" in text
    assert shown(verify, root, "--step", "1", "--numbers")[0]["checkpoints"][0]["numbers"] == []
    assert "model.weight: NOT FINITE, and was before" in shown(verify, root, "--step", "3", "--numbers")[1]


def test_metrics_and_the_page_follow_norm_and_magnitude(persisted: Any) -> None:
    root, metrics = persisted
    assert {step: (one["norm"], one["largest_number"]) for step, one in metrics.items()} == {
        1: (8.0, 2.0),
        2: (1600.0, 400.0),
        3: (0.0, 0.0),
    }
    curves = PageSource(root).document()["curves"]
    (points,) = [one["points"] for one in curves]
    assert points["job/norm of rank 0"][:2] == [(1, 8.0), (2, 1600.0)]
    assert points["job/largest number of rank 0"][:2] == [(1, 2.0), (2, 400.0)]
