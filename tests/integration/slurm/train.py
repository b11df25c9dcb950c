"""A small data-parallel run under Slurm: endless until it is stopped; once restored it trains 20 steps more and ends with 0.

Writes a line per step to rank0.trace, each rank: `restored STEP BYTES_FROM_MEMORY BYTES_FROM_STORAGE`, then `STEP LOSS`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flashckpt import Checkpointer

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ckpt = Checkpointer("ckpt", snapshot_every=2, persist_every=50)
ckpt.track(model=model, optimizer=optimizer, rng=True)
report = ckpt.restore()
step = report.step if report else 0
last = step + 20 if report else 1 << 30
with Path(f"rank{rank}.trace").open("a", encoding="utf-8") as trace:
    if report:
        source = report.tier_bytes
        trace.write(f"restored {step} {source.get('memory', 0)} {source.get('storage', 0)}\n")
    while step < last and not ckpt.should_stop:
        step += 1
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        trace.write(f"{step} {loss.item().hex()} {os.environ['SLURMD_NODENAME']}\n")
        trace.flush()
        ckpt.step(step)
        time.sleep(0.02)  # a step that can be interrupted rather than a busy machine
ckpt.wait(60)
ckpt.close()
dist.destroy_process_group()
