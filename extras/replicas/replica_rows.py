"""Which rows of a snapshot go to a partner: those that too few failure domains hold without it. Pure, numpy only.

Data-parallel replicas are replicas already. Each row has a key, its name and box; the rank that a key belongs to hears who holds it,
and answers each holder with the partners it is to send the row to, so that no rank ever sees all rows of the job.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import digest
from flashckpt.core.shard import place_sizes
from flashckpt.core.shard_table import ShardTable, chunk_counts, ranges

Keys = npt.NDArray[np.uint64]
Masks = npt.NDArray[np.uint8]


def row_keys(table: ShardTable) -> Keys:
    """Return a u64 per row: equal for the same box of the same tensor, wherever it is held."""
    names = [int(digest(fqn.encode())) for fqn in table.fqns]
    starts = table.dim_start.tolist()
    boxes = np.stack((table.offsets, table.lengths), axis=1).astype("<i8")
    return np.array(
        [
            digest(struct.pack("<Q", names[name]) + boxes[starts[row] : starts[row + 1]].tobytes())
            for row, name in enumerate(table.fqn_id.tolist())
        ],
        np.uint64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMap:
    """The nodes of a job, their failure domains and partners, as all of them compute it.

    Attributes:
        node_of: Node of each rank.
        domains: Failure domain of each node.
        partners: Of each node, as `partner_map`.
        replicas: Copies that each row is to have beside the first, in as many other domains as there are.
    """

    node_of: Sequence[int]
    domains: Sequence[str]
    partners: Sequence[Sequence[int]]
    replicas: int

    def masks(self, keys: Mapping[int, Keys]) -> dict[int, Masks]:
        """Return for each rank, row by row, the partners that it sends the row to: bit k stands for partner k of its node.

        Args:
            keys: Of each rank that holds rows, their keys.
        """
        found = {rank: np.zeros(len(rows), np.uint8) for rank, rows in keys.items()}
        none = np.zeros(0, np.int64)
        ranks = np.concatenate([none, *(np.full(len(rows), rank, np.int64) for rank, rows in keys.items())])
        places = np.concatenate([none, *(np.arange(len(rows), dtype=np.int64) for rows in keys.values())])
        every = np.concatenate([*keys.values(), np.zeros(0, np.uint64)])
        order = np.lexsort((places, ranks, every))
        starts = np.flatnonzero(np.diff(every[order], prepend=every[order][:1] + np.uint64(1)))
        for group in np.split(order, starts[1:]) if len(order) else ():
            holders = sorted({int(rank) for rank in ranks[group]}, key=lambda rank: (self.node_of[rank], rank))
            row = group[ranks[group] == holders[0]][0]  # of several holders the first one sends
            found[holders[0]][int(places[row])] = self._mask([self.node_of[rank] for rank in holders])
        return found

    def _mask(self, nodes: Sequence[int]) -> int:
        held_in = {self.domains[node] for node in nodes}
        lacking, mask = self.replicas + 1 - len(held_in), 0
        candidates = [k for k, partner in enumerate(self.partners[nodes[0]]) if partner not in nodes]
        for k in sorted(candidates, key=lambda k: self.domains[self.partners[nodes[0]][k]] in held_in):
            if lacking > 0:
                mask, lacking = mask | 1 << k, lacking - 1
        return mask


def masks_of(keys: Keys, known_keys: Keys, known_masks: Masks, *, unknown: int) -> Masks:
    """Return the masks of some rows, looked up by key; `unknown` for a row that nobody has asked about."""
    if not len(known_keys):
        return np.full(len(keys), unknown, np.uint8)
    order = np.argsort(known_keys, kind="stable")
    at = np.minimum(np.searchsorted(known_keys[order], keys), len(order) - 1)
    found = known_masks[order][at]
    return np.where(known_keys[order][at] == keys, found, np.uint8(unknown)).astype(np.uint8)


def rows_for(masks: Masks, partner: int) -> npt.NDArray[np.int64]:
    """Return the rows that go to partner number `partner`."""
    return np.flatnonzero(masks & (1 << partner))


def replica_bytes(table: ShardTable, rows: npt.NDArray[np.int64]) -> int:
    """Return the bytes of the data area that keeps a replica of some rows."""
    return place_sizes(table.nbytes[rows]).total


def replica_manifest(manifest: Manifest, rows: npt.NDArray[np.int64]) -> Manifest:
    """Return the manifest of some rows of a slot, placed close together as they lie in a replica slot; all values stay."""
    table = manifest.table.take(rows)
    placed = place_sizes(table.nbytes).offsets.astype(np.int64)
    columns = {name: getattr(table, name) for name in (*_COLUMNS, *_DIMS)} | {"byte_offset": placed}
    chunks = ranges(manifest.table.first_chunk[rows], chunk_counts(manifest.table.nbytes[rows]))
    return replace(
        manifest,
        table=ShardTable(table.fqns, table.dtypes, columns),
        digests=manifest.digests[chunks],
        figures=None if manifest.figures is None else manifest.figures.take(rows),
        is_part=True,
    )


_COLUMNS = ("fqn_id", "dtype_id", "ndim", "replica", "nbytes", "first_chunk", "object_id")
_DIMS = ("global_shape", "offsets", "lengths")
