"""What the nodes of a job ask of the shared storage to agree on a checkpoint, to commit it, and to remove an old one. Pure.

The counts are those of the functions that do it: tests compare the two over a store that counts. What they cannot know is
how long a request takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.planning.packs import PACK_BYTES, TOGETHER_BYTES

KEYS_PER_REQUEST = 1000
"""Of a listing or a batch delete."""
IN_FLIGHT = 64
"""Indexes or proposals that are read at a time."""
LOOK_S = 0.5
"""Seconds between two looks at the root while a node waits for the commit."""
CARRIED_S = 1.0
"""Seconds from a snapshot until the ranks have carried what all nodes propose: where they rest, they look once a second."""
LONG_COMMIT_WRITERS = 1000
"""Ranks from which on nodes that wait for a commit look less often, in proportion."""
CARRIED_LOOK_S = 64.0
"""Seconds between two looks while nothing is to be persisted, and the ranks run."""
COMMIT_CPU_S, ROW_CPU_S = 0.03e-3, 1.9e-6
"""Seconds of a processor in a commit, per rank and per tensor of a rank (benchmarks/results/2026-11-26/scale-rows.json)."""
RANGED_FROM = 64
"""Ranks from which on the state of their generators is beside MANIFEST, an object per node."""
RANK_BYTES, RANGED_BYTES, ROW_BYTES = 10_200, 150, 100
"""Bytes of MANIFEST per rank, with its generators and without, and per tensor of a rank."""
INDEXED_FROM = 8 << 20
"""Bytes of all indexes from which on MANIFEST of so many ranks names them in place of rows."""
INDEXED_RANK_BYTES, INDEXED_ROW_BYTES, INDEXED_ROW_CPU_S = 80, 115, 0.12e-6
"""Bytes of such a MANIFEST per rank and per tensor of one rank, seconds of a processor in its commit per tensor of all ranks
(benchmarks/results/2026-11-26/scale-indexes.json)."""
FENCE = 1
"""Requests that find out whether a newer generation has claimed the root: a listing, once the own claim was read back."""
JOIN = 2 + 1
"""Requests of a node that joins: which intents there are, what the one says, whose indexes are there."""
OUTCOME = 2
"""Requests of a node that asks whether a checkpoint is committed or abandoned."""
LEASE = 1
"""Requests of a node that looks which node commits."""
REQUESTS_PER_S = 3500.0
"""What one prefix of S3 takes, of the requests that write, before it answers 503: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html"""
MANIFEST_BYTES = 150e6
"""More than every node should read and decode to restore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordination:
    """Requests and seconds of one persist, besides its data.

    Attributes:
        look_requests: Of the leader that looks at the root where no ranks run and all nodes have proposed something new.
        commit_requests: Of the node that commits.
        retention_requests: To remove one old checkpoint, beside training.
        job_requests: Of all nodes for one persist, first to last: decision, packs and indexes, commit, retention.
        idle_requests_per_s: Of all nodes while nothing is to be persisted.
        agree_s: From the snapshot until all nodes write it: what they propose goes through the ranks, the decision is read
            from the root.
        commit_s: From the last pack to the commit.
        manifest_bytes: Of MANIFEST.
        least_s: Below which persists cannot follow each other, for their requests alone.
    """

    look_requests: int
    commit_requests: int
    retention_requests: int
    job_requests: int
    idle_requests_per_s: float
    agree_s: float
    commit_s: float
    manifest_bytes: float
    least_s: float

    @property
    def seconds(self) -> float:
        """Seconds that it adds to a persist."""
        return self.agree_s + self.commit_s


