"""The storage side of the daemon: executes what the negotiation decides. Every error of the root is raised to the loop.

`turn` is called again and again; between two calls everything that matters is on the root or in slot
headers, so a daemon that is killed anywhere is replaced by the next one, which continues from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from flashckpt.checkpoint.catalog import newest_checkpoint
from flashckpt.checkpoint.indexes import missing_writers
from flashckpt.checkpoint.intents import (
    LeaseObjects,
    Proposals,
    abandon_intent,
    abandoned_reason,
    close_intent,
    put_intent,
    read_intents,
)
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.root_records import (
    MANIFEST,
    ReplacedRoot,
    check_fence,
    claimed_token,
    prefix_of,
    read_generations,
)
from flashckpt.checkpoint.writer import PersistOptions, commit
from flashckpt.core.intent import Intent, NodeMessage
from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.machine.logs import log_context
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.flush import OF_THE_DATA, Flush, problem_of
from flashckpt.daemon.persister.housekeeping import Housekeeper
from flashckpt.daemon.persister.negotiation import Negotiation
from flashckpt.daemon.persister.protocol import Action, Event, Outcome
from flashckpt.daemon.persister.seeker import Seeker
from flashckpt.errors import FencedError
from flashckpt.shm.acks import GroupAcks
from flashckpt.shm.inventory import NodeInventory, pin_all, release
from flashckpt.shm.job_directory import JobConfig
from flashckpt.shm.segment import Pin
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PersistTotals:
    """Counters since this daemon started; `persisted_bytes` are bytes of tensors, `persist_seconds` of commits.

    `norm` and `largest_number` are of what this node wrote of the last commit.
    """

    commits: int = 0
    given_up: int = 0
    persisted_bytes: int = 0
    persist_seconds: float = 0.0
    norm: float = 0.0
    largest_number: float = 0.0


class PersistCoordinator:
    """What one daemon does on the root of its job: it asks the negotiation, and does what it answers.

    Args:
        on_commit: Called when a snapshot was committed, before its slots are released.
        send: Gives the ranks a message to carry to the other nodes.
        see: Returns the node's slots as they are now, to a thread too; None: a turn knows those it began with.
        wake: Called, in a thread, when a turn has something to do.

    Attributes:
        housekeeper: Retention and sweep, in their own thread.
        flush: The writes of the open intent that this node works on.
        committed_s: time.monotonic() of the last commit that this daemon saw.
        totals: Counters.
    """

    def __init__(
        self,
        config: JobConfig,
        on_commit: Callable[[NodeInventory], None] | None = None,
        send: Callable[[NodeMessage], None] = lambda _: None,
        see: Callable[[], NodeInventory] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._on_commit, self._send, self._wake = on_commit, send, wake
        self.negotiation = Negotiation(config.node_count, config.persist_every or 1)
        self.flush: Flush | None = None
        self.committed_s: float | None = None
        self.totals = PersistTotals()
        self._policy = Policy.of(config)
        self.housekeeper = Housekeeper(lambda: open_store(config.root, **config.storage_options), self._policy)
        self._store: Store | None = None
        self._replaced = ReplacedRoot()
        self._confirmed = 0, ""  # number and token of the claim that was read back
        self._proposals = Proposals()
        self._leases = LeaseObjects()
        self._pins: dict[SnapshotId, dict[int, Pin]] = {}
        self._view = NodeInventory(slots=())
        self._see = see or (lambda: self._view)
        self._seeker = Seeker(self._see)
        self._record = Generation(number=0)
        self._error: Exception | None = None
        self._begun_s = float("-inf")  # when the last persist began

    # -- what the loop calls --------------------------------------------------------------------------------

    def turn(
        self,
        view: NodeInventory,
        record: Generation,
        *,
        urgent: bool,
        received: tuple[NodeMessage, ...] | None = None,
        job: GroupAcks | None = None,
    ) -> None:
        """Do what can be done now; returns quickly except for small storage operations.

        Args:
            view: This node's slots.
            record: The current generation of the job.
            urgent: Persist the newest common snapshot now, whether it is of a persist step or not.
            received: What the ranks carry from the persisters of other nodes; None where they carry nothing.
            job: What all ranks of the job are known to hold, and what some lack; None where that is not known.

        Raises:
            RootError, StoreError, FencedError, DamagedError, PersistError, OSError: nothing
                partial became visible; call `turn` again later.
        """
        self._record = record
        if self.flush is not None and (result := self.flush.result()) is not None:
            self._error = self.flush.error if isinstance(result, p.WriteFailed) else None
            self._run(view, result)
        now_s = time.monotonic()
        is_due = now_s - self._begun_s >= self.config.persist_s
        tick = p.Tick(
            now_s=now_s, node=view, generation=record, urgent=urgent, received=received, is_due=is_due,
            common=None if job is None else job.common, lacked=() if job is None else job.lacked,
        )  # fmt: skip
        self._run(view, tick)
        self._seeker.let_go(view)

    def pause(self, view: NodeInventory, *, urgent: bool = False, failing: bool = False) -> None:
        """Keep the candidate pinned without accessing the root; release it if storage fails and training needs the slot."""
        self._seeker.let_go()
        self._run(view, p.Paused(node=view, urgent=urgent, failing=failing))

    def disconnect(self) -> None:
        """Drop the connection (unless it is in use), so that the next one reads the credentials again."""
        if self._store is not None and (self.flush is None or not self.flush.is_writing):
            self._store.close()
            self._store = None

    def close(self) -> None:
        """Release everything; waits for writes in progress, and a limited time for deletions."""
        if self.flush is not None:
            self.flush.close()
            self.flush = None
        for pins in self._pins.values():
            release(pins)
        self._pins.clear()
        self._seeker.let_go()
        self.disconnect()
        self.housekeeper.close()

    # -- what it is asked about -----------------------------------------------------------------------------

    @property
    def committed(self) -> SnapshotId | None:
        """Newest committed snapshot of this root, as far as known."""
        return self.negotiation.committed

    @property
    def floor(self) -> SnapshotId:
        """Snapshot up to which nothing is left to persist."""
        return self.negotiation.floor

    @property
    def is_due(self) -> bool:
        """Whether the time between two persists is over, as far as it was looked at."""
        return self.negotiation.is_due

    @property
    def skipped(self) -> int:
        """Persist steps that were complete here but skipped, since another was being persisted."""
        return self.negotiation.skipped

    @property
    def given_up(self) -> str:
        """Why the last snapshot that was given up was; "" if none was."""
        return self.negotiation.given_up

    def undone(self, view: NodeInventory, *, urgent: bool) -> list[SnapshotId]:
        """Return what this node holds and was to persist: the open intent's snapshot, else the newest; [] if none."""
        return self.negotiation.undone(view, urgent=urgent)

    # -- execution ------------------------------------------------------------------------------------------

    def _run(self, view: NodeInventory, event: Event) -> None:
        """Feed an event to the negotiation, and the answers to its questions, until it has none; raise what failed."""
        self._view = view
        try:
            actions = self.negotiation.step(event)
            while actions:
                answer = None
                for action in actions:
                    answer = self._execute(action)
                actions = self.negotiation.step(answer) if answer is not None else []
        finally:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _execute(self, action: Action) -> Event | None:
        """Do one thing; return the answer where it is a question."""
        if not action.answers:
            self._settle(action)
            return None
        match action:
            case p.PinSlots(identity, ranks):
                return self._pin(identity, ranks)
            case p.StartWrite(intent, ranks):
                self._start_write(intent, ranks)
                return p.Done()
            case p.Commit(intent):
                return self._commit(intent)
        store = self._connected()
        with self._seeker.seeking(self.negotiation.sought):  # the root may take longer than a snapshot lasts
            return self._look(action, store) or self._lease(action, store) or self._write(action, store)

    def _settle(self, action: Action) -> None:
        """Do what cannot fail."""
        match action:
            case p.Unpin(identity):
                release(self._pins.pop(identity, {}))
            case p.StopCommit():
                assert self.flush is not None
                self.flush.stop_commit()
            case p.EndWrite(identity, outcome):
                self._end_write(identity, outcome)
            case p.Send(message):
                with contextlib.suppress(OSError):  # no room: who waits in vain asks the root
                    self._send(message)

    def _look(self, action: Action, store: Store) -> Event | None:
        """Answer a question about the root; None if it is something to do."""
        match action:
            case p.ReadRoot():
                claims = [*read_generations(store), self._record]
                newest = newest_checkpoint(store, generations=claims)
                return p.RootRead(None if newest is None else newest.identity)
            case p.ReadIntents():
                intents, abandoned = read_intents(store, self._record.number)
                return p.IntentsRead(tuple(intents), frozenset(abandoned))
            case p.ReadProposals(generation, of_all):
                proposals = tuple(self._proposals.read(store, generation, of_all=of_all))
                self._view = self._see()
                return p.ProposalsRead(proposals, self._view)
            case p.ReadIndexes(identity, writers):
                return p.IndexesRead(tuple(missing_writers(store, prefix_of(*identity), writers)))
            case p.ReadOutcome(identity):
                return self._outcome(store, identity)
        return None

    def _outcome(self, store: Store, identity: SnapshotId) -> Event:
        if store.head(f"{prefix_of(*identity)}/{MANIFEST}") is not None:
            return p.CommitFound()
        if abandoned_reason(store, *identity) is not None:
            return p.AbandonmentFound()
        # A node that sat out generations knows of none but the one that runs; that it was abandoned may be forgotten.
        between = [] if identity.generation + 1 >= self._record.number else read_generations(store, identity.generation)
        return p.RollbackFound() if is_rolled_back(identity, between) else p.NothingFound()

    def _write(self, action: Action, store: Store) -> Event:
        """Change something on the root."""
        match action:
            case p.CheckFence():
                claim = replace(self._record, created_s=time.time())
                own = claim.number, claim.token
                check_fence(
                    store,
                    claim,
                    on_missing=lambda: self._replaced.refuse(store, claim),
                    is_known=self._confirmed == own and store.is_conditional,
                )
                self._confirmed = own
                self._replaced.note(store, claim)
            case p.PublishProposal(generation, proposal):
                self._proposals.publish(store, generation, proposal)
            case p.WriteIntent(identity, writers):
                leader = f"{socket.gethostname()} pid {os.getpid()}"
                generation, step = identity
                put_intent(
                    store,
                    Intent(generation=generation, step=step, writers=writers, leader=leader, created_s=time.time()),
                )
            case p.CloseIntent(identity):
                close_intent(store, *identity)
            case p.AbandonIntent(identity, reason):
                abandon_intent(store, *identity, reason=reason)
            case p.ApplyRetention():
                self.housekeeper.retain()
            case p.Sweep(committed):
                if self._sweeps_here():
                    self.housekeeper.sweep(committed)
            case _:
                raise AssertionError(action)
        return p.Done()

    def _sweeps_here(self) -> bool:
        """Whether this node sweeps the root: the one with rank 0 does, for all."""
        return self.config.node_count <= 1 or 0 in self._view.ranks(self._view.newest_generation())

    def _lease(self, action: Action, store: Store) -> Event | None:
        """Look who commits, or do something about it; None where it is about something else."""
        match action:
            case p.ReadCommitLease(identity):
                return p.LeaseRead(*self._leases.read(store, identity, self._holder(identity)))
            case p.TakeCommitLease(identity, number):
                is_taken = self._leases.take(store, identity, number, self._holder(identity))
                return p.LeaseTaken() if is_taken else p.LeaseLost()
            case p.RenewCommitLease(identity, number):
                self._leases.renew(store, identity, number, self._holder(identity))
                return p.Done()
        return None

    def _holder(self, identity: SnapshotId) -> str:
        """Return what marks this node's leases: a persister that starts again is the same holder."""
        return f"{socket.gethostname()} rank {min(self._view.ranks(identity.generation), default=-1)}"

    def _connected(self) -> Store:
        if self._store is None:
            self._store = open_store(self.config.root, **self.config.storage_options)
        return self._store

    def _pin(self, identity: SnapshotId, ranks: tuple[int, ...]) -> Event:
        pins = pin_all(self._view, identity, ranks)
        if pins is None:
            return p.PinLost()
        release(self._pins.pop(identity, {}))
        self._pins[identity] = pins
        return p.Pinned()

    def _start_write(self, intent: Intent, ranks: tuple[int, ...]) -> None:
        identity = intent.identity
        if self.flush is None:  # before the root is asked for: the pins are the flush's even where that fails
            options = PersistOptions(compression=self.config.compression)
            self.flush = Flush(identity, self._pins.pop(identity, {}), options, self._policy, self._wake)
            self._begun_s = time.monotonic()
        self.flush.start(self._connected(), ranks)

    def _end_write(self, identity: SnapshotId, outcome: Outcome) -> None:
        if outcome is Outcome.COMMITTED and self._on_commit is not None:
            self._on_commit(self._view)
        if outcome is not Outcome.COMMITTED:
            self._begun_s = float("-inf")
        release(self._pins.pop(identity, {}))
        flush, self.flush = self.flush, None
        if flush is None:
            return
        flush.close()
        self.totals.persisted_bytes += flush.persisted_bytes
        if outcome is Outcome.DEFERRED:
            return
        seconds = time.monotonic() - flush.started_s
        if outcome is Outcome.COMMITTED:
            self.committed_s = time.monotonic()
            self.totals.commits += 1
            self.totals.persist_seconds += seconds
            self.totals.norm, self.totals.largest_number = flush.sizes
        else:
            self.totals.given_up += 1
        with log_context(generation=identity[0], step=identity[1]):
            _log.info("%s after %.1f s, %d bytes from this node", outcome.value, seconds, flush.persisted_bytes)

    def _commit(self, intent: Intent) -> Event:
        assert self.flush is not None
        store, prefix = self._connected(), prefix_of(*intent.identity)
        record, number = self._record, intent.generation

        def work(is_wanted: Callable[[], bool]) -> bool:
            token = record.token if number == record.number else claimed_token(store, number)
            return commit(store, prefix, intent.writers, is_wanted=is_wanted, token=token)

        try:
            if not self.flush.commits(work):
                return p.CommitRuns()
        except FencedError:  # swept: there is a tombstone in place of MANIFEST
            return p.TombstoneFound()
        except OF_THE_DATA as error:
            self._error = error  # raised once the negotiation knows of it
            return p.CommitFailed(self.flush.cause_of(error), problem_of(error))
        return p.Committed()
