"""Which step the whole job persists next: one small object on the root, written by the leader.

`intents/000003-000000120` says "generation 3 persists step 120, these ranks write". Every daemon
persists exactly the open intent and keeps its slot pinned until MANIFEST exists or the intent is
abandoned (`intents/000003-000000120.abandoned`). Any daemon may take over as leader: everything here
may be repeated.
"""

from __future__ import annotations

import re

from flashckpt.checkpoint.root_records import explaining, open_record, parallel, prefix_of
from flashckpt.core.intent import Intent, NodeProposal
from flashckpt.core.records import pack, seal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

SIX_DIGITS = 100_000
INTENTS = "intents/"
_MARK = ".abandoned"
_NAME = re.compile(r"^(\d{6,})-(\d{9,})$")
_COMMITTER = "committer."


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


# -- Proposals of the nodes as small objects on the root: what each of them would persist next. Torch-free ---------
#
# intents/000003-000000120 the intent (flashckpt.checkpoint.intents) intents/000003-000000120.abandoned it will
# never be committed intents/ready-000003/r00008.000000004 what the node whose lowest rank is 8 proposes, the
# fifth time

READY = f"{INTENTS}ready-"


class Proposals:
    """The proposals of the nodes: each proposal is another object, so that one that was read need not be read again.

    A node numbers its own; its newest counts, and it removes those before. An object without a number is from before.
    """

    def __init__(self) -> None:
        self._read: dict[str, NodeProposal] = {}
        self._last = "", -1  # the node that was published for, and its number: a listing may lag behind it

    def read(self, store: Store, generation: int, *, of_all: bool = True) -> list[NodeProposal]:
        """Return the newest proposals in one generation: a listing, and one request for each new one.

        Args:
            store: The root.
            generation: Which one.
            of_all: Read those of all nodes; else only those of rank 0's node, whose listing does not grow with the nodes.
        """
        newest = [keys[-1] for keys in _listed(store, generation, None if of_all else 0).values()]
        new = [key for key in newest if key not in self._read]
        found = dict(zip(new, parallel(lambda key: _get(store, key), new), strict=True))
        self._read = {key: one for key in newest if (one := self._read.get(key) or found.get(key)) is not None}
        return list(self._read.values())

    def publish(self, store: Store, generation: int, proposal: NodeProposal) -> None:
        """Put this node's proposal, named by its lowest rank, and remove what it proposed before."""
        node = _node_key(generation, first := min(proposal.ranks))
        before = _listed(store, generation, first).get(
            node, []
        )  # each time: a number of somebody else would outweigh ours
        last = self._last[1] if self._last[0] == node else -1
        number = 1 + max([last, *map(_number, before)])
        store.put(f"{node}.{number:09d}", encode_proposal(proposal))
        self._last = node, number
        store.delete_many(before)


def _listed(store: Store, generation: int, first: int | None) -> dict[str, list[str]]:
    """Return the keys of each node's proposals, oldest first; with `first` only those of the node of that lowest rank."""
    keys: dict[str, list[str]] = {}
    prefix = _ready_prefix(generation) if first is None else _node_key(generation, first)
    for info in store.list(prefix):  # sorted: by number
        keys.setdefault(info.key.partition(".")[0], []).append(info.key)
    return keys


def _node_key(generation: int, first: int) -> str:
    return f"{_ready_prefix(generation)}r{first:05d}"


def _get(store: Store, key: str) -> NodeProposal | None:
    try:
        return decode_proposal(store.get(key), key, store.url)
    except ObjectMissingError:
        return None  # a newer one has taken its place meanwhile


def _number(key: str) -> int:
    number = key.rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def clear_proposals(store: Store, below: int) -> None:
    """Remove the proposals of generations before `below`."""
    numbers = {info.key: info.key[len(READY) :].partition("/")[0] for info in store.list(READY)}
    store.delete_many([key for key, number in numbers.items() if number.isdigit() and int(number) < below])


def _ready_prefix(generation: int) -> str:
    return f"{READY}{generation:06d}/"


def encode_proposal(proposal: NodeProposal) -> bytes:
    """Return the object of a proposal."""
    return seal(pack(proposal))


def decode_proposal(raw: bytes, key: str, url: str) -> NodeProposal:
    """Return the record in `raw`, which was read from `key` of the root `url`.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to continue.
    """
    with explaining(
        f"the proposal {key} of {url} is damaged",
        state="Nothing was persisted because of it; committed checkpoints are as they were.",
        remedy=f"none is needed while its node runs: it writes it again; else delete the object {key}",
    ):
        proposal = open_record(NodeProposal, raw, key)
        if not proposal.ranks:
            raise ValueError("no ranks")
        return proposal


class LeaseObjects:
    """The leases of the nodes that commit: numbered objects in a checkpoint's folder, of which the highest counts.

    A number is taken by one conditional write and never again. To renew a lease its object is written again, which changes the
    time that the storage shows. `holder`, the text in it, marks it as a node's own: a persister that starts again knows it.
    """

    def __init__(self) -> None:
        self._holders: dict[str, bytes] = {}

    def read(self, store: Store, identity: SnapshotId, holder: str) -> tuple[int, float, bool]:
        """Return (number of the newest lease, time of its object, whether it is `holder`'s); number -1: there is none."""
        found = store.list(f"{prefix_of(*identity)}/{_COMMITTER}")
        if not found:
            return -1, 0.0, False
        newest = max(found, key=lambda info: info.key)
        is_own = self._holder_of(store, newest.key) == holder.encode()
        return int(newest.key.rpartition(".")[2]), newest.mtime, is_own

    def take(self, store: Store, identity: SnapshotId, number: int, holder: str) -> bool:
        """Take the lease of this number; False where another node was faster."""
        crash_point("lease.before-take")
        taken = store.put_if_absent(_lease_key(identity, number), holder.encode())
        crash_point("lease.after-take")
        return taken

    def renew(self, store: Store, identity: SnapshotId, number: int, holder: str) -> None:
        """Show that the holder is alive."""
        store.put(_lease_key(identity, number), holder.encode())

    def _holder_of(self, store: Store, key: str) -> bytes:
        """Return what a lease says; it is read once."""
        if key not in self._holders:
            try:
                self._holders = {key: store.get(key)}  # of the newest alone
            except ObjectMissingError:
                return b""
        return self._holders[key]


def _lease_key(identity: SnapshotId, number: int) -> str:
    return f"{prefix_of(*identity)}/{_COMMITTER}{number:06d}"
