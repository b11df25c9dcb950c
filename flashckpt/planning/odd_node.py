"""Which node's numbers become bad while those of the others stay good: its hardware is suspect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.planning.inventory import Inventory, Member, host_names, node_names


class OddNode(NamedTuple):
    """A node on which alone numbers became NaN or infinite, and the first snapshot in memory of which this is true."""

    node: str
    host: str
    ranks: tuple[int, ...]
    identity: SnapshotId


def odd_node(inventories: Sequence[Inventory]) -> OddNode | None:
    """Return the node whose state alone became bad; None where the first bad snapshot shows no such node.

    What other ranks hold too does not tell: only one of them writes it into its snapshot.
    """
    homes = {member: i.node for i in inventories for member in i.members}
    slots = [(homes.get(Member(held.generation, held.rank), ""), held) for i in inventories for held in i.slots]
    bad = [held for _, held in slots if held.suspect]
    if not bad:
        return None
    newest = max(held.generation for held in bad)
    step = min(held.step for held in bad if held.generation == newest)
    found = {(home, held.rank): held.suspect for home, held in slots if (held.generation, held.step) == (newest, step)}
    odd = {home for (home, _), suspect in found.items() if suspect}
    names = node_names(inventories)
    if len(odd) > 1 or {home for home, _ in found} != set(names) or max(found.values()) < 2 or len(names) < 2:
        return None
    (node,) = odd
    ranks = tuple(sorted(rank for (_, rank), suspect in found.items() if suspect))
    return OddNode(node, host_names(inventories)[names.index(node)], ranks, SnapshotId(newest, step))
