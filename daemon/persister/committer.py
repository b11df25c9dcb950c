"""Which node commits: the one that holds the lease. No I/O, like `negotiation`.

Only the holder looks for the other writers' indexes, so that waiting for a commit costs a node one small listing, whatever
the number of nodes. A lease is a number that goes up: the next one is taken by one conditional write, which one of all
nodes wins. No two clocks are compared: a lease has expired for a node that has not seen it change for long enough.
MANIFEST is created once whoever tries, so a holder that was only slow does no harm.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.protocol import Action, Event

LEASE_S = 5.0
"""Seconds without a change after which the lease of another node has expired."""
LEASE_WRITERS = 2500
"""Writers up to which that is long enough: a commit of more takes longer without a renewal, and is waited for as much longer."""
RENEWALS = 3
"""Renewals of a lease in the time in which it would expire."""


@dataclass
class CommitLease:
    """What this node knows of the lease of one snapshot.

    Attributes:
        identity: The snapshot.
        expires_s: Seconds without a change after which it is another node's turn.
        since_s: When `seen` was seen first, by this node's clock.
        seen: The lease as it was last read; at first none.
        held: Number of the lease that this node holds; None where it holds none.
        renewed_s: When it was taken or renewed.
    """

    identity: SnapshotId
    expires_s: float
    since_s: float
    seen: p.LeaseRead = field(default_factory=p.LeaseRead)
    held: int | None = None
    renewed_s: float = 0.0

    def hold(self, now_s: float, *, leads: bool) -> Generator[Action, Event, bool]:
        """Return whether this node is to commit: it holds the lease, or could take it now.

        Args:
            now_s: Seconds of a clock that never goes back.
            leads: Whether this is the node that commits unless it is late: it waits for nobody to take the first lease.
        """
        if self.held is not None and now_s - self.renewed_s < self.expires_s / RENEWALS:
            return True
        seen = yield from p.ask(p.ReadCommitLease(self.identity), p.LeaseRead)
        if seen.is_own:
            yield p.RenewCommitLease(self.identity, seen.number)
            return self._has(seen.number, now_s)
        self.held = None
        if seen != self.seen:
            self.seen, self.since_s = seen, now_s
        is_free = leads and seen.number < 0
        if not is_free and now_s - self.since_s < self.expires_s:
            return False
        answer = yield p.TakeCommitLease(self.identity, seen.number + 1)
        return isinstance(answer, p.LeaseTaken) and self._has(seen.number + 1, now_s)

    def _has(self, number: int, now_s: float) -> bool:
        self.held, self.renewed_s = number, now_s
        return True


def lease_of(identity: SnapshotId, writers: int, written_s: float) -> CommitLease:
    """Return the lease of a snapshot before anything is known of it.

    Args:
        identity: The snapshot.
        writers: Ranks that write it.
        written_s: When the last index of this node became durable.
    """
    return CommitLease(identity, LEASE_S * max(1.0, writers / LEASE_WRITERS), written_s)
