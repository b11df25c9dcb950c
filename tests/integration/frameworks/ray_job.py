"""A user's program with Ray Train, that says which samples each step trained and with which losses.

ray_job.py FOLDER: an unbroken run, one whose worker is killed, and its continuation by another `fit()` on one worker, and on four.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from support.ranks import wait_for

from flashckpt.errors import ConfigError
from flashckpt.integrations.ray import checkpointer
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler

SAMPLES, BATCH = 50, 8  # 50 does not divide by 8: the order crosses the end of the data inside a step


def die_beside_waiting_rank(folder: Path, rank: int) -> None:
    """Kill rank 1, once, as soon as rank 0 begins the backward pass, whose all_reduce nobody will join."""
    if rank == 0:
        (folder / "waits").touch()
    else:
        wait_for((folder / "waits").exists)
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    folder, context = Path(config["folder"]), get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ElasticSampler(SAMPLES, dp_rank=rank, dp_size=world, global_batch_size=BATCH, seed=3)
    torch.manual_seed(rank)
    ckpt = checkpointer(f"{context.get_experiment_name()}-root", snapshot_every=1, persist_every=4)
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
    report = ckpt.restore()
    step = report.step if report else 0
    with (folder / f"rank{rank}.txt").open("a") as file:
        print("-", os.environ["SLURM_JOB_ID"], ckpt._settings.job, report, file=file, flush=True)
        batches = ElasticBatchSampler(sampler, BATCH // world)
        for numbers in (numbers for _ in sampler.epochs(100) for numbers in batches):
            step += 1
            x = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(i)) for i in numbers])
            loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
            if step == config["kill_at"] and not (folder / "killed").exists():
                die_beside_waiting_rank(folder, rank)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            words = step, ",".join(map(str, numbers)), float(loss.item()).hex(), float(torch.rand(()).item()).hex()
            print(*words, file=file, flush=True)
            ckpt.step(step, persist=step == config["steps"])
            if step == config["steps"]:
                break
    ckpt.wait(60)
    ckpt.close()


def fit(folder: Path, *, workers: int = 2, steps: int, kill_at: int = 0) -> None:
    """Train to a step; RunConfig.name is the name of the folder."""
    folder.mkdir(exist_ok=True)
    failures = FailureConfig(max_failures=2)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": steps, "kill_at": kill_at},
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=folder.name, storage_path=str(folder.parent / "ray"), failure_config=failures),
    ).fit()


def main():
    folder = Path(sys.argv[1])
    try:
        checkpointer("root")
    except ConfigError as error:
        print(error.problem)
    os.environ["SLURM_JOB_ID"] = "7"  # of the allocation that the cluster runs in
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:  # a short name: sockets lie in it
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=10**8, _temp_dir=temporary)
        try:
            fit(folder / "whole", steps=20)
            fit(folder / "killed", steps=12, kill_at=8)
            fit(folder / "killed", steps=16, workers=1)
            fit(folder / "killed", steps=20, workers=4)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
