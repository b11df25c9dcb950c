"""Rank processes that a benchmark commands line by line, so that cases of different processes take turns.

A rank reads one JSON object per line from stdin, `{"do": NAME, ...}`, and answers with one line on what was its stdout;
everything that libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        answer = commands[order.pop("do")](**order)
        out.write(json.dumps(answer) + "\n")
        out.flush()


class Ranks:
    """The processes of all ranks; `ask` gives every one the same order at the same time."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self._processes = [
                subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **environment},
                    text=True,
                )
                for command, environment in zip(commands, environments, strict=True)
            ]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def ask(self, do: str, **order: Any) -> list[Any]:
        """Send one order to all and return their answers by rank.

        Raises:
            RuntimeError: A rank ended instead of answering; the end of its log is in the text.
        """
        self.send(do, **order)
        return self.receive()

    def send(self, do: str, **order: Any) -> None:
        """Send one order to all; `receive` gives the answers."""
        line = json.dumps({"do": do, **order}) + "\n"
        try:
            for process in self._processes:
                stream(process.stdin).write(line)
                stream(process.stdin).flush()
        except BrokenPipeError:
            raise RuntimeError(f"a rank ended before {do!r}:\n{self.log.read_text()[-3000:]}") from None

    def receive(self) -> list[Any]:
        """Wait for the answers of all ranks to the last order."""
        answers = [stream(process.stdout).readline() for process in self._processes]
        if not all(answers):
            raise RuntimeError(f"a rank ended instead of answering:\n{self.log.read_text()[-3000:]}")
        return [json.loads(answer) for answer in answers]

    def has_answered(self) -> bool:
        """Whether an answer can be read from the first rank without waiting."""
        return bool(select.select([stream(self._processes[0].stdout)], [], [], 0)[0])

    def close(self) -> None:
        """End the input of all ranks and wait for them; whoever does not end soon is killed."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended already
                stream(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(150)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stream(process.stdout).close()


def clean_up_on_sigterm() -> None:
    """Let SIGTERM (of `timeout`) unwind the program as Ctrl-C does, so that ranks end and folders go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def descendants(pid: int) -> list[int]:
    """Return a process and all living descendants."""
    found, rest = [], [pid]
    while rest:
        one = rest.pop()
        found.append(one)
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                rest += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread ended meanwhile
    return found


class PeakMemory:
    """Largest memory of a family of processes above what it was at the start."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self.start_bytes = self.now()
        self.extra_bytes = 0

    def now(self) -> int:
        """Memory of the processes, each page once."""
        return sum(memory_bytes(pid) for pid in self._pids())

    def look(self) -> None:
        """Take one sample."""
        self.extra_bytes = max(self.extra_bytes, self.now() - self.start_bytes)


@contextmanager
def peak_memory_of(pids: Callable[[], Sequence[int]], interval_s: float = 0.005) -> Any:
    """Sample beside the body of the `with`; read `extra_bytes` afterwards. Not for rounds that are timed."""
    peak, stop = PeakMemory(pids), threading.Event()

    def sample() -> None:
        while not stop.wait(interval_s):
            peak.look()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.look()


def memory_bytes(pid: int) -> int:
    """Private and shared memory of a process, without files; a page that others have mapped too counts in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
