"""Incidents on the root, beside the history of sessions: `history/incident-<id>.json`, written once. Torch-free.

Nothing decides by them: what cannot be read is left out.
"""

from __future__ import annotations

import re

from flashckpt.checkpoint.history import HISTORY
from flashckpt.checkpoint.root_records import parallel
from flashckpt.core.incident import Incident, decode
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.storage.store import Store

PREFIX = f"{HISTORY}incident-"
MOST_INCIDENTS = 1000
"""Incidents that a root remembers; the oldest are forgotten."""
_NAME = re.compile(r"history/incident-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}\.json")


def put_incident(store: Store, name: str, raw: bytes) -> None:
    """Publish the JSON of an incident under its file's name."""
    store.put(f"{PREFIX}{name}", raw)


def read_incidents(store: Store, *, most: int = 20) -> list[Incident]:
    """Return the newest incidents of a root, oldest first."""
    found = parallel(lambda key: _read(store, key), _keys(store)[-most:])
    return [one for one in found if one is not None]


def forget_oldest_incidents(store: Store) -> None:
    """Delete those beyond MOST_INCIDENTS."""
    store.delete_many(_keys(store)[:-MOST_INCIDENTS])


def _keys(store: Store) -> list[str]:
    return sorted(info.key for info in store.list(PREFIX) if _NAME.fullmatch(info.key))


def _read(store: Store, key: str) -> Incident | None:
    try:
        return decode(store.get(key))
    except (ObjectMissingError, DamagedError):
        return None
