"""`--node-check` of 2,048 nodes (make test-launcher), on a virtual clock: the bad ones are found within two minutes."""

from __future__ import annotations

import pytest
from simulation.node_checks import six_bad_ones_are_found, world_of


@pytest.mark.timeout(300)
def test_2048_nodes_find_the_six_bad_ones_within_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time it takes 20 s are waited for a node that met the others and then says nothing, before the check begins."""
    assert six_bad_ones_are_found(world_of(monkeypatch), 2048) < 120.0
