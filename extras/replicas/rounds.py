"""Reports and decisions between nodes: the thread that reports, whom it reports to, and what the node that decides has heard.

The first node decides. A node that cannot reach it for one and a half times the patience, by when that one counts it as silent, reports
to the next one, and decides for itself where no node before it can be reached.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.replicate.connections import SMALL, linked
from flashckpt.replicate.peer_link import PeerLink
from flashckpt.replicate.records import ReplicaSession
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision
from flashckpt.replicate.round_memory import DecidingMemory
from flashckpt.replicate.sender import ANSWER_S, CONNECT_S

IDLE_S, BUSY_S = 1.0, 0.2
"""Seconds between two reports to the node that decides: with nothing to send, and while something is under way."""
_log = logging.getLogger("flashckpt.daemon")


class HeardReports:
    """What a node that decides has heard of all nodes; for several threads.

    Args:
        session: The session.

    Attributes:
        node: The one that hears.
    """

    def __init__(self, session: ReplicaSession) -> None:
        self._session, self.node = session, session.node
        self._reports: dict[int, tuple[float, NodeReport]] = {}
        self._memory = DecidingMemory(every=session.every, last=RoundDecision(everywhere=session.restored))
        self._began_s = time.monotonic()
        self._lock = threading.Lock()

    def take(self, node: int, report: NodeReport) -> RoundDecision:
        """Note the report of a node; return what follows from those of all."""
        with self._lock:
            now = time.monotonic()
            if node == self.node and now - self._reports.get(node, (0.0,))[0] > env.FLASHCKPT_REPLICA_PATIENCE:
                self._memory.is_begun = False  # another node has decided meanwhile
            self._reports[node] = now, report
            nodes = range(len(self._session.addresses))
            silent = {
                k for k in nodes if now - self._reports.get(k, (self._began_s,))[0] > env.FLASHCKPT_REPLICA_PATIENCE
            }
            known = [self._reports[k][1] if k in self._reports and k not in silent else None for k in nodes]
            return self._memory.decide(known, silent)


class RoundsReporter:
    """Reports to the node that decides, and takes its decisions, until `close`.

    Args:
        session: The session.
        changed: Set when there is something to report.
        report: What this node says now; None while it has nothing to say.
        decide_here: Takes a report of this node where it decides itself.
        decided: Takes a decision.
    """

    def __init__(
        self,
        session: ReplicaSession,
        changed: threading.Event,
        *,
        report: Callable[[], NodeReport | None],
        decide_here: Callable[[int, NodeReport], RoundDecision],
        decided: Callable[[RoundDecision], None],
    ) -> None:
        self._session, self._changed = session, changed
        self._make, self._decide_here, self._decided = report, decide_here, decided
        self._over = threading.Event()
        self._failing: dict[int, tuple[float, float]] = {}  # when a node first failed to answer, and was last tried
        self._link: tuple[int, PeerLink] | None = None
        self.problem = ""
        threading.Thread(target=self._run, name="flashckpt-rounds", daemon=True).start()

    def close(self) -> None:
        """Have the thread end, without waiting for it."""
        self._over.set()
        self._changed.set()

    def _run(self) -> None:
        is_busy, failure = False, ""
        while not self._over.is_set():
            idle_s = min(IDLE_S, env.FLASHCKPT_REPLICA_PATIENCE / 8)  # who says nothing for longer is passed over
            self._changed.wait(max(BUSY_S, len(self._session.addresses) / 1000) if is_busy else idle_s)
            self._changed.clear()
            try:
                is_busy = self._turn()
            except Exception as error:  # noqa: BLE001 -- replicas wait, the thread does not end
                if repr(error) != failure:
                    _log.exception("a round of replicas failed")
                failure, self.problem = repr(error), f"a round failed: {error!r}"
                self._over.wait(IDLE_S)
        self._disconnect()

    def _turn(self) -> bool:
        """Report, and take the decision; return whether something is under way."""
        report = self._make()
        if self._over.is_set() or report is None:
            self._over.wait(BUSY_S / 4)
            return False
        leader = self._leader()
        try:
            decision = self._ask(leader, report)
        except (OSError, FlashckptError) as error:
            self._failed(leader, error)
            return False
        self._failing.pop(leader, None)
        self.problem = "" if leader == 0 else self.problem
        if not self._over.is_set():
            self._decided(decision)
        return decision.target is not None or any(i != decision.kept for i in report.held[-1:])

    def _leader(self) -> int:
        """Return the first node that answers, or may answer by now; this one where none before it does."""
        now = time.monotonic()
        patience_s = 1.5 * env.FLASHCKPT_REPLICA_PATIENCE  # by then a node that it leaves counts it as silent
        for node in range(self._session.node):
            first_s, tried_s = self._failing.get(node, (now, now))
            if now - first_s < patience_s or now - tried_s > patience_s:
                return node
        return self._session.node

    def _ask(self, leader: int, report: NodeReport) -> RoundDecision:
        if leader == self._session.node:
            return self._decide_here(leader, report)
        if self._link is None or self._link[0] != leader:
            self._disconnect()
            self._link = leader, _connected(self._session, leader)
        link = self._link[1]
        link.send(packed_report(report), ANSWER_S)
        return decision_from(link.receive_map(ANSWER_S, SMALL))

    def _failed(self, leader: int, error: Exception) -> None:
        now = time.monotonic()
        self._failing[leader] = self._failing.get(leader, (now, now))[0], now
        self.problem = f"{self._session.name(leader)}, which decides what is sent, cannot be reached: {error}"
        self._disconnect()
        self._over.wait(min(IDLE_S, env.FLASHCKPT_REPLICA_PATIENCE))

    def _disconnect(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link[1].close()
        self._link = None


def _connected(session: ReplicaSession, node: int) -> PeerLink:
    place = session.place(node)
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


# -- messages ------------------------------------------------------------------------------------------------


def packed_report(report: NodeReport) -> dict[str, Any]:
    """Return a report as the fields of a message."""
    return {name: getattr(report, name) for name in NodeReport.__slots__}


def report_from(fields: dict[str, Any]) -> NodeReport:
    """Return the report in a message; ConnectionError where it is none."""
    try:
        return NodeReport(
            held=_ids(fields["held"]),
            replicated=_ids(fields["replicated"]),
            target=id_or_none(fields["target"]),
            everywhere=id_or_none(fields["everywhere"]),
            kept=id_or_none(fields["kept"]),
            committed=id_or_none(fields["committed"]),
            passed_over=_nodes(fields["passed_over"]),
            reached=None if fields["reached"] is None else _ids(fields["reached"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConnectionError(f"a report cannot be read: {error!r}") from error


def packed_decision(decision: RoundDecision) -> dict[str, Any]:
    """Return a decision as the fields of a message."""
    return {name: getattr(decision, name) for name in RoundDecision.__slots__}


def decision_from(fields: dict[str, Any]) -> RoundDecision:
    """Return the decision in a message; ConnectionError where it is none."""
    try:
        return RoundDecision(
            target=id_or_none(fields["target"]),
            everywhere=id_or_none(fields["everywhere"]),
            kept=id_or_none(fields["kept"]),
            without=_nodes(fields["without"]),
            waits=fields.get("waits") is True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConnectionError(f"a decision cannot be read: {error!r}") from error


def _ids(value: Any) -> tuple[SnapshotId, ...]:
    return tuple(_id(one) for one in value)


def id_or_none(value: Any) -> SnapshotId | None:
    """Return the id in a message, or None; TypeError or ValueError where it is neither."""
    return None if value is None else _id(value)


def _id(value: Any) -> SnapshotId:
    generation, step = value
    if type(generation) is not int or type(step) is not int:
        raise TypeError("an id is no pair of integers")
    return SnapshotId(generation, step)


def _nodes(value: Any) -> tuple[int, ...]:
    if any(type(one) is not int for one in value):
        raise TypeError("a node is no integer")
    return tuple(value)
