"""Numbers that a training loop logs, by name and step: lines of JSON in the job directory, taken by the persister.

`values` is appended to, one write per line. The persister renames it to `values.taken.<number>` before it reads it, and
removes that once the values are on the root; a line that is appended at that very moment may be lost. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashckpt.errors import DamagedError
from flashckpt.shm.private import open_file, read_file, remove_file

MOST_BYTES = 8 << 20
"""Of lines that nobody has taken yet, and of taken ones that are not on the root; what comes then is not kept."""
MOST_NAME = 100


class LoggedValue(NamedTuple):
    """A number of one step, of one generation."""

    generation: int
    step: int
    name: str
    value: float


def append(directory: Path, logged: LoggedValue) -> bool:
    """Append a line; return whether it was kept."""
    line = json.dumps([logged.generation, logged.step, logged.name, logged.value]).encode() + b"\n"
    try:
        fd = open_file(directory / "values", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except (OSError, DamagedError):  # the directory was removed, or tmpfs is full: training continues
        return False
    try:
        if os.fstat(fd).st_size > MOST_BYTES:
            return False
        return os.write(fd, line) == len(line)
    except OSError:
        return False
    finally:
        os.close(fd)


class TakenValues(NamedTuple):
    """What was taken, and the files that hold it until it is on the root."""

    values: list[LoggedValue]
    files: list[Path]


def take(directory: Path) -> TakenValues:
    """Take what is logged, with what was taken before and is not forgotten yet."""
    files = _taken(directory)
    number = int(files[-1].name.rpartition(".")[2]) + 1 if files else 0
    with contextlib.suppress(OSError):
        # a root that fails for hours: what is taken does not grow, and `append` will refuse
        if sum(path.stat().st_size for path in files) < MOST_BYTES:
            files.append((directory / "values").rename(directory / f"values.taken.{number:06d}"))
    return TakenValues([one for path in files for one in _lines(path)], files)


def forget(taken: TakenValues) -> None:
    """Remove what was taken."""
    for path in taken.files:
        remove_file(path)


def waiting(directory: Path) -> list[LoggedValue]:
    """Return what has not reached the root yet, and leave it."""
    return [one for path in [*_taken(directory), directory / "values"] for one in _lines(path)]


def _taken(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("values.taken.*") if path.name.rpartition(".")[2].isdigit())


def _lines(path: Path) -> Iterator[LoggedValue]:
    try:
        raw = read_file(path, most=2 * MOST_BYTES)
    except (OSError, DamagedError):
        return
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # cut short, or of somebody else
            generation, step, name, value = json.loads(line)
            if type(generation) is type(step) is int and type(name) is str:
                yield LoggedValue(generation, step, name[:MOST_NAME], float(value))
