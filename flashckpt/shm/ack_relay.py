"""Acknowledgements between nodes: rows of this node -> one record of it -> one record of the job -> its control page.

The first rank of each node has a relay, in a separate thread. It publishes one record for the ranks of its node in the
store of the process group. The first rank of the job, the *aggregator*, reads the records of all nodes with one request
and publishes one record for the job. Each node's first rank reads that record and writes it into its control page, where
`step()` finds it. So a snapshot costs each node the same few requests, however many there are.

Every record says what was true when it was written, and each step may stop for ever: then other ranks learn late, or not
before the next generation, that a snapshot is common, and keep more than they need. Keys carry the generation, so that
nothing of a dead one is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.faults import crash_point
from flashckpt.logs import guarded
from flashckpt.shm.acks import rank_acks
from flashckpt.shm.control import Control
from flashckpt.shm.group_acks import NOBODY, GroupAcks, decode_group, encode_group, merge_acks, node_acks

_PREFIX = "flashckpt/acks"
SHORTEST_S, LONGEST_S = 0.001, 1.0
"""Seconds between two turns: after something was published, and at most; each is twice the one before."""
CLOSE_S = 1.0
"""Seconds that `close` waits for a request under way: the store may hang."""
_log = guarded(logging.getLogger("flashckpt"))


class RelayStore(Protocol):
    """The part of a c10d store that is used."""

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist, without waiting for them."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys (waits for them)."""


class AckRelay:
    """The relay of one node; `turn` is one round of it.

    Args:
        control: The node's control file.
        store: Of the process group.
        generation: Of the worker group.
        firsts: The first rank of every node, ascending.
        first: The first rank of this node.
        local_world_size: Ranks of this node.
    """

    def __init__(
        self,
        *,
        control: Control,
        store: RelayStore,
        generation: int,
        firsts: Sequence[int],
        first: int,
        local_world_size: int,
    ) -> None:
        """Sends nothing yet."""
        self._control, self._store = control, store
        self._generation, self._rows = generation, local_world_size
        self._own = f"{_PREFIX}/g{generation}/r{first}"
        self._job_key = f"{_PREFIX}/g{generation}/job"
        self._nodes = [f"{_PREFIX}/g{generation}/r{rank}" for rank in firsts] if first == firsts[0] else []
        self._published: GroupAcks | None = None
        self._present: set[str] = set()  # keys of which one is known to exist; none is ever deleted
        self._seen: frozenset[bytes] = frozenset()
        self._job = NOBODY
        self._open: tuple[SnapshotId, ...] = ()  # aggregator: what some nodes hold and others may come to

    def turn(self) -> bool:
        """Carry what has changed; return whether nothing more is to be learned of the snapshots of this node.

        Reads the rows only, and sends nothing, as long as that is so and they have not changed.
        """
        mine = node_acks(rank_acks(self._control, generation=self._generation, rows=self._rows))
        if mine == self._published and not self._nodes and is_settled(mine, self._job):
            return True
        if mine != self._published:
            crash_point("acks.before-node")
            self._store.set(self._own, encode_group(mine))
            self._published = mine
        job = self._aggregate() if self._nodes else self._fetch()
        if job != self._job:
            self._control.publish_job_acks(self._generation, encode_group(job))
            self._job = job
        return is_settled(mine, job) and not _may_become_common(job, self._open)

    def _aggregate(self) -> GroupAcks:
        """Return the record of the job, and publish it where it has changed."""
        distinct = frozenset(map(bytes, self._read(self._nodes)))  # most nodes say the same
        if distinct in (self._seen, frozenset()):
            return self._job
        whole = merge_acks(decode_group(raw) for raw in distinct)
        job = GroupAcks(is_whole=whole.is_whole, common=whole.common, lacked=whole.lacked)  # what ranks ask for
        if job != self._job:
            crash_point("acks.before-job")
            self._store.set(self._job_key, encode_group(job))
        self._seen, self._open = distinct, whole.open
        return job

    def _fetch(self) -> GroupAcks:
        found = self._read([self._job_key])
        return decode_group(bytes(found[0])) if found else self._job

    def _read(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys; none before all of them exist, for a request would wait until then."""
        if keys[-1] not in self._present:
            if not self._store.check(keys):
                return []
            self._present.add(keys[-1])
        return list(self._store.multi_get(keys))


def is_settled(mine: GroupAcks, job: GroupAcks) -> bool:
    """Return whether all that a node holds is known to be common, older than that, or unrecoverable."""
    return mine.is_whole and not _may_become_common(job, mine.held.difference(job.common, job.lacked))


def _may_become_common(job: GroupAcks, identities: Iterable[SnapshotId]) -> bool:
    return any(not job.common or identity > job.common[0] for identity in identities)


class RelayThread:
    """Turns a relay: at once after a publication, then ever more rarely until there is nothing more to learn.

    Args:
        relay: Of this node.
    """

    def __init__(self, relay: AckRelay) -> None:
        """Starts the thread."""
        self._relay = relay
        self._wake, self._is_closed = threading.Event(), False
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="flashckpt-acks", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Take a turn now. Sends nothing itself."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; one that hangs in a request ends with the process."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        pause_s = SHORTEST_S
        while not self._is_closed:
            is_over = self._safe_turn()
            is_woken = self._wake.wait(LONGEST_S if is_over else pause_s)
            self._wake.clear()  # before the turn that follows: what is published meanwhile wakes it again
            pause_s = SHORTEST_S if is_over or is_woken else min(2 * pause_s, LONGEST_S)

    def _safe_turn(self) -> bool:
        """One turn; a store that fails costs skipped snapshots, and never training."""
        try:
            done = self._relay.turn()
        except Exception as error:  # noqa: BLE001 -- c10d raises several kinds, among them RuntimeError
            if str(error) != self._problem and not self._is_closed:
                _log.warning(
                    "other nodes do not learn which snapshots this one holds, and it is tried again: %s", error
                )
            self._problem = str(error)
            return False
        self._problem = ""
        return done
