"""From the kill of a rank to the end of the next step, where a sample takes long to prepare: with kept samples, and without.

    python benchmarks/first_batch.py [--rounds 5] [--ranks 2] [--batch 10] [--workers 4] [--sample-ms 200] [--step-ms 600] [--json FILE]

dlrun trains a small model whose loader waits so many milliseconds for each sample; a step takes `--step-ms`, as a device would,
so that the loader is ahead. Rank 0 is killed in the middle of a run, several times. `restart` is from the kill until the restored rank asks for its first batch, `batch` until
it has it, `step` until the step is done. Then all are killed and one rank alone continues: `resized` is from its question for
the first batch until its step is done. A digest of the first steps says that both kinds trained the same samples.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from processes import clean_up_on_sigterm, places, with_environment

from flashckpt.bench.measure import LoadWatch, document, summarise, write_json

STEPS_BEFORE = 6


class Slow:
    """Rows that take their time."""

    fingerprint = "slow"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        import torch

        time.sleep(self.seconds)
        return torch.full((256,), index / 1e5), index


def rank(folder: Path, kind: str, batch: int, workers: int, seconds: float, step_s: float) -> None:
    """Train until killed; one line for each step."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from flashckpt import Checkpointer
    from flashckpt.sampler import ElasticSampler

    dist.init_process_group("gloo")
    number, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(256, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Slow(seconds)
    sampler = ElasticSampler(data, dp_rank=number, dp_size=world, seed=1, global_batch_size=batch)
    ckpt = Checkpointer(folder / "root", snapshot_every=1, persist_every=None, job=folder.name)
    samples: Any = ckpt.keep_samples(data) if kind == "kept" else data
    loader = DataLoader(
        samples,
        batch_size=batch // world,
        sampler=sampler,
        num_workers=workers // world,
    )
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
    report = ckpt.restore()
    step = report.step if report else 0
    asked, batches = time.time(), iter(loader)
    with (folder / f"rank{number}").open("a") as file:
        while not ckpt.should_stop:
            rows, ids = next(batches)
            got = time.time()
            time.sleep(step_s)
            optimizer.zero_grad()
            loss: Any = model(rows).square().mean()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world)
            optimizer.step()
            step += 1
            ckpt.step(step)
            line = {
                "step": step,
                "pid": os.getpid(),
                "asked": asked,
                "got": got,
                "done": time.time(),
                "ids": ids.tolist(),
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            asked = time.time()
    ckpt.close()


def lines(folder: Path, number: int = 0) -> list[dict[str, Any]]:
    path = folder / f"rank{number}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until(folder: Path, condition: Any) -> dict[str, Any]:
    """Wait for a line of rank 0 and return it."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for line in lines(folder):
            if condition(line):
                return line
        time.sleep(0.002)
    raise RuntimeError(f"no such step within 120 s: {lines(folder)[-1:]}")


def launch(folder: Path, memory: Path, kind: str, ranks: int, words: list[str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "FLASHCKPT_SHM_DIR": str(memory)}
    command = ["-m", "flashckpt.daemon.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "9"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command, __file__, "--rank", str(folder), kind, *words], stdout=log, stderr=log, env=env
        )


def end(memory: Path) -> None:
    """Return when no process has this memory: the persister ends last where the job was to stop."""
    patience = time.monotonic() + 30
    while found := with_environment(f"FLASHCKPT_SHM_DIR={memory}"):
        for pid in found if time.monotonic() > patience else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def kills(folder: Path, memory: Path, kind: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Kill rank 0 so many times, then all of them; return seconds by name."""
    words = [str(options.batch), str(options.workers), str(options.sample_ms / 1e3), str(options.step_ms / 1e3)]
    job = launch(folder, memory, kind, options.ranks, words)
    try:
        found = killed_ranks(folder, job, options)
        before = {line["pid"] for line in lines(folder)}
        job = launch(folder, memory, kind, 1, words)
        first = until(folder, lambda line: line["pid"] not in before)
        found["resized"].append(first["done"] - first["asked"])
    finally:
        job.terminate()
        job.wait()
        end(memory)
    return found


def killed_ranks(folder: Path, job: subprocess.Popen[bytes], options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("steady", "restart", "batch", "step", "resized")}
    goal, pid = STEPS_BEFORE, 0
    for _ in range(options.rounds):
        last = until(folder, lambda line, pid=pid, goal=goal: line["pid"] != pid and line["step"] >= goal)
        mine = [line["done"] for line in lines(folder) if line["pid"] == last["pid"]]
        found["steady"] += [b - a for a, b in itertools.pairwise(mine[1:])]
        pid, killed = last["pid"], time.time()
        os.kill(pid, signal.SIGKILL)
        first = until(folder, lambda line, pid=pid, killed=killed: line["pid"] != pid and line["done"] > killed)
        found["restart"].append(first["asked"] - killed)
        found["batch"].append(first["got"] - killed)
        found["step"].append(first["done"] - killed)
        goal = first["step"] + STEPS_BEFORE
    until(folder, lambda line: line["step"] >= goal)
    job.kill()
    job.wait()
    for number in range(options.ranks):
        with contextlib.suppress(ProcessLookupError):  # they die with dlrun
            os.kill(lines(folder, number)[-1]["pid"], signal.SIGKILL)
    return found


def order(folder: Path, ranks: int) -> str:
    """Return a digest of which samples each step trained, whichever rank did."""
    steps: dict[int, set[int]] = {}
    for number in range(ranks):
        for line in lines(folder, number):
            steps.setdefault(line["step"], set()).update(line["ids"])
    sizes = {len(ids) for ids in steps.values()}
    return (
        f"{len(steps)} steps of {sorted(sizes)} samples, "
        + hashlib.blake2b(
            repr([sorted(steps[step]) for step in sorted(steps)][:STEPS_BEFORE]).encode(), digest_size=6
        ).hexdigest()
    )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        place, which, batch, workers, seconds, step_s = sys.argv[2:]
        rank(Path(place), which, int(batch), int(workers), float(seconds), float(step_s))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sample-ms", type=float, default=200.0)
    parser.add_argument("--step-ms", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clean_up_on_sigterm()
    rows, load = dict[str, Any](), LoadWatch()
    for kind in ("kept", "plain"):
        with places(None) as (folder, memory):
            timed = {name: summarise(each) for name, each in kills(folder, memory, kind, options).items()}
            rows[kind] = {"seconds": timed, "order": order(folder, options.ranks)}
            text = ", ".join(
                f"{name} {each.median:.2f} s [{each.min:.2f}-{each.max:.2f}]" for name, each in timed.items()
            )
            print(f"{kind:6} {text}; {rows[kind]['order']}", flush=True)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        write_json(options.json, document("first-batch", settings, rows, load=load))


if __name__ == "__main__":
    main()
