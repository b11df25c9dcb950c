"""Replication on one node: what the persister's loop calls each turn. Nothing here waits; threads send, receive and report.

The first node of a session decides for all which snapshot is sent next (`planning/replica_rounds`); the others report to it.
A snapshot under way, and the newest one that is everywhere, stay pinned in this node's own slots as well: rows that several
nodes hold are in no replica, and a lost partner takes the replica with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashckpt.core.generation import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.peer_link import PeerLink
from flashckpt.planning.replica_rounds import NodeReport, RoundDecision, decide
from flashckpt.replicate import records
from flashckpt.replicate.connections import SMALL, linked
from flashckpt.replicate.receiver import Listener, decision_from, packed_report
from flashckpt.replicate.records import NodeEndpoint, ReplicaRows, ReplicaSession
from flashckpt.replicate.sender import ANSWER_S, CONNECT_S, ReplicaTarget, Sender
from flashckpt.replicate.slots import Kept, ReplicaSlots
from flashckpt.shm import job_records
from flashckpt.shm.inventory import NodeInventory, pin, release
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.job_id import root_digest
from flashckpt.shm.segment import Pin

IDLE_S, BUSY_S = 1.0, 0.2
"""Seconds between two reports to the node that decides: with nothing to send, and while something is under way."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """How far replication is, for status and metrics.

    Attributes:
        everywhere: Newest snapshot that all partners of all nodes hold; None before the first of this generation.
        lag_steps: Steps that the newest snapshot of this node is ahead of it.
        lag_s: Seconds since this node held a snapshot that is not everywhere; 0 if there is none.
        pending_bytes: Bytes of the snapshot under way that partners lack.
        sent_bytes: Bytes sent by this persister in all.
        kept_bytes: Shared memory that replicas of other nodes take here.
        problem: Why nothing can be sent; "" where it can.
    """

    everywhere: SnapshotId | None = None
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
        self._decision = RoundDecision()
        self._reports: dict[int, NodeReport] = {}
        self._senders: list[Sender] = []
        self._targets: dict[SnapshotId, ReplicaTarget] = {}
        self._held: tuple[SnapshotId, ...] = ()
        self._seen_s: dict[SnapshotId, float] = {}
        self._changed, self._over = threading.Event(), threading.Event()
        self._problem = ""
        self._lock = threading.Lock()
        self._sent_before = 0
        self._left: list[
            tuple[list[Sender], ReplicaTarget]
        ] = []  # of sessions that are over, until no thread reads them

    # -- what the loop calls -------------------------------------------------------------------------------

    def turn(self, config: JobConfig, view: NodeInventory, record: Generation) -> None:
        """Do what can be done now.

        Args:
            config: Of the job.
            view: This node's own slots.
            record: The current generation.

        Raises:
            FlashckptError, OSError: A record cannot be read, or no socket can be opened; to be tried again.
        """
        self._listen(config)
        session = records.read_session(self._directory) if config.replicate else None
        if session is not None and session.generation != record.number:
            session = None
        if session != self.session:
            self._begin(session, record)
        if self.session is not None:
            self._advance(self.session, view)
        self._let_go()

    def state(self) -> ReplicaState:
        """Return how far it is."""
        everywhere = self._decision.everywhere
        floor = everywhere or (self.session.restored if self.session is not None else None)
        begun = self._record.parent.step if self._record.parent is not None else 0
        newest = max(self._held, default=None)
        waiting = [at for identity, at in self._seen_s.items() if floor is None or identity > floor]
        problems = [sender.progress.problem for sender in self._senders if sender.progress.problem]
        return ReplicaState(
            everywhere=everywhere,
            lag_steps=max(0, newest.step - (floor.step if floor is not None else begun)) if newest is not None else 0,
            lag_s=time.monotonic() - min(waiting) if waiting else 0.0,
            pending_bytes=sum(sender.progress.pending_bytes for sender in self._senders),
            sent_bytes=self._sent_before + sum(sender.progress.sent_bytes for sender in self._senders),
            kept_bytes=sum(_nbytes(path) for path in self._directory.replica_segments()),
            problem="; ".join([*problems, *([self._problem] if self._problem else [])]),
        )

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
        session, decision = self.session, self._decision
        if session is None:
            return None
        common = [identity for identity in (decision.everywhere, session.restored) if identity is not None]
        return Kept(
            generation=self._record,
            common=common,
            unrecoverable=[identity for identity in decision.unrecoverable if identity not in common],
            superseded=session.superseded,
        )

    def take_report(self, node: int, report: NodeReport) -> RoundDecision:
        """Note the report of a node; return what follows from those of all."""
        with self._lock:
            session = self.session
            if session is None:
                return RoundDecision()
            self._reports[node] = report
            decision = decide(
                [self._reports.get(k) for k in range(len(session.addresses))], every=max(1, session.every)
            )
        if decision != self._decision and session.node == 0:
            self._changed.set()
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
            _log.info("takes replicas in at %s port %d", wanted, found.port)
        except OSError as error:
            found = NodeEndpoint(address=wanted, pid=os.getpid(), problem=str(error))
            _log.error("takes no replicas in: cannot listen on %s: %s", wanted, error)
        job_records.write(records.endpoint_path(self._directory), found)

    def _begin(self, session: ReplicaSession | None, record: Generation) -> None:
        """End what is under way for the last session, and begin another one."""
        with self._lock:
            self._over.set()
        self._changed.set()
        for sender in self._senders:
            sender.close()  # its thread may still count a chunk or two
            self._sent_before += sender.progress.sent_bytes
        if self._listener is not None:
            self._listener.drop()
        self._left += [(self._senders, target) for target in self._targets.values()]
        with self._lock:
            self.session, self._record = session, record
            self._reports.clear()
            self._decision = RoundDecision()
        self._senders, self._targets, self._held, self._problem = [], {}, (), ""
        self._seen_s.clear()
        if session is None:
            if self._slots is not None:
                self._slots.close()
            return
        self._over, self._changed = threading.Event(), threading.Event()
        self._senders = [Sender(session, place, self._changed) for place in range(len(session.partners[session.node]))]
        arguments = (session, self._over, self._changed)
        threading.Thread(target=self._report_all, args=arguments, name="flashckpt-rounds", daemon=True).start()
        _log.info(
            "replicates to nodes %s, every %d steps", ", ".join(str(s.partner) for s in self._senders), session.every
        )

    def _advance(self, session: ReplicaSession, view: NodeInventory) -> None:
        ranks = set(session.ranks_of(session.node))
        found = [i for i in view.complete() if i[0] == session.generation and view.holders(i).keys() >= ranks]
        now = time.monotonic()
        self._seen_s = {i: self._seen_s.get(i, now) for i in {*found, *self._targets} if i[0] == session.generation}
        decision = self._decision
        wanted = {i for i in (decision.target, decision.everywhere or session.restored) if i is not None}
        for identity in sorted(wanted - self._targets.keys()):
            self._pin(identity, ranks, view)
        target = self._targets.get(decision.target) if decision.target is not None else None
        for sender in self._senders:
            sender.set_target(target)
        self._left += [(self._senders, self._targets.pop(one)) for one in sorted(self._targets.keys() - wanted)]
        held = tuple(found)
        if held != self._held:
            self._held = held
            self._changed.set()
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
        is_target = identity == self._decision.target
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
        self._targets[identity] = ReplicaTarget(identity=identity, pins=pins, rows=rows)

    # -- the thread that reports -------------------------------------------------------------------------------

    def _report_all(self, session: ReplicaSession, over: threading.Event, changed: threading.Event) -> None:
        """Report to the node that decides, and take its decision, until the session is over."""
        connection: PeerLink | None = None
        while not over.is_set():
            is_busy = self._decision.target is not None or any(i != self._decision.everywhere for i in self._held[-1:])
            changed.wait(max(BUSY_S, len(session.addresses) / 1000) if is_busy else IDLE_S)
            changed.clear()
            report = self._report(session)
            if over.is_set() or report is None:
                over.wait(BUSY_S / 4)
                continue
            try:
                if session.node == 0:
                    decision = self.take_report(0, report)
                else:
                    connection = connection or _connected(session)
                    connection.send(packed_report(report), ANSWER_S)
                    decision = decision_from(connection.receive_map(ANSWER_S, SMALL))
                self._problem = ""
            except (OSError, FlashckptError) as error:
                self._problem = f"node 0, which decides what is sent, cannot be reached: {error}"
                if connection is not None:
                    connection.close()
                connection = None
                over.wait(IDLE_S)
                continue
            with self._lock:
                is_news = decision != self._decision and not over.is_set()
                self._decision = decision if is_news else self._decision
            if is_news:
                self._wake()
        if connection is not None:
            connection.close()

    def _report(self, session: ReplicaSession) -> NodeReport | None:
        """Return what this node says now; None until its partners have said what they hold."""
        progress = [sender.progress for sender in self._senders]
        if any(one.holds is None for one in progress):
            return None
        replicated = (
            frozenset.intersection(*(one.holds or frozenset() for one in progress)) if progress else frozenset()
        )
        damaged = frozenset[SnapshotId]().union(*(one.damaged for one in progress))
        return NodeReport(
            held=tuple(identity for identity in self._held if identity not in damaged),
            replicated=tuple(sorted(i for i in replicated if i[0] == session.generation)),
            target=self._decision.target,
        )


def _connected(session: ReplicaSession) -> PeerLink:
    place = session.place(0)
    if place is None:
        raise ConnectionError("its persister does not listen")
    connection = socket.create_connection(place, timeout=CONNECT_S)
    try:
        link = linked(connection, session, accepts=False)
        link.send({"kind": "rounds", "node": session.node, "generation": session.generation}, ANSWER_S)
        is_ready = link.receive_map(ANSWER_S, SMALL).get("state") == "ready"
    except BaseException:
        connection.close()
        raise
    if not is_ready:
        connection.close()
        raise ConnectionError("it is in another session")
    return link


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
