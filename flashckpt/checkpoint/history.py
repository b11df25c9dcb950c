"""The history of a job on its root: one small record per session, so that what restarts cost is known after memory is gone.

`history/<generation>-<token>` belongs to one generation of one run, whose persister on the first node alone writes it, as a
whole each time. So no write meets another, a reader sees the old record or the new one, and a session that is killed
leaves the last one. Beside it are curves, each thinned to a bounded number of points, and incidents (`history/incident-<id>.json`, written once).
Nothing decides by any of it: what cannot be read is left out. Torch-free.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt.checkpoint.root_records import parallel
from flashckpt.core.incident import Incident, decode
from flashckpt.core.rank_table import RankTimes, decode_table
from flashckpt.core.records import pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

HISTORY = "history/"
MOST_SESSIONS = 1000
"""Sessions that a root remembers; the oldest are forgotten."""
ENDED, STOPPED = "ended", "stopped"
"""`end` of a session that ended cleanly, and of one whose ranks ended otherwise."""
RANKS = ".ranks"
"""Behind the key of a record: the times of the ranks of its session, as its first agent knew them last."""
_NAME = re.compile(r"history/([0-9]{6,19})-([0-9A-Za-z]{1,64})")
_MOST_TEXT = 500
MOST_POINTS = 1000
MOST_NAMES = 64
CURVES = ".values"
COURSE = "job/"
"""Before the names of curves that the persister adds to those that are logged."""
Points = dict[str, list[tuple[int, float]]]
"""Steps and values by name, in the order they came."""
INCIDENTS = f"{HISTORY}incident-"
MOST_INCIDENTS = 1000
"""Incidents that a root remembers; the oldest are forgotten."""
_INCIDENT = re.compile(r"history/incident-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """One session of a job, as its persister last saw it.

    Attributes:
        job, host, world_size, nodes, version: Of the job, the first node, and the release that ran.
        begun_s, updated_s: When it was first and last seen, unix seconds.
        parent: Snapshot that it was restored from; None on a fresh start.
        restored_step: Step it was restored from, -1 on a fresh start or where its ranks have not said it yet.
        first_step_s: Seconds from the start of the slowest rank's program to its first step; 0 where none was trained.
        restore_s: Seconds of them that its restore took.
        step: Last step that a rank of the first node has done; -1 for none.
        persist_failures, error: Attempts to persist that failed, and the last failure.
        end: "" as long as it runs and where nobody saw its end; else ENDED or STOPPED.
        stall_s, snapshots: What training waited for so many snapshots, on the rank of the first node that waited longest.
        failure, ended_by: dlrun's ledger entries (cause, rank, host, step, seconds, ...) of the failure before it, and of the
            one that no restart followed; {} without one.
    """

    generation: int
    token: str
    job: str
    host: str = ""
    world_size: int = 1
    nodes: int = 1
    version: str = ""
    begun_s: float = 0.0
    updated_s: float = 0.0
    parent: SnapshotId | None = None
    restored_step: int = field(default=-1, metadata={"least": -1})
    first_step_s: float = 0.0
    restore_s: float = 0.0
    step: int = field(default=-1, metadata={"least": -1})
    committed: SnapshotId | None = None
    persist_failures: int = 0
    error: str = ""
    end: str = ""
    stall_s: float = 0.0
    snapshots: int = 0
    failure: dict[str, Any] = field(default_factory=dict)
    ended_by: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its object on the root."""
        return f"{HISTORY}{self.generation:06d}-{self.token}"


def write_session(store: Store, record: SessionRecord) -> None:
    """Publish a record, in place of the one before of the same session."""
    crash_point("history.before-put")
    store.put(record.key, seal(pack(record)))


def read_session(store: Store, key: str) -> SessionRecord | None:
    """Return the record at a key; None where there is none that can be read."""
    try:
        raw = store.get(key)
        return unpack(SessionRecord, unseal(raw, key), partial=True)
    except (ObjectMissingError, DamagedError, FormatVersionError, ValueError, KeyError):
        return None


def read_history(store: Store, *, most: int = MOST_SESSIONS) -> list[SessionRecord]:
    """Return the newest `most` sessions of a root, oldest first."""
    found = parallel(lambda key: read_session(store, key), _keys(store)[-most:])
    return sorted((one for one in found if one is not None), key=lambda one: (one.generation, one.begun_s))


def read_ranks(store: Store, key: str) -> list[RankTimes]:
    """Return the times of the ranks of a session; [] where there are none."""
    try:
        return decode_table(store.get(key + RANKS))[0]
    except (ObjectMissingError, DamagedError):
        return []


def forget_oldest(store: Store) -> None:
    """Delete the records beyond MOST_SESSIONS."""
    oldest = _keys(store)[:-MOST_SESSIONS]
    store.delete_many([one for key in oldest for one in (key, key + CURVES, key + RANKS)])


def _keys(store: Store) -> list[str]:
    named = [(int(name[1]), info.key) for info in store.list(HISTORY) if (name := _NAME.fullmatch(info.key))]
    return [key for _, key in sorted(named)]


