"""Acknowledgements between nodes: what they cost, what is known when, and what a kill leaves."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.memory import ended, fork
from support.ranks import wait_for
from support.relays import CountedStore, RelayedNode

from flashckpt import faults
from flashckpt.faults import CRASH_POINTS
from flashckpt.shm.ack_relay import AGAIN, RelayThread
from flashckpt.shm.acks import NOBODY, encode_group, job_acks, whole_job


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


def job(shm_dir: Path, store: Any, nodes: int, ranks: int = 1, **more: Any) -> list[RelayedNode]:
    return [RelayedNode(shm_dir, store, node=n, nodes=nodes, ranks=ranks, **more) for n in range(nodes)]


def turn(*nodes: RelayedNode) -> list[bool]:
    return [node.relay.turn() for node in nodes]


def test_what_all_nodes_hold_is_common_once_it_was_carried_to_the_job_and_back(shm_dir: Path, store: Any) -> None:
    a, b = job(shm_dir, store, nodes=2, ranks=2)
    a.publish(10)
    assert turn(a, b) == [False, False]
    b.publish(10, 5)
    assert turn(b) == [False]
    assert (a.known(), b.known()) == (([], set()), ([], set()))
    assert turn(a, b) == [True, True]
    assert a.known() == b.known() == ([10], {5})


def test_a_rank_that_has_not_published_keeps_its_node_and_the_job_from_anything_common(
    shm_dir: Path, store: Any
) -> None:
    a, b = job(shm_dir, store, nodes=2, ranks=2)
    a.publish(10)
    b.ranks[0].publish([(2, 10)])  # type: ignore[list-item]
    turn(a, b, a, b)
    assert a.known() == b.known() == ([], set())
    b.publish(10)
    turn(b, a, b)
    assert a.known() == b.known() == ([10], set())


def test_ranks_of_different_nodes_that_lost_different_snapshots_do_not_wait_for_each_other(
    shm_dir: Path, store: Any
) -> None:
    a, b = job(shm_dir, store, nodes=2)
    a.publish(40, low_watermark=45)
    b.publish(45, 40)
    turn(a, b, a, b)
    assert a.known() == b.known() == ([40], {45})


@pytest.mark.parametrize("lost", range(3))
def test_a_record_that_the_store_lost_without_an_error_is_sent_again(
    shm_dir: Path, store: Any, monkeypatch: Any, lost: int
) -> None:
    keep, sent = store.set, itertools.count()
    monkeypatch.setattr(store, "set", lambda key, value: None if next(sent) == lost else keep(key, value))
    a, b = job(shm_dir, store, nodes=2)
    for node in (a, b):
        node.publish(10)
    for _ in range(2 * AGAIN):
        turn(a, b)
    assert a.known() == b.known() == ([10], set())


def test_records_of_a_dead_generation_do_not_count(shm_dir: Path, store: Any) -> None:
    old = job(shm_dir, store, nodes=2)
    for node in old:
        node.publish(50)
    turn(*old, *old)
    assert old[0].known() == ([50], set())
    new = job(shm_dir, store, nodes=2, generation=3)
    assert new[0].known() == ([], set())
    new[0].publish(50)
    turn(*new, *new)
    assert new[0].known() == ([], set())


def test_the_snapshot_restored_from_counts_as_common_before_anything_was_carried(shm_dir: Path, store: Any) -> None:
    (a, _) = job(shm_dir, store, nodes=2, restored=(1, 40))
    assert [tuple(one) for one in a.ranks[0].known().common] == [(1, 40)]
    assert store.requests.total() == 0


def test_reading_and_publishing_send_nothing_whatever_the_world(shm_dir: Path, store: Any) -> None:
    """What `step()` does: the store could as well be gone."""
    a, b = job(shm_dir, store, nodes=2, ranks=4)
    for node in (a, b):
        node.publish(10)
        node.known()
    assert not store.requests
    turn(a, b, a, b)
    store.requests.clear()
    a.publish(15, 10)
    assert a.known() == ([10], set())
    assert not store.requests


def test_a_node_that_knows_all_about_its_snapshots_sends_nothing(shm_dir: Path, store: Any) -> None:
    a, b, c = job(shm_dir, store, nodes=3)
    for node in (a, b, c):
        node.publish(10)
    turn(a, b, c, a, b, c)
    store.requests.clear()
    assert turn(b, c, b, c) == [True] * 4
    assert not store.requests
    assert turn(a) == [True]
    assert store.requests == {"multi_get": 1}, "one node looks for what others have to say, with one request"


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [2, 16, 128, 2048])
def test_a_snapshot_costs_each_node_the_same_few_requests(shm_dir: Path, store: Any, nodes: int) -> None:
    everybody = job(shm_dir, store, nodes)
    for node in everybody:
        node.publish(5)
    turn(*everybody, *everybody)  # the keys exist from here on
    per_node = []
    for node in everybody:
        before = store.requests.total()
        node.publish(10, 5)
        node.relay.turn()
        per_node.append(store.requests.total() - before)
    before = store.requests.total()
    turn(everybody[0])
    aggregating = store.requests.total() - before
    before = store.requests.total()
    assert all(turn(*everybody[1:]))
    assert (store.requests.total() - before) == nodes - 1
    assert {*per_node} == {2}
    assert aggregating == 2
    assert all(node.known() == ([10, 5], set()) for node in everybody)


def operations_of_known(shm_dir: Path, nodes: int, ranks: int) -> int:
    """Lines of Python that `known()` runs in a world of that size."""
    import sys

    node = RelayedNode(shm_dir, CountedStore(), node=0, nodes=nodes, ranks=ranks)
    node.publish(10, 5)
    other = CountedStore()
    pair = [RelayedNode(shm_dir, other, node=n, nodes=2, ranks=ranks) for n in (0, 1)]
    pair[1].publish(10, 5)
    turn(*pair, *pair)  # fills the page of node 0
    count = 0

    def line(*_: Any) -> Any:
        nonlocal count
        count += 1
        return line

    sys.settrace(line)
    try:
        known = node.ranks[0].known()
    finally:
        sys.settrace(None)
    assert [one.step for one in known.common] == [10, 5]
    return count


def test_reading_what_16384_ranks_have_acknowledged_takes_the_same_operations_as_of_16(shm_dir: Path) -> None:
    assert operations_of_known(shm_dir, 2048, 8) == operations_of_known(shm_dir, 2, 8) > 0


def test_the_thread_carries_what_is_published_and_ends(shm_dir: Path) -> None:
    import torch.distributed

    dist: Any = torch.distributed  # it does not list its stores

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    nodes = job(shm_dir, dist.PrefixStore("x", server).clone(), nodes=2)
    threads = [RelayThread(node.relay) for node in nodes]
    for node, thread in zip(nodes, threads, strict=True):
        node.publish(10)
        thread.wake()
    wait_for(lambda: all(node.known() == ([10], set()) for node in nodes))
    nodes[1].publish(15, 10)  # nobody is woken: another rank of the node published
    nodes[0].publish(15, 10)
    wait_for(lambda: all(node.known() == ([15, 10], set()) for node in nodes))
    for thread in threads:
        thread.close()
        assert not thread._thread.is_alive()


def test_a_store_that_fails_is_logged_once_and_tried_again(shm_dir: Path, caplog: Any) -> None:
    class Failing(CountedStore):
        broken = True

        def set(self, key: str, value: Any, /) -> None:
            self.requests["tried"] += 1
            if self.broken:
                raise RuntimeError("Connection reset by peer")
            super().set(key, value)

    store = Failing()
    (a, b) = job(shm_dir, store, nodes=2)
    b.publish(10)
    a.publish(10)
    thread = RelayThread(a.relay)
    wait_for(lambda: store.requests["tried"] >= 3)
    store.broken = False
    b.relay.turn()
    wait_for(lambda: a.known() == ([10], set()))
    thread.close()
    assert caplog.text.count("Connection reset by peer") == 1


POINTS = [name for name in CRASH_POINTS if name.startswith("acks.")]


@pytest.mark.matrix
@pytest.mark.parametrize("hit", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_relay_killed_at_any_point_leaves_what_was_known_or_what_is_known_now(
    shm_dir: Path, point: str, hit: int
) -> None:
    """Never a mixture, and never more than the ranks hold; the next generation begins with nothing and gets to know all."""
    import torch.distributed

    dist: Any = torch.distributed  # it does not list its stores

    path = str(shm_dir / "store")
    keys = dist.FileStore(path, 1)
    a, b = job(shm_dir, keys, nodes=2)
    for node in (a, b):
        node.publish(5)
    turn(a, b, a, b)
    assert b.known() == ([5], set())
    b.publish(10, 5)
    turn(b)

    def first_rank() -> None:
        (mine, other) = job(shm_dir, dist.FileStore(path, 1), nodes=2)
        faults.arm(f"{point}:{hit}")
        mine.publish(10, 5)
        turn(mine, mine)
        other.publish(10, 5)
        turn(other, mine, other)
        faults.arm(None)
        os._exit(0)

    code = ended(fork(first_rank))
    assert code in (0, -signal.SIGKILL)
    assert code or hit > 1
    for node in (a, b):
        assert node.known() in [([], set()), ([5], set()), ([10, 5], set())]
    again = job(shm_dir, dist.FileStore(path, 1), nodes=2, generation=3)
    assert again[0].known() == ([], set())
    for node in again:
        node.publish(10)
    turn(*again, *again)
    assert again[0].known() == again[1].known() == ([10], set())
    assert job_acks(a.control, 2) is None, "of the generation before nothing is read any more"


def test_a_persister_reads_what_all_ranks_hold_from_the_control_file(shm_dir: Path, store: Any) -> None:
    a, b = job(shm_dir, store, nodes=2)
    path = shm_dir / "control-0"
    assert whole_job(path, 2) is None
    a.control.publish_job_acks(2, encode_group(NOBODY))
    assert whole_job(path, 2) is None, "one rank has said nothing yet"
    a.publish(10)
    b.publish(10, 5)
    turn(b, a, b)
    known = whole_job(path, 2)
    assert known is not None
    assert (known.common, known.lacked) == (((2, 10),), ((2, 5),))
    assert whole_job(path, 3) is None, "of another generation"
    assert whole_job(shm_dir / "control-9", 2) is None
    os.truncate(path, 8)
    assert whole_job(path, 2) is None
