"""The training program of `test_gpu_jobs.py` and of benchmarks/gpu_restart.py's tests: one rank, exact, told where to die.

dlrun ... -m integration.gpu.job FOLDER --device cuda --backend nccl --die copy
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from support.deaths import die_in_a_copy, kill
from torch import nn

from flashckpt import Checkpointer, faults

STEPS, DIES_AT, WIDTH = 10, 7, 300
EVERY = 2
"""Steps between snapshots."""
DEATHS = ("", "step", "copy", "restore", "memory", "assert", "ordinal")


def fail(death: str, device: torch.device) -> None:
    """Fail as a driver does; without a device with the error that torch raises for it."""
    if death == "memory":
        if device.type == "cuda":
            torch.empty(1 << 46, dtype=torch.uint8, device=device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 65536.00 GiB.")
    if death == "assert":
        if device.type == "cuda":
            torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()
        raise torch.AcceleratorError("CUDA error: device-side assert triggered", 710)
    if death == "ordinal":
        torch.zeros(1, device="cuda:63" if device.type == "cuda" else device)
        raise torch.AcceleratorError("CUDA error: invalid device ordinal", 101)


def reduce_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, restarts = dist.get_rank(), int(os.environ.get("FLASHCKPT_RESTART", "0"))
    dying = rank == options.rank and restarts == 0
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    ckpt = Checkpointer(f"{options.folder}/root", snapshot_every=EVERY, persist_every=1000, job=options.job)
    complete = threading.Event()
    ckpt.on_snapshot = lambda _: complete.set()
    ckpt.track(model=model, optimizer=optimizer, rng=True, replicated_over="world")
    if options.die == "restore" and restarts == 1 and rank == options.rank:
        faults.arm("restore.before-lineage")
    report = ckpt.restore()
    first = report.step if report else 0
    for step in range(first + 1, STEPS + 1):
        if options.die and restarts == 0 and step > EVERY and step % EVERY == 1:
            # copies run beside the steps: which one a killed job goes on from must not depend on their speed
            assert complete.wait(60), "no snapshot of the step before within 60 s"
        complete.clear()
        optimizer.zero_grad()
        loss = model(torch.rand(8, WIDTH, device=device)).square().mean()
        loss.backward()
        reduce_gradients(model)
        if dying and step == DIES_AT:
            if options.die in ("step", "restore"):
                kill()
            fail(options.die, device)
        optimizer.step()
        with Path(f"{options.folder}/trace{rank}").open("a") as file:
            file.write(f"{restarts} {step} {loss.item().hex()}\n")
        if dying and options.die == "copy" and step == DIES_AT - 1:
            die_in_a_copy()
        ckpt.step(step)
    ckpt.wait()
    ckpt.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--die", choices=DEATHS, default="")
    parser.add_argument("--rank", type=int, default=0, help="which rank dies")
    parser.add_argument("--job", default="gpu")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # all ranks share the one device
    if options.device == "cpu":
        torch.set_num_threads(1)
        from support.fake_cuda import install

        install(setattr)  # the device's path, on the host
    dist.init_process_group(options.backend)
    train(options, device)
    dist.destroy_process_group()  # not behind an error: a device that has failed would be waited for


if __name__ == "__main__":
    main()
