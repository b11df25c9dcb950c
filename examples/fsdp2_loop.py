"""FSDP2 on any number of ranks: the checkpointer reads the layout from the DTensors.

dlrun --nproc-per-node 4 examples/fsdp2_loop.py /tmp/run
dlrun --nproc-per-node 2 examples/fsdp2_loop.py /tmp/run     # the same run on half the ranks
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (size,), mesh_dim_names=("dp",))

torch.manual_seed(0)
inputs = torch.randn(4096, 16)
targets = inputs.sum(dim=1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler(len(inputs), dp_rank=rank, dp_size=size, global_batch_size=32, seed=0)

with Checkpointer(root, snapshot_every=5, persist_every=50) as ckpt:
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True, mesh=mesh)
    report = ckpt.restore()
    step = report.step if report else 0
    while step < steps and not ckpt.should_stop:
        samples = iter(sampler)
        while step < steps and not ckpt.should_stop:
            weights = sampler.weights.to(device)  # of this rank's rows; 1 where 32 divides
            picks = list(islice(samples, len(weights)))
            if not picks:
                break
            x, y = inputs[picks].to(device), targets[picks].to(device)
            loss = ((model(x) - y).square().mean(1) * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            ckpt.step(step)
    ckpt.wait()
if rank == 0:
    print(f"done: step {step}  loss {loss.item():.6f}" if step else "nothing to do", flush=True)
dist.destroy_process_group()