def coordination(
    *,
    ranks: int,
    nodes: int,
    checkpoint_bytes: float,
    rows: int,
    request_s: float,
    requests_per_s: float = REQUESTS_PER_S,
) -> Coordination:
    """Return the costs of one persist.

    Args:
        ranks: Of the job.
        nodes: Of the job; one alone has nobody to agree with.
        checkpoint_bytes: Of the data of a checkpoint, all ranks together.
        rows: Tensors of a rank.
        request_s: Seconds that a small request takes.
        requests_per_s: Requests that the storage answers per second, of all nodes together.
    """
    is_ranged = ranks >= RANGED_FROM
    objects = _packs(ranks, nodes, checkpoint_bytes / ranks) + nodes * (1 + is_ranged)
    parts = max(1, math.ceil(ranks / KEYS_PER_REQUEST))  # of a listing, side by side
    pages = max(1, parts * math.ceil(objects / parts / KEYS_PER_REQUEST))
    proposals = max(1, math.ceil(nodes / KEYS_PER_REQUEST))
    look = 2 * proposals + nodes
    commit = pages + nodes + 3  # is there a MANIFEST? then the sizes, the indexes, MANIFEST, LATEST
    decided = _decision(nodes)
    agree_s = CARRIED_S + request_s * (FENCE + 1 + JOIN)
    turns = math.ceil(pages / min(parts, IN_FLIGHT)) + 3 + math.ceil(nodes / IN_FLIGHT)
    commit_s = max(request_s * turns, commit / requests_per_s)
    names_indexes = is_ranged and ranks * rows * ROW_BYTES >= INDEXED_FROM
    commit_s += ranks * (COMMIT_CPU_S + (INDEXED_ROW_CPU_S if names_indexes else ROW_CPU_S) * rows)
    of_rows = ranks * ((RANGED_BYTES if is_ranged else RANK_BYTES) + ROW_BYTES * rows)
    retention = 2 * pages + 19
    total = decided + objects + _waiting(nodes, ranks, pages, commit_s) + commit + retention
    return Coordination(
        look_requests=look if nodes > 1 else 0,
        commit_requests=commit,
        retention_requests=retention,
        job_requests=total,
        idle_requests_per_s=(2 * nodes + proposals - 1) / CARRIED_LOOK_S if nodes > 1 else 0.0,
        agree_s=max(agree_s, decided / requests_per_s) if nodes > 1 else 0.0,
        commit_s=commit_s,
        manifest_bytes=ranks * INDEXED_RANK_BYTES + rows * INDEXED_ROW_BYTES if names_indexes else of_rows,
        least_s=total / requests_per_s,
    )


def _packs(ranks: int, nodes: int, rank_bytes: float) -> int:
    """Return the packs of all nodes: several of a rank with much, one of several ranks with little."""
    if rank_bytes > TOGETHER_BYTES:
        return ranks * math.ceil(rank_bytes / PACK_BYTES)
    share = max(1, math.floor(TOGETHER_BYTES / max(rank_bytes, 1.0)))
    return nodes * math.ceil(ranks / nodes / share)


def _decision(nodes: int) -> int:
    """Return the requests of all nodes until each knows what is decided. What they propose asks nothing of the root."""
    intent = FENCE + 1 + 2  # written by the leader, and closed together with its mark
    return intent + (nodes * JOIN if nodes > 1 else 0)


def _waiting(nodes: int, ranks: int, pages: int, commit_s: float) -> int:
    """Return the requests of nodes that have written their part, while the leader commits."""
    looks = max(1, math.ceil(commit_s / (LOOK_S * max(1.0, ranks / LONG_COMMIT_WRITERS))))
    found = (nodes - 1) * (1 + 2)  # there is a MANIFEST, and its first bytes say that it is valid
    taken = LEASE + 1 if nodes > 1 else 0
    return nodes * FENCE + OUTCOME + taken + pages + found + (nodes - 1) * (looks - 1) * (FENCE + OUTCOME + LEASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """A job of one size: `persist_s` is what a persist takes in all, `wanted_s` Young's interval between two.

    `requests_per_s` is what the storage answers.
    """

    gpus: int
    costs: Coordination
    persist_s: float
    wanted_s: float
    requests_per_s: float = REQUESTS_PER_S


WALLS: Mapping[str, Callable[[AtSize], bool]] = {
    "a persist takes longer than the best interval between two": lambda at: at.persist_s > at.wanted_s,
    "agreement and commit are more than half of a persist": lambda at: 2 * at.costs.seconds > at.persist_s,
    "an idle job asks more per second than the storage answers": lambda at: (
        at.costs.idle_requests_per_s > at.requests_per_s
    ),
    "the requests of a persist take longer than the best interval": lambda at: at.costs.least_s > at.wanted_s,
    "MANIFEST is larger than 150 MB": lambda at: at.costs.manifest_bytes > MANIFEST_BYTES,
}
"""What becomes too much as a job grows."""


def walls(sizes: Sequence[AtSize]) -> list[dict[str, Any]]:
    """Return at which of the growing sizes each wall begins, None where at none."""
    return [
        {"wall": wall, "gpus": next((at.gpus for at in sizes if begins(at)), None)} for wall, begins in WALLS.items()
    ]


def plain(costs: Coordination) -> dict[str, float]:
    """Return the fields as JSON."""
    return asdict(costs) | {"seconds": costs.seconds}
