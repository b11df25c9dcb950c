"""Many nodes in one rendezvous: each change is written once, keep-alive messages change nothing, and a writer that dies holds nobody up."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import Mock

import pytest
from support.ranks import wait_for
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
)

from flashckpt.daemon.launcher import shared_state
from flashckpt.daemon.launcher.job_secret import Seal
from flashckpt.daemon.launcher.job_state import JobState
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous
from flashckpt.daemon.launcher.shared_state import SharedState
from flashckpt.daemon.launcher.silence import AWAY, GONE
from flashckpt.daemon.launcher.unit_rounds import UnitRounds

SEAL = Seal(b"correct-horse-battery-staple", "rendezvous x")
HEAD = "flashckpt.rendezvous.x"
LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Counted:
    """A store that counts requests, and the bytes that go to it and come back."""

    def __init__(self) -> None:
        self.inner, self.lock = HashStore(), threading.Lock()
        self.requests: Counter[str] = Counter()
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any) -> Any:
            with self.lock:
                found = getattr(self.inner, name)(*words)
                self.requests[name] += 1
                self.nbytes += sum(len(str(word)) for word in words)
                self.nbytes += len(found) if isinstance(found, bytes) else 8
                return found

        return ask


class Job:
    """Nodes of one rendezvous, each with its own view of a store, and threads for those that wait."""

    def __init__(self, size: int, *, least: int = 0) -> None:
        self.store = Counted()
        timeout = RendezvousTimeout(join=timedelta(seconds=60))
        self.settings = RendezvousSettings("x", least or size, size, timeout, timedelta(seconds=60), 3)
        self.nodes = [_NodeDesc(f"n{i:04}", 1, i) for i in range(size)]
        self.views = {node: SharedState(self.store, self.settings, SEAL, node) for node in self.nodes}  # type: ignore[arg-type]
        for view in self.views.values():
            view._silence.lost = lambda *_: {}  # type: ignore[method-assign]  # its tests are in test_silence
        self.steps = {node: self.steps_of(node) for node in self.nodes}

    def steps_of(self, node: _NodeDesc) -> UnitRounds:
        inner = DynamicRendezvousHandler(node, self.settings, "c10d", HashStore(), self.views[node])
        return UnitRounds(inner, 1, lambda _: False)

    def do(self, operation: Any, nodes: list[_NodeDesc]) -> None:
        threads = [
            threading.Thread(target=self.steps[node].run, args=(operation, float("inf")), daemon=True) for node in nodes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node that waits for ever"

    def seen_by(self, node: _NodeDesc) -> JobState:
        self.views[node].wait(0)
        self.views[node].sync()
        return self.views[node].state

    def places(self) -> dict[str, int]:
        return {node.addr: rank for node, rank in self.seen_by(self.nodes[0]).participants.items()}


@pytest.mark.parametrize("size", [8, 48])
def test_nodes_join_leave_and_join_again(size: int) -> None:
    job = Job(size)
    job.do(_RendezvousJoinOp(), job.nodes)
    assert sorted(job.places().values()) == list(range(size))
    job.do(_RendezvousExitOp(), job.nodes)
    job.do(_RendezvousJoinOp(), job.nodes)
    assert sorted(job.places().values()) == list(range(size))
    state = job.views[job.nodes[0]].state
    assert (state.round, state.complete) == (1, True)
    assert job.store.inner.add(f"{HEAD}.changes", 0) & 0xFFFFFFFF <= 2 * size, (
        "each node joins by one write, and begins again by one"
    )


@pytest.mark.parametrize("comes", ["nobody", "a spare"])
def test_a_round_that_lost_a_node_begins_again_at_once_unless_another_node_comes(comes: str) -> None:
    """Of four nodes, where two are enough: those that are left do not wait for a last call; with a spare they may wait for more."""
    job = Job(5, least=2)
    first, lost, spare = job.views[job.nodes[0]], job.nodes[3], job.nodes[4]
    first.sync()
    first.state.participants, first.state.complete = {node: i for i, node in enumerate(job.nodes[:4])}, True
    first.mark_dirty()
    assert first.sync() is True
    job.do(_RendezvousJoinOp(), job.nodes[:3])
    job.views[lost].wait(0)
    job.views[lost].sync()
    del job.views[lost].state.participants[lost]
    job.views[lost].state.wait_list |= {spare} if comes == "a spare" else set()
    job.views[lost].mark_dirty()
    assert job.views[lost].sync() is True
    for node in job.nodes[:3]:
        job.views[node].wait(0)
    job.do(_RendezvousExitOp(), job.nodes[:3])
    assert sorted(job.places()) == ["n0000", "n0001", "n0002", *(["n0004"] if comes == "a spare" else [])]
    assert first.state.complete == (comes == "nobody")
    assert (first.state.round, first.state.deadline is None) == (1, comes == "nobody")


def test_a_spare_has_the_place_of_a_lost_node_by_the_write_that_begins_the_round() -> None:
    """Two wait: one is let in and has to write nothing, the other waits on and makes nobody begin again."""
    job = Job(5)
    job.settings = RendezvousSettings("x", 3, 3, job.settings.timeout, timedelta(seconds=60), 3)
    job.steps = {node: job.steps_of(node) for node in job.nodes}
    trained, spares = job.nodes[1:4], [job.nodes[0], job.nodes[4]]
    job.do(_RendezvousJoinOp(), trained)
    threads = [
        threading.Thread(target=job.steps[spare].run, args=(_RendezvousJoinOp(), 1e9), daemon=True) for spare in spares
    ]
    watcher = job.views[trained[0]]
    for thread in threads:
        thread.start()
    wait_for(lambda: job.seen_by(trained[0]).redundancy_list == set(spares), what="two spares")
    watcher._silence.lost = lambda *_: {trained[2]: (1.8, AWAY)}  # type: ignore[method-assign]
    watcher._remove_lost()
    watcher._silence.lost = lambda *_: {}  # type: ignore[method-assign]
    wait_for(lambda: job.seen_by(trained[0]).wait_list == set(spares), what="both to wait")
    job.do(_RendezvousExitOp(), trained[:2])
    state = job.seen_by(trained[0])
    assert (state.round, state.complete) == (1, True), "nobody else has to write"
    assert state.participants == {spares[0]: 0, trained[0]: 1, trained[1]: 2}
    assert [state.wait_list, state.redundancy_list] == [set(), {spares[1]}]
    threads[0].join(60)
    assert not threads[0].is_alive(), "who was let in has joined"
    watcher._silence.lost = lambda *_: {trained[1]: (1.8, AWAY)}  # type: ignore[method-assign]
    watcher._remove_lost()
    watcher._silence.lost = lambda *_: {}  # type: ignore[method-assign]
    wait_for(lambda: job.seen_by(trained[0]).wait_list, what="the other to wait again")
    job.do(_RendezvousExitOp(), [spares[0], trained[0]])
    threads[1].join(60)
    assert not threads[1].is_alive(), "the next place is its own"


def test_who_dies_while_it_waits_for_the_next_round_is_lost_from_it() -> None:
    job = Job(3)
    job.do(_RendezvousJoinOp(), job.nodes)
    job.do(_RendezvousExitOp(), job.nodes)  # the first two may be dead by now
    job.places()
    watcher = job.views[job.nodes[0]]
    watcher._silence.lost = lambda *_: {job.nodes[1]: (0.8, GONE)}  # type: ignore[method-assign]
    watcher._remove_lost()
    assert job.places().keys() == {"n0000", "n0002"}
    assert watcher.state.lost[job.nodes[1]] == [1, 800, 1]


def bytes_of_an_idle_node(size: int) -> float:
    """What a keep-alive and a look cost each node, when nothing happens."""
    job = Job(size)
    first = job.nodes[0]
    job.views[first].sync()
    job.views[first].state.participants = {node: rank for rank, node in enumerate(job.nodes)}
    job.views[first].state.complete = True
    job.views[first].mark_dirty()
    assert job.views[first].sync() is True
    for view in job.views.values():
        view.wait(0)
        view.sync()
    before, writes = job.store.nbytes, job.store.inner.add(f"{HEAD}.changes", 0)
    for node in job.nodes:
        view = job.views[node]
        view.state.last_heartbeats[node] = LONG_AGO
        view._last_sync_time = view._read_s = float("inf")  # however long this loop takes
        job.steps[node].run(_RendezvousOnce(), float("inf"))
        view._last_sync_time = -1
        view.sync()
    assert job.store.inner.add(f"{HEAD}.changes", 0) == writes, "a keep-alive is no change"
    return (job.store.nbytes - before) / size


class _RendezvousOnce:
    """A keep-alive that is due once."""

    def __init__(self) -> None:
        self.inner, self.is_done = _RendezvousKeepAliveOp(), False

    def __call__(self, context: Any, deadline: float) -> Any:
        action = self.inner(context, deadline)
        if self.is_done:
            return type(action).FINISH
        assert action is type(action).KEEP_ALIVE
        self.is_done = True
        return action


def test_what_an_idle_node_asks_for_does_not_grow_with_the_nodes() -> None:
    few, many = bytes_of_an_idle_node(4), bytes_of_an_idle_node(64)
    assert many == pytest.approx(few, abs=8)


def test_a_write_that_another_was_faster_with_is_not_taken() -> None:
    job = Job(2)
    one, two = (job.views[node] for node in job.nodes)
    assert (one.sync(), two.sync()) == (None, None)
    one.state.participants[job.nodes[0]] = 0
    one.mark_dirty()
    assert one.sync() is True
    two.state.round = 9
    two.mark_dirty()
    assert two.sync() is False, "it had not seen the change of the other"
    assert (two.state.participants, two.state.round) == ({job.nodes[0]: 0}, 0)


def test_who_waits_reads_the_state_when_the_round_is_there_not_when_others_join_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(4)
    waiting = job.views[job.nodes[0]]
    waiting.sync()
    reads = Mock(side_effect=waiting._read)
    monkeypatch.setattr(waiting, "_read", reads)
    monkeypatch.setattr(shared_state, "_WHOLE_S", 600.0)
    for number, node in enumerate(job.nodes):
        view = job.views[node]
        view._last_sync_time = -1
        view.sync()
        reads.reset_mock()
        view.state.participants[node] = 0
        view.state.complete = number == 3
        view.mark_dirty()
        assert view.sync() is True
        waiting.wait(0)
        waiting.sync()
        assert reads.call_count == (number == 3)
    assert waiting.state.participants.keys() == set(job.nodes)


def test_a_writer_that_dies_before_it_counts_is_seen_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    dead, other = (job.views[node] for node in job.nodes)
    assert (dead.sync(), other.sync()) == (None, None)
    dead.state.participants[job.nodes[0]] = 0
    dead.mark_dirty()
    monkeypatch.setattr(dead, "_count", lambda _: 0)  # killed between the state and its number
    assert dead.sync() is True
    other._last_sync_time = -1
    other.sync()
    assert not other.state.participants
    monkeypatch.setattr(shared_state, "_WHOLE_S", 0.0)
    other.wait(0)
    other.sync()
    assert other.state.participants == {job.nodes[0]: 0}


def test_a_keep_alive_counts_only_from_its_node_and_with_the_secret() -> None:
    job = Job(2)
    one, two = (job.views[node] for node in job.nodes)
    two.beat()
    assert (first := one._beat_of(job.nodes[1])) > (0, 0)
    two.beat()
    assert one._beat_of(job.nodes[1]) > first
    theirs = job.store.inner.get(f"{HEAD}.beat.{job.nodes[1]}")
    job.store.inner.set(f"{HEAD}.beat.{job.nodes[0]}", theirs.decode())
    assert one._beat_of(job.nodes[0]) == (0, 0), "that of another node"
    stranger = Seal(b"another secret of a job", "rendezvous x").close(f"{job.nodes[1]} 99 0")
    job.store.inner.set(f"{HEAD}.beat.{job.nodes[1]}", stranger.decode())
    assert one._beat_of(job.nodes[1]) == (0, 0)


@pytest.mark.parametrize("race", [False, True], ids=["alone", "another-write-is-first"])
def test_a_lost_node_is_out_of_the_state_for_all_and_a_waiting_one_may_join(*, race: bool) -> None:
    job = Job(3)
    job.do(_RendezvousJoinOp(), job.nodes)
    watcher, lost, other = (job.views[node] for node in job.nodes)
    for view in (watcher, other):
        view.wait(0)
        view.sync()
    watcher._silence.lost = lambda *_: {job.nodes[1]: (1.5, AWAY)}  # type: ignore[method-assign]
    if race:
        other.state.wait_list.add(_NodeDesc("n9", 1, 9))
        other.mark_dirty()
        assert other.sync() is True
    watcher._remove_lost()
    watcher._remove_lost()
    other.wait(0)
    other.sync()
    assert set(other.state.participants) == {job.nodes[0], job.nodes[2]}
    assert other.state.lost[job.nodes[1]] == [0, 1500, 1]
    assert len(other.state.wait_list) == race
    assert lost.state.participants.keys() == set(job.nodes), "it reads that when it is back"


@pytest.mark.parametrize(
    ("least", "back", "is_away", "expected"), [(1, 0, 1, True), (2, 0, 1, False), (1, 1, 1, False), (1, 0, 0, False)],
    ids=["away", "the others are too few", "it came back", "its machine answers"],
)  # fmt: skip
def test_ranks_are_only_restarted_for_a_lost_node_that_is_away_and_not_needed(
    least: int, back: int, is_away: int, *, expected: bool
) -> None:
    here, other = _NodeDesc("a", 1, 0), _NodeDesc("b", 1, 0)
    settings = RendezvousSettings("x", least, 2, RendezvousTimeout(), timedelta(seconds=60), 3)
    view = SharedState(HashStore(), settings, SEAL, here)
    stores = FreshStoreRendezvous(DynamicRendezvousHandler(here, settings, "c10d", HashStore(), view))
    stores._nodes = {here: 0, other: 1}
    view.state.participants = {here: 0} | ({other: 1} if back else {})
    view.state.lost = {other: [0, 1500, is_away]}
    assert stores.has_lost() is expected
