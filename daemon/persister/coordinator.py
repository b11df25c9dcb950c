"""The storage side of the daemon: agree on a snapshot, flush it, keep house. Every error is raised to the loop.

`turn` is called again and again; between two calls everything that matters is on the root or in slot
headers, so a daemon that is killed anywhere is replaced by the next one, which goes on from there.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashckpt.checkpoint.catalog import newest_checkpoint
from flashckpt.checkpoint.generations import check_fence, read_generations
from flashckpt.checkpoint.intents import Intent, abandon_intent, close_intent, list_intents, put_intent
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.writer import PersistOptions, missing_writers
from flashckpt.core.generation import Generation
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.superblock import MIN_SLOTS
from flashckpt.daemon.machine.logs import log_context
from flashckpt.daemon.persister.flush import Flush, FlushOutcome
from flashckpt.daemon.persister.housekeeping import Housekeeping
from flashckpt.daemon.persister.proposals import (
    NodeProposal,
    Search,
    choose_proposal,
    next_candidate,
    of_other_nodes,
    publish_proposal,
    read_proposals,
    spacing,
)
from flashckpt.errors import DamagedError, DisagreementError, PersistError, ShardGapError
from flashckpt.shm.inventory import Identity, NodeInventory, pin_all, release
from flashckpt.shm.job_directory import JobConfig
from flashckpt.shm.segment import Pin
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

ROOT_LOOK_S = 0.5
"""Seconds between two looks at the root while this node waits for others: events come with every snapshot."""
INTENT_PATIENCE_S = 600.0
"""Seconds that the leader waits for the writers of other nodes before it gives an intent up."""
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PersistTotals:
    """Counters since this daemon started; `persisted_bytes` are bytes of tensors, `persist_seconds` of commits."""

    commits: int = 0
    given_up: int = 0
    persisted_bytes: int = 0
    persist_seconds: float = 0.0


class PersistCoordinator:
    """What one daemon does on the root of its job.

    Args:
        config: The job.

    Attributes:
        committed: Newest committed identity of this root, as far as known.
        flush: The open intent that this node works on.
        committed_s: time.monotonic() of the last commit that this daemon saw.
        totals: Counters.
        skipped: Persist steps that were seen complete here and left out, since another was being persisted.
        given_up: Why the last snapshot that was given up was; "" if none was.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.committed: Identity | None = None
        self.flush: Flush | None = None
        self.skipped = 0
        self.given_up = ""
        self.committed_s: float | None = None
        self.totals = PersistTotals()
        self._store: Store | None = None
        self._floor: Identity = SnapshotId(0, -1)  # nothing at or below it is persisted any more
        self._owed: Identity = SnapshotId(
            0, -1
        )  # to be persisted, or something newer, though it may be overwritten meanwhile
        self._known = False  # whether the root was looked at since the connection was opened
        self._asked = False
        self._search = Search()
        self._pinned: dict[int, Pin] = {}
        self._candidate: Identity | None = None
        self._seen: set[Identity] = set()
        self._said: NodeProposal | None = None
        self._housekeeping = Housekeeping(Policy(keep_last=config.keep_last, keep_every=config.keep_every))
        self._looked_s = float("-inf")
        self._heard: list[NodeProposal] = []

    # -- one turn ---------------------------------------------------------------------------------------

    def turn(self, view: NodeInventory, record: Generation, *, urgent: bool) -> None:
        """Do what can be done now; returns quickly except for small storage operations.

        Args:
            view: This node's slots.
            record: The current generation of the job.
            urgent: Persist the newest common snapshot now, whether it is of a persist step or not.

        Raises:
            RootError, StoreError, FencedError, DamagedError, PersistError, OSError: nothing was made
                visible by halves; call `turn` again later.
        """
        self.hold(view, urgent=urgent)
        if not self._known and (self._candidate is None and not urgent and not view.slots):
            return
        store = self._connected(record)
        if self.flush is None:
            self._decide(store, view, record, urgent=urgent)
        if self.flush is not None:
            self._drive(store, view, record)
        if self.flush is None:
            self._housekeeping.turn(store, self.committed)

    def hold(self, view: NodeInventory, *, urgent: bool = False) -> None:
        """Keep the candidate pinned without touching the root (also while the root cannot be reached)."""
        flagged = self._flagged(view)
        whole = [identity for identity in (view.complete() if urgent else flagged) if view.is_whole(identity[0])]
        self._seen.update(flagged)
        if self.flush is not None or self._others(view):
            return
        if self._candidate is not None and self._candidate not in whole:
            self._unpin()  # abandoned by a restore, or no longer asked for
        best = max(whole, default=None)
        if best is not None and best > self._floor and best != self._candidate:
            self._pin(view, best)

    def _flagged(self, view: NodeInventory) -> list[Identity]:
        """Return what is to be persisted; where that was given back and overwritten, the newest snapshot in its place."""
        flagged = [identity for identity in view.flagged() if identity > self._floor]
        if not flagged and self._owed > self._floor:
            flagged = [identity for identity in view.complete() if identity >= self._owed][-1:]
        return flagged

    def yield_slots(self, view: NodeInventory) -> bool:
        """Give all pins back between two attempts where training would have no slot to write; whether it did so.

        With two slots a pinned one leaves none: the other holds the newest snapshot. While storage fails the
        memory tier must go on, and the next attempt takes what is newest then.
        """
        if not 0 < view.least_slots <= MIN_SLOTS or (self.flush is not None and self.flush.is_begun):
            return False
        pinned = self.flush.intent.identity if self.flush is not None else self._candidate
        if pinned is not None:
            self._owed = max(self._owed, pinned)
            self._asked = False  # an intent that is open is looked at again: it may have to be given up
        if self.flush is not None:
            self.flush.close()
            self.flush = None
        self._unpin()
        return True

    def is_idle(self, view: NodeInventory, *, urgent: bool) -> bool:
        """Return whether nothing is left to persist that this node holds."""
        return not self.undone(view, urgent=urgent)

    def undone(self, view: NodeInventory, *, urgent: bool) -> list[Identity]:
        """Return what this node holds and was to persist, newest last: the open flush, else the newest snapshot."""
        if self.flush is not None:
            return [self.flush.intent.identity]
        wanted = view.complete() if urgent else self._flagged(view)
        possible = [identity for identity in wanted if self.config.node_count > 1 or view.is_whole(identity[0])]
        return sorted(identity for identity in possible if identity > self._floor)[-1:]

    @property
    def floor(self) -> Identity:
        """Identity up to which nothing is left to persist."""
        return self._floor

    def disconnect(self) -> None:
        """Drop the connection (unless it is in use), so that the next one reads credentials anew."""
        if self._store is not None and (self.flush is None or not self.flush.is_writing):
            self._store.close()
            self._store = None

    def close(self) -> None:
        """Give everything back; waits for writes in progress."""
        if self.flush is not None:
            self.flush.close()
            self.flush = None
        self._unpin()
        self.disconnect()

    # -- agreement --------------------------------------------------------------------------------------

    def _connected(self, record: Generation) -> Store:
        if self._store is None:
            self._store = open_store(self.config.root, **self.config.storage_options)
            if self.flush is not None:
                self.flush.use(self._store)
        if not self._known:
            claims = read_generations(self._store)
            newest = newest_checkpoint(self._store, generations=[*claims, record])
            if newest is not None:
                self.committed = newest.identity
                self._floor = max(self._floor, newest.identity)
            self._known = True
        return self._store

    def _others(self, view: NodeInventory) -> bool:
        """Whether the newest generation here has ranks on other nodes."""
        if self.config.node_count <= 1:
            return False
        newest = max((held.header.generation for held in view.slots), default=0)
        return not view.is_whole(newest)

    def _decide(self, store: Store, view: NodeInventory, record: Generation, *, urgent: bool) -> None:
        """Adopt the open intent, or open one if this node may and the nodes agree."""
        alone = not self._others(view)
        look = not self._asked or (not alone and self._may_look())
        if look and self._adopt(store, view, record):
            return
        self._asked = True  # a node that has all ranks is the only one that opens intents from here on
        if alone:
            if self._candidate is not None:
                self._open(store, self._candidate, tuple(range(view.world_size(self._candidate[0]))), record)
                self._adopt_own(store, view)
            return
        if view.slots:
            self._agree(store, view, record, urgent=urgent, look=look)

    def _may_look(self) -> bool:
        """Whether the root may be asked again; asking it with every event would be many requests for nothing."""
        now = time.monotonic()
        if now - self._looked_s < ROOT_LOOK_S:
            return False
        self._looked_s = now
        return True

    def _agree(self, store: Store, view: NodeInventory, record: Generation, *, urgent: bool, look: bool) -> None:
        """Pin what the nodes converge on, say so, and open the intent once they agree and this node leads."""
        generation = max(held.header.generation for held in view.slots)
        ranks = view.ranks(generation)
        if look:
            self._heard = of_other_nodes(read_proposals(store, generation), ranks)
        world_size = view.world_size(generation)
        alike = [  # of a generation with the same ranks here: others cannot be agreed on in these records
            identity
            for identity in view.complete()
            if (view.ranks(identity[0]), view.world_size(identity[0])) == (ranks, world_size)
        ]
        flagged = [identity for identity in view.flagged() if identity in alike]
        self._search, wanted = next_candidate(
            self._search,
            flagged=flagged,
            newest=max(alike, default=SnapshotId(0, -1)),
            floor=self._floor,
            others=self._heard or [NodeProposal(ranks=ranks, world_size=0)],
            spacing=spacing(flagged),
        )
        if wanted != self._candidate:
            self._unpin()
            if wanted is not None:
                self._pin(view, wanted)
        mine = NodeProposal(
            ranks=ranks,
            world_size=world_size,
            pinned=self._candidate,
            at_least=self._search.target,
            complete=tuple(alike),
            urgent=urgent,
        )
        if look and mine != self._said:
            publish_proposal(store, generation, mine)
            self._said = mine
        nodes = [mine, *self._heard]
        chosen = choose_proposal(nodes, self._floor) if look else None
        if chosen is not None and min(ranks) == min(min(ready.ranks) for ready in nodes):
            self._open(store, chosen[0], tuple(range(world_size)), record)
            self._adopt(store, view, record)

    def _open(self, store: Store, identity: Identity, writers: Sequence[int], record: Generation) -> None:
        check_fence(store, replace(record, created_s=time.time()))
        intent = Intent(
            generation=identity[0],
            step=identity[1],
            writers=tuple(writers),
            leader=f"{socket.gethostname()} pid {os.getpid()}",
            created_s=time.time(),
        )
        put_intent(store, intent)

    def _adopt_own(self, store: Store, view: NodeInventory) -> None:
        """Start the flush of the intent that was just opened for the pinned candidate."""
        assert self._candidate is not None
        generation, step = self._candidate
        intent = Intent(generation=generation, step=step, writers=tuple(range(view.world_size(generation))))
        self._start(store, intent, self._take_pins())

    def _adopt(self, store: Store, view: NodeInventory, record: Generation) -> bool:
        """Start or join the newest open intent of the root; True if there is one for this node to wait for."""
        for intent in list_intents(store):
            if intent.identity <= self._floor:
                close_intent(store, *intent.identity)
                continue
            if is_rolled_back(intent.identity, [record]):
                abandon_intent(store, *intent.identity, reason="its lineage was abandoned by a restore")
                continue
            check_fence(store, replace(record, created_s=time.time()))
            return self._join(store, view, intent)
        return False

    def _join(self, store: Store, view: NodeInventory, intent: Intent) -> bool:
        here = intent.writers if self.config.node_count <= 1 else set(intent.writers) & {*view.ranks(intent.generation)}
        todo = missing_writers(store, intent.prefix, sorted(here))
        if intent.identity == self._candidate and {*todo} <= self._pinned.keys():
            self._start(store, intent, self._take_pins())
            return True
        pins = pin_all(view, intent.identity, todo)
        if pins is not None:
            self._unpin()
            self._start(store, intent, pins)
            return True
        lost = [rank for rank in todo if not view.may_hold(rank, intent.identity)]
        if not lost:
            return True  # it is not complete here yet
        abandon_intent(store, *intent.identity, reason=f"ranks {lost} no longer hold the snapshot in memory")
        self._floor = max(self._floor, intent.identity)
        return False

    # -- flush ------------------------------------------------------------------------------------------

    def _start(self, store: Store, intent: Intent, pins: dict[int, Pin]) -> None:
        self.flush = Flush(intent, pins, store, PersistOptions(compression=self.config.compression))

    def _drive(self, store: Store, view: NodeInventory, record: Generation) -> None:
        flush = self.flush
        assert flush is not None
        try:
            if not flush.write() or (flush.has_waited and not self._may_look()):
                return
            check_fence(store, replace(record, created_s=time.time()))
            if is_rolled_back(flush.intent.identity, [record]):
                abandon_intent(store, *flush.intent.identity, reason="its lineage was abandoned by a restore")
                self._end(FlushOutcome.GIVEN_UP)
                return
            place = self._place(flush.intent, view)
            outcome = flush.settle(place=place)
        except (DamagedError, PersistError, ShardGapError, DisagreementError) as error:
            if not flush.may_retry(error):
                abandon_intent(store, *flush.intent.identity, reason=error.problem)
                self.given_up = f"step {flush.intent.step} was given up: {error.problem}"
                self._end(FlushOutcome.GIVEN_UP)
            raise
        if outcome is FlushOutcome.WAITING:
            if flush.waited_s > INTENT_PATIENCE_S and place == 0:
                abandon_intent(store, *flush.intent.identity, reason="other writers did not finish")
            return
        self._end(outcome)
        if outcome is FlushOutcome.COMMITTED and place == 0:
            close_intent(store, *flush.intent.identity)
            self._housekeeping.retain(store)

    def _place(self, intent: Intent, view: NodeInventory) -> int:
        """This node's place in the order of those that may commit: 0 for the node of the lowest writer."""
        here = view.ranks(intent.generation)
        if not here or min(here) == min(intent.writers):
            return 0
        return 1 + min(here) // max(len(here), 1)

    def _end(self, outcome: FlushOutcome) -> None:
        assert self.flush is not None
        identity = self.flush.intent.identity
        seconds = time.monotonic() - self.flush.started_s
        nbytes = self.flush.persisted_bytes
        self.flush.close()
        self.flush = None
        self._floor = max(self._floor, identity)
        if outcome is FlushOutcome.COMMITTED:
            self.committed = max(self.committed or identity, identity)
            self.committed_s = time.monotonic()
            self.totals.commits += 1
            self.totals.persist_seconds += seconds
        else:
            self.totals.given_up += 1
        self.totals.persisted_bytes += nbytes
        older = {seen for seen in self._seen if seen <= identity}
        self._seen -= older
        self.skipped += len(older - ({identity} if outcome is FlushOutcome.COMMITTED else set()))
        self._search = Search()
        with log_context(generation=identity[0], step=identity[1]):
            _log.info("%s after %.1f s, %d bytes from this node", outcome.value, seconds, nbytes)

    # -- pins -------------------------------------------------------------------------------------------

    def _pin(self, view: NodeInventory, identity: Identity) -> None:
        pins = pin_all(view, identity, sorted(view.holders(identity)))
        if pins is None:
            return
        self._unpin()
        self._pinned, self._candidate = pins, identity

    def _take_pins(self) -> dict[int, Pin]:
        pins, self._pinned, self._candidate = self._pinned, {}, None
        return pins

    def _unpin(self) -> None:
        release(self._pinned)
        self._candidate = None
