"""A rank of `soak.py`: trains a small model until it is stopped, with a snapshot each step and a commit each second one.

With the length of a step it keeps to that, waits for no commit, and writes down when each step was done (`soak_failures.py`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

PERSIST_EVERY = 2


def main() -> None:
    """Train until dlrun ends the job: ROOT PROGRESS [SECONDS]. Rank 0 writes the last committed step into the second file."""
    root, progress, step_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = ElasticSampler(data, dp_rank=rank, dp_size=world, global_batch_size=8 * world, seed=0)
    with Checkpointer(root, snapshot_every=1, persist_every=PERSIST_EVERY, keep_last=2) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
        report = ckpt.restore()
        step = report.step if report else 0
        due_s = time.monotonic()
        for _ in sampler.epochs(10**9):
            for (inputs,) in DataLoader(data, batch_size=8, sampler=sampler):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                step += 1
                if step_s:
                    due_s = max(due_s + step_s, time.monotonic())
                    time.sleep(max(0.0, due_s - time.monotonic()))
                    if rank == 0:
                        with progress.with_name("steps").open("a") as file:
                            file.write(f"{time.monotonic()} {step}\n")
                ckpt.step(step)
                if step % PERSIST_EVERY == 0 and step_s:
                    if rank == 0:
                        progress.write_text(str(step))
                elif step % PERSIST_EVERY == 0:
                    ckpt.wait(300)  # so that each of them is committed, and none is overtaken
                    if rank == 0:
                        progress.write_text(str(step))
                if ckpt.should_stop:
                    break
            if ckpt.should_stop:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
