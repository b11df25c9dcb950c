"""The ranks of one contestant of benchmarks/trainer_speed.py: started, given turns, and measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import stream
from trainer_speed_runs import Contestant

TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What all ranks together needed; `peak_mb` of the rank with the most, since its start."""

    tokens: int
    wall_s: float
    cpu_s: float
    data_s: float
    peak_mb: float
    beyond_imports_mb: float


class Job:
    """Processes that train when it is their turn.

    Args:
        run: What to start.
        folder: For the logs.
    """

    def __init__(self, run: Contestant, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._answers: list[dict[str, Any]] = []  # of each turn: rows of ranks, CPU of the daemon
        self._steps: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        started = [self._start(rank, port) for rank in range(run.ranks)]
        self._ranks = [process for process, _ in started]
        self._pipes = [pipe for _, pipe in started]

    def _start(self, rank: int, port: int) -> tuple[subprocess.Popen[str], Any]:
        here, there = os.pipe()
        environment = {
            **os.environ, **self._run.environment, "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._run.ranks), "LOCAL_WORLD_SIZE": str(self._run.ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "SPEED_ANSWERS": str(there),
        }  # fmt: skip
        with (self._folder / f"rank{rank}.log").open("w") as log:
            process = subprocess.Popen(
                self._run.command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment,
                pass_fds=[there], cwd=self._folder,
            )  # fmt: skip
        os.close(there)
        return process, os.fdopen(here)

    def turn(self, steps: int) -> None:
        """Train so many steps."""
        self._steps.append(steps)
        self._ask(steps)

    def finish(self) -> list[Turn]:
        """End the ranks and return what each turn took, from its beginning to that of the next."""
        self._ask(0)
        for process in self._ranks:
            process.wait(60)
        return [self._turn(number) for number in range(len(self._steps))]

    def kill(self) -> None:
        """End what still runs."""
        for process in self._ranks:
            process.kill()
            process.wait()
        for daemon in self._daemons():
            os.kill(daemon, 15)

    def _ask(self, steps: int) -> None:
        daemon_s = sum(_cpu_s(daemon) for daemon in self._daemons())
        for process in self._ranks:
            pipe = stream(process.stdin)
            pipe.write(f"{steps}\n")
            pipe.flush()
        lines = [pipe.readline() for pipe in self._pipes]
        if not all(lines):
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("rank*.log")))
            raise SystemExit(f"{self._run.name} ended early:\n{logs}")
        self._answers.append({"ranks": [json.loads(line) for line in lines], "daemon_s": daemon_s})

    def _turn(self, number: int) -> Turn:
        this, after = self._answers[number], self._answers[number + 1]
        rows, later = this["ranks"], after["ranks"]

        def used(name: str) -> float:
            return float(sum(row[name] for row in later) - sum(row[name] for row in rows))

        return Turn(
            tokens=self._run.tokens * self._steps[number],
            wall_s=max(row["ended"] for row in rows) - min(row["began"] for row in rows),
            cpu_s=used("cpu_s") + after["daemon_s"] - this["daemon_s"],
            data_s=used("data_s"),
            peak_mb=max(row["peak_kb"] for row in later) / 1e3,
            beyond_imports_mb=max(row["peak_kb"] - row["imported_kb"] for row in later) / 1e3,
        )

    def _daemons(self) -> list[int]:
        if not self._run.shm:
            return []
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            if "flashckpt.daemon.persister" in words and self._run.shm in words:
                found.append(int(path.parent.name))
        return found


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 of one that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK
