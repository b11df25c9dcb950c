"""Acknowledgements between nodes: rows of this node -> one record of it -> one record of the job -> its control page.

The first rank of each node has a relay, in a separate thread. It publishes one record for the ranks of its node in the
store of the process group. The first rank of the job, the *aggregator*, reads the records of all nodes with one request
and publishes one record for the job. Each node's first rank reads that record and writes it into its control page, where
`step()` finds it. So a snapshot costs each node the same few requests, however many there are.

Every record says what was true when it was written, and each step may stop for ever: then other ranks learn late, or not
before the next generation, that a snapshot is common, and keep more than they need. Keys carry the generation, so that
nothing of a dead one is read.

The same records carry the messages of the persisters (`messages`): those of all nodes to the node of the aggregator, and
that one's to the others. While nothing moves, a node looks for it once in a few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.faults import crash_point
from flashckpt.framing import frame, split
from flashckpt.report import guarded
from flashckpt.shm.acks import NOBODY, GroupAcks, decode_group, encode_group, merge_acks, node_acks, rank_acks
from flashckpt.shm.control import Control
from flashckpt.shm.messages import NO_MESSAGE, MessageFiles, OutgoingMessage

_PREFIX = "flashckpt/acks"
RESTS = 8
"""Turns after which a node that rests looks for a new message: as many seconds."""
AGAIN = 16
"""Turns with requests after which records are sent once more: what got lost without an error would be waited for for ever."""
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
        store: Of the process group.
        firsts: The first rank of every node, ascending.
        first: The first rank of this node.
        messages: Of the node's persister; None: the relay carries acknowledgements alone.
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
        messages: MessageFiles | None = None,
    ) -> None:
        """Sends nothing yet."""
        self._control, self._store, self._messages = control, store, messages
        self._generation, self._rows = generation, local_world_size
        self._own = f"{_PREFIX}/g{generation}/r{first}"
        self._job_key = f"{_PREFIX}/g{generation}/job"
        self._nodes = [f"{_PREFIX}/g{generation}/r{rank}" for rank in firsts] if first == firsts[0] else []
        self._published: tuple[GroupAcks, bytes] | None = None
        self._sent_to_all = b""  # aggregator: what is in the job's record of its persister
        self._rested, self._turns = 0, 0
        self._present: set[str] = set()  # keys of which one is known to exist; none is ever deleted
        self._seen: frozenset[bytes] = frozenset()
        self._job = NOBODY
        self._received: tuple[bytes, ...] = ()
        self._open: tuple[SnapshotId, ...] = ()  # aggregator: what some nodes hold and others may come to

    def turn(self) -> bool:
        """Carry what has changed; return whether nothing more is to be learned of the snapshots of this node.

        Reads the rows only, and sends nothing, as long as that is so and they have not changed.
        """
        mine = node_acks(rank_acks(self._control, generation=self._generation, rows=self._rows))
        outgoing = NO_MESSAGE if self._messages is None else self._messages.outgoing(self._generation)
        if self._may_rest(mine, outgoing):
            self._deliver(self._received)
            return True
        self._turns += 1
        is_due = self._turns % AGAIN == 0
        if is_due or (mine, outgoing.message) != self._published:
            crash_point("acks.before-node")
            self._store.set(self._own, frame(encode_group(mine)) + outgoing.message)
            self._published = mine, outgoing.message
        job, received = self._aggregate(outgoing, is_due=is_due) if self._nodes else self._fetch()
        if job != self._job:
            self._control.publish_job_acks(self._generation, encode_group(job))
            self._job = job
        self._deliver(received)
        return is_settled(mine, job) and not _may_become_common(job, self._open) and not outgoing.waits

    def close(self) -> None:
        """Remove what was received."""
        if self._messages is not None:
            self._messages.forget()

    def _may_rest(self, mine: GroupAcks, outgoing: OutgoingMessage) -> bool:
        """Whether this turn may do without a request: nothing is new, nothing is waited for."""
        is_quiet = (mine, outgoing.message) == self._published and not outgoing.waits and is_settled(mine, self._job)
        self._rested = self._rested + 1 if is_quiet and not self._nodes else 0
        return self._rested > 0 and (self._messages is None or self._rested % RESTS > 0)

    def _deliver(self, received: tuple[bytes, ...]) -> None:
        self._received = received
        if self._messages is not None:
            crash_point("acks.before-delivery")
            with contextlib.suppress(OSError):  # no room: the persister receives nothing, and asks the root
                self._messages.deliver(self._generation, received)

    def _aggregate(self, outgoing: OutgoingMessage, *, is_due: bool) -> tuple[GroupAcks, tuple[bytes, ...]]:
        """Return the record of the job and the messages of all nodes; publish it where it has changed."""
        records = [split(bytes(raw)) for raw in self._read(self._nodes)]
        distinct = frozenset(acks for acks, _ in records)  # most nodes say the same
        received = tuple(message for _, message in records if message)
        if not distinct or (not is_due and distinct == self._seen and outgoing.message == self._sent_to_all):
            return self._job, received
        whole = merge_acks(decode_group(raw) for raw in distinct)
        job = GroupAcks(is_whole=whole.is_whole, common=whole.common, lacked=whole.lacked)  # what ranks ask for
        if is_due or job != self._job or outgoing.message != self._sent_to_all:
            crash_point("acks.before-job")
            self._store.set(self._job_key, frame(encode_group(job)) + outgoing.message)
        self._seen, self._open, self._sent_to_all = distinct, whole.open, outgoing.message
        return job, received

    def _fetch(self) -> tuple[GroupAcks, tuple[bytes, ...]]:
        found = self._read([self._job_key])
        if not found:
            return self._job, ()
        acks, message = split(bytes(found[0]))
        return decode_group(acks), (message,) if message else ()

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
    """Turns a relay: at once after a publication, then ever more rarely until there is nothing more to learn."""

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
        with contextlib.suppress(OSError):
            self._relay.close()

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
                _log.warning("could not tell other nodes which snapshots this one holds (will retry): %s", error)
            self._problem = str(error)
            return False
        self._problem = ""
        return done
