"""A program of DLRover's call shapes that is killed continues from memory; its checkpoints are on storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
import torch
from flashckpt.integrations.dlrover import DdpCheckpointer, StorageType

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
flash = DdpCheckpointer("root")
state = flash.load_checkpoint()
if state:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(state.get("step", 0) + 1, 9):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, model.weight.sum().item().hex(), flush=True)
    kind = StorageType.DISK if step % 3 == 0 else StorageType.MEMORY
    flash.save_checkpoint(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, storage_type=kind)
    if step == int(sys.argv[1]):
        flash.wait_latest_checkpoint(60)
        os.kill(os.getpid(), signal.SIGKILL)
flash.close()
"""


def test_a_program_that_is_killed_continues_from_memory_and_its_checkpoints_are_on_storage(tmp_path: Path) -> None:
    def run(folder: Path, kill_at: int) -> tuple[int, dict[int, str]]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", PROGRAM, str(kill_at)]
        env = {key: value for key, value in os.environ.items() if key != "FLASHCKPT_AGENT_DIR"}  # as started by a user
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=100)
        return done.returncode, dict((int(a), b) for a, b in map(str.split, done.stdout.splitlines()))  # noqa: C402

    code, whole = run(tmp_path / "whole", -1)
    assert (code, sorted(whole)) == (0, list(range(1, 9)))
    code, before = run(tmp_path / "killed", 5)
    assert code == -signal.SIGKILL
    committed = {int(path.parent.name[5:14]) for path in (tmp_path / "killed/root").glob("step-*/MANIFEST")}
    assert 3 in committed
    code, after = run(tmp_path / "killed", -1)
    assert code == 0
    assert min(after) == 6
    assert before | after == whole
