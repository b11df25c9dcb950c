"""The ledger: one JSON line per failure, saying where the seconds between it and the next step went."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

PHASES = ("detect", "stop", "rendezvous", "fork", "init", "restore", "first_step", "recompute")


class Stamps(Protocol):
    """The fields of a control row that the ledger reads: CLOCK_MONOTONIC nanoseconds, 0 if not reached yet."""

    rank: int
    step: int
    generation: int
    entered: int
    initialised: int
    restore_started: int
    restored: int
    first_step: int
    restored_step: int


@dataclass(kw_only=True)
class LedgerEntry:
    """One failure and the restart after it; `seconds` fills while the new generation comes up.

    It begins (`begun_ns`, CLOCK_MONOTONIC) when the rank failed or, in a hang, at the last heartbeat.
    """

    time: str
    host: str
    restart: int
    rank: int
    cause: str
    step: int
    begun_ns: int
    seconds: dict[str, float] = field(default_factory=dict)
    forked_ns: int = 0
    steps_lost: int = -1
    restored_step: int = -1
    total_s: float = -1.0
    outcome: str = "restarted"

    def line(self) -> str:
        """Return the JSON line."""
        data = asdict(self)
        del data["begun_ns"], data["forked_ns"]
        data["seconds"] = {name: round(self.seconds[name], 4) for name in PHASES if name in self.seconds}
        return json.dumps(data, sort_keys=True)


def seconds_of_start(rows: Sequence[Stamps], forked_ns: int) -> dict[str, float] | None:
    """Return the seconds of init, restore and first_step of a generation; None until all its ranks have trained a step.

    Only rows stamped after the fork count: earlier ones belong to the generation before.
    """
    fresh = [row for row in rows if row.entered >= forked_ns > 0]
    if not fresh or len(fresh) < len(rows) or not all(row.first_step for row in fresh):
        return None
    marks = {name: max(getattr(row, name) for row in fresh) for name in ("initialised", "restored", "first_step")}
    begun = max(marks["initialised"], forked_ns)
    restored = max(marks["restored"], begun)
    return {
        "init": (begun - forked_ns) / 1e9,
        "restore": (restored - begun) / 1e9,
        "first_step": max(0, marks["first_step"] - restored) / 1e9,
    }


def advance(failure: LedgerEntry, rows: Sequence[Stamps], now_ns: int) -> bool:
    """Fill the phases of the new generation from its control rows; True once the lost steps are trained again."""
    seconds = seconds_of_start(rows, failure.forked_ns)
    if seconds is None:
        return False
    failure.seconds |= seconds
    stepped_ns = max(row.first_step for row in rows)
    failure.total_s = round((stepped_ns - failure.begun_ns) / 1e9, 4)
    failure.restored_step = max(row.restored_step for row in rows)
    failure.steps_lost = max(0, failure.step - max(failure.restored_step, 0)) if failure.step >= 0 else -1
    if min(row.step for row in rows) < failure.step:
        return False
    failure.seconds["recompute"] = max(0, now_ns - stepped_ns) / 1e9
    return True


class Ledger:
    """Appends lines to every path it was given; a write that fails loses a line, never the job."""

    def __init__(self, *paths: str | Path) -> None:
        self.paths: list[Path] = [Path(path) for path in paths if path]

    def append(self, failure: LedgerEntry) -> None:
        """Append one line; each is one write, so that several agents may share a file."""
        data = (failure.line() + "\n").encode()
        for path in self.paths:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.write(fd, data)
                finally:
                    os.close(fd)


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a ledger; a last line cut short by a crash is left out."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records
