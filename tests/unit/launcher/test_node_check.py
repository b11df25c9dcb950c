"""Node check: verdicts from measurements, and whole checks of several nodes over real sockets."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from flashckpt.daemon.launcher import node_probe
from flashckpt.daemon.launcher.node_check import (
    DISK,
    EXCHANGE,
    MEMORY,
    PRODUCT,
    Check,
    NodeTiming,
    first_pairs,
    is_due,
    measured_alone,
    second_pairs,
    slow,
    verdict,
)
from flashckpt.daemon.launcher.stop import Group

INFINITE = float("inf")


def alone(*seconds: float) -> list[NodeTiming]:
    return [NodeTiming(nodes=(node,), seconds=value) for node, value in enumerate(seconds)]


def pairs(*items: tuple[int, int, float]) -> list[NodeTiming]:
    return [NodeTiming(nodes=(one, two), seconds=value) for one, two, value in items]


def test_every_node_is_in_a_first_pair() -> None:
    for count in range(2, 9):
        found = first_pairs(range(count))
        assert {node for pair in found for node in pair} == set(range(count))
        assert len(found) == (count + 1) // 2


def test_all_well_nobody_is_named() -> None:
    assert verdict(alone(1, 1.1, 0.9, 1), pairs((0, 1, 1.0), (2, 3, 1.4)), []) == {}


def test_slow_product_names_the_node_and_not_its_partner() -> None:
    first = pairs((0, 1, 1.0), (2, 3, 9.0), (4, 5, 1.0))
    second = pairs((2, 0, 1.0))
    assert second_pairs(range(6), first, [3]) == [(2, 0)]
    assert list(verdict(alone(1, 1, 1, 9, 1, 1), first, second)) == [3]


def test_slow_pair_the_suspect_that_is_slow_with_a_good_node_too_is_named() -> None:
    first = pairs((0, 1, 1.0), (2, 3, 9.0), (4, 5, 1.1))
    assert second_pairs(range(6), first, []) == [(2, 0), (3, 1)]
    assert list(verdict(alone(*[1] * 6), first, pairs((2, 0, 1.0), (3, 1, 9.0)))) == [3]


def test_slow_node_of_few_is_not_its_own_measure() -> None:
    """Of two nodes, of two pairs, or where all other pairs failed, the better one is the measure."""
    assert list(verdict(alone(1, 9), [], [])) == [1]
    first = pairs((0, 1, 1.0), (2, 3, 9.0), (4, 5, INFINITE))
    second = pairs((2, 0, 1.0), (3, 1, 9.0), (4, 0, 1.0), (5, 1, INFINITE))
    assert sorted(verdict(alone(*[1] * 6), first, second)) == [3, 5]


def test_two_bad_nodes_in_one_pair_are_both_named() -> None:
    first = pairs((0, 1, 1.0), (2, 3, INFINITE), (4, 5, 1.0))
    assert sorted(verdict(alone(*[1] * 6), first, pairs((2, 0, INFINITE), (3, 1, 8.0)))) == [2, 3]


def test_a_disk_is_shared_with_others_and_may_be_slower_than_a_processor() -> None:
    disks = [NodeTiming(nodes=(node,), seconds=seconds, what=DISK) for node, seconds in enumerate((0.5, 0.5, 3.0, 4.5))]
    assert [item.nodes for item in slow([*disks, *alone(1, 1, 1, 1)])] == [(3,)]


def test_a_node_is_measured_and_what_is_broken_is_infinite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_alone()
    assert set(found) == {PRODUCT, MEMORY, DISK}
    assert all(0 < seconds < INFINITE for seconds in found.values()), found
    assert node_probe.disk_s(str(tmp_path / "not there")) == INFINITE
    hangs = threading.Event()
    monkeypatch.setattr("os.fsync", lambda _: hangs.wait())
    assert node_probe.disk_s(str(tmp_path), limit_s=0.01) == INFINITE
    hangs.set()
    assert node_probe.fastest(lambda: False, 2) == INFINITE


def run_checks(
    count: int, *, slow_alone: int = -1, slow_network: int = -1, timeout_s: float = 30.0, slow_in: str = PRODUCT
) -> list[dict[int, str]]:
    store, found = HashStore(), [{-1: "not run"} for _ in range(count)]

    def measure_of(node: int) -> Callable[[], dict[str, float]]:
        return lambda: {PRODUCT: 1.0, MEMORY: 0.1, DISK: 1.0} | ({slow_in: 50.0} if node == slow_alone else {})

    def one(node: int) -> None:
        delay_s = 1.0 if node == slow_network else 0.0
        check = Check(
            store,
            node=node,
            count=count,
            address="127.0.0.1",
            timeout_s=timeout_s,
            measure=measure_of(node),
            delay_s=delay_s,
        )
        found[node] = check.run()

    threads = [threading.Thread(target=one, args=(node,)) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("what", [PRODUCT, MEMORY, DISK, EXCHANGE])
def test_artificially_slow_node_is_named_by_all_nodes_with_what_is_slow(what: str) -> None:
    found = run_checks(6, slow_network=3) if what == EXCHANGE else run_checks(6, slow_alone=3, slow_in=what)
    assert all(list(one) == [3] and one[3].startswith(f"{what} took") for one in found), found
    assert len({str(one) for one in found}) == 1


def test_newcomer_is_checked_by_nodes_that_were_checked_before() -> None:
    """All nodes of a round take part in the check, or none does."""
    for checked, due in (((True, True, False), True), ((True, True, True), False), ((False, False, False), True)):
        store, found = HashStore(), dict[int, bool]()

        def one(node: int, store: HashStore = store, found: dict[int, bool] = found, done: bool = False) -> None:
            found[node] = is_due(Group(store=store, rank=node, size=3), checked=done)

        threads = [threading.Thread(target=one, args=(n,), kwargs={"done": done}) for n, done in enumerate(checked)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == dict.fromkeys(range(3), due)


@pytest.mark.parametrize("data", [b"\xff" * 8 + bytes(1000), b"\x01\x00"])
def test_length_that_no_node_sends_ends_the_connection(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            Check(HashStore(), node=0, count=1, address="")._serve(there, None)
        there.close()
        with contextlib.suppress(ConnectionResetError):  # closed before it had read everything
            assert here.recv(10) == b""


def test_a_node_that_had_no_descriptor_for_a_moment_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = socket.socket.accept, set[socket.socket]()

    def refused_once(sock: socket.socket) -> tuple[socket.socket, object]:
        if sock not in failed:
            failed.add(sock)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", refused_once)
    assert run_checks(2, timeout_s=3.0) == [{}, {}]
    assert len(failed) == 2


def test_node_that_never_answers_is_named() -> None:
    """A broken node takes part in the rendezvous and then says nothing."""
    store, found = HashStore(), {}

    def one(node: int) -> None:
        check = Check(store, node=node, count=4, address="127.0.0.1", timeout_s=1.0, measure=lambda: {PRODUCT: 1.0})
        found[node] = check.run()

    threads = [threading.Thread(target=one, args=(node,)) for node in (0, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(3 in one for one in found.values()), found
