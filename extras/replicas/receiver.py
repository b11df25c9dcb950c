"""The listening side: one thread per connection takes replicas in, or the reports of nodes where this one decides for all."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from flashckpt.acceptor import Acceptor
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.errors import FlashckptError
from flashckpt.faults import crash_point
from flashckpt.replicate.connections import SMALL, give_way, linked
from flashckpt.replicate.peer_link import PeerLink
from flashckpt.replicate.records import ReplicaSession
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision, newest
from flashckpt.replicate.rounds import id_or_none, packed_decision, report_from
from flashckpt.replicate.slots import IncomingReplica, Kept, NoSlotError, ReplicaSlots

SILENCE_S = 60.0
"""Seconds after which a connection on which nothing comes is closed; the other side says something every second or so."""
MOST_CONNECTIONS = 4096
"""A leader of that many nodes has one connection to each."""


class Host(Protocol):
    """What a connection asks of the persister that it reached."""

    @property
    def session(self) -> ReplicaSession | None:
        """The present one."""

    @property
    def slots(self) -> ReplicaSlots:
        """What this node keeps."""

    def kept(self) -> Kept | None:
        """Return what may not be overwritten; None where that is not known yet."""

    def take_report(self, node: int, report: NodeReport) -> RoundDecision:
        """Note what a node says, and return what all do."""


class Listener:
    """Accepts connections from `start` to `close`.

    Args:
        host: The persister.
        address: What to listen on: the address that other nodes reach this one by.
        port: As before, where this persister takes the place of one that was killed; 0 for any.
    """

    def __init__(self, host: Host, address: str, port: int = 0) -> None:
        self._host = host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._senders: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self._socket.bind((address, port))
            except OSError:
                if not port:
                    raise
                self._socket.bind((address, 0))
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])
        self._acceptor = Acceptor(self._socket, self._serve, name="flashckpt-replica", most=MOST_CONNECTIONS)

    def close(self) -> None:
        """Close the socket and every connection; their threads end."""
        self._acceptor.close()
        self._socket.close()

    def drop(self) -> None:
        """Close every connection: they are of a session that is over."""
        self._acceptor.drop()

    def _serve(self, connection: socket.socket, _: object) -> None:
        give_way()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = self._host.session
        if session is None:
            return
        link = linked(connection, session, accepts=True)
        self._acceptor.proven(connection)
        hello = link.receive_map(SILENCE_S, SMALL)
        node, generation = hello.get("node"), hello.get("generation")
        if type(node) is not int or generation != session.generation or not 0 <= node < len(session.addresses):
            link.send({"state": "other session"}, SILENCE_S)
            return
        if hello.get("kind") == "rounds":
            _Rounds(self._host, link, node, session).run()
            return
        self._take_place_of_earlier(node, connection)
        _Replicas(self._host, link, node, session).run()

    def _take_place_of_earlier(self, node: int, connection: socket.socket) -> None:
        """A node has one connection for replicas: where it comes again, the one before is dead, whether TCP knows it or not."""
        with self._lock:
            earlier, self._senders[node] = self._senders.get(node), connection
        if earlier is not None:
            with contextlib.suppress(OSError):
                earlier.shutdown(socket.SHUT_RDWR)


class _Rounds:
    """The reports of one node."""

    def __init__(self, host: Host, link: PeerLink, node: int, session: ReplicaSession) -> None:
        self._host, self._link, self._node, self._session = host, link, node, session

    def run(self) -> None:
        self._link.send({"state": "ready"}, SILENCE_S)
        while self._host.session == self._session:
            report = report_from(self._link.receive_map(SILENCE_S, SMALL))
            self._link.send(packed_decision(self._host.take_report(self._node, report)), SILENCE_S)


class _Replicas:
    """The replicas that one node sends."""

    def __init__(self, host: Host, link: PeerLink, node: int, session: ReplicaSession) -> None:
        self._host, self._link, self._session = host, link, session
        self._ranks = session.ranks_of(node)
        self._buffer = bytearray(CHUNK_BYTES)
        self._coming: IncomingReplica | None = None

    def run(self) -> None:
        holds = {rank: self._holds(rank) for rank in self._ranks}
        self._link.send({"state": "ready", "holds": holds}, SILENCE_S)
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "offer": self._offer,
            "chunk": self._chunk,
            "end": self._end,
        }
        try:
            while self._host.session == self._session:
                fields = self._link.receive_map(SILENCE_S)
                handler = handlers.get(next(iter(fields), ""))
                if handler is not None:
                    handler(fields)
        finally:
            if self._coming is not None:  # stays as it is: the next connection fills it further
                self._coming.writer.leave()

    def _holds(self, rank: int) -> list[list[int]]:
        kept = self._host.kept()
        return [] if kept is None else [list(one) for one in self._host.slots.holds(rank, kept)]

    def _offer(self, fields: dict[str, Any]) -> None:
        if self._coming is not None:
            self._coming.writer.leave()
            self._coming = None
        kept, raw = self._host.kept(), fields["offer"]
        if kept is None or type(raw) is not bytes:
            self._link.send({"state": "busy", "reason": "what may be overwritten here is not known yet"}, SILENCE_S)
            return
        # the sender may know already that something newer is everywhere
        newer = replace(kept, identity=newest([kept.identity, id_or_none(fields.get("kept"))]))
        try:
            self._coming = self._host.slots.begin(
                raw, kept=newer, persist=fields.get("persist") is True, ranks=self._ranks
            )
        except NoSlotError as error:
            self._link.send({"state": "busy", "reason": str(error)}, SILENCE_S)
        except (FlashckptError, OSError) as error:
            self._link.send({"state": "refused", "reason": str(error)[:2000]}, SILENCE_S)
        else:
            self._answer()

    def _answer(self) -> None:
        if self._coming is None:
            self._link.send({"state": "complete"}, SILENCE_S)
        else:
            arrived = np.packbits(self._coming.arrived).tobytes()
            holds = self._holds(self._coming.manifest.rank)  # less what gave way to it
            self._link.send({"state": "send", "arrived": arrived, "holds": holds}, SILENCE_S)

    def _chunk(self, fields: dict[str, Any]) -> None:
        nbytes = fields.get("bytes")
        if type(nbytes) is not int or not 0 <= nbytes <= CHUNK_BYTES:
            raise ConnectionError(f"not a chunk: {nbytes!r} bytes")
        data = memoryview(self._buffer)[:nbytes]
        self._link.receive_bytes(data, SILENCE_S)
        if self._coming is not None and type(fields["chunk"]) is int:
            self._coming.take_in(fields["chunk"], data)
            crash_point("replica.during-receive")

    def _end(self, fields: dict[str, Any]) -> None:
        del fields
        if self._coming is not None and self._coming.commit():
            self._coming = None
            crash_point("replica.after-complete")
        self._answer()
