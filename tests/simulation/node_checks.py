"""`--node-check` of many nodes on a virtual clock, with a store that serves one request after the other."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest

from flashckpt.daemon.launcher import node_check
from flashckpt.daemon.launcher.node_check import DISK, MEMORY, PRODUCT, Check, is_due
from flashckpt.daemon.launcher.stop import Group
from simulation.clock import Fiber, Process, Scheduler

REQUEST_S, ROUND_TRIP_S = 100e-6, 0.5e-3
"""What a request costs the store, which serves one after the other (a TCPStore: 10,000 a second), and the network."""
BLOCK_S, MEASURE_S = 0.02, 8.0
DEAD, NO_NETWORK, SLOW_LINK, SLOW_PRODUCT, SLOW_DISK, BAD_MEMORY = 5, 100, 101, 150, 151, 255


class Store:
    """The store of a round: every request waits for its turn."""

    def __init__(self, world: Scheduler) -> None:
        self.world, self.values = world, dict[str, bytes]()
        self.requests, self._busy_s = 0, 0.0
        self._waiting: dict[str, list[Fiber]] = collections.defaultdict(list)

    def _request(self) -> None:
        self.requests += 1
        self._busy_s = max(self._busy_s, self.world.now + ROUND_TRIP_S / 2) + REQUEST_S
        self.world.sleep(self._busy_s + ROUND_TRIP_S / 2 - self.world.now)

    def set(self, key: str, value: str) -> None:
        self._request()
        self.values[key] = value.encode()
        for fiber in self._waiting.pop(key, []):
            self.world.wake(fiber)

    def get(self, key: str) -> bytes:
        self._request()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._request()
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        self._request()
        (key,), end, fiber = keys, self.world.now + limit.total_seconds(), self.world.fiber
        assert fiber is not None
        while key not in self.values:
            if self.world.now >= end:
                raise RuntimeError("wait timeout")
            self._waiting[key].append(fiber)
            self.world.after(end - self.world.now, lambda: self.world.wake(fiber))
            self.world.block()


def world_of(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Return a world in which the product's checks run."""
    made = Scheduler()
    listener = SimpleNamespace(getsockname=lambda: ("", 1), close=lambda: None)
    monkeypatch.setattr(node_check, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr("flashckpt.daemon.launcher.rendezvous_store.listener", lambda *_: listener)
    monkeypatch.setattr(node_check, "Acceptor", lambda *_, **__: SimpleNamespace(close=lambda: None))

    def ask(self: Check, partner: int) -> float:
        """Of a partner that cannot be reached the time-out is waited for; a slow link is slow in every block."""
        pair = {self._node, partner}
        rounds_s = (node_check._ROUNDS + 2) * BLOCK_S * (150 if SLOW_LINK in pair else 1)
        made.sleep(self._timeout_s if NO_NETWORK in pair or DEAD in pair else rounds_s)
        return float("inf") if NO_NETWORK in pair or DEAD in pair else rounds_s

    monkeypatch.setattr(Check, "_ask", ask)
    return made


def measure(world: Scheduler, node: int) -> Callable[[], dict[str, float]]:
    """Return what a node measures of itself."""

    def measured() -> dict[str, float]:
        world.sleep(MEASURE_S)
        bad = {SLOW_PRODUCT: PRODUCT, SLOW_DISK: DISK, BAD_MEMORY: MEMORY}.get(node)
        found = {PRODUCT: 0.1 + node % 7 / 100, MEMORY: 0.2, DISK: 0.5 + node % 11 / 5}
        return found | ({bad: float("inf") if bad == MEMORY else 30.0} if bad else {})

    return measured


def six_bad_ones_are_found(world: Scheduler, count: int) -> float:
    """Run a check in which six nodes are bad, each in another way; return when the last node knew which (virtual seconds)."""
    store, found, ended_s = Store(world), dict[int, dict[int, str]](), list[float]()

    def run(node: int) -> None:
        if node == DEAD:
            return
        assert is_due(Group(store=store, rank=node, size=count), checked=False)
        found[node] = Check(store, node=node, count=count, address=str(node), measure=measure(world, node)).run()
        ended_s.append(world.now)

    before = threading.stack_size(256 << 10)
    try:
        for node in range(count):
            world.spawn(Process(str(node), node), lambda node=node: run(node))  # type: ignore[misc]
        world.run(until_s=600.0)
    finally:
        threading.stack_size(before)
    assert found.keys() == set(range(count)) - {DEAD}
    assert len({str(one) for one in found.values()}) == 1, "all agree"
    assert {node: why.partition(" took")[0] for node, why in found[0].items()} == {
        DEAD: "it sent no measurement",
        NO_NETWORK: "the exchange with other nodes failed",
        SLOW_LINK: "the exchange with other nodes",
        SLOW_PRODUCT: PRODUCT,
        SLOW_DISK: DISK,
        BAD_MEMORY: "its memory failed",
    }
    assert store.requests < 30 * count, "a few per node"
    return max(ended_s)
