"""A state that is intact and worthless: the job goes back to one that is good, and a fault of the script still ends it."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from support.dlrun import run_dlrun

from flashckpt.errors import RestartBudgetError

pytestmark = pytest.mark.timeout(400)

TRAIN = """
import math, os, sys
import torch
from flashckpt import Checkpointer

folder, fault, where, bad_step = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
mark = f"{folder}/mark"
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = Checkpointer(f"{folder}/root", snapshot_every=1, persist_every=10)
ckpt.track(model=model, optimizer=optimizer, rng=True)
report = ckpt.restore()
step = 0 if report is None else report.step
print("began at", step, flush=True)
while step < 45:
    loss = model(torch.randn(8, 16)).pow(2).mean()
    if step >= bad_step + 2 and (fault == "script" or not loss.item() < 1e6):
        raise FloatingPointError("the loss is bad")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == bad_step and fault in ("nan", "flip") and not os.path.exists(mark):
        open(mark, "w").close()
        state = optimizer.state[model.weight]
        with torch.no_grad():
            (model.weight if where == "weight" else state[where])[step % 16, 3] = math.nan if fault == "nan" else 1e15
    ckpt.step(step)
    if step % 10 == 0:
        ckpt.wait()
    with open(f"{folder}/trace", "a") as trace:
        print(step, loss.item().hex(), file=trace)
ckpt.wait()
print("weights", model.weight.sum().item().hex(), flush=True)
"""


SEEDS = int(os.environ.get("SEEDS", "4"))
"""How many faults are tried; `make test-poisoned SEEDS=1000` tries more."""


def run(folder: Path, fault: str, where: str, step: int, *options: object) -> tuple[int, str, list[int]]:
    """Run a job with a fault at a step; return its exit code, its output and the steps that its lives began at."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    code, output = run_dlrun(
        folder, "--standalone", "--nproc-per-node=1", *options, folder / "train.py", folder, fault, where, step
    )
    return code, output, [int(one) for one in re.findall(r"began at (\d+)", output)]


def weights(output: str) -> list[str]:
    return re.findall(r"weights (\S+)", output)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what a run without a fault ends with."""
    _, output, _ = run(tmp_path_factory.mktemp("unbroken") / "job", "none", "", 0)
    return weights(output)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_with_one_bad_number_ends_equal_to_the_unbroken_run(
    seed: int, unbroken: list[str], tmp_path: Path
) -> None:
    chosen = random.Random(seed)
    fault, where, step = ("nan", "flip")[seed % 2], chosen.choice(["weight", "exp_avg"]), chosen.randint(11, 40)
    code, output, began = run(tmp_path / "broken", fault, where, step)
    assert code == 0, output
    assert weights(output) == unbroken != []
    assert began[-1] < step
    assert len(began) <= (2 if fault == "nan" else 5), output
    assert ("holds NaN or infinity" in output) == (fault == "nan")


def test_a_fault_of_the_script_ends_the_job_after_the_older_states_were_tried(tmp_path: Path) -> None:
    code, output, began = run(tmp_path / "job", "script", "", 31, "--escalate=2")
    assert code == RestartBudgetError.exit_code, output
    assert len(began) == 4, output
    assert began[1] > began[2] > began[3]
    assert "(2 of 2, --escalate)" in output
    assert "and again from 2 older states" in output
