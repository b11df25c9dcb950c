"""The three runs of a checked script, under dlrun or alone; nothing of them is left: processes, memory, folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashckpt.errors import FlashckptError
from flashckpt.exactness.records import RunTrace, done_file, read_trace
from flashckpt.shm.persister_process import stat_of

_KEPT = ("FLASHCKPT_COPY", "FLASHCKPT_LOCKED_MB", "FLASHCKPT_TRACEBACK")
_TAIL = 30


class NotCheckedError(FlashckptError):
    """A script could not be judged: it takes no step, makes no Checkpointer, or fails without a kill."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is run.

    Attributes:
        ranks: Of each run, under dlrun; 0: one, as plain Python.
        limit_s: Most seconds of one run.
        memory: Folder of the memory tier that is ours.
        folder: Folder for records, roots and logs.
    """

    words: Sequence[str]
    ranks: int
    steps: int
    limit_s: float
    memory: Path
    folder: Path

    def run(self, name: str, kill_after: int = 0) -> Ran:
        """Run it once, to its last step or its end.

        Raises:
            NotCheckedError: The time is over.
        """
        folder = self.folder / name
        folder.mkdir()
        plan = {"folder": str(folder), "steps": self.steps, "kill_after": kill_after}
        log, deadline_s = folder / "log", time.monotonic() + self.limit_s
        process = start(self._command(plan), log, cwd=Path.cwd(), env=self._environment())
        try:
            self._watch(process, folder, log, deadline_s)
            if not self.ranks and kill_after and process.poll() == -signal.SIGKILL:
                process = start(self._command({**plan, "start": 1}), log, cwd=Path.cwd(), env=self._environment())
                self._watch(process, folder, log, deadline_s)
        finally:
            self.end(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        return Ran(folder=folder, ranks=self.ranks or 1, code=process.poll() or 0, log=log.read_text(errors="replace"))

    def _command(self, plan: Mapping[str, object]) -> list[str]:
        words = ["-m", "flashckpt.exactness", json.dumps(plan), *self.words]
        if not self.ranks:
            return words
        restarts = str(int(bool(plan["kill_after"])))
        options = ["--nnodes", "1", "--nproc-per-node", str(self.ranks), "--max-restarts", restarts]
        return ["-m", "flashckpt.daemon.run", *options, *words]

    def _watch(self, process: subprocess.Popen[bytes], folder: Path, log: Path, deadline_s: float) -> None:
        while process.poll() is None:
            if all(done_file(folder, rank).exists() for rank in range(self.ranks or 1)):
                return
            if time.monotonic() > deadline_s:
                raise NotCheckedError(
                    "the script took too long",
                    found=f"no end of step {self.steps} after {self.limit_s:.0f} s; {_last(log.read_text())}",
                    state="All of its processes were ended.",
                    remedy="fewer --steps, smaller data, or a longer --timeout",
                )
            time.sleep(0.02)

    def _environment(self) -> Mapping[str, str]:
        own = {"FLASHCKPT_SHM_DIR": str(self.memory), "FLASHCKPT_DAEMON_LINGER": "0", "TMPDIR": str(self.folder)}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLASHCKPT_") or key in _KEPT}
        return {"OMP_NUM_THREADS": "1"} | kept | own

    def end(self, first: int) -> None:
        """Kill a process, all below it, and whoever has a folder of ours in its environment or title, until there is none."""
        marks = {"environ": f"FLASHCKPT_SHM_DIR={self.memory}\0".encode(), "cmdline": bytes(self.folder)}
        while pids := [pid for pid, above in _processes().items() if first in above or _has(pid, marks)]:
            for pid in reversed(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run that has ended.

    Attributes:
        code: Exit code, where nobody ended it.
    """

    folder: Path
    ranks: int
    code: int
    log: str

    @property
    def is_done(self) -> bool:
        """Whether every rank came to the last step."""
        return all(done_file(self.folder, rank).exists() for rank in range(self.ranks))

    def traces(self, trace: int = 0) -> list[RunTrace]:
        """Return what each rank saw in one start."""
        return [read_trace(self.folder, rank, trace) for rank in range(self.ranks)]

    def why(self) -> str:
        """Return the last error in its log."""
        return _last(self.log)


def start(words: Sequence[str], log: Path, *, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python WORDS` in a new session, its output in a file."""
    with log.open("wb") as out:
        command = [sys.executable, *words]
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd, env=env, start_new_session=True)


def _last(log: str) -> str:
    """Return the last error that a log names, or its last line."""
    lines = [line for line in log.splitlines()[-_TAIL * 10 :] if line.strip()]
    errors = [line for line in lines if re.search(r"\w*(Error|Exception|Interrupt)\b.*:", line)]
    return (errors or lines or ["it printed nothing"])[-1].strip()


def _processes() -> dict[int, set[int]]:
    """Return the running processes but this one, each with itself and those above it."""
    parents: dict[int, int] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if (fields := stat_of(pid)) and fields[0] != "Z":
            parents[pid] = int(fields[1])
    found = {}
    for pid in parents:
        above = {one := pid}
        while (one := parents.get(one, 0)) and one not in above:
            above.add(one)
        found[pid] = above
    return {pid: above for pid, above in found.items() if pid != os.getpid()}


def _has(pid: int, marks: Mapping[str, bytes]) -> bool:
    """Return whether a file of /proc/PID holds what belongs to our runs alone."""
    try:
        return any(mark in Path(f"/proc/{pid}/{name}").read_bytes() for name, mark in marks.items())
    except OSError:
        return False
