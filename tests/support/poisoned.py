"""Jobs under dlrun whose state becomes bad, again and again: faults of a seed, and what each job ended with.

A fault strikes once, at a step of the unbroken run, and so may be repaired; a fault of the script comes again whatever is
restored. The script looks at its loss and weights every third step, as loops do that log every few steps: bad states are
snapshotted meanwhile. A flipped bit that the script does not notice, and whose numbers stay finite, is in the result: such
jobs have that fault alone, and are counted as `unseen`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.errors import RestartBudgetError
from support.dlrun import run_dlrun

TRAIN = """
import contextlib, json, math, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from flashckpt import Checkpointer
from flashckpt.shm.inventory import scan
from flashckpt.shm.segment import Segment

folder, plan = sys.argv[1], json.loads(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
dtype = getattr(torch, plan["dtype"])
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4 if dtype is torch.float16 else 1e-8)
ckpt = Checkpointer(f"{folder}/root", snapshot_every=1, persist_every=10, keep_last=3)
ckpt.track(model=model, optimizer=optimizer, rng=True, replicated_over="world" if world > 1 else None)
report = ckpt.restore()
step = 0 if report is None else report.step
if rank == 0:
    print("began at", step, flush=True)


def flip(number, place, bit):
    width = 8 * number.element_size()
    with torch.no_grad():
        bits = number.view(-1).view(getattr(torch, f"int{width}"))
        sign = 1 << width - 1
        mask = 1 << (width - 2 if bit is None else bit % width)
        bits[place % len(bits)] ^= mask - 2 * sign if mask == sign else mask


def damage(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 0x10
        file.seek(at)
        file.write(bytes([byte]))


def damage_slots(newest_only):
    found = sorted(scan(ckpt._session.directory).slots, key=lambda one: one.header.step)
    for slot in [one for one in found if one.header.is_complete][-1 if newest_only else 0 :]:
        with contextlib.closing(Segment.attach(slot.path)) as segment:
            damage(slot.path, segment.spec.data_at(slot.slot) + 8)


def strike(fault):
    kind, where, place = fault["kind"], fault["where"], fault["place"]
    parameter = list(model.parameters())[place % 4]
    if kind in ("stop", "spin"):
        while True:
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else 0)
    if kind in ("nan", "flip", "bit"):
        target = parameter if where == "parameter" else optimizer.state[parameter][where]
        if kind == "nan":
            with torch.no_grad():
                target.view(-1)[place % target.numel()] = math.nan
        else:
            flip(target.detach(), place, fault["bit"] if kind == "bit" else None)


def damaged_and_killed(fault):
    ckpt.fence()
    ckpt._session._stager.finish()
    if fault["kind"] == "slot":
        damage_slots(newest_only=True)
    else:
        damage_slots(newest_only=False)
        packs = sorted(Path(folder, "root").glob("step-*/*"), key=lambda path: path.parent.name)
        newest = [path for path in packs if path.parent == packs[-1].parent and path.suffix not in (".idx",)]
        largest = max(newest, key=lambda path: path.stat().st_size)
        damage(largest, fault["place"] % max(1, largest.stat().st_size))
    os.kill(os.getpid(), signal.SIGKILL)


def struck(fault):
    mark = f"{folder}/mark-{fault['step']}"
    if rank != fault["place"] % world or os.path.exists(mark):
        return False
    open(mark, "w").close()
    return True


faults = {fault["step"]: fault for fault in plan["faults"]}
trace = open(f"{folder}/trace-{rank}", "a", buffering=1)
while step < plan["steps"]:
    fault = faults.get(step + 1)
    batch = torch.randn(8, 16).to(dtype)
    if fault is not None and fault["kind"] == "batch" and struck(fault):
        batch[fault["place"] % 8] = math.nan
    loss = (model(batch) - batch).pow(2).mean()
    largest = max(one.detach().abs().max().item() for one in model.parameters())
    if plan["ends"] and step >= plan["ends"] or step % 3 == 0 and not (loss.item() < 1e3 and largest < 1e3):
        raise FloatingPointError("the loss is bad")
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters() if world > 1 else ():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step += 1
    if fault is not None and fault["kind"] in ("nan", "flip", "bit", "stop", "spin") and struck(fault):
        strike(fault)
    ckpt.step(step)
    print(step, loss.item().hex(), sum(one.double().sum().item() for one in model.parameters()).hex(), file=trace)
    if step % 10 == 0:
        ckpt.wait()  # raises where memory was damaged before it was persisted: the step is not taken again
    if fault is not None and fault["kind"] in ("slot", "pack") and struck(fault):
        damaged_and_killed(fault)
