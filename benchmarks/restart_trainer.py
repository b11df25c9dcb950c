"""The training script of benchmarks/restart.py: one and the same under torchrun and dlrun.

Every rank owns its own share of the state and reduces one number per step over gloo. It writes one
JSON line per phase, so that the restart can be cut into phases from outside.
"""

import time

ENTERED, ENTERED_CPU = time.time(), time.process_time()

import json  # noqa: E402 -- the time of the first line is the measurement
import os  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

IMPORTED, IMPORTED_CPU = time.time(), time.process_time()


def save(path: str, state: dict[str, object]) -> None:
    torch.save(state, f"{path}.part")
    Path(f"{path}.part").replace(path)


def reached(marks: dict[str, float], name: str) -> None:
    """Note the time, and the processor seconds of this process so far."""
    marks[name], marks[f"cpu_{name}"] = time.time(), time.process_time()


def main() -> None:
    folder, engine, state_bytes, build = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    marks = {"entered": ENTERED, "imported": IMPORTED, "cpu_entered": ENTERED_CPU, "cpu_imported": IMPORTED_CPU}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reached(marks, "initialised")
    width = max(16, state_bytes // 3 // 4 // 256)  # parameter, and AdamW's two moments, float32
    # "empty" leaves the weights unfilled where a restore is going to overwrite them, as large models are built
    make = torch.nn.Linear if build == "random" else partial(torch.nn.utils.skip_init, torch.nn.Linear)
    model = make(256, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    reached(marks, "built")
    first, path = 0, f"{os.environ['BENCH_SHM']}/state{rank}"
    ckpt = None
    if engine == "flashckpt":
        from flashckpt import Checkpointer

        ckpt = Checkpointer(f"{folder}/root", snapshot_every=5, persist_every=None)
        ckpt.track(model=model, optimizer=optimizer)
        report = ckpt.restore()
        first = report.step if report else 0
    elif Path(path).exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if not first and build == "empty":
        model.reset_parameters()
    reached(marks, "restored")
    step, seconds = first, []
    while not Path(f"{folder}/finish{step}").exists():
        step += 1
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(1, 256)).sum().backward()
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        if ckpt is not None:
            ckpt.step(step)
        elif step % 5 == 0:
            save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        if step == first + 1:
            reached(marks, "stepped")
            line = json.dumps({"rank": rank, "pid": os.getpid(), "first": first, **marks})
            with Path(f"{folder}/marks").open("a") as file:
                file.write(line + "\n")
        seconds.append(time.perf_counter() - begun)
        if step == first + 12:
            with Path(f"{folder}/ready").open("a") as file:
                file.write(f"{os.getpid()} {sorted(seconds[1:])[len(seconds) // 2]}\n")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
