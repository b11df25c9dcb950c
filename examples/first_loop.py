"""The loop of the README: kill it at any moment, start it again, and it continues.

python examples/first_loop.py
dlrun --nproc-per-node 1 examples/first_loop.py     # restarts automatically
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

torch.manual_seed(0)
x = torch.randn(4096, 16)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=32, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)

with Checkpointer("out/first", snapshot_every=5, persist_every=100, keep_last=3) as ckpt:
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
    report = ckpt.restore()  # None on a fresh start
    step = report.step if report else 0  # steps are counted over all epochs
    for epoch in sampler.epochs(3):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()  # waits for the copy if it is still running
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:  # log before ckpt.step(): a resumed run does not repeat what comes after
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}", flush=True)
            ckpt.step(step)  # commits the data position; takes a snapshot every 5 steps
            if ckpt.should_stop:  # all ranks agree (preemption, SIGTERM)
                break
        if ckpt.should_stop:
            break
    ckpt.wait()  # until the last checkpoint is durable
