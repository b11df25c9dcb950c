"""`--node-check` of hundreds of nodes on a virtual clock: who is named. Of thousands: tests/integration/launcher/launcher_node_check.py."""

from __future__ import annotations

from typing import Any

import pytest

from flashckpt.daemon.launcher.node_check import Check
from simulation.clock import Process
from simulation.node_checks import Store, measure, six_bad_ones_are_found, world_of


def test_256_nodes_find_the_six_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    six_bad_ones_are_found(world_of(monkeypatch), 256)


def test_first_node_dead_is_named_by_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world, found = world_of(monkeypatch), dict[int, Any]()
    store = Store(world)

    def run(node: int) -> None:
        found[node] = Check(store, node=node, count=3, address=str(node), measure=measure(world, node)).run()

    for node in (1, 2):
        world.spawn(Process(str(node), node), lambda node=node: run(node))  # type: ignore[misc]
    world.run(until_s=600.0)
    assert found == {node: {0: "it collects the measurements, and published none"} for node in (1, 2)}
