"""The verdict on one incident: what ended a generation, why the others waited, what is done about it. Pure; docs/incidents.md.

One JSON object per incident, of version 1: a reader ignores names that it does not know, and a missing one has its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashckpt.core.records import pack, unpack
from flashckpt.printable import counted, printable

VERSION = 1
CLASSES = ("script", "data", "machine", "network", "storage", "memory", "unknown")
RESTART, RESTART_WITHOUT, STOP, CONTINUE = "restart", "restart without that node", "stop", "continue"
MOST_BYTES = 256 << 10
"""Longest record that is read."""
_MOST_TEXT = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One incident of a job, and the verdict on it.

    Attributes:
        id: Its name: UTC time and six random hex digits, so that names sort by time.
        time: When the verdict was given, ISO 8601, UTC.
        job: Id of the job; "" for a program without a Checkpointer.
        restart: Starts of the worker group before it, on the node that writes this.
        kind: `failure`, `hang`, `node lost`, `persister` or `straggler`.
        category: One of CLASSES; `class` in JSON.
        node, host, rank, pid, step: Where it began: -1, "" or 0 where that is not known, or where it was no rank.
        what: What happened there, in words.
        silent_s: Seconds since the last sign of the node or rank; 0 where it ended by an error.
        others: What the other ranks did: `doing`, `count`, `ranks` ("0-2,5") and, where one is known, `stack`.
        lost: Nodes that stopped answering: `node`, `host`, `ranks`, `silent_s`, `answers` (its machine; null where that is not known).
        unheard: Nodes whose account did not come in time.
        findings: What else is known: lines of kernels, persisters that fail, devices, differences of environment.
        action: What happens next: `restart`, `restart without that node`, `stop` or `continue`.
        version: Of this schema.
    """

    id: str
    time: str
    job: str = ""
    restart: int = 0
    kind: str = "failure"
    category: str = field(default="unknown", metadata={"key": "class"})
    node: int = field(default=-1, metadata={"least": -1})
    host: str = ""
    rank: int = field(default=-1, metadata={"least": -1})
    pid: int = 0
    step: int = field(default=-1, metadata={"least": -1})
    what: str = ""
    silent_s: float = 0.0
    others: tuple[dict[str, Any], ...] = ()
    lost: tuple[dict[str, Any], ...] = ()
    unheard: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    action: str = STOP
    reason: str = ""
    version: int = VERSION

    @property
    def verdict(self) -> str:
        """The verdict in one line: class, place, step, what happened, what is done."""
        if self.rank >= 0:
            where = (
                f"rank {self.rank} (pid {self.pid}) on {self.host}" if self.pid else f"rank {self.rank} on {self.host}"
            )
        else:
            where = f"node {self.node} ({self.host})" if self.node >= 0 and self.host else self.host
        at = f" at step {self.step}" if self.step >= 0 else " before its first step" if self.rank >= 0 else ""
        about = f"{where}{at}: " if where else ""
        return printable(f"{self.category}: {about}{self.what.strip()[:_MOST_TEXT]} -> {self.action}")

    def render(self) -> str:
        """Return the report that a person reads."""
        lines = [f"incident {self.id}: {self.verdict}"]
        if self.others:
            parts = [f"{one.get('count')} in {one.get('doing')} (rank {one.get('ranks')})" for one in self.others]
            lines.append(f"  the other ranks: {', '.join(parts)}")
        lines += [f"  also: {one}" for one in self.findings]
        if self.unheard:
            lines.append(f"  no account came from {counted(len(self.unheard), 'node')}: {', '.join(self.unheard[:8])}")
        lines.append(f"  -> {self.action}: {self.reason}" if self.reason else f"  -> {self.action}")
        return "\n".join(printable(line) for line in lines)


def as_values(incident: Incident) -> dict[str, Any]:
    """Return an incident as JSON values, with its verdict."""
    return pack(incident) | {"verdict": incident.verdict}


def encode(incident: Incident) -> bytes:
    """Return the JSON of an incident."""
    return json.dumps(pack(incident), indent=1).encode() + b"\n"


def decode(raw: bytes) -> Incident | None:
    """Return the incident of a JSON text; None where it is none, is too long, or is of another version."""
    try:
        found = json.loads(raw) if len(raw) <= MOST_BYTES else None
        return (
            unpack(Incident, found, partial=True)
            if isinstance(found, dict) and found.get("version") == VERSION
            else None
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def in_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a person writes them: "0-2,5"."""
    parts: list[list[int]] = []
    for one in sorted(set(numbers)):
        if parts and one == parts[-1][-1] + 1:
            parts[-1][1:] = [one]
        else:
            parts.append([one])
    return ",".join("-".join(map(str, part)) for part in parts)
