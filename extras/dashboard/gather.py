"""What the page shows, as one JSON document: read from the root, and from the job directory where this machine has one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.checkpoint.catalog import read_contents
from flashckpt.checkpoint.history import SessionRecord, read_history, summary
from flashckpt.checkpoint.incidents import read_incidents
from flashckpt.checkpoint.retention import kept_prefixes
from flashckpt.checkpoint.series import Points, added, read_series
from flashckpt.cli.common import abandoned, open_root
from flashckpt.cli.status import describe
from flashckpt.core.incident import as_values
from flashckpt.core.records import pack
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.shm import logged_values
from flashckpt.shm.control import CLOSED, ControlView
from flashckpt.shm.incident_files import incidents_in
from flashckpt.shm.job_directory import JobDirectory, jobs_in_memory
from flashckpt.shm.job_id import root_url
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

MOST_CHECKPOINTS = 200
MOST_SESSIONS = 50
"""Newest sessions that are shown, and whose curves are read."""


class PageSource:
    """A job, found by its root or by its id.

    Args:
        name: A root, or the id of a job in this machine's memory.
        options: Storage options of the root, KEY=VALUE.

    Attributes:
        root, store: Where it persists.

    Raises:
        RootError, ConfigError: As `open_root`.
    """

    def __init__(self, name: str, options: tuple[str, ...] = ()) -> None:
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
        found["ranks"] = ranks(directory) if directory is not None else []
        try:
            records = self.sessions()
            found |= {"summary": summary(records), "sessions": [pack(one) for one in records[-MOST_SESSIONS:]]}
            incidents = {one.id: one for one in read_incidents(self.store, most=MOST_SESSIONS)}
            incidents |= {one.id: one for one in (incidents_in(directory.path) if directory is not None else [])}
            found["incidents"] = [as_values(incidents[key]) for key in sorted(incidents)]
            found["curves"] = self._curves(records[-MOST_SESSIONS:], directory)
            found["checkpoints"] = checkpoints(self.store)
        except (FlashckptError, OSError) as error:
            found = {"summary": summary([]), "sessions": [], "curves": [], "checkpoints": [], "incidents": []} | found
            found["error"] = str(error).splitlines()[0]
        return found

    def sessions(self) -> list[SessionRecord]:
        """Return the sessions that the root remembers."""
        return read_history(self.store)

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


def checkpoints(store: Store) -> list[Mapping[str, Any]]:
    """Return the newest checkpoints of a root, with their state and what keeps them."""
    infos = sorted(read_contents(store).infos, key=lambda one: one.identity, reverse=True)
    left, kept = abandoned(store, infos), kept_prefixes(store)
    return [
        {
            "step": one.step,
            "generation": one.generation,
            "created_s": one.created_s,
            "nbytes": one.nbytes,
            "state": "damaged" if one.problem else "rolled back" if one.identity in left else "committed",
            "kept": one.prefix in kept,
        }
        for one in infos[:MOST_CHECKPOINTS]
    ]


def ranks(directory: JobDirectory) -> list[Mapping[str, Any]]:
    """Return the ranks of this node as their rows in the control file say."""
    try:
        rows = [row for row in ControlView(directory.control_path).rows() if row.pid]
    except (OSError, DamagedError):
        return []
    now_ns = time.monotonic_ns()
    return [
        {
            "rank": row.rank,
            "pid": row.pid,
            "step": row.step,
            "silent_s": round(max(0, now_ns - row.heartbeat_ns) / 1e9, 1) if row.heartbeat_ns else None,
            "is_paused": row.paused == 1,
            "has_ended": row.paused == CLOSED,
        }
        for row in sorted(rows, key=lambda row: row.rank)
    ]
