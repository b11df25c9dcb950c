"""Jobs under dlrun whose state becomes bad, again and again: faults of a seed, and what each job ended with.

A fault strikes once, at a step of the unbroken run, and so may be repaired. Three kinds of jobs have another one: the script
fails whatever is restored; a sample is bad whenever it is drawn; a bit flips of which the numbers may stay finite. The last
has that fault alone: where the script notices nothing, the flip is in the result, and is counted as `unseen`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.errors import RestartBudgetError
from support.dlrun import dlrun
from support.paths import TESTS
from support.poisoned_job import BATCH
from support.s3 import free_port

SCRIPT = TESTS / "support" / "poisoned_job.py"
KINDS = (
    ("nan", "parameter"),
    ("flip", "parameter"),
    ("nan", "exp_avg"),
    ("flip", "exp_avg"),
    ("nan", "exp_avg_sq"),
    ("slot", ""),
    ("pack", ""),
    ("nan", "batch"),
    ("stop", ""),
    ("spin", ""),
)
REPLICAS = ("replica", "")
"""Of jobs on two nodes."""
DTYPES = ("float32", "bfloat16", "float32", "float16", "float64")
APART = (22, 30)
"""Steps between two faults: more than `--refill-steps`, so that each has the restarts of a fault that comes alone."""
CLASSES = ("many",) * 5 + ("nodes", "bit", "bit", "bit", "bit", "sample", "script")
"""What jobs are, by turns."""
LIVES = 6
"""Restarts that a fault may cost: more are a loop."""


@dataclass
class Outcome:
    """What a job ended with: `problem` is "" where it did what it should."""

    seed: int
    kind: str
    ranks: int
    faults: list[dict[str, Any]]
    code: int
    lives: list[int] = field(default_factory=list)
    problem: str = ""
    dtype: str = ""
    how: str = ""
    unseen: bool = False
    grown: bool = False
    looped: bool = False
    seconds: float = 0.0


def planned(seed: int, faults: int) -> dict[str, Any]:
    """Return the plan of a seed: the faults of one job, or what its script fails at whatever is restored."""
    chosen, kind = random.Random(seed), CLASSES[seed % len(CLASSES)]
    dtype = DTYPES[seed % len(DTYPES)]
    kinds: Sequence[tuple[str, str]] = (*KINDS, REPLICAS, REPLICAS) if kind == "nodes" else KINDS
    if kind == "bit":
        kinds = [("bit", where) for where in ("parameter", "exp_avg", "exp_avg_sq", "batch")]
    kinds = [one for one in kinds if dtype != "float16" or one[0] != "flip"]  # finite there
    found: list[dict[str, Any]] = []
    step = 11
    for _ in range({"many": faults, "nodes": faults, "bit": 1}.get(kind, 0)):
        name, where = chosen.choice(kinds)
        name = "slot" if name == "pack" and not found else name  # there is one checkpoint yet: all would be damaged
        fault = {"step": step + chosen.randrange(4), "kind": name, "where": where, "place": chosen.randrange(10**6)}
        found.append({**fault, "bit": chosen.randrange(64)})
        step += chosen.randint(*APART)
    bad = chosen.randint(13, 40) if kind in {"sample", "script"} else 0
    return {
        "kind": kind,
        "nodes": 2 if kind == "nodes" else 1,
        "ranks": 2 if kind == "nodes" or seed // len(CLASSES) % 3 == 2 else 1,
        "steps": max(step + 10, bad + 20),
        "faults": found,
        "ends": bad if kind == "script" else 0,
        "sample": BATCH * (bad - 1) + chosen.randrange(BATCH) if kind == "sample" else -1,
        "how": chosen.choice(("raise", "nan", "spin", "crash")),
        "dtype": dtype,
    }


def traced(folder: Path, rank: int = 0) -> dict[int, list[str]]:
    """Return what each step was when it was trained last: loss, sum of all parameters, samples of this rank."""
    lines = [line.split() for line in (folder / f"trace-{rank}").read_text().splitlines()]
    return {int(step): rest for step, *rest in lines}


def run_job(folder: Path, plan: dict[str, Any], *options: str, deadline_s: float = 600) -> tuple[int, str]:
    """Run a job of the plan; return its exit code and output, of several nodes the first that is not 0 and all of them."""
    (folder / "root").mkdir(parents=True, exist_ok=True)
    shm, port, nodes = os.environ["FLASHCKPT_SHM_DIR"], free_port(), plan["nodes"]
    memories = [f"{shm}/{folder.name}-{node}" for node in range(nodes)]
    words = [f"--nproc-per-node={plan['ranks'] // nodes}", "--hang-timeout=10", *options, SCRIPT, folder]
    words.append(json.dumps({**plan, "memories": memories}))
    where = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=poisoned"]
    with contextlib.ExitStack() as stack:
        launches = []
        for node, memory in enumerate(memories):
            mine = folder / f"node{node}"
            for made in (mine, Path(memory)):
                made.mkdir(exist_ok=True)
            environment = {"FLASHCKPT_SHM_DIR": memory, "FLASHCKPT_REPLICA_ADDRESS": "127.0.0.1"}
            start = ["--standalone"] if nodes == 1 else [*where, "--local-addr=127.0.0.1"]
            launches.append(stack.enter_context(dlrun(mine, *start, *words, env=environment)))
        codes = [launch.wait(deadline_s) for launch in launches]
        return next(filter(None, codes), 0), "\n".join(launch.output for launch in launches)


def unbroken(folder: Path, plan: dict[str, Any], steps: int) -> dict[int, list[str]]:
    """Return the trace of a run like that of a plan, of so many steps, without faults."""
    whole = {"steps": steps, "faults": [], "ends": 0, "sample": -1, "nodes": 1}
    code, output = run_job(folder, plan | whole)
    assert code == 0, output
    return traced(folder)


def judged(folder: Path, seed: int, *, faults: int, expected: dict[int, list[str]], deadline_s: float = 600) -> Outcome:
    """Run the job of a seed and judge it; `expected` is the trace of the unbroken run."""
    plan, begun = planned(seed, faults), time.monotonic()
    outcome = Outcome(seed, plan["kind"], plan["ranks"], plan["faults"], -1, dtype=plan["dtype"], how=plan["how"])
    try:
        outcome.code, output = run_job(folder, plan, deadline_s=deadline_s)
    except AssertionError as error:  # it did not end
        outcome.looped, outcome.problem, output = True, f"no end within {deadline_s:.0f} s", str(error)
    outcome.seconds = round(time.monotonic() - begun, 1)
    outcome.lives = [int(one) for one in re.findall(r"began at (\d+)", output)]
    outcome.grown = "the largest number of" in output
    _judge(outcome, plan, output, folder, expected)
    if outcome.problem:
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
        (folder / "output.log").write_text(output)
    return outcome


def _judge(outcome: Outcome, plan: dict[str, Any], output: str, folder: Path, expected: dict[int, list[str]]) -> None:
    """Say what the job did that it should not have done."""
    if len(outcome.lives) > 1 + LIVES * max(1, len(plan["faults"])):
        outcome.looped, outcome.problem = True, f"{len(outcome.lives)} lives"
    if outcome.problem:
        return
    missed = [fault["step"] for fault in plan["faults"] if not (folder / f"struck-{fault['step']}").exists()]
    problem = {"script": _ends, "sample": _goes_without}.get(plan["kind"], _goes_on)
    outcome.problem = problem(outcome, plan, output, folder, expected)
    if outcome.problem.startswith("another") and outcome.kind == "bit" and outcome.lives == [0]:
        outcome.unseen, outcome.problem = True, ""
    if missed and not outcome.problem:
        outcome.problem = f"the faults of steps {missed} did not strike"


def _ends(outcome: Outcome, plan: dict[str, Any], output: str, _folder: Path, _expected: dict[int, list[str]]) -> str:
    """The script fails at one step whatever is restored."""
    if outcome.code != RestartBudgetError.exit_code:
        return f"exit code {outcome.code} and not {RestartBudgetError.exit_code}"
    tried = max(map(int, re.findall(r"\((\d) of 3, --escalate\)", output)), default=0)
    if f"and again from {tried} older states" not in output:
        return f"the message does not say that {tried} older states were tried"
    left = [int(step) for step in re.findall(r"dlrun --restore-step (\d+) ", output)]
    if not left or max(left) >= plan["ends"]:
        return f"the states left are {left}"
    if tried < 3 and min(left) < outcome.lives[-1]:
        return f"{tried} older states were tried, and there is one of step {min(left)}"
    most = 2 + tried + output.count("(hang timeout")  # a start that takes long on a busy machine is tried again
    return "" if 2 + tried <= len(outcome.lives) <= most else f"{len(outcome.lives)} lives"


def _goes_without(
    outcome: Outcome, plan: dict[str, Any], output: str, folder: Path, expected: dict[int, list[str]]
) -> str:
    """A sample is bad whenever it is drawn: those of its step are left out, every other is trained once."""
    if outcome.code != 0:
        return f"exit code {outcome.code}"
    if len(outcome.lives) != 4:
        return f"{len(outcome.lives)} lives"
    bad = plan["sample"] // BATCH + 1
    if f"samples of step {bad} are left out: {BATCH} of 'data'" not in output:
        return f"nothing says that the samples of step {bad} are left out"
    traces = [traced(folder, rank) for rank in range(plan["ranks"])]
    trained = sorted(int(one) for trace in traces for _, _, ids in trace.values() for one in ids.split(","))
    if trained != [one for one in range(BATCH * (plan["steps"] + 1)) if one // BATCH != bad - 1]:
        return "not every other sample was trained once"
    wrong = [step for step in range(1, bad) if traces[0].get(step) != expected[step]]
    return f"another loss or state at step {wrong[0]}" if wrong else ""


def _goes_on(outcome: Outcome, plan: dict[str, Any], _output: str, folder: Path, expected: dict[int, list[str]]) -> str:
    """Each fault passes."""
    if outcome.code != 0:
        return f"exit code {outcome.code}"
    found, steps = traced(folder), plan["steps"]
    wrong = [step for step in range(1, steps + 1) if found.get(step) != expected[step]]
    return f"another loss or state at step {wrong[0]} of {steps}" if wrong else ""
