"""The messages of a node, which the ranks carry; how long it believes others, and how often it looks at the root. No I/O, as `negotiation`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from flashckpt.core.intent import NodeMessage, NodeProposal
from flashckpt.core.snapshot_id import NOTHING, SnapshotId
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.protocol import Tick

PATIENCE_S = 5.0
"""Seconds without a decision, after which what the ranks carry is not trusted any more: then the root is asked."""
ROOT_LOOK_S = 0.5
"""Seconds between two looks at the root while this node waits for others: events come with every snapshot."""
LONG_COMMIT_WRITERS = 1000
"""Writers of a snapshot from which on a node that waits for its commit looks less often, in proportion."""
IDLE_LOOK_S = 8.0
"""The most between two looks while nothing is to be persisted here and no other node is known to want anything."""
CARRIED_LOOK_S = 64.0
"""Seconds between two looks while the ranks carry messages, and none of them names a new decision."""
_Proposal = TypeVar("_Proposal", bound=NodeProposal)


class Messaging:
    """What one node has sent, and since when it waits for an answer."""

    def __init__(self) -> None:
        """Has sent nothing yet."""
        self._sent: NodeMessage | None = None
        self._waiting_s: float | None = None

    def believed(self, tick: Tick, *, is_idle: bool) -> tuple[NodeMessage, ...] | None:
        """Return what the ranks carry; None where they carry nothing, or it has led to no decision for too long.

        Then each node that waits uses the root: so a node whose ranks hang is found all the same.
        """
        if tick.received is None or is_idle:
            self._waiting_s = None
        elif self._waiting_s is None:
            self._waiting_s = tick.now_s
        elif tick.now_s - self._waiting_s > PATIENCE_S:
            return None
        return tick.received

    def announced(
        self, received: Iterable[NodeMessage], *, floor: SnapshotId, abandoned: Collection[SnapshotId]
    ) -> SnapshotId | None:
        """Return the newest decision in messages that this node has not done with; None if there is none."""
        news = [one.decided for one in received if one.decided > max(floor, NOTHING) and one.decided not in abandoned]
        return max(news, default=None)

    def decided(self) -> None:
        """Something was decided, in whatever way."""
        self._waiting_s = None

    def send(self, tick: Tick, mine: NodeProposal, *, waits: bool, decided: SnapshotId = NOTHING) -> p.Turn:
        """Send a proposal, and what was decided last, where it is news.

        What is complete changes with every snapshot: it is no news to a node that does not wait.
        """
        sent, carrier = self._sent, tick.generation.number
        before = sent.decided if sent is not None and sent.generation == carrier else NOTHING
        message = NodeMessage(
            **{name: getattr(mine, name) for name in NodeProposal.__slots__},
            generation=carrier,
            proposes_in=tick.node.newest_generation(),
            decided=max(before, decided),
            waits=waits,
        )
        if message != (sent if waits else aged(message, sent)):
            yield p.Send(message)
            self._sent = message

    def announce(self, tick: Tick, identity: SnapshotId) -> p.Turn:
        """Send what was decided, and propose nothing: who does not know it yet looks at the root."""
        node, generation = tick.node, tick.node.newest_generation()
        if tick.received is not None and node.ranks(generation):
            bare = NodeProposal(ranks=node.ranks(generation), world_size=node.world_size(generation))
            yield from self.send(tick, bare, waits=False, decided=identity)


class RootLooks:
    """When a node may look at the root; to look with every event would waste requests."""

    def __init__(self) -> None:
        """Has not looked yet."""
        self.last_s = float("-inf")
        self._idle_s = ROOT_LOOK_S

    def may(self, now_s: float, *, is_idle: bool = False, is_quiet: bool = False) -> bool:
        """Whether it may look now; it then does.

        Args:
            now_s: The time.
            is_idle: Nothing would be done at once about what is found: each look is twice as late as the one before.
            is_quiet: A message would name a decision, and none does: a node that waits need not look.
        """
        if is_quiet and not is_idle:
            return False
        if not is_idle:
            self._idle_s = ROOT_LOOK_S
        if now_s - self.last_s < (CARRIED_LOOK_S if is_quiet else self._idle_s):
            return False
        self.last_s = now_s
        if is_idle and not is_quiet:
            self._idle_s = min(2 * self._idle_s, IDLE_LOOK_S)
        return True

    def may_for_commit(self, now_s: float, writers: int) -> bool:
        """Whether a node that waits for a commit may look now; that of many writers takes a while."""
        return now_s - self.last_s >= ROOT_LOOK_S * writers / LONG_COMMIT_WRITERS and self.may(now_s)


def aged(mine: NodeProposal, before: _Proposal | None) -> _Proposal | None:
    """Return what was sent before as if it named what is complete now."""
    return before and replace(before, complete=mine.complete)
