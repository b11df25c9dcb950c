"""Which step the whole job persists next: one small object on the root, written by the leader.

`intents/000003-000000120` says "generation 3 persists step 120, these ranks write". Every daemon
persists exactly the open intent and keeps its slot pinned until MANIFEST exists or the intent is
abandoned (`intents/000003-000000120.abandoned`). Any daemon may take over as leader: everything here
may be repeated.
"""

from __future__ import annotations

import re

from flashckpt.checkpoint.root_records import explaining, open_record
from flashckpt.core.intent import Intent
from flashckpt.core.records import pack, seal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

SIX_DIGITS = 100_000
INTENTS = "intents/"
_MARK = ".abandoned"
_NAME = re.compile(r"^(\d{6,})-(\d{9,})$")


def put_intent(store: Store, intent: Intent) -> bool:
    """Write the decision; return False if one for this snapshot already exists (it remains in force)."""
    crash_point("persist.before-intent")
    created = store.put_if_absent(_key(intent.generation, intent.step), encode_intent(intent))
    crash_point("persist.after-intent")
    return created


def list_intents(store: Store) -> list[Intent]:
    """Return the intents that are neither closed nor abandoned, newest first (committed ones may still be among them)."""
    return read_intents(store)[0]


def read_intents(store: Store, newest: int = SIX_DIGITS) -> tuple[list[Intent], set[SnapshotId]]:
    """Return what `list_intents` does, and the snapshots whose intents carry the mark that they were abandoned.

    Args:
        store: The root.
        newest: No generation is newer than this one. Names of the first 100,000 begin with a 0: what nodes propose, below
            the same folder, is not listed then.
    """
    names = {info.key[len(INTENTS) :] for info in store.list(INTENTS if newest >= SIX_DIGITS else f"{INTENTS}0")}
    found, marked = [], set()
    for name in names:
        if (parts := _NAME.match(name)) is None:
            continue
        if name + _MARK in names:
            marked.add(SnapshotId(*map(int, parts.groups())))
            continue
        try:
            found.append(_read(store, name))
        except ObjectMissingError:
            continue  # closed while we looked
    return sorted(found, key=lambda intent: intent.identity, reverse=True), marked


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
    """Remove an intent and its mark: the checkpoint is committed, or no node waits for it any more."""
    key = _key(generation, step)
    store.delete(key)
    store.delete(key + _MARK)


def _key(generation: int, step: int) -> str:
    return f"{INTENTS}{generation:06d}-{step:09d}"


def encode_intent(intent: Intent) -> bytes:
    """Return the object of a decision."""
    return seal(pack(intent))


def decode_intent(raw: bytes, key: str, url: str) -> Intent:
    """Return the decision in `raw`, which was read from `key` of the root `url`; one without a digest is from before 1.2.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to continue.
    """
    with explaining(
        f"the intent {key} of {url} is damaged",
        state="Nothing was persisted because of it; committed checkpoints are as they were.",
        remedy=f"delete the object {key}: the snapshot is decided on again, or a newer one is",
    ):
        intent = open_record(Intent, raw, key)
        if _key(*intent.identity) != key:
            raise ValueError(f"the intent of step {intent.step} of generation {intent.generation}")
        if not intent.writers or len({*intent.writers}) != len(intent.writers):
            raise ValueError(f"writers {intent.writers!r:.40}")
        return intent


def _read(store: Store, name: str) -> Intent:
    key = INTENTS + name
    return decode_intent(store.get(key), key, store.url)
