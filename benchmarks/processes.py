"""Processes and folders of a benchmark: ending them with it, finding those that belong to one. Needs the standard library only."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def clean_up_on_sigterm() -> None:
    """Let SIGTERM (of `timeout`) unwind the program as Ctrl-C does, so that ranks end and folders go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def descendants(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
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


def with_environment(mark: str) -> list[int]:
    """Return the running processes that have a text in their environment, whoever their parents are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is another user's
    return found


def end_all(mark: str, within_s: float = 20.0) -> None:
    """SIGKILL all processes that have a text in their environment; return when they are gone."""
    end = time.monotonic() + within_s
    while (found := with_environment(mark)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextmanager
def places(where: str | None) -> Iterator[tuple[Path, Path]]:
    """A folder on the disk to measure, and one in memory for the slots; both are removed, and processes that were given the second end.

    A persister is a session apart, and would make its folder again behind the removal.
    """
    with (
        tempfile.TemporaryDirectory(dir=where, prefix="flashckpt-bench-", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-bench-", ignore_cleanup_errors=True) as memory,
    ):
        try:
            yield Path(disk), Path(memory)
        finally:
            end_all(memory)
