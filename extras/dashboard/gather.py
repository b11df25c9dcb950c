"""What the page shows, as one JSON document: read from the root, and from the job directory where this machine has one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.checkpoint.catalog import CheckpointInfo, read_contents
from flashckpt.checkpoint.history import (
    Points,
    SessionRecord,
    added,
    read_history,
    read_incidents,
    read_ranks,
    read_series,
    summary,
)
from flashckpt.checkpoint.retention import Policy, choose_expired, kept_prefixes, leased_prefixes
from flashckpt.cli.common import abandoned, open_root
from flashckpt.commands.status import describe
from flashckpt.core.incident import as_values
from flashckpt.core.rank_table import RankTimes
from flashckpt.core.records import pack
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.shm import logged_values
from flashckpt.shm.control import CLOSED, PHASES, ControlRow, ControlView
from flashckpt.shm.incident_files import incidents_in
from flashckpt.shm.job_directory import JobDirectory, jobs_in_memory
from flashckpt.shm.rank_table import read_table
from flashckpt.storage.factory import open_store, root_url
from flashckpt.storage.store import Store

MOST_CHECKPOINTS = 200
MOST_SESSIONS = 50
"""Newest sessions that are shown, and whose curves are read."""


class PageSource:
    """A job, found by its root or by its id.

    Raises:
        RootError, ConfigError: As `open_root`.
    """

    def __init__(self, name: str, options: tuple[str, ...] = (), plan: Mapping[str, Any] | None = None) -> None:
        self._plan = dict(plan or {})
        self._known: Policy | None = None
        jobs = {one.job: one for one in jobs_in_memory()[0]}
        config = jobs[name].read_config() if name in jobs else None
        self.root = name if config is None else config.root
        if config is None or options:
            self.store: Store = open_root(self.root, options)
        else:
            self.store = open_store(config.root, **config.storage_options)
        self._finished: dict[str, Points] = {}

    def document(self) -> dict[str, Any]:
        """Return everything that is known now; what the root refuses is reported under `error`, and the rest is there."""
        found: dict[str, Any] = {"root": self.store.url, "now_s": time.time(), "error": ""}
        directory = self.directory()
        found["job"] = describe(directory) if directory is not None else None
        found["plan"] = self._plan
        found["ranks"] = ranks(directory) if directory is not None else []
        try:
            records = self.sessions()
            if not found["ranks"] and records:
                found["ranks"] = [_shown(one) for one in read_ranks(self.store, records[-1].key)]
            found |= {"summary": summary(records), "sessions": [pack(one) for one in records[-MOST_SESSIONS:]]}
            incidents = {one.id: one for one in read_incidents(self.store, most=MOST_SESSIONS)}
            incidents |= {one.id: one for one in (incidents_in(directory.path) if directory is not None else [])}
            found["incidents"] = [
                as_values(incidents[key]) | {"report": incidents[key].render()} for key in sorted(incidents)
            ]
            found["curves"] = self._curves(records[-MOST_SESSIONS:], directory)
            found["checkpoints"] = checkpoints(self.store, self._policy(directory))
        except (FlashckptError, OSError) as error:
            found = {"summary": summary([]), "sessions": [], "curves": [], "checkpoints": [], "incidents": []} | found
            found["error"] = str(error).splitlines()[0]
        return found

    def sessions(self) -> list[SessionRecord]:
        """Return the sessions that the root remembers."""
        return read_history(self.store)

    def _policy(self, directory: JobDirectory | None) -> Policy | None:
        """Return the job's rule of retention, where this machine knows it."""
        with contextlib.suppress(FlashckptError, OSError):
            if directory is not None and (config := directory.read_config()) is not None:
                self._known = Policy.of(config)
        return self._known

    def directory(self) -> JobDirectory | None:
        """Return this machine's memory of the job."""
        for directory in jobs_in_memory()[0]:
            try:
                config = directory.read_config()
            except (FlashckptError, OSError):
                continue
            if config is not None and root_url(config.root) == root_url(self.root):
                return directory
        return None

    def _curves(self, records: Sequence[SessionRecord], directory: JobDirectory | None) -> list[dict[str, Any]]:
        """Return the curves of each session, those of older ones read once."""
        waiting = logged_values.waiting(directory.path) if directory is not None else []
        found = []
        for record in records:
            is_old = record is not records[-1]
            points = self._finished.get(record.key)
            if points is None:
                points = read_series(self.store, record.key)
            if is_old:
                self._finished[record.key] = points
            mine = [(one.name, one.step, one.value) for one in waiting if one.generation == record.generation]
            found.append({"generation": record.generation, "points": added(points, mine)})
        return found


