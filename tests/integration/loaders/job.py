"""A training program as users write it, with the loader of one library; says which samples each step trained.

job.py FOLDER WORKLOAD [--steps N] [--kills STEP,...] [--workers N,...]
The Nth start dies at the Nth of the kills, by SIGKILL, and has the Nth number of workers; then the last one.
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from flashckpt import Checkpointer
from integration.loaders.workloads import EPOCHS, GLOBAL_BATCH, SAMPLES, WORKLOADS, Place, ids_of


def numbers(text):
    return [int(one) for one in text.split(",") if one]


def rounds(source):
    """Yield for each time that the loop is to be read: a loader by itself counts no epochs, and may have ended one already."""
    yield from source.epochs(EPOCHS) if hasattr(source, "epochs") else range(EPOCHS + 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("workload")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--kills", type=numbers, default=[])
    parser.add_argument("--workers", type=numbers, default=[0])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    start, rank = int(os.environ["FLASHCKPT_RESTART"]), int(os.environ["RANK"])
    kill_at = given.kills[start] if start < len(given.kills) else 0
    workers = given.workers[min(start, len(given.workers) - 1)]
    dist.init_process_group("gloo")
    torch.manual_seed(start)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    noise = torch.Generator().manual_seed(start)  # of the user's own, tracked
    workload = WORKLOADS[given.workload]
    loop, tracked = workload.make(Place(given.folder.parent / "data", rank, dist.get_world_size(), workers))
    with Checkpointer(given.folder / "root", snapshot_every=1, persist_every=4) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, replicated_over="world", rng=True, noise=noise, **tracked)
        report = ckpt.restore()
        step = report.step if report else 0
        with (given.folder / f"rank{rank}.txt").open("a") as file:
            for _ in rounds(next(iter(tracked.values()))):
                for batch in loop:
                    ids = ids_of(batch)
                    inputs = torch.tensor(ids, dtype=torch.float32)[:, None] + torch.rand((), generator=noise)
                    loss = model(inputs).square().mean()
                    loss.backward()
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    print(step, ",".join(map(str, ids)), loss.item().hex(), file=file, flush=True)
                    ckpt.step(step)
                    if step == kill_at and rank == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if step == (given.steps or EPOCHS * SAMPLES // GLOBAL_BATCH):
                        ckpt.wait()
                        return
        ckpt.wait()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