def clipped(text: str) -> str:
    """Return the first line of a text, bounded."""
    return text.partition("\n")[0][:_MOST_TEXT]


def summary(records: Sequence[SessionRecord]) -> dict[str, Any]:
    """Return what a job's sessions cost, as JSON values.

    Returns:
        `sessions`, `restarts` (of sessions that did not end cleanly), `restarts_by_cause`, `steps_lost` and their seconds
        `lost_s`, `down_s` (from the last sign of a session to the first step of the next one) and `down_by_cause`, `elapsed_s`,
        `stall_s` of `snapshots` that training waited for, `begun_s`, `updated_s`, `end`, and `goodput`: the share of the time
        that was neither down nor spent on lost steps; None where no time has passed.
    """
    causes: dict[str, int] = {}
    down: dict[str, float] = {}
    steps_lost, down_s, lost_s = 0, 0.0, 0.0
    elapsed_s = sum(max(0.0, one.updated_s - one.begun_s) for one in records)
    for before, after in itertools.pairwise(records):
        if before.end == ENDED:
            continue
        cause, gap_s = cause_of(after), max(0.0, after.begun_s - before.updated_s)
        causes[cause] = causes.get(cause, 0) + 1
        lost = max(0, before.step - max(after.restored_step, 0))
        steps_lost += lost
        elapsed_s += gap_s
        down_s += gap_s + after.first_step_s
        down[cause] = down.get(cause, 0.0) + gap_s + after.first_step_s
        lost_s += lost * _seconds_per_step(before)
    return {
        "sessions": len(records),
        "restarts": sum(causes.values()),
        "restarts_by_cause": causes,
        "steps_lost": steps_lost,
        "lost_s": round(lost_s, 3),
        "down_s": round(down_s, 3),
        "down_by_cause": {cause: round(spent, 3) for cause, spent in down.items()},
        "elapsed_s": round(elapsed_s, 3),
        "stall_s": round(sum(one.stall_s for one in records), 3),
        "snapshots": sum(one.snapshots for one in records),
        "begun_s": records[0].begun_s if records else None,
        "updated_s": records[-1].updated_s if records else None,
        "end": records[-1].end if records else "",
        "goodput": None if elapsed_s <= 0 else max(0.0, 1 - (down_s + lost_s) / elapsed_s),
    }


def cause_of(record: SessionRecord) -> str:
    """Return why the session before this one ended, as far as it is known."""
    return clipped(str(record.failure.get("cause", ""))) or "not known: no dlrun watched it"


def _seconds_per_step(record: SessionRecord) -> float:
    steps = record.step - max(record.restored_step, 0)
    return max(0.0, record.updated_s - record.begun_s - record.first_step_s) / steps if steps > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    points: dict[str, Any] = field(default_factory=dict)


def added(points: Points, new: Iterable[tuple[str, int, float]]) -> Points:
    """Return the curves with new points (name, step, value); one with too many loses every second of its older points.

    The steps of a curve ascend within a session: what is there already changes nothing if it comes again.
    """
    found = {name: list(one) for name, one in points.items()}
    for name, step, value in new:
        if name in found or len(found) < MOST_NAMES:
            curve = found.setdefault(name, [])
            if curve and step <= curve[-1][0]:
                continue
            curve.append((step, value))
            if len(curve) > MOST_POINTS:
                curve[:-1] = curve[:-1:2]
    return found


def write_series(store: Store, key: str, points: Points) -> None:
    """Publish the curves of the session whose record is at `key`."""
    plain = {name: [[step for step, _ in one], [value for _, value in one]] for name, one in points.items()}
    store.put(key + CURVES, seal(pack(_Series(points=plain))))


def read_series(store: Store, key: str) -> Points:
    """Return the curves of the session whose record is at `key`; {} where there are none that can be read."""
    try:
        raw = unpack(_Series, unseal(store.get(key + CURVES), key), partial=True).points
    except (ObjectMissingError, DamagedError, FormatVersionError, ValueError, KeyError):
        return {}
    return {name: _curve(one) for name, one in raw.items() if isinstance(name, str)}


def _curve(found: Any) -> list[tuple[int, float]]:
    try:
        steps, values = found
        return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]
    except (ValueError, TypeError):
        return []


def put_incident(store: Store, name: str, raw: bytes) -> None:
    """Publish the JSON of an incident under its file's name."""
    store.put(f"{INCIDENTS}{name}", raw)


def read_incidents(store: Store, *, most: int = 20) -> list[Incident]:
    """Return the newest incidents of a root, oldest first."""
    found = parallel(lambda key: _read_incident(store, key), _incident_keys(store)[-most:])
    return [one for one in found if one is not None]


def forget_oldest_incidents(store: Store) -> None:
    """Delete those beyond MOST_INCIDENTS."""
    store.delete_many(_incident_keys(store)[:-MOST_INCIDENTS])


def _incident_keys(store: Store) -> list[str]:
    return sorted(info.key for info in store.list(INCIDENTS) if _INCIDENT.fullmatch(info.key))


def _read_incident(store: Store, key: str) -> Incident | None:
    try:
        return decode(store.get(key))
    except (ObjectMissingError, DamagedError):
        return None
