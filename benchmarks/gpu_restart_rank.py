"""The training script of gpu_restart.py: one rank under dlrun that writes when each phase of its start was over."""

import time

ENTERED = time.time()

import argparse  # noqa: E402 -- the time of the first line is the measurement
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

IMPORTED = time.time()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float)
    parser.add_argument("--device")
    options = parser.parse_args()
    marks: dict[str, float] = {"entered": ENTERED, "imported": IMPORTED}

    def mark(name: str) -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()
        marks[name] = time.time()

    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
    torch.zeros(1, device=device)  # the first use of a device makes its context
    mark("context")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dist.all_reduce(
        torch.ones(1, device=device if device.type == "cuda" else "cpu")
    )  # the first collective makes the communicator
    mark("group")
    from flashckpt import Checkpointer

    if device.type == "cpu":
        from gpu_time import take_the_devices_path

        take_the_devices_path()
    width = 4096 if options.gb >= 1 else 256
    count = max(1, round(options.gb * 1e9 / 12 / width**2))
    kinds = {"bias": False, "device": device}
    skip: Any = torch.nn.utils.skip_init
    parts: list[torch.nn.Linear] = [skip(torch.nn.Linear, width, width, **kinds) for _ in range(count)]
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    mark("built")
    ckpt = Checkpointer(f"{options.folder}/root", snapshot_every=1, persist_every=None, job="gpu-restart", slots=2)
    ckpt.track(model=model, optimizer=optimizer)
    done = [0]
    ckpt.on_snapshot = lambda *_: done.append(1)
    report = ckpt.restore()
    mark("restored")
    if report is None:
        for part in parts:
            part.reset_parameters()
    step = report.step if report else 0
    while not (options.folder / "finish").exists():
        step += 1
        optimizer.zero_grad()
        model(torch.ones(1, width, device=device)).sum().backward()
        optimizer.step()
        if "stepped" not in marks:
            mark("stepped")
            seconds = dict(report.seconds) if report else {}
            record = {"pid": os.getpid(), "restored": step - 1, "seconds": seconds, "marks": marks}
            line = json.dumps(record)
            with (options.folder / "marks").open("a") as file:
                file.write(line + "\n")
        ckpt.step(step)
        if len(done) > 2 and not (options.folder / f"ready{os.getpid()}").exists():
            (options.folder / f"ready{os.getpid()}").touch()
        time.sleep(0.02)
    os._exit(0)  # nothing of it is to be kept


if __name__ == "__main__":
    main()
