"""Which snapshot is persisted next: one decision for the whole job, kept as small objects on the root.

Daemons that skip on their own diverge and commit next to nothing. So one *intent* is open at a time:
every daemon persists exactly that snapshot and keeps its slots pinned until MANIFEST or an abandon mark
exists. While none is open, every daemon pins a candidate and says so in its *ready* record; once all
pin the same snapshot, the leader (the node of the lowest rank) opens the intent. The others take over
by themselves when it does not. All writes are conditional or idempotent, so two leaders do no harm.

    intents/000003-000000120             the intent (flashckpt.checkpoint.intents)
    intents/000003-000000120.abandoned   it will never be committed
    intents/ready-000003/r00008          what the node whose lowest rank is 8 has pinned

The decisions are pure functions; the last functions read and write ready records.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flashckpt.checkpoint.intents import INTENTS
from flashckpt.checkpoint.root_records import explaining, open_record
from flashckpt.core.records import pack, seal
from flashckpt.core.snapshot_id import NOTHING, SnapshotId
from flashckpt.errors import ObjectMissingError
from flashckpt.storage.store import Store

Identity = SnapshotId
READY = f"{INTENTS}ready-"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProposal:
    """What one node offers while no intent is open.

    Args:
        ranks: Ranks whose slots lie on this node; the lowest one names the node.
        world_size: Of their worker group.
        pinned: The snapshot it holds pinned, None while it waits for one.
        at_least: It asks all nodes for the first persist step from (generation, step) on: the highest wins.
        complete: All snapshots that every rank of this node holds now.
        urgent: It was asked to persist now: any common snapshot will do, not only one of a persist step.
    """

    ranks: tuple[int, ...]
    world_size: int
    pinned: Identity | None = None
    at_least: Identity = NOTHING
    complete: tuple[Identity, ...] = ()
    urgent: bool = False


def covers_world(readies: Collection[NodeProposal]) -> bool:
    """Return whether the nodes together hold every rank of one world."""
    worlds = {ready.world_size for ready in readies}
    ranks = {rank for ready in readies for rank in ready.ranks}
    if len(worlds) != 1 or len(ranks) != max(worlds):  # the size first: a damaged one must not be counted up to
        return False
    return ranks == set(range(len(ranks)))


def of_other_nodes(readies: Collection[NodeProposal], own: Collection[int]) -> list[NodeProposal]:
    """Return the records that still stand: one per node, without this node's own.

    A record is named by the lowest rank its node had when it wrote it. A daemon that looked before all ranks
    of its node had a segment leaves one behind under another name: its ranks lie within a later record's.
    """
    foreign = [ready for ready in readies if not {*ready.ranks} & {*own}]
    return [ready for ready in foreign if not any({*ready.ranks} < {*other.ranks} for other in foreign)]


def choose_proposal(readies: Collection[NodeProposal], floor: Identity = NOTHING) -> tuple[Identity, str] | None:
    """Return the snapshot to open an intent for and the reason, or None while the nodes do not agree yet.

    With an urgent request the newest snapshot that all nodes hold is taken; else all must have pinned the
    same. Nothing at or below `floor` (committed or given up) is chosen again.
    """
    if not covers_world(readies):
        return None
    if any(ready.urgent for ready in readies):
        shared = set.intersection(*({*ready.complete} for ready in readies))
        best = max(shared, default=floor)
        return (best, "request") if best > floor else None
    pinned = {ready.pinned for ready in readies}
    (only,) = pinned if len(pinned) == 1 else (None,)
    return None if only is None or only <= floor else (only, "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How one node looks for the snapshot that all nodes can pin.

    Args:
        target: It wants the first persist step from here on; the highest target of all nodes wins.
        misses: How often a target was already overwritten here when this node heard of it.
    """

    target: Identity = NOTHING
    misses: int = 0


def next_candidate(
    search: Search,
    *,
    flagged: Sequence[Identity],
    newest: Identity,
    floor: Identity,
    others: Collection[NodeProposal],
    spacing: int = 1,
) -> tuple[Search, Identity | None]:
    """Return how to go on and what to pin now (None: wait).

    A target that this node hears of before reaching it is safe: the first persist step from there on is
    the same one on every node. A target that it has overwritten already is answered by what it holds
    instead, and from the second miss on by one that lies ahead, twice as far each time, until all nodes
    hear of it in time.

    Args:
        search: Result of the last call; a new one after each intent.
        flagged: Complete snapshots of persist steps on this node, ascending.
        newest: The newest complete snapshot of any kind.
        floor: Only snapshots above this count (committed or given up).
        others: Ready records of the other nodes.
        spacing: Steps between two persist steps, as far as seen.
    """
    usable = [identity for identity in flagged if identity > floor]
    if not others:
        best = max(usable, default=None)
        return replace(search, target=best or search.target), best
    heard = max(max(ready.at_least, ready.pinned or NOTHING) for ready in others)
    if heard > max(search.target, floor):
        if heard not in usable and newest >= heard:
            best = max(usable, default=heard)
            if not search.misses and best > heard:  # the others may still hold, or have yet to reach, ours
                return Search(target=best, misses=1), best
            ahead = SnapshotId(newest.generation, newest.step + spacing * 2 ** min(search.misses, 16))
            return Search(target=max(ahead, heard), misses=search.misses + 1), None
        search = replace(search, target=heard)
    if search.target <= floor:
        best = max(usable, default=None)
        return replace(search, target=best or search.target), best
    return search, next((identity for identity in usable if identity >= search.target), None)


def publish_proposal(store: Store, generation: int, ready: NodeProposal) -> None:
    """Put this node's ready record, named by its lowest rank."""
    store.put(f"{_ready_prefix(generation)}r{min(ready.ranks):05d}", encode_ready(ready))


def read_proposals(store: Store, generation: int) -> list[NodeProposal]:
    """Return the ready records of all nodes in one generation."""
    found = []
    for info in store.list(_ready_prefix(generation)):
        try:
            found.append(decode_ready(store.get(info.key), info.key, store.url))
        except ObjectMissingError:
            continue
    return found


def clear_proposals(store: Store, below: int) -> None:
    """Remove the ready records of generations before `below`."""
    for info in store.list(READY):
        number = info.key[len(READY) :].partition("/")[0]
        if number.isdigit() and int(number) < below:
            store.delete(info.key)


def _ready_prefix(generation: int) -> str:
    return f"{READY}{generation:06d}/"


def encode_ready(ready: NodeProposal) -> bytes:
    """Return the object of a ready record."""
    return seal(pack(ready))


def decode_ready(raw: bytes, key: str, url: str) -> NodeProposal:
    """Return the record in `raw`, which was read from `key` of the root `url`.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to go on.
    """
    with explaining(
        f"the ready record {key} of {url} is damaged",
        state="Nothing was persisted because of it; committed checkpoints are as they were.",
        remedy=f"none is needed while its node runs: it writes it again; else delete the object {key}",
    ):
        ready = open_record(NodeProposal, raw, key)
        if not ready.ranks:
            raise ValueError("no ranks")
        return ready


def spacing(flagged: Sequence[Identity]) -> int:
    """Return the most steps between two snapshots that are to be persisted, at least 1."""
    steps = [step for _, step in flagged]
    return max((b - a for a, b in itertools.pairwise(steps)), default=1) or 1
