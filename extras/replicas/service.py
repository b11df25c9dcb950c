"""Replication on one node: what the persister's loop calls each turn. Nothing here waits; threads send, receive and report.

One node decides for all which snapshot is sent next (`replica_rounds`); the others report to it (`rounds`).
A snapshot under way, and the newest one that is everywhere, stay pinned in this node's own slots as well: rows that several
nodes hold are in no replica, and a lost partner takes the replica with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.replicate import records
from flashckpt.replicate.receiver import Listener
from flashckpt.replicate.records import NodeEndpoint, ReplicaRows, ReplicaSession
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision
from flashckpt.replicate.round_memory import PartnerView, RoundMemory
from flashckpt.replicate.rounds import HeardReports, RoundsReporter
from flashckpt.replicate.sender import ReplicaTarget, Sender
from flashckpt.replicate.slots import Kept, ReplicaSlots
from flashckpt.shm import private
from flashckpt.shm.inventory import NodeInventory, pin, release
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.segment import Pin
from flashckpt.storage.factory import root_digest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """How far replication is, for status and metrics.

    Attributes:
        everywhere: Newest snapshot that all partners of all nodes hold, but for nodes that are passed over; None before the first
            of this generation.
        without: Names of the nodes that are passed over.
        lag_steps: Steps that the newest snapshot of this node is ahead of it.
        lag_s: Seconds since this node held a snapshot that is not everywhere; 0 if there is none.
        pending_bytes: Bytes of the snapshot under way that partners lack.
        sent_bytes: Bytes sent by this persister in all.
        kept_bytes: Shared memory that replicas of other nodes take here.
        problem: Why nothing can be sent; "" where it can.
    """

    everywhere: SnapshotId | None = None
    without: tuple[str, ...] = ()
    lag_steps: int = 0
    lag_s: float = 0.0
    pending_bytes: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    problem: str = ""


class ReplicationService:
    """All of it, for one job on one node.

    Args:
        directory: Of the job.
        wake: Wakes the loop that calls `turn`.
    """

    def __init__(self, directory: JobDirectory, wake: Callable[[], None]) -> None:
        self._directory, self._wake = directory, wake
        self._listener: Listener | None = None
        self._listens_at = ""
        self.session: ReplicaSession | None = None
        self._slots: ReplicaSlots | None = None
        self._record = Generation(number=0)
        self._rounds = RoundMemory()
        self._committed: SnapshotId | None = None
        self._heard: HeardReports | None = None
        self._reporter: RoundsReporter | None = None
        self._senders: list[Sender] = []
        self._targets: dict[SnapshotId, ReplicaTarget] = {}
        self._held: tuple[SnapshotId, ...] = ()
        self._pinned: tuple[SnapshotId, ...] = ()
        self._seen_s: dict[SnapshotId, float] = {}
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._sent_before = 0
        self._left: list[
            tuple[list[Sender], ReplicaTarget]
        ] = []  # of sessions that are over, until no thread reads them

    # -- what the loop calls -------------------------------------------------------------------------------

    def turn(
        self, config: JobConfig, view: NodeInventory, record: Generation, committed: SnapshotId | None = None
    ) -> None:
        """Do what can be done now.

        Args:
            config: Of the job.
            view: This node's own slots.
            record: The current generation.
            committed: Newest checkpoint on storage that is known of.

        Raises:
            FlashckptError, OSError: A record cannot be read, or no socket can be opened; to be tried again.
        """
        self._listen(config)
        session = records.read_session(self._directory) if config.replicate else None
        if session is not None and session.generation != record.number:
            session = None
        if session != self.session:
            self._begin(session, record)
        # what an earlier generation committed may have been rolled back since
        self._committed = committed if committed is not None and committed.generation == record.number else None
        if (session := self.session) is not None:
            self._advance(session, view)
            if self._reporter is None:  # what is held here is known by now: else a snapshot under way is given up
                self._reporter = RoundsReporter(
                    session,
                    self._changed,
                    report=lambda: self._report(session),
                    decide_here=self.take_report,
                    decided=lambda decision: self._take_decision(session, decision),
                )
        self._let_go()

    def state(self) -> ReplicaState:
        """Return how far it is."""
        floor, session = self._rounds.kept, self.session
        everywhere = floor if floor is not None and floor.generation == self._record.number else None
        begun = self._record.parent.step if self._record.parent is not None else 0
        newest = max(self._held, default=None)
        waiting = [at for identity, at in self._seen_s.items() if floor is None or identity > floor]
        problems = [sender.progress.problem for sender in self._senders if sender.progress.problem]
        if self._reporter is not None and self._reporter.problem:
            problems.append(self._reporter.problem)
        return ReplicaState(
            everywhere=everywhere,
            without=tuple(session.name(node) for node in self._rounds.decision.without) if session is not None else (),
            lag_steps=max(0, newest.step - (floor.step if floor is not None else begun)) if newest is not None else 0,
            lag_s=time.monotonic() - min(waiting) if waiting else 0.0,
            pending_bytes=sum(sender.progress.pending_bytes for sender in self._senders),
            sent_bytes=self._sent_before + sum(sender.progress.sent_bytes for sender in self._senders),
            kept_bytes=sum(_nbytes(path) for path in self._directory.replica_segments()),
            problem="; ".join(problems),
        )

    def report(self, trouble: str) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """Return the fields of the persister's status and the metrics; see `flashckpt.plugin.PersisterExtension`."""
        state = self.state() if self.session is not None else ReplicaState()
        status = {
            "replicated": state.everywhere,
            "replica_lag": state.lag_steps,
            "replica_lag_s": int(state.lag_s),
            "replica_pending": state.pending_bytes,
            "replica_problem": (state.problem or trouble)[:1000],
        }
        return status, replica_numbers(state) if self.session is not None else {}

    def close(self) -> None:
        """End all threads; what is kept stays in memory."""
        self._begin(None, self._record)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- what connections ask (receiver.Host) ----------------------------------------------------------------

    @property
    def slots(self) -> ReplicaSlots:
        """What this node keeps of others."""
        assert self._slots is not None
        return self._slots

    def kept(self) -> Kept | None:
        """Return what may not be overwritten here."""
        with self._lock:
            session, known, kept = self.session, self._rounds.known, self._rounds.kept
        if session is None:
            return None
        return Kept(generation=self._record, identity=known, presumed=kept, superseded=session.superseded)

    def take_report(self, node: int, report: NodeReport) -> RoundDecision:
        """Note the report of a node; return what follows from those of all."""
        heard = self._heard
        if heard is None:
            return RoundDecision(waits=True)
        decision = heard.take(node, report)
        if heard.node != node and not decision.waits and decision != self._rounds.decision:
            self._changed.set()  # the reporter of this node, which reports its own, takes the decision at its next turn
        return decision

    # -- one session -----------------------------------------------------------------------------------------

    def _listen(self, config: JobConfig) -> None:
        """Listen on the address that the job names, and say where; on the port of before, for others know that one."""
        wanted = config.replica_address if config.replicate else ""
        if wanted == self._listens_at:
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._slots = self._slots or ReplicaSlots(self._directory, root_digest=root_digest(config.root))
        self._listens_at = wanted
        if not wanted:
            return
        before = records.read_endpoint(self._directory)
        port = before.port if before is not None and before.address == wanted else 0
        try:
            self._listener = Listener(self, wanted, port)
            found = NodeEndpoint(address=wanted, port=self._listener.port, pid=os.getpid())
            _log.info("accepting replicas at %s port %d", wanted, found.port)
        except OSError as error:
            found = NodeEndpoint(address=wanted, pid=os.getpid(), problem=str(error))
            _log.error("cannot accept replicas: cannot listen on %s: %s", wanted, error)
        private.write_record(records.endpoint_path(self._directory), found)

    def _begin(self, session: ReplicaSession | None, record: Generation) -> None:
        """End what is under way for the last session, and begin another one."""
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
        for sender in self._senders:
            sender.close()  # its thread may still count a chunk or two
            self._sent_before += sender.progress.sent_bytes
        if self._listener is not None:
            self._listener.drop()
        self._left += [(self._senders, target) for target in self._targets.values()]
        with self._lock:
            self.session, self._record = session, record
            self._heard = HeardReports(session) if session is not None else None
            if session is not None:
                self._rounds = RoundMemory.begin(record.number, session.restored, self._rounds)
        self._senders, self._targets, self._held, self._pinned = [], {}, (), ()
        self._seen_s.clear()
        if session is None:
            if self._slots is not None:
                self._slots.close()
            return
        self._changed = threading.Event()
        self._senders = [Sender(session, place, self._changed) for place in range(len(session.partners[session.node]))]
        names = ", ".join(session.name(sender.partner) for sender in self._senders)
        _log.info("replicates to %s, every %d steps", names, session.every)

    def _advance(self, session: ReplicaSession, view: NodeInventory) -> None:
        ranks = set(session.ranks_of(session.node))
        found = [i for i in view.complete() if i[0] == session.generation and view.holders(i).keys() >= ranks]
        now = time.monotonic()
        self._seen_s = {i: self._seen_s.get(i, now) for i in {*found, *self._targets} if i[0] == session.generation}
        decision = self._rounds.decision
        wanted = self._rounds.pinned()
        for identity in sorted(wanted - self._targets.keys()):
            self._pin(identity, ranks, view)
        target = self._targets.get(decision.target) if decision.target is not None else None
        for sender in self._senders:
            sender.set_target(target)
        pinned = tuple(sorted(i for i, one in self._targets.items() if i in wanted and one.pins.keys() == ranks))
        held, before = tuple(found), (self._held, self._pinned)
        self._held, self._pinned = (
            held,
            pinned,
        )  # before anything is let go of: a report never names what is no longer pinned
        if (held, pinned) != before:
            self._changed.set()
        self._left += [(self._senders, self._targets.pop(one)) for one in sorted(self._targets.keys() - wanted)]
        if decision.everywhere is not None:
            self.slots.retire(decision.everywhere)

    def _let_go(self) -> None:
        """Release the slots that no thread reads any more."""
        left, self._left = self._left, []
        for senders, target in left:
            if any(sender.is_using(target) for sender in senders):
                self._left.append((senders, target))
            else:
                release(dict(target.pins))

    def _pin(self, identity: SnapshotId, ranks: set[int], view: NodeInventory) -> None:
        """Pin what this node holds of a snapshot, with the rows that go to partners where it is to be sent."""
        held = view.holders(identity)
        is_target = identity == self._rounds.decision.target
        rows: dict[int, ReplicaRows] = {}
        if is_target:
            for rank in ranks:
                one = records.read_rows(self._directory, rank)
                if one is None or one.generation != self._record.number:
                    return  # another rank of this node is about to write it
                rows[rank] = one
        pins: dict[int, Pin] = {}
        for rank in sorted(held):
            if (taken := pin(held[rank])) is not None:
                pins[rank] = taken
        if is_target and pins.keys() != ranks:
            release(pins)
            return
        self._targets[identity] = ReplicaTarget(identity=identity, kept=self._rounds.known, pins=pins, rows=rows)

    # -- what it reports ---------------------------------------------------------------------------------------

    def _report(self, session: ReplicaSession) -> NodeReport | None:
        """Return what this node says now; None until its partners have said what they hold."""
        damaged = frozenset[SnapshotId]().union(*(sender.progress.damaged for sender in self._senders))
        held, pinned = ([i for i in one if i not in damaged] for one in (self._held, self._pinned))
        views = [
            PartnerView(node=one.partner, holds=one.progress.holds, is_passed_over=one.is_passed_over)
            for one in self._senders
        ]
        with self._lock:
            if session is not self.session:
                return None
            return self._rounds.report(held, views, self._committed, pinned=pinned)

    def _take_decision(self, session: ReplicaSession, decision: RoundDecision) -> None:
        with self._lock:
            if session is not self.session or decision.waits or decision == self._rounds.decision:
                return
            passed_over, before = decision.without, self._rounds.decision.without
            self._rounds.adopt(decision)
        if passed_over != before:
            _say_passed_over(session, passed_over)
        self._wake()


def _say_passed_over(session: ReplicaSession, nodes: Sequence[int]) -> None:
    if nodes:
        names = ", ".join(session.name(node) for node in nodes)
        _log.warning(
            "replicas are sent without %s, which could not be reached for %.0f s: state that only these "
            "nodes hold is protected only up to the newest full replica or checkpoint", names, env.FLASHCKPT_REPLICA_PATIENCE,
        )  # fmt: skip
    else:
        _log.info("all nodes take part in replication again")


def _nbytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def replica_numbers(state: ReplicaState) -> Mapping[str, float]:
    """Return what the metrics show of it."""
    found = {
        "replica_lag_steps": float(state.lag_steps),
        "replica_lag_seconds": state.lag_s,
        "replica_pending_bytes": float(state.pending_bytes),
        "replica_bytes": float(state.kept_bytes),
        "replica_sent_bytes": float(state.sent_bytes),
        "replica_failing": float(bool(state.problem)),
    }
    if state.everywhere is not None:
        found |= {
            "replicated_generation": float(state.everywhere.generation),
            "replicated_step": float(state.everywhere.step),
        }
    return found
