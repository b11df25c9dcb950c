"""The smallest loop: one process, an ordinary module and optimizer, data that resumes at the next untrained sample.

python examples/plain_loop.py /tmp/run             # kill it at any moment, start it again: it continues
dlrun --nproc-per-node 1 examples/plain_loop.py /tmp/run
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200

torch.manual_seed(0)
inputs = torch.randn(4096, 16)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=32, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

with Checkpointer(root, snapshot_every=5, persist_every=50) as ckpt:
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
    report = ckpt.restore()
    step = report.step if report else 0
    while step < steps and not ckpt.should_stop:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:  # before ckpt.step(): a run that resumes here does not repeat what comes after it
                print(f"step {step}  loss {loss.item().hex()}", flush=True)
            ckpt.step(step)
            if step == steps or ckpt.should_stop:
                break
    ckpt.wait()
