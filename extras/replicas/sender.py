"""The sending side: one thread and one connection per partner. What is sent is pinned; a dropped connection is resumed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.faults import crash_point
from flashckpt.replicate.connections import SMALL, give_way, linked
from flashckpt.replicate.peer_link import PeerLink
from flashckpt.replicate.records import ReplicaRows, ReplicaSession
from flashckpt.replicate.replica_rows import masks_of, replica_manifest, row_keys, rows_for
from flashckpt.replicate.slots import chunk_ranges
from flashckpt.shm.segment import Pin

ANSWER_S = 30.0
"""Seconds within which a partner answers, or takes a chunk."""
CONNECT_S = 5.0
"""Seconds within which a partner takes a connection."""
RETRY_S = (0.2, 5.0)
"""Seconds before the next attempt: the first, and the most."""
ATTEMPTS = 3
"""Times that chunks which do not match their digests are sent again: then they are damaged here."""
_log = logging.getLogger(__name__)


class DamagedHereError(Exception):
    """Bytes of the snapshot do not match their digests where they lie: no partner can take it."""


class RateLimit:
    """Lets bytes pass at a given rate, with no more than a quarter of a second's worth at once.

    Args:
        rate: Bytes per second; 0 for no limit.
    """

    def __init__(self, rate: int) -> None:
        self._rate, self._free, self._seen_s = rate, 0.0, time.monotonic()

    def wait_s(self, nbytes: int) -> float:
        """Count bytes that are about to be sent; return the seconds to wait before."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        self._free = min(self._free + (now - self._seen_s) * self._rate, self._rate / 4) - nbytes
        self._seen_s = now
        return max(0.0, -self._free / self._rate)


@dataclass(frozen=True, kw_only=True)
class ReplicaTarget:
    """A snapshot that is to be sent.

    Attributes:
        identity: Its id.
        kept: The id that partners may not overwrite for it.
        pins: Leases on the slots of this node's ranks.
        rows: Which partners their rows go to.
    """

    identity: SnapshotId
    pins: Mapping[int, Pin]
    rows: Mapping[int, ReplicaRows]
    kept: SnapshotId | None = None

    def part(self, rank: int, partner: int, replicas: int) -> tuple[Manifest, np.ndarray]:
        """Return what goes to a partner of a rank: its manifest there, and where each of its chunks starts in the slot here."""
        whole = self.pins[rank].manifest()
        keys, masks = self.rows[rank].known
        found = masks_of(row_keys(whole.table), keys, masks, unknown=(1 << replicas) - 1)
        chosen = rows_for(found, partner)
        part = replica_manifest(whole, chosen)
        moved = np.repeat(whole.table.byte_offset[chosen] - part.table.byte_offset, _counts(part))
        return part, chunk_ranges(part)[0] + moved


@dataclass
class SendProgress:
    """How far a partner is with what is sent to it. Written by its thread alone.

    Attributes:
        holds: Ids that it holds COMPLETE of all ranks of this node; None before it was asked.
        pending_bytes: Bytes of the present target that it lacks, as far as known.
        sent_bytes: Bytes of chunks sent to it, in all.
        problem: Why nothing can be sent to it now; "" where something can.
        failing_s: Since when nothing has arrived there that was to be sent (monotonic); None while something does.
        damaged: An id that cannot be sent, since its bytes here are damaged.
    """

    holds: frozenset[SnapshotId] | None = None
    pending_bytes: int = 0
    sent_bytes: int = 0
    problem: str = ""
    failing_s: float | None = None
    damaged: frozenset[SnapshotId] = field(default_factory=frozenset)


