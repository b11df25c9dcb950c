"""What the nodes of a job ask of the shared storage to agree on a checkpoint, to commit it, and to remove an old one. Pure.

The counts are those of the functions that do it: tests compare the two over a store that counts. What they cannot know is
how long a request takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.planning.packs import PACK_BYTES

KEYS_PER_REQUEST = 1000
"""Of a listing or a batch delete."""
IN_FLIGHT = 64
"""Indexes or proposals that are read at a time."""
LOOK_S = 0.5
"""Seconds between two looks at the root while something is to be persisted."""
LOOKS = 3
"""Looks from a snapshot to its writing: each node proposes, sees that all have, and hears of the decision."""
IDLE_LOOK_S = 8.0
"""Seconds between two looks while nothing is."""
COMMIT_CPU_S = 0.4e-3
"""Seconds of Python per rank in a commit (benchmarks/results/scale.json)."""
RANK_BYTES, ROW_BYTES = 10_200, 100
"""Bytes of MANIFEST per rank, nearly all of them random generators, and per tensor of a rank."""
REQUESTS_PER_S = 3500.0
"""What one prefix of S3 takes before it answers 503: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html"""
MANIFEST_BYTES = 150e6
"""More than every node should read and decode to restore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordination:
    """Requests and seconds of one persist, besides its data.

    Attributes:
        look_requests: Of one node that looks at the root while all nodes have proposed something new.
        commit_requests: Of the node that commits.
        retention_requests: To remove one old checkpoint, beside training.
        job_requests: Of all nodes for one persist, first to last.
        idle_requests_per_s: Of all nodes while nothing is to be persisted.
        agree_s: From the snapshot until all nodes write it.
        commit_s: From the last pack to the commit.
        manifest_bytes: Of MANIFEST.
    """

    look_requests: int
    commit_requests: int
    retention_requests: int
    job_requests: int
    idle_requests_per_s: float
    agree_s: float
    commit_s: float
    manifest_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds that it adds to a persist."""
        return self.agree_s + self.commit_s


def coordination(*, ranks: int, nodes: int, checkpoint_bytes: float, rows: int, request_s: float) -> Coordination:
    """Return the costs of one persist.

    Args:
        ranks: Of the job.
        nodes: Of the job; one alone has nobody to agree with.
        checkpoint_bytes: Of the data of a checkpoint, all ranks together.
        rows: Tensors of a rank.
        request_s: Seconds that a small request takes.
    """
    objects = ranks * (max(1, math.ceil(checkpoint_bytes / ranks / PACK_BYTES)) + 1)  # packs and an index
    pages, proposals = (max(1, math.ceil(count / KEYS_PER_REQUEST)) for count in (objects, nodes))
    look = 2 * proposals + nodes
    commit = pages + ranks + 3  # is there a MANIFEST? then the sizes, the indexes, MANIFEST, LATEST
    agree_s = LOOKS * (LOOK_S + request_s * (2 * proposals + math.ceil(nodes / IN_FLIGHT)))
    return Coordination(
        look_requests=look if nodes > 1 else 0,
        commit_requests=commit,
        retention_requests=2 * pages + 17,
        job_requests=commit + (nodes * (LOOKS * 2 * proposals + 2 * nodes) if nodes > 1 else 0),
        idle_requests_per_s=nodes * 2 * proposals / IDLE_LOOK_S if nodes > 1 else 0.0,
        agree_s=agree_s if nodes > 1 else 0.0,
        commit_s=request_s * (pages + 3 + math.ceil(ranks / IN_FLIGHT)) + COMMIT_CPU_S * ranks,
        manifest_bytes=ranks * (RANK_BYTES + ROW_BYTES * rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """A job of one size: `persist_s` is what a persist takes in all, `wanted_s` Young's interval between two."""

    gpus: int
    costs: Coordination
    persist_s: float
    wanted_s: float


WALLS: Mapping[str, Callable[[AtSize], bool]] = {
    "a persist takes longer than the best interval between two": lambda at: at.persist_s > at.wanted_s,
    "agreement and commit are more than half of a persist": lambda at: 2 * at.costs.seconds > at.persist_s,
    "an idle job asks more per second than a prefix of S3 takes": lambda at: at.costs.idle_requests_per_s > REQUESTS_PER_S,
    "a persist asks more per second than that": lambda at: at.costs.job_requests > REQUESTS_PER_S * max(at.costs.seconds, 1.0),
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
