"""Which step the whole job persists next: one small object on the root, written by the leader.

`intents/000003-000000120` says "generation 3 persists step 120, these ranks write". Every daemon
persists exactly the open intent and keeps its slot pinned until MANIFEST exists or the intent is
abandoned (`intents/000003-000000120.abandoned`). Any daemon may take over as leader: everything here
may be repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgpack

from flashckpt.checkpoint.persist import prefix_of
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

INTENTS = "intents/"
_MARK = ".abandoned"
_NAME = re.compile(r"^(\d{6,})-(\d{9,})$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """One decision of the leader.

    Attributes:
        generation, step: The snapshot to persist.
        writers: Global ranks that write; the commit waits for their indexes.
        leader: Who decided, for people ("node0 pid 1234").
        created_s: Unix seconds.
    """

    generation: int
    step: int
    writers: tuple[int, ...]
    leader: str = ""
    created_s: float = 0.0

    @property
    def identity(self) -> tuple[int, int]:
        """(generation, step)."""
        return self.generation, self.step

    @property
    def prefix(self) -> str:
        """Folder of the checkpoint it will become."""
        return prefix_of(self.generation, self.step)


def put_intent(store: Store, intent: Intent) -> bool:
    """Write the decision; return False where one for this snapshot is already there (it stands)."""
    crash_point("persist.before-intent")
    fields = {
        "generation": intent.generation,
        "step": intent.step,
        "writers": list(intent.writers),
        "leader": intent.leader,
        "created_s": intent.created_s,
    }
    created = store.put_if_absent(_key(intent.generation, intent.step), msgpack.packb(fields))
    crash_point("persist.after-intent")
    return created


def list_intents(store: Store) -> list[Intent]:
    """Return the intents that are neither closed nor abandoned, newest first (committed ones may still be among them)."""
    names = {info.key[len(INTENTS) :] for info in store.list(INTENTS)}
    found = []
    for name in names:
        if _NAME.match(name) and name + _MARK not in names:
            try:
                found.append(_read(store, name))
            except ObjectMissingError:
                continue  # closed while we looked
    return sorted(found, key=lambda intent: intent.identity, reverse=True)


def abandon_intent(store: Store, generation: int, step: int, reason: str) -> None:
    """Mark the intent as given up: daemons unpin, nobody commits it; its data is swept later."""
    store.put_if_absent(_key(generation, step) + _MARK, reason.encode())


def abandoned_reason(store: Store, generation: int, step: int) -> str | None:
    """Return why the intent was given up; None where it was not."""
    try:
        return store.get(_key(generation, step) + _MARK).decode(errors="replace")
    except ObjectMissingError:
        return None


def close_intent(store: Store, generation: int, step: int) -> None:
    """Remove an intent and its mark: the checkpoint is committed, or nobody waits for it any more."""
    key = _key(generation, step)
    store.delete(key)
    store.delete(key + _MARK)


def _key(generation: int, step: int) -> str:
    return f"{INTENTS}{generation:06d}-{step:09d}"


def _read(store: Store, name: str) -> Intent:
    raw = store.get(INTENTS + name)
    try:
        fields = msgpack.unpackb(raw)
        return Intent(
            generation=int(fields["generation"]),
            step=int(fields["step"]),
            writers=tuple(int(rank) for rank in fields["writers"]),
            leader=str(fields["leader"]),
            created_s=float(fields["created_s"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the intent {INTENTS}{name} of {store.url} is damaged", found=repr(raw[:64])) from error
