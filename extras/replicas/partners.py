"""Which node keeps the replicas of which other node: one function of the nodes' failure domains. Pure, numpy only.

Every node computes the map from the same list, so that all agree without asking each other. Each node has as many partners
as it is the partner of others: memory and network are shared out evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partner_map(domains: Sequence[str], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each node, the nodes that keep its replicas, the first partner first.

    The nodes are put in a ring, those of one failure domain side by side, and the partners of each are found by the same
    shift for all. Of all shifts that one is taken that leads most nodes to a domain which neither they nor their
    earlier partners are in: to another domain for every node if no domain has more than half of the nodes.

    Args:
        domains: Name of the failure domain of each node.
        replicas: Partners of each node; a job of few nodes has fewer, one node none.
    """
    nodes = len(domains)
    known = {name: k for k, name in enumerate(dict.fromkeys(domains))}
    numbers = np.array([known[name] for name in domains], np.int64)
    sizes = np.bincount(numbers, minlength=len(known)) if nodes else np.zeros(0, np.int64)
    ring = np.lexsort((np.arange(nodes), numbers, -sizes[numbers]))
    found: list[list[int]] = [[] for _ in range(nodes)]
    shifts: list[int] = []
    for _ in range(min(replicas, nodes - 1)):
        shifts.append(_best_shift(numbers[ring], shifts))
        for place, node in enumerate(ring.tolist()):
            found[node].append(int(ring[(place + shifts[-1]) % nodes]))
    return tuple(map(tuple, found))


def _best_shift(ring: np.ndarray, taken: Sequence[int]) -> int:
    """Return the shift that leads most places of a ring of domains to one that is new to them; the smallest of equal ones."""
    best, most = 0, -1
    for shift in range(1, len(ring)):
        if shift in taken:
            continue
        partner = np.roll(ring, -shift)
        is_new = partner != ring
        for earlier in taken:
            is_new &= partner != np.roll(ring, -earlier)
        count = int(is_new.sum())
        if count > most:
            best, most = shift, count
        if most == len(ring):
            break
    return best


def senders_to(partners: Sequence[Sequence[int]], node: int) -> list[int]:
    """Return the nodes whose replicas `node` keeps, ascending."""
    return [sender for sender, kept_by in enumerate(partners) if node in kept_by]
