"""Run a case: its lives, each forked from this process, which has imported everything once.

The unbroken life is not tracked. The killed one dies in the middle of a step. A second one goes on from its memory, with
other seeds, and is killed too; a daemon persists what it leaves. From there two more go on, one from memory and one from
storage alone: what they find was written after a restore.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from integration.frameworks.case import Case
from integration.frameworks.life import JOB, Journal, Plan, live

KILLED_AT, LAST = 3, 6
LIFE_S = 100.0
UNBROKEN = Plan(seed=1, root=None, memory="", last=LAST + 1, killed=False, restarted=False)


@dataclass
class Life:
    """What one life left.

    Attributes:
        lines: Per rank, what it wrote.
        ends: Per rank, its signal or 0.
        output: Of all ranks, standard output and error.
    """

    lines: list[list[dict[str, Any]]]
    ends: list[int]
    output: str = ""

    def all(self, key: str) -> list[dict[str, Any]]:
        return [line for rank in self.lines for line in rank if key in line]

    def of(self, rank: int, key: str) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if key in line]


@dataclass
class Lives:
    """All lives of a case; those after a refusal are missing."""

    unbroken: Life
    killed: Life
    restarted: dict[str, Life] = field(default_factory=dict)


def run_case(case: Case, folder: Path, shm: Path) -> Lives:
    """Run all lives of a case.

    Args:
        case: The case.
        folder: For roots and journals.
        shm: For the memory tier.
    """
    root, memory, empty = str(folder / "root"), shm / "memory", shm / "empty"
    for path in (memory, empty):
        path.mkdir(parents=True)
    unbroken = run_life(case, UNBROKEN, folder / "unbroken")
    first = Plan(seed=1, root=root, memory=str(memory), last=KILLED_AT, killed=True, restarted=False)
    lives = Lives(unbroken, run_life(case, first, folder / "killed"))
    if not unbroken.all("error") and not lives.killed.all("error") and all(lives.killed.ends):
        second = replace(first, restarted=True, last=LAST)
        lives.restarted["memory"] = run_life(case, replace(second, seed=2), folder / "memory")
        in_child(lambda: persist(str(memory)), folder / "persist")
        third = replace(second, last=LAST + 1, killed=False)
        lives.restarted["memory again"] = run_life(case, replace(third, seed=3), folder / "again")
        lives.restarted["storage"] = run_life(case, replace(third, seed=4, memory=str(empty)), folder / "storage")
    shutil.rmtree(folder / "root", ignore_errors=True)
    return lives


def run_life(case: Case, plan: Plan, folder: Path) -> Life:
    """Fork the ranks of one life and wait for their end."""
    folder.mkdir()
    pids = [_fork(partial(_rank, case, plan, rank, folder), folder / f"out{rank}") for rank in range(case.world)]
    ends = _reap(pids, folder)
    lines = []
    for rank in range(case.world):
        path = folder / f"journal{rank}"
        lines.append([json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else [])
    output = "".join((folder / f"out{rank}").read_text(errors="replace") for rank in range(case.world))
    return Life(lines, ends, output)


def in_child(work: Callable[[], None], folder: Path) -> None:
    """Run something in a forked process; what it prints stays in the folder."""
    folder.mkdir()
    _reap([_fork(work, folder / "out0")], folder)


def persist(memory: str) -> None:
    """Persist the newest snapshot that all ranks left in memory."""
    from flashckpt.daemon.machine.logs import configure
    from flashckpt.daemon.persister.service import Daemon
    from flashckpt.daemon.persister.timeouts import DaemonTimeouts
    from flashckpt.shm.job_directory import JobDirectory, memory_root

    configure()
    os.environ["FLASHCKPT_SHM_DIR"] = memory
    directory = JobDirectory(memory_root() / JOB)
    lock = directory.hold_daemon()
    assert lock is not None
    Daemon(directory, lock, DaemonTimeouts(linger_s=0.0)).run()


def _fork(work: Callable[[], None], output: Path) -> int:
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time-out belongs to the parent
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        faulthandler.enable(sys.stderr)
        warnings.resetwarnings()  # pytest makes errors of them, and what other projects warn of is theirs
        work()
    except BaseException:  # noqa: BLE001 -- nothing may unwind into the test runner
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _rank(case: Case, plan: Plan, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    journal = Journal(folder / f"journal{rank}")
    try:
        if case.world > 1:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(case.world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(case.world)
            )
            store = dist.FileStore(f"{folder}/store", case.world)  # type: ignore[attr-defined]  # torch exports it without saying so
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=case.world, timeout=timedelta(seconds=LIFE_S)
            )
        live(case, plan, rank, journal)
    except BaseException as error:  # noqa: BLE001 -- everything a life raises is its result
        journal.failure(error, journal.stage)


def _reap(pids: list[int], folder: Path) -> list[int]:
    """Wait for all; once one has ended by an error or a signal of its own, the others get 10 s."""
    ends: dict[int, int] = {}
    end = time.monotonic() + LIFE_S
    while len(ends) < len(pids) and time.monotonic() < end:
        for rank, pid in enumerate(pids):
            if rank not in ends and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ends[rank] = os.WTERMSIG(found[1]) if os.WIFSIGNALED(found[1]) else 0
                if ends[rank] or b'{"error"' in _read(folder / f"journal{rank}"):
                    end = min(end, time.monotonic() + 10)
        if all((folder / f"journal{rank}.ready").exists() for rank in range(len(pids))):
            for rank in set(range(len(pids))) - set(ends):
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.005)
    for rank, pid in enumerate(pids):
        if rank not in ends:
            os.kill(pid, signal.SIGABRT)  # faulthandler says where it hung
            os.waitpid(pid, 0)
            ends[rank] = signal.SIGABRT
    return [ends[rank] for rank in range(len(pids))]


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
