"""Both sides of the change of a torchrun loop in docs/migrating.md run: the one before as it is, the one after through a kill."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

SAMPLES, BATCH, EPOCHS = 640, 32, 2
AROUND = f"""
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

class Numbers(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, i):
        return i, torch.full((4,), i / {SAMPLES})

rank, world, epochs, data = 0, 1, {EPOCHS}, Numbers()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())

def train(batch):
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(batch[1]).sum().backward()
    optimizer.step()
    with open("seen", "a") as file:
        print(step, *batch[0].tolist(), file=file)

"""


def sides() -> tuple[str, str]:
    """Return the loop before and after the change."""
    (lines,) = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "docs" / "migrating.md").read_text(), re.MULTILINE | re.DOTALL
    )
    before, after = ("".join(line[1:] + "\n" for line in lines.splitlines() if line[0] in f" {sign}") for sign in "-+")
    return before, after


def run(loop: str, folder: Path, kill_at: int = -1) -> int:
    (folder / "train.py").write_text(AROUND + loop)
    return subprocess.run([sys.executable, "train.py", str(kill_at)], cwd=folder, check=False, timeout=100).returncode


def seen(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, those of the last time it was trained."""
    rows = [[int(word) for word in line.split()] for line in (folder / "seen").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_loop_before_runs_and_the_loop_after_trains_every_sample_once_through_a_kill(tmp_path: Path) -> None:
    before, after = sides()
    after = after.replace("s3://bucket/run", "root")
    steps = EPOCHS * SAMPLES // BATCH
    for name, loop, kills in (("before", before, []), ("whole", after, []), ("killed", after, [8, 27])):
        folder = tmp_path / name
        folder.mkdir()
        assert [run(loop, folder, kill) for kill in kills] == [-signal.SIGKILL] * len(kills)
        assert run(loop, folder) == 0
        assert sorted(seen(folder)) == list(range(steps))
    killed = seen(tmp_path / "killed")
    assert killed == seen(tmp_path / "whole")
    for epoch in range(EPOCHS):
        ids = [i for step in range(epoch * steps // EPOCHS, (epoch + 1) * steps // EPOCHS) for i in killed[step]]
        assert sorted(ids) == list(range(SAMPLES))
