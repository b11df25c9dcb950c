"""A training script for launchers: `launched.py ROOT OUT`; kills rank 0 in step 5 of its first life."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashckpt import Checkpointer


def main(root: str, out: Path) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 6)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, snapshot_every=2, persist_every=8)
    ckpt.track(model=model, optimizer=optimizer, rng=True)
    taken = threading.Event()
    ckpt.on_snapshot = lambda step: taken.set() if step == 4 else None
    report = ckpt.restore()
    first = report.step + 1 if report else 1
    with (out / f"r{rank}").open("a") as file:
        file.write(f"life {first}\n")
        for step in range(first, 9):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 6)).pow(2).mean()
            loss.backward()
            if step == 5 and first == 1:
                assert taken.wait(60), "the copy of step 4 may still be under way when step 5 begins"
                if dist.is_initialized():
                    dist.barrier()  # on every rank: the launcher ends the others as soon as one has died
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            ckpt.step(step)
            file.write(f"{step} {loss.item().hex()}\n")
            file.flush()
    ckpt.wait(60)
    ckpt.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