class Sender:
    """Sends targets to one partner, the last one that was set, until `close`.

    Args:
        session: The session.
        place: Number of the partner among those of this node.
        changed: Set when there is progress.
    """

    def __init__(self, session: ReplicaSession, place: int, changed: threading.Event) -> None:
        self._session, self._place, self._changed = session, place, changed
        self.partner = session.partners[session.node][place]
        self._name = session.name(self.partner)
        self.progress = SendProgress()
        self._target: ReplicaTarget | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._limit = RateLimit(session.rate)
        self._socket: socket.socket | None = None
        self._link: PeerLink | None = None
        self._buffer = bytearray(CHUNK_BYTES)
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name=f"flashckpt-send-{self.partner}", daemon=True)
        self._thread.start()

    def set_target(self, target: ReplicaTarget | None) -> None:
        """Replace what is sent; what is under way is given up after its present chunk."""
        if target is not self._target:
            self._target = target
            self._wake.set()

    def is_using(self, target: ReplicaTarget) -> bool:
        """Whether the thread may still read from the slots of a target."""
        return self._target is target or not self._idle.is_set()

    @property
    def is_passed_over(self) -> bool:
        """Whether the partner has taken nothing for so long that the others do not wait for it."""
        since_s = self.progress.failing_s
        return since_s is not None and time.monotonic() - since_s > env.FLASHCKPT_REPLICA_PATIENCE

    def close(self) -> None:
        """Have the thread end, without waiting for it: it may be waiting for a node that is gone. `is_using` says when it has."""
        self._target = None
        self._stop.set()
        self._wake.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # -- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        give_way()
        pause_s = RETRY_S[0]
        while not self._stop.is_set():
            try:
                self._connect()
                self._serve()
                return
            except OSError as error:
                self._say(f"{self._name} cannot be reached: {error}")
            except FlashckptError as error:
                self._say(str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 -- replicas wait, the persister does not end
                _log.exception("replicas could not be sent")
                self._say(repr(error))
            finally:
                self._idle.set()
                if self._socket is not None:
                    self._socket.close()
                    self._socket = self._link = None
            self._stop.wait(pause_s)
            pause_s = RETRY_S[0] if not self.progress.problem else min(2 * pause_s, RETRY_S[1])

    def _say(self, problem: str) -> None:
        if self._stop.is_set():
            return
        if problem and problem != self.progress.problem:
            _log.warning("replicas wait: %s", problem)
        elif self.progress.problem and not problem:
            _log.info("replicas are sent to %s again", self._name)
        self.progress.problem = problem
        if problem and self.progress.failing_s is None:
            self.progress.failing_s = time.monotonic()
        self._changed.set()

    def _worked(self) -> None:
        """Something has arrived, or there is nothing to send: a connection alone does not count, it may fail again at once."""
        self.progress.failing_s = None

    def _connect(self) -> None:
        place = self._session.place(self.partner)
        if place is None:
            raise ConnectionError("its persister does not listen")
        self._socket = socket.create_connection(place, timeout=CONNECT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = linked(self._socket, self._session, accepts=False)
        hello = {"kind": "replicas", "node": self._session.node, "generation": self._session.generation}
        self._link.send(hello, ANSWER_S)
        answer = self._answer("ready")
        theirs: Any = answer.get("holds", {})
        holds = [
            {SnapshotId.of(one) for one in theirs.get(rank, ())} for rank in self._session.ranks_of(self._session.node)
        ]
        self.progress.holds = frozenset(set.intersection(*holds)) if holds else frozenset()
        self._say("")

    def _answer(self, *expected: str) -> dict[str, object]:
        assert self._link is not None
        fields = self._link.receive_map(ANSWER_S, SMALL)
        if fields.get("state") not in expected:
            raise ConnectionError(str(fields.get("reason") or fields.get("state"))[:500])
        return fields

    def _serve(self) -> None:
        """Send one target after another."""
        while not self._stop.is_set():
            target = self._target
            holds = self.progress.holds or frozenset()
            if target is None or target.identity in holds or target.identity in self.progress.damaged:
                self.progress.pending_bytes = 0
                self._worked()
                self._idle.set()
                self._changed.set()
                if not self._wake.wait(1.0):
                    self._require_open()
                self._wake.clear()
                continue
            self._idle.clear()
            if self._target is not target:
                self._idle.set()
                continue
            try:
                if self._send_all(target):
                    self.progress.holds = (self.progress.holds or frozenset()) | {target.identity}
                else:
                    self._stop.wait(0.02)
            except DamagedHereError as error:
                self.progress.damaged |= {target.identity}
                _log.error("%s is not replicated: %s", target.identity, error)

    def _require_open(self) -> None:
        """Find out whether the partner has closed the connection meanwhile: it says nothing that it was not asked."""
        assert self._socket is not None
        self._socket.setblocking(False)  # noqa: FBT003 -- the name says it
        is_closed = False
        with contextlib.suppress(BlockingIOError):
            is_closed = not self._socket.recv(1, socket.MSG_PEEK)
        self._socket.settimeout(ANSWER_S)
        if is_closed:
            raise ConnectionError("the connection was closed")

    def _send_all(self, target: ReplicaTarget) -> bool:
        """Send what the partner lacks of a target; False where it was given up."""
        parts = {rank: target.part(rank, self._place, self._session.replicas) for rank in sorted(target.pins)}
        left = {rank: int(part.table.nbytes.sum()) for rank, (part, _) in parts.items()}
        for rank, (part, starts) in parts.items():
            self.progress.pending_bytes = sum(left.values())
            if not self._send_rank(target, rank, part, starts):
                return False
            left[rank] = 0
        self.progress.pending_bytes = 0
        return True

    def _send_rank(self, target: ReplicaTarget, rank: int, part: Manifest, starts: np.ndarray) -> bool:
        assert self._link is not None
        crash_point("replica.before-offer")
        persist = target.pins[rank].header.persist
        self._link.send({"offer": encode_manifest(part), "persist": persist, "kept": target.kept}, ANSWER_S)
        sizes = chunk_ranges(part)[1]
        for _ in range(1 + ATTEMPTS):
            answer = self._answer("complete", "send", "busy", "refused")
            if answer["state"] == "complete":
                self._worked()
                return True
            if answer["state"] in ("busy", "refused"):
                self._say(f"{self._name}: {answer.get('reason')}")
                self._stop.wait(RETRY_S[0] if answer["state"] == "busy" else RETRY_S[1])
                return False
            if self.progress.problem:
                self._say("")
            theirs = {SnapshotId.of(one) for one in answer.get("holds", ())}  # type: ignore[attr-defined]
            self.progress.holds = frozenset(i for i in self.progress.holds or () if i in theirs)
            arrived = np.unpackbits(np.frombuffer(answer["arrived"], np.uint8), count=len(sizes))  # type: ignore[call-overload]
            missing = np.flatnonzero(arrived == 0)
            self.progress.pending_bytes -= int(sizes[arrived == 1].sum())
            for chunk in missing.tolist():
                if not self._send_chunk(target, rank, chunk, (int(starts[chunk]), int(sizes[chunk]))):
                    return False
            self._link.send({"end": True}, ANSWER_S)
        if target.pins[rank].is_current():
            raise DamagedHereError(f"{len(missing)} chunks of rank {rank} do not match their digests")
        return False

    def _send_chunk(self, target: ReplicaTarget, rank: int, chunk: int, place: tuple[int, int]) -> bool:
        """Send one chunk; False where the target was given up."""
        assert self._link is not None
        start, nbytes = place
        if (wait_s := self._limit.wait_s(nbytes)) and self._stop.wait(wait_s):
            return False
        if self._target is not target or self._stop.is_set():
            return False
        view = memoryview(self._buffer)[:nbytes]
        target.pins[rank].read_into(start, view)
        self._link.send({"chunk": chunk, "bytes": nbytes}, ANSWER_S)
        self._link.send_bytes(view, ANSWER_S)
        self._worked()
        self.progress.sent_bytes += nbytes
        self.progress.pending_bytes = max(0, self.progress.pending_bytes - nbytes)
        crash_point("replica.during-send")
        return True


def _counts(part: Manifest) -> np.ndarray:
    return -(-part.table.nbytes // CHUNK_BYTES)