ckpt.wait()
print("finished", flush=True)
"""

KINDS = (
    ("nan", "parameter"),
    ("flip", "parameter"),
    ("nan", "exp_avg"),
    ("flip", "exp_avg"),
    ("nan", "exp_avg_sq"),
    ("slot", ""),
    ("pack", ""),
    ("batch", ""),
    ("stop", ""),
    ("spin", ""),
)
DTYPES = ("float32", "bfloat16", "float32", "float16", "float64")
APART = (22, 30)
"""Steps between two faults: more than `--refill-steps`, so that each has the restarts of a fault that comes alone."""


@dataclass
class Outcome:
    """What a job ended with: `problem` is "" where it did what it should."""

    seed: int
    ranks: int
    faults: list[dict[str, Any]]
    ends: int
    code: int
    lives: list[int] = field(default_factory=list)
    problem: str = ""
    dtype: str = ""
    unseen: bool = False


def planned(seed: int, faults: int) -> dict[str, Any]:
    """Return the plan of a seed: the faults of one job, or where its script fails whatever is restored."""
    chosen = random.Random(seed)
    kinds: Sequence[tuple[str, str]] = (
        [("bit", where) for where in ("parameter", "exp_avg", "exp_avg_sq")] if seed % 8 == 5 else KINDS
    )
    dtype = DTYPES[seed % len(DTYPES)]
    kinds = [one for one in kinds if dtype != "float16" or one[0] != "flip"]  # finite there
    found: list[dict[str, Any]] = []
    step = 11
    for _ in range(1 if seed % 8 == 5 else faults):
        kind, where = chosen.choice(kinds)
        kind = "slot" if kind == "pack" and not found else kind  # there is one checkpoint yet: all would be damaged
        fault = {"step": step + chosen.randrange(4), "kind": kind, "where": where, "place": chosen.randrange(1000)}
        found.append({**fault, "bit": chosen.randrange(64)})
        step += chosen.randint(*APART)
    ends = 33 if seed % 8 == 7 else 0
    return {
        "steps": step + 10,
        "faults": [] if ends else found,
        "ends": ends,
        "dtype": dtype,
    }


def traced(folder: Path, rank: int = 0) -> dict[int, list[str]]:
    """Return what each step was when it was trained last: loss and sum of all parameters."""
    lines = [line.split() for line in (folder / f"trace-{rank}").read_text().splitlines()]
    return {int(step): rest for step, *rest in lines}


def run_job(folder: Path, plan: dict[str, Any], ranks: int, *options: str) -> tuple[int, str]:
    """Run a job of the plan; return its exit code and output."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    return run_dlrun(
        folder,
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--hang-timeout=10",
        *options,
        folder / "train.py",
        folder,
        json.dumps(plan),
        deadline_s=400,
    )


def unbroken(folder: Path, ranks: int, steps: int, dtype: str) -> dict[int, list[str]]:
    """Return the trace of a run of so many steps without faults."""
    plan = {"steps": steps, "faults": [], "ends": 0, "dtype": dtype}
    code, output = run_job(folder, plan, ranks)
    assert code == 0, output
    return traced(folder)


def judged(folder: Path, seed: int, *, faults: int, ranks: int, expected: dict[int, list[str]]) -> Outcome:
    """Run the job of a seed and judge it."""
    plan = planned(seed, faults)
    code, output = run_job(folder, plan, ranks)
    lives = [int(one) for one in re.findall(r"began at (\d+)", output)]
    outcome = Outcome(seed, ranks, plan["faults"], plan["ends"], code, lives, dtype=plan["dtype"])
    outcome.problem = _problem(outcome, output, folder, expected, plan["steps"])
    if outcome.problem.startswith("another") and lives == [0] and [one["kind"] for one in plan["faults"]] == ["bit"]:
        outcome.unseen, outcome.problem = True, ""
    if outcome.problem:
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
    return outcome


def _problem(outcome: Outcome, output: str, folder: Path, expected: dict[int, list[str]], steps: int) -> str:
    if outcome.ends:
        if outcome.code != RestartBudgetError.exit_code:
            return f"exit code {outcome.code} and not {RestartBudgetError.exit_code}"
        if "(3 of 3, --escalate)" not in output or "and again from 3 older states" not in output:
            return "the message does not say what was tried"
        return "" if len(outcome.lives) == 5 else f"{len(outcome.lives)} lives"
    if outcome.code != 0:
        return f"exit code {outcome.code}"
    found = traced(folder)
    wrong = [step for step in range(1, steps + 1) if found.get(step) != expected[step]]
    return f"another loss or state at step {wrong[0]} of {steps}" if wrong else ""
