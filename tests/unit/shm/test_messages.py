"""What persisters say to each other through the ranks: carried by the relays, believed only while those live and turn."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from support.memory import ended, fork, killed_at
from support.relays import CountedStore, RelayedNode

from flashckpt.core.intent import NodeMessage
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm import ack_relay, messages
from flashckpt.shm.messages import MessageFiles


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


def job(shm_dir: Path, store: Any, nodes: int, **more: Any) -> list[RelayedNode]:
    return [RelayedNode(shm_dir, store, node=n, nodes=nodes, ranks=2, **more) for n in range(nodes)]


def turn(*nodes: RelayedNode) -> list[bool]:
    return [node.relay.turn() for node in nodes]


def test_the_leader_hears_all_and_the_others_hear_the_leader(shm_dir: Path, store: Any) -> None:
    a, b, c = job(shm_dir, store, nodes=3)
    sent = [node.send(step) for node, step in ((a, 10), (b, 20), (c, 30))]
    turn(a, b, c)
    assert (a.received(), b.received()) == ((), ()), "the other two had yet to say something"
    turn(a, b, c)
    assert a.received() == tuple(sent)
    assert b.received() == c.received() == (sent[0],)
    newer = a.send(40)
    turn(a, b)
    assert b.received() == (newer,)


def test_it_is_all_in_the_records_that_are_carried_anyway(shm_dir: Path, store: Any) -> None:
    everybody = job(shm_dir, store, nodes=4)
    for node in everybody:
        node.publish(10)
        node.send(10, waits=False)
    turn(*everybody, *everybody)
    store.requests.clear()
    for node in everybody:
        node.publish(20, 10)
        node.send(20, waits=False)
    turn(*everybody[1:], *everybody)
    assert len(everybody[0].received() or ()) == 4
    assert all(node.received() == (everybody[0].received() or ())[:1] for node in everybody[1:])
    assert store.requests == {"set": 5, "multi_get": 7}, "as without messages"


def test_a_node_that_waits_keeps_asking_and_one_that_rests_asks_once_in_a_while(shm_dir: Path, store: Any) -> None:
    a, b = job(shm_dir, store, nodes=2)
    for node in (a, b):
        node.publish(10)
    b.send(10, waits=True)
    turn(a, b, a, b)
    store.requests.clear()
    assert turn(b, b, b) == [False] * 3
    assert store.requests["multi_get"] == 3
    b.send(10, waits=False)
    turn(b)
    store.requests.clear()
    newer = a.send(20)
    turn(a)
    store.requests.clear()
    assert turn(*[b] * (ack_relay.RESTS - 1)) == [True] * (ack_relay.RESTS - 1)
    assert not store.requests
    assert turn(b) == [True]
    assert store.requests == {"multi_get": 1}
    assert b.received() == (newer,)


def test_a_persister_is_woken_by_what_is_new_and_by_nothing_else(shm_dir: Path, store: Any) -> None:
    a, b = job(shm_dir, store, nodes=2)
    event = shm_dir / "job-1" / "events" / "incoming"
    turn(a, b, a, b)
    event.unlink()
    turn(b, b)
    assert not event.exists()
    a.send(10)
    turn(a, b)
    assert event.exists()


def test_of_another_generation_nothing_is_said_or_heard(shm_dir: Path, store: Any) -> None:
    a, b = job(shm_dir, store, nodes=2)
    a.send(10, generation=3)
    turn(a, b, a, b)
    assert (a.received(), b.received()) == ((), ())
    assert b.received(generation=3) is None


def test_nothing_is_heard_once_the_relay_ended_died_or_rests_too_long(
    shm_dir: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = job(shm_dir, store, nodes=2)
    assert b.received() is None, "it has not turned yet"
    turn(a, b, a, b)
    assert b.received() == ()
    monkeypatch.setattr(messages, "SILENT_S", 0.0)
    assert b.received() is None
    monkeypatch.undo()
    assert b.received() == ()
    b.relay.close()
    assert b.received() is None
    child = fork(lambda: (turn(a, b), os._exit(0)))
    ended(child)
    assert b.received() is None, "its writer is dead"
    turn(b)
    assert b.received() is not None


def test_a_relay_that_has_nothing_new_says_that_it_turns(
    shm_dir: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = job(shm_dir, store, nodes=2)
    turn(a, b, a, b)
    monkeypatch.setattr(messages, "RESTAMP_S", 0.0)
    path = shm_dir / "job-1" / "incoming"
    before = path.read_bytes()
    turn(b)
    after = path.read_bytes()
    assert struct.unpack_from("<q", after, 32) > struct.unpack_from("<q", before, 32)
    assert after[40:] == before[40:]


@pytest.mark.parametrize("name", ["outgoing", "incoming"])
def test_damaged_bytes_are_as_if_nothing_was_said(shm_dir: Path, store: Any, name: str) -> None:
    a, b = job(shm_dir, store, nodes=2)
    sent = a.send(10)
    turn(a, b, a, b)
    path = shm_dir / ("job-0" if name == "outgoing" else "job-1") / name
    whole = path.read_bytes()
    assert a.messages.outgoing(2).message
    assert b.received() == (sent,)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert a.messages.outgoing(2).message == b"" if name == "outgoing" else b.received() is None
        path.write_bytes(whole[:at])
        assert a.messages.outgoing(2).message == b"" if name == "outgoing" else b.received() is None
    path.write_bytes(whole)
    assert b.received() == (sent,)


def test_a_message_of_somebody_else_that_makes_no_sense_is_left_out(shm_dir: Path) -> None:
    (shm_dir / "events").mkdir()
    files = MessageFiles(shm_dir)
    files.send(NodeMessage(ranks=(0,), world_size=2, generation=2, proposes_in=2))
    good = files.outgoing(2).message
    files.send(NodeMessage(ranks=(), world_size=2, generation=2, proposes_in=2))
    nobody = files.outgoing(2).message
    files.deliver(2, [b"", b"x" * 100, good[:-1], nobody, good])
    assert files.received(2) == (NodeMessage(ranks=(0,), world_size=2, generation=2, proposes_in=2),)


def test_what_is_said_comes_back_whole(shm_dir: Path) -> None:
    (shm_dir / "events").mkdir()
    files = MessageFiles(shm_dir)
    message = NodeMessage(
        ranks=(8, 9), world_size=16, pinned=SnapshotId(2, 10), at_least=SnapshotId(2, 10), urgent=True,
        complete=(SnapshotId(2, 10), SnapshotId(1, 5)), generation=3, proposes_in=2, decided=SnapshotId(1, 5), waits=True,
    )  # fmt: skip
    files.send(message)
    assert files.outgoing(3).waits
    files.deliver(3, [files.outgoing(3).message])
    assert files.received(3) == (message,)


@pytest.mark.parametrize("point", ["messages.before-rename", "messages.after-rename"])
def test_a_persister_that_is_killed_while_it_writes_a_message_leaves_a_whole_one(
    shm_dir: Path, store: Any, point: str
) -> None:
    a, b = job(shm_dir, store, nodes=2)
    first = a.send(10)
    killed_at(point, lambda: a.send(20))
    turn(a, b)
    turn(a, b)
    heard = b.received()
    assert heard is not None
    assert heard[0].pinned == (first.pinned if point == "messages.before-rename" else SnapshotId(2, 20))
    again = a.send(30)  # the next persister
    turn(a, b)
    turn(a, b)
    assert b.received() == (again,)
    assert not list(shm_dir.rglob(".*.tmp")), "what the killed one left was written over"


@pytest.mark.parametrize("point", ["messages.before-rename", "messages.after-rename"])
def test_a_rank_that_is_killed_while_it_writes_messages_leaves_whole_ones(
    shm_dir: Path, store: Any, point: str
) -> None:
    a, b = job(shm_dir, store, nodes=2)
    sent = a.send(10)
    turn(a, b)
    turn(a)  # the leader's message is in the store
    killed_at(point, lambda: turn(b))
    before: Any = () if point == "messages.before-rename" else None  # from a process that is dead nothing is believed
    assert b.received() == before
    turn(a, b)
    turn(a, b)
    assert b.received() == (sent,)
