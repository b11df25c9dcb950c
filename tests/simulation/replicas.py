"""Replicas: the product's service in each persister, over connections between simulated machines.

A connection keeps the order of what is sent, as TCP does: it is not lost or doubled in between, but with the connection, whose
other side then does not know what has arrived.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import service as daemon
from flashckpt.errors import FlashckptError
from flashckpt.replicate import receiver, records, rounds, sender, service, slots
from flashckpt.replicate.partners import partner_map
from flashckpt.replicate.peer_link import StrangerError
from flashckpt.replicate.records import ReplicaRows, ReplicaSession
from flashckpt.replicate.replica_rows import ReplicaMap, row_keys
from flashckpt.replicate.service import ReplicationService
from flashckpt.shm import private
from flashckpt.shm.segment import Segment
from simulation.clock import CLOCK, Process
from simulation.machines import Rank, make_segment
from simulation.states import table_of
from simulation.threads import Event, Threading

if TYPE_CHECKING:
    from simulation.job import Job

LATENCY_S, NO_ANSWER_S = 0.02, 3.0
"""Most seconds that a message travels, and after which a connection that is cut is given up."""
_job: list[Job] = []
_listening: dict[str, SimListener] = {}


class Connection:
    """One end of a connection, and of the link over it."""

    def __init__(self, process: Process) -> None:
        self.process, self.is_open, self.key = process, True, b""
        self.other: Connection
        self._arrived: deque[bytes] = deque()
        self._news = Event()
        process.on_death.append(self.close)

    # -- what a socket is asked

    def setsockopt(self, *_: object) -> None:
        """Nothing to set."""

    setblocking = settimeout = setsockopt

    def recv(self, *_: object) -> bytes:
        """Look whether the other side has closed it."""
        if self.is_open:
            raise BlockingIOError
        return b""

    def close(self, *_: object) -> None:
        """Both ends learn of it."""
        for end in (self, self.other):
            end.is_open = False
            end._news.set()

    shutdown = close

    # -- what a link is asked

    def send(self, message: Any, timeout_s: float) -> None:
        self._send(msgpack.packb(message), timeout_s)

    def send_bytes(self, data: memoryview, timeout_s: float) -> None:
        self._send(bytes(data), timeout_s)

    def receive_map(self, timeout_s: float, most: int | None = None) -> Any:
        del most
        return msgpack.unpackb(self._receive(timeout_s), strict_map_key=False)

    def receive_bytes(self, into: memoryview, timeout_s: float) -> None:
        into[:] = self._receive(timeout_s)

    def _send(self, raw: bytes, timeout_s: float) -> None:
        job, here, there = _job[0], self.process.node, self.other.process.node
        CLOCK.scheduler.sleep(LATENCY_S * job.random.random())
        if here in job.mute and job.random.random() < 0.5:
            self.close()
        if {here, there} & job.cut_off:
            CLOCK.scheduler.sleep(min(timeout_s, NO_ANSWER_S))
            self.close()
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        self.other._arrived.append(raw)
        self.other._news.set()

    def _receive(self, timeout_s: float) -> bytes:
        while not self._arrived:
            if not self.is_open:
                raise ConnectionError("the connection was closed")
            self._news.clear()
            if not self._news.wait(timeout_s):
                raise TimeoutError
        return self._arrived.popleft()


class SimListener:
    """In place of `Listener`, whose decisions it takes."""

    _serve, _take_place_of_earlier = receiver.Listener._serve, receiver.Listener._take_place_of_earlier

    def __init__(self, host: Any, address: str, port: int = 0) -> None:
        self._host, self.address, self.port = host, address, port or 1
        self._senders: dict[int, Any] = {}
        self._lock, self._acceptor = Threading.Lock(), self
        self._open: list[Connection] = []
        process = CLOCK.scheduler.process
        assert process is not None
        self.process = process
        _listening[address] = self

    def accept(self, connection: Connection) -> None:
        """Serve a connection in a thread."""
        self._open.append(connection)
        CLOCK.scheduler.spawn(self.process, partial(self._take, connection))

    def _take(self, connection: Any) -> None:
        with contextlib.suppress(OSError, FlashckptError):
            self._serve(connection, None)  # type: ignore[misc]
        connection.close()

    def proven(self, _: object) -> None:
        """It is of this job."""

    def drop(self) -> None:
        """Close every connection."""
        for connection in self._open:
            connection.close()
        self._open.clear()

    def close(self) -> None:
        """Accept nothing any more."""
        self.drop()
        if _listening.get(self.address) is self:
            del _listening[self.address]


def _connect(place: tuple[str, int], timeout: float) -> Connection:
    listener, process = _listening.get(place[0]), CLOCK.scheduler.process
    assert process is not None
    is_cut = listener is not None and {process.node, listener.process.node} & _job[0].cut_off
    CLOCK.scheduler.sleep(min(timeout, NO_ANSWER_S) if is_cut else LATENCY_S)
    if listener is None or is_cut or not listener.process.alive:
        raise ConnectionRefusedError(f"nobody listens at {place[0]}")
    here, there = Connection(process), Connection(listener.process)
    here.other, there.other = there, here
    listener.accept(there)
    return here


def _linked(connection: Any, session: ReplicaSession, *, accepts: bool) -> Any:
    connection.key = session.key
    if accepts and connection.other.key != session.key:
        raise StrangerError("the other side is of another session")
    return connection


class Replicating:
    """In place of `Extensions`: replicas alone, where the job wants them."""

    def __init__(self, directory: Any, wake: Any) -> None:
        self.service = ReplicationService(directory, wake) if _job[0].setup.replicate else None

    def turn(self, *arguments: Any) -> None:
        if self.service is not None:
            with contextlib.suppress(OSError, FlashckptError):
                self.service.turn(*arguments)

    def report(self) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        return ({}, {}) if self.service is None else self.service.report("")

    def observe(self, _: object) -> None:
        """Nobody scrapes."""

    def close(self) -> None:
        if self.service is not None:
            self.service.close()


def install() -> None:
    """Put connections of the simulation in place of sockets, once per program."""
    for module in (sender, rounds, service, receiver, slots):
        module.__dict__["threading"] = Threading
    for module in (sender, rounds, service):
        module.__dict__["time"] = CLOCK
    names = {"create_connection": _connect, "IPPROTO_TCP": 0, "TCP_NODELAY": 0, "SHUT_RDWR": 0, "MSG_PEEK": 0}
    for module in (sender, rounds, receiver):
        module.__dict__.update(socket=SimpleNamespace(**names), linked=_linked, give_way=lambda: None)
    service.__dict__["Listener"] = SimListener
    daemon.__dict__["Extensions"] = Replicating
    kind: Any = Segment
    kind.create, kind.reserve = staticmethod(make_segment), lambda *_: None


def forget(job: Job) -> None:
    """A simulation begins."""
    _job[:] = [job]
    _listening.clear()


def write_session(
    job: Job, ranks: Sequence[Rank], record: Generation, restored: SnapshotId | None, superseded: SnapshotId | None
) -> None:
    """Tell the persisters of a worker group who the others are, as the ranks do behind a restore."""
    nodes = list({rank.node.index: rank.node for rank in ranks}.values())
    names = tuple(node.name for node in nodes)
    replicas = min(job.setup.replicate, len(nodes) - 1)
    of_node = [" ".join(str(rank.rank) for rank in ranks if rank.node is node) for node in nodes]
    known = ReplicaMap(
        node_of=[nodes.index(rank.node) for rank in ranks], domains=names, partners=partner_map(names, replicas),
        replicas=replicas,
    )  # fmt: skip
    keys = {rank.rank: row_keys(table_of(rank.rank, len(ranks))[0]) for rank in ranks}
    masks = known.masks(keys)
    for rank in ranks:
        directory: Any = rank.node.directory
        rows = ReplicaRows.of(record.number, keys[rank.rank], masks[rank.rank])
        call = partial(CLOCK.scheduler.call_as, rank.process)
        call(partial(private.write_record, records.rows_path(directory, rank.rank), rows))
        if rank.local == 0:
            session = ReplicaSession(
                generation=record.number, node=nodes.index(rank.node), addresses=tuple(f"{name} 1" for name in names),
                domains=names, ranks=tuple(of_node), replicas=replicas, restored=restored, superseded=superseded,
                secret={"key": record.token.encode()}, hosts=names,
            )  # fmt: skip
            call(partial(private.write_record, records.session_path(directory), session))


__all__ = ["Connection", "Replicating", "forget", "install", "write_session"]
