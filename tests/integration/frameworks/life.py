"""One life of a program: built, tracked, restored, trained, killed; what happened is written down line by line.

Every line reaches the file by one write, so that a life that dies, of SIGKILL or of a bug, leaves what it had written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.agents import pretend_agent
from support.one_rank import step_kept

from flashckpt import Checkpointer
from flashckpt.errors import FlashckptError
from integration.frameworks.case import Case, Program, Start
from integration.frameworks.fingerprint import fingerprint

JOB = "frameworks"
COMPLETE_S = 60.0
"""How long a life waits for its last snapshot before it goes on to its death without one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one life is to do.

    Attributes:
        seed: Of all generators, before the program is built: a restarted life has another one.
        root: Checkpoint root; None for a life that is not tracked.
        memory: Folder of the memory tier.
        last: Step up to which it trains and announces its steps.
        killed: Whether it then trains one step more and is killed before that one is announced.
    """

    seed: int
    root: str | None
    memory: str
    last: int
    killed: bool
    restarted: bool


class Journal:
    """Lines of JSON in a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._ready = path.with_suffix(".ready")
        self.stage = "build"

    def write(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def ready(self) -> None:
        """Say that this rank may be killed."""
        self._ready.touch()

    def failure(self, error: BaseException, stage: str) -> None:
        """Write down an error, and the program's stage at which it came."""
        problem = error.problem if isinstance(error, FlashckptError) else str(error)
        self.write(
            error=type(error).__name__,
            known=isinstance(error, FlashckptError),
            stage=stage,
            problem=problem,
            text="".join(traceback.format_exception(error)),
        )


def live(case: Case, plan: Plan, rank: int, journal: Journal) -> None:
    """Live one life; the process ends in it if the plan says so."""
    seed_everything(plan.seed)
    program = case.build(Start(restarted=plan.restarted, rank=rank))
    seed_everything(plan.seed + 100 * (rank + 1))
    if plan.root is None:
        for step in range(1, plan.last + 1):
            _train(program, step, journal)
        return
    os.environ["FLASHCKPT_SHM_DIR"] = plan.memory
    os.environ["FLASHCKPT_AGENT_DIR"] = pretend_agent(Path(tempfile.mkdtemp(dir=plan.memory)))  # no daemon is started
    _tracked_life(program, plan, journal)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- the global generator is what programs use


def _tracked_life(program: Program, plan: Plan, journal: Journal) -> None:
    assert plan.root is not None
    ckpt = Checkpointer(plan.root, snapshot_every=1, persist_every=1_000_000, job=JOB)
    last = threading.Event()
    ckpt.on_snapshot = lambda step: last.set() if step == plan.last else None
    ckpt.on_failure = lambda error: journal.failure(error, "snapshot")
    journal.stage = "track"
    ckpt.track(**program.tracked, **program.options, rng=True)
    journal.stage = "restore" if plan.restarted else "start"
    report = ckpt.restore()
    first = report.step if report else 0
    journal.write(restored=first, tiers=dict(report.tier_bytes) if report else {}, state=fingerprint(program.tracked))
    for step in range(first + 1, plan.last + 1):
        journal.stage = f"training of step {step}"
        _train(program, step, journal)
        journal.stage = f"step({step})"
        step_kept(ckpt, step)
    journal.stage = "death"
    if not plan.killed:
        return
    program.train(plan.last + 1)  # beside the copy of the snapshot
    if not last.wait(COMPLETE_S):
        journal.write(no_snapshot=plan.last)
    journal.ready()
    signal.pause()  # SIGKILL comes once every rank is here


def _train(program: Program, step: int, journal: Journal) -> None:
    loss = program.train(step)
    journal.write(step=step, loss=float(loss).hex(), state=fingerprint(program.tracked))
