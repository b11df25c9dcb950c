"""Keeps the record of this session on the root: at its beginning and end, at commits, and once a minute.

In its own thread, with a connection to itself: nothing waits for it. What cannot be written now is written later,
as it is then.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from flashckpt import __version__
from flashckpt.checkpoint.history import (
    COURSE,
    ENDED,
    RANKS,
    STOPPED,
    Points,
    SessionRecord,
    added,
    clipped,
    forget_oldest,
    forget_oldest_incidents,
    put_incident,
    read_history,
    read_series,
    read_session,
    summary,
    write_series,
    write_session,
)
from flashckpt.checkpoint.root_records import newest_claim, owns_generation
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.metrics import class_of
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.shm import incident_files, logged_values, rank_table
from flashckpt.shm.control import PHASES, RESTORED_FROM, ControlRow, ControlView
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory
from flashckpt.shm.logged_values import LoggedValue, TakenValues
from flashckpt.storage.store import Store

EVERY_S = 60.0
"""Seconds between two writes where nothing else is to be said; a session that is killed with its node is known up to then."""
CLOSE_S, RANKS_S = 10.0, 10.0
_MOST_LEDGER = 64 << 10
_MOST_BEFORE = 200
"""Sessions before this one that the metrics count."""
_MOST_DUE = 32
"""Records that wait for a root that fails."""
_log = logging.getLogger("flashckpt.daemon")


class _Due(NamedTuple):
    config: JobConfig
    record: SessionRecord
    logged: TakenValues
    incidents: dict[str, bytes]
    ranks: bytes


class SessionHistory:
    """Writes the records of a job from its first node."""

    def __init__(self, directory: JobDirectory, connect: Callable[[JobConfig], Store]) -> None:
        self._directory, self._connect = directory, connect
        self._record: SessionRecord | None = None
        self._claim = Generation(number=0)
        self._written_s = float("-inf")
        self._said: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        self._due: dict[str, _Due] = {}
        self._thread: threading.Thread | None = None
        self._resumed: set[str] = set()
        self._shipped: set[str] = set()
        self._problem = ""
        self._curves: dict[str, Points] = {}
        self._keys: dict[int, str] = {}
        self._before: list[SessionRecord] = []
        self._stall = 0.0, 0.0
        self._source = RESTORED_FROM[0]
        self._ledger: tuple[int, dict[str, Any]] = (-1, {})
        self._ranks: tuple[float, dict[str, float]] = (float("-inf"), {})

    def turn(
        self,
        config: JobConfig,
        record: Generation,
        status: DaemonStatus,
        *,
        alive: bool,
        committed: SnapshotId | None,
        is_last: bool = False,
    ) -> None:
        """Note what is now, and have it written where it is due.

        Args:
            config: Of the job.
            record: Of this generation.
            status: What the persister last reported.
            alive: Whether a rank or agent is running.
            committed: The newest checkpoint.
            is_last: Whether the job has ended.
        """
        try:
            self._turn(config, record, status, alive=alive, committed=committed, is_last=is_last)
        except Exception as error:  # noqa: BLE001 -- a history must not keep anything from being persisted
            self._report(repr(error))

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("the history of the job cannot be written: %s", problem)
        self._problem = problem

    def _turn(
        self,
        config: JobConfig,
        record: Generation,
        status: DaemonStatus,
        *,
        alive: bool,
        committed: SnapshotId | None,
        is_last: bool,
    ) -> None:
        if config.node != 0 or not record.token.isalnum():
            return
        self._claim = record
        now_s, rows = time.time(), self._rows(record.number)
        before = self._record
        if before is None or (before.generation, before.token) != (record.number, record.token):
            if before is not None and not before.end:
                self._put(config, replace(before, end=STOPPED))
            before = _begun(config, record, now_s)
            self._ledger, self._stall = (self._ledger[0], {}), (0.0, 0.0)
        self._keys[record.number] = before.key
        if rows:
            self._stall = max((row.stall_ns / 1e9, float(row.snapshots)) for row in rows)
            self._source = RESTORED_FROM[max(row.restored_from for row in rows) % len(RESTORED_FROM)]
        end = "" if alive else ENDED if is_last else STOPPED
        step = max([before.step, *(row.step for row in rows)])
        self._record = replace(
            before,
            **_of_start(rows, before),
            step=step,
            committed=committed,
            persist_failures=status.failures,
            error=clipped(status.error),
            end=end,
            stall_s=round(self._stall[0], 4),
            snapshots=int(self._stall[1]),
            **self._failures(),
            updated_s=now_s if alive or end != before.end else before.updated_s,
        )
        of_failures = [one.get("time") for one in (self._record.failure, self._record.ended_by)]
        incidents = incident_files.incident_names(self._directory.path)[-1:]
        said = record.token, committed, end, *of_failures, step >= 0, bool(status.error), *incidents
        if said != self._said or (alive and now_s - self._written_s >= EVERY_S):
            self._said, self._written_s = said, now_s
            self._put(config, self._record, self._course(config, status))

    def numbers(self) -> dict[str, float]:
        """Return what the job has cost so far, by the names of `metrics.GAUGES` and `metrics.COUNTERS`; {} on other nodes."""
        record = self._record
        if record is None:
            return {}
        found = summary([*self._before, record])
        numbers: dict[str, float] = {
            "lost_steps": found["steps_lost"],
            "down_seconds": found["down_s"],
            "first_step_seconds": record.first_step_s,
            f"restore_seconds_{self._source}": record.restore_s,
            **({} if found["goodput"] is None else {"goodput_ratio": found["goodput"]}),
            **dict(zip(("stall_seconds", "snapshots"), self._stall, strict=True)),
        }
        for cause, count in found["restarts_by_cause"].items():
            name = f"restarts_{class_of(cause)}"
            numbers[name] = numbers.get(name, 0) + count
        return numbers | self._rank_numbers(record)

    def _rank_numbers(self, record: SessionRecord) -> dict[str, float]:
        """Return what the first agent knows of the ranks' times, read at most every RANKS_S: there may be thousands."""
        if (now := time.monotonic()) - self._ranks[0] >= RANKS_S:
            ranks, made_s = rank_table.read_table(self._directory.path)
            trains = record.updated_s - made_s < EVERY_S
            numbers: dict[str, float] = {"slow_ranks": sum(bool(one.slow) for one in ranks) if trains else 0}
            for phase in PHASES:
                if spent := [one.seconds[phase] for one in ranks if phase in one.seconds]:
                    numbers[f"phase_seconds_{phase}"] = median_low(spent)
            self._ranks = now, numbers
        return self._ranks[1]

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait for what is being written; what hangs is lost."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def _rows(self, generation: int) -> list[ControlRow]:
        try:
            rows = ControlView(self._directory.control_path).rows()
        except (OSError, DamagedError):
            return []
        return [row for row in rows if row.pid and row.generation == generation]

    def _failures(self) -> dict[str, Any]:
        """Return the field of the record that dlrun's ledger now has a line for: of the failure before it, or of its end."""
        if not (found := self._ledger_line()):
            return {}
        is_before = found.get("outcome") in ("restarted", "failed again")
        return {"failure" if is_before else "ended_by": found}

    def _ledger_line(self) -> dict[str, Any]:
        """Return the last line of dlrun's ledger that came since this session began."""
        path = self._directory.path / "ledger.jsonl"
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        seen, found = self._ledger
        if size > max(seen, 0) and seen >= 0:
            found = _last_line(path) or found
        self._ledger = size, found
        return found

    def _course(self, config: JobConfig, status: DaemonStatus) -> list[LoggedValue]:
        """Return how far storage, replicas and phases are at this step, as points of the session's curves."""
        record = self._record
        if record is None or record.step < 0:
            return []
        found: dict[str, float] = {
            "steps not on storage": max(0, record.step - (record.committed.step if record.committed else 0))
        }
        found |= {"steps not replicated": status.replica_lag} if config.replicate else {}
        found |= {
            f"{name[14:]} seconds": one
            for name, one in self._rank_numbers(record).items()
            if name[:14] == "phase_seconds_"
        }
        return [
            LoggedValue(record.generation, record.step, f"{COURSE}{name}", float(one)) for name, one in found.items()
        ]

    def _put(self, config: JobConfig, record: SessionRecord, course: Sequence[LoggedValue] = ()) -> None:
        logged = logged_values.take(self._directory.path)  # here: after its last turn the directory goes
        logged.values.extend(course)
        names = [one for one in incident_files.incident_names(self._directory.path) if one not in self._shipped]
        incidents = {name: incident_files.read_raw(self._directory.path, name) for name in names}
        with self._lock:
            self._due[record.key] = _Due(config, record, logged, incidents, rank_table.read_raw(self._directory.path))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="flashckpt-history", daemon=True)
                try:
                    thread.start()  # it waits for the lock
                except RuntimeError:  # a limit on threads: the next write tries again
                    return
                self._thread = thread

    def _next(self) -> _Due | None:
        with self._lock:
            if self._due:
                return self._due.pop(next(iter(self._due)))
            self._thread = None
            return None

    def _put_off(self, task: _Due) -> None:
        """Keep a record for the next write, unless there is a newer one."""
        with self._lock:
            if len(self._due) < _MOST_DUE:
                self._due.setdefault(task.record.key, task)
            self._thread = None

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._write(task)
                self._problem = ""
            except Exception as error:  # noqa: BLE001 -- a history must not keep anything from being persisted
                self._report(str(error) if isinstance(error, (FlashckptError, OSError)) else repr(error))
                self._put_off(task)
                return

    def _write(self, task: _Due) -> None:
        """Write a record; nothing to a root where no generation is claimed (another one is mounted there), or a newer run has begun."""
        store, record = self._connect(task.config), task.record
        try:
            if not self._may_write(store, self._claim):
                return
            if record.key not in self._resumed:  # a persister before us may have begun it
                self._resumed.add(record.key)
                forget_oldest(store)
                forget_oldest_incidents(store)
                self._before = [one for one in read_history(store, most=_MOST_BEFORE) if one.key != record.key]
                if (before := read_session(store, record.key)) is not None:
                    record = self._continued(record, before)
            write_session(store, record)
            self._ship_values(store, task.logged)
            if task.ranks:
                store.put(record.key + RANKS, task.ranks)
            for name, raw in task.incidents.items():
                put_incident(store, name, raw)
                self._shipped.add(name)
        finally:
            store.close()

    def _ship_values(self, store: Store, logged: TakenValues) -> None:
        """Add what ranks have logged to the curves of their session on the root."""
        for number in sorted({one.generation for one in logged.values} & self._keys.keys()):
            key = self._keys[number]
            points = self._curves.get(key) or read_series(store, key)  # a persister before us may have begun them
            points = added(
                points, ((one.name, one.step, one.value) for one in logged.values if one.generation == number)
            )
            write_series(store, key, points)
            self._curves = {key: points}
        logged_values.forget(logged)

    def _may_write(self, store: Store, record: Generation) -> bool:
        """Whether the root is the job's: a generation is claimed there, none by a newer run, and not this one by another."""
        newest = newest_claim(store)
        return 0 < newest <= record.number and (newest < record.number or owns_generation(store, record))

    def _continued(self, record: SessionRecord, before: SessionRecord) -> SessionRecord:
        if self._record is not None and self._record.key == record.key:
            self._record = replace(self._record, begun_s=before.begun_s, failure=self._record.failure or before.failure)
        return replace(
            record,
            begun_s=before.begun_s,
            step=max(record.step, before.step),
            failure=record.failure or before.failure,
        )


def _begun(config: JobConfig, record: Generation, now_s: float) -> SessionRecord:
    return SessionRecord(
        generation=record.number,
        token=record.token,
        job=config.job,
        host=socket.gethostname(),
        world_size=config.world_size,
        nodes=config.node_count,
        version=__version__,
        begun_s=now_s,
        updated_s=now_s,
        parent=record.parent,
    )


def _of_start(rows: Sequence[ControlRow], before: SessionRecord) -> dict[str, Any]:
    """Return what the rows say about the start: of the slowest rank, once each has trained a step."""
    if not rows:
        return {}
    found: dict[str, Any] = {"restored_step": max(before.restored_step, *(row.restored_step for row in rows))}
    if all(row.first_step for row in rows):
        found["first_step_s"] = round(max(row.first_step - row.entered for row in rows) / 1e9, 4)
        found["restore_s"] = round(max(row.restored - row.restore_started for row in rows) / 1e9, 4)
    return found


def _last_line(path: Path) -> dict[str, Any]:
    """Return the last whole line of a file of JSON lines; {} where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_LEDGER))
            found = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}