def checkpoints(store: Store, policy: Policy | None = None) -> list[Mapping[str, Any]]:
    """Return the newest checkpoints of a root, with their state and what keeps them."""
    infos = sorted(read_contents(store).infos, key=lambda one: one.identity, reverse=True)
    left, kept, leased = abandoned(store, infos), kept_prefixes(store), leased_prefixes(store)
    whole = [one for one in infos if not one.problem]
    expired = set() if policy is None else {one.prefix for one in choose_expired(whole, policy, abandoned=left)}

    def keeps(info: CheckpointInfo) -> str:
        found = ["a mark"] * (info.prefix in kept) + ["a reader"] * (info.prefix in leased)
        if policy is not None and info.prefix not in expired and not info.problem:
            is_every = policy.keep_every and info.step % policy.keep_every == 0 and info.identity not in left
            last = "no limit" if policy.keep_last is None else f"keep_last {policy.keep_last}"
            found.append(f"keep_every {policy.keep_every}" if is_every else last)
        return ", ".join(found) or ("the rule of its job" if policy is None else "nothing")

    return [
        {
            "step": one.step,
            "generation": one.generation,
            "created_s": one.created_s,
            "nbytes": one.nbytes,
            "state": "damaged" if one.problem else "rolled back" if one.identity in left
            else "suspect" if one.suspects else "committed",
            "kept": keeps(one),
        }
        for one in infos[:MOST_CHECKPOINTS]
    ]  # fmt: skip


def ranks(directory: JobDirectory) -> list[dict[str, Any]]:
    """Return the ranks of the job as its first agent knows them, and those of this node as their rows in the control file say."""
    found = {one.rank: _shown(one) for one in read_table(directory.path)[0]}
    try:
        rows = [row for row in ControlView(directory.control_path).rows() if row.pid]
    except (OSError, DamagedError):
        rows = []
    for row in rows:
        found[row.rank] = _of_row(row) | found.get(row.rank, {"pid": row.pid}) | _sign(row)
    return [found[rank] for rank in sorted(found)]


def _shown(one: RankTimes) -> dict[str, Any]:
    return {
        name: getattr(one, name)
        for name in ("rank", "pid", "step", "node", "host", "stage", "slow", "step_s", "seconds")
    }


def _of_row(row: ControlRow) -> dict[str, Any]:
    """Return what a row says of a rank of which no agent tells: seconds of a step on the average of its session."""
    steps = row.step - max(row.restored_step, 0)
    names = zip(PHASES, row.phases(), strict=True) if steps > 0 else ()
    seconds = {name: spent / 1e9 / steps for name, spent in names if spent}
    return {"rank": row.rank, "node": -1, "host": "", "stage": row.stage, "slow": "", "step_s": 0.0, "seconds": seconds}


def _sign(row: ControlRow) -> dict[str, Any]:
    silent_s = round(max(0, time.monotonic_ns() - row.heartbeat_ns) / 1e9, 1) if row.heartbeat_ns else None
    return {"step": row.step, "silent_s": silent_s, "is_paused": row.paused == 1, "has_ended": row.paused == CLOSED}
