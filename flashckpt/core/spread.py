"""The MANIFEST of a large job: which boxes its ranks hold, and which indexes say where these lie. Pure.

A MANIFEST with a row for each box has 1.5 GB at 16,384 ranks, and of that a rank needs what its own node wrote. So
the rows, their digests and the objects stay in the indexes of the nodes. MANIFEST has their outline (`outline`), and
for each index a digest of what its rows hold. A node that writes late may write its index once more, with packs that are
cut or compressed otherwise: the bytes of the tensors are the same, and so is that digest. All indexes merged are what the
other kind of MANIFEST holds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgpack
import numpy as np

from flashckpt.core.manifest import Manifest, body_of, fields_of, frame_of, head_from, header_of
from flashckpt.core.outline import Outline, decode_outline, encode_outline
from flashckpt.core.records import digest_of
from flashckpt.core.schema import (
    KEY,
    MAGIC,
    MAJOR_WITH_INDEXES,
    ManifestHeader,
    broken_schema,
    encode_manifest_header,
)
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId

_MAJOR = struct.Struct("<H")
_INDEXES = {"first": "<u4", "last": "<u4", "digest": "<u8"}


class IndexEntry(NamedTuple):
    """One index that a MANIFEST names: its ranks, and the digest of what they hold, wherever it lies."""

    first: int
    last: int
    digest: int

    @classmethod
    def of(cls, index: Manifest) -> IndexEntry:
        """Return the entry of an index, read with its digests."""
        ranks = index.covers or (index.rank,)
        digests = np.ascontiguousarray(index.digests, "<u8").tobytes()
        return cls(ranks[0], ranks[-1], digest_of(digests, index.outline))


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """A MANIFEST whose rows are in the indexes that it names.

    Attributes:
        head: What it says of the snapshot itself, without rows: `rank` is -1. Its objects are those of values in ranges.
        outline: Which boxes the ranks hold.
        indexes: That together are those of all writers, by rank; two may have a rank in common.
    """

    head: Manifest
    outline: Outline
    indexes: Sequence[IndexEntry]

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return self.head.identity

    @property
    def header(self) -> ManifestHeader:
        """What a listing shows of it."""
        one = self.outline
        return replace(header_of(self.head), tensors=len(one.fqns), nbytes=one.nbytes, suspects=len(one.suspects))

    def near(self, wanted: ShardTable) -> list[IndexEntry]:
        """Return the indexes of ranks that hold an element of some row of `wanted`."""
        return self.of_ranks(self.outline.holders(wanted).tolist())

    def of_ranks(self, ranks: Sequence[int]) -> list[IndexEntry]:
        """Return the indexes of some ranks: of each rank the first one that has it."""
        chosen = set(self._index_of[np.searchsorted(self.outline.ranks, ranks)].tolist()) if len(ranks) else set()
        return [self.indexes[number] for number in sorted(chosen)]

    @cached_property
    def _index_of(self) -> np.ndarray:
        """The number of the index of each rank of the outline."""
        firsts = np.array([one.first for one in self.indexes], np.int64)
        lasts = np.array([one.last for one in self.indexes], np.int64)
        found = np.full(len(self.outline.ranks), -1, np.int64)
        for number in reversed(range(len(firsts))):
            low, high = np.searchsorted(self.outline.ranks, (firsts[number], lasts[number] + 1))
            found[low:high] = number
        return found

    def check(self) -> None:
        """Raise ValueError, TypeError or KeyError where it contradicts itself."""
        self.outline.check()
        if self.head.rank >= 0:
            raise ValueError("the MANIFEST of one rank")
        if (self._index_of < 0).any():
            raise ValueError("a rank that is in no index")
        if not self.outline.is_tiling():
            raise ValueError("the boxes of a tensor do not tile it")


def is_spread(raw: Any) -> bool:
    """Return whether these first bytes are of a MANIFEST whose rows are in indexes."""
    start = bytes(raw[:10])
    return len(start) == 10 and start[:8] == MAGIC and _MAJOR.unpack(start[8:]) == (MAJOR_WITH_INDEXES,)


def encode_spread(spread: Spread) -> bytes:
    """Return it as bytes, header and digest included."""
    columns = zip(*spread.indexes, strict=True)
    indexes = {n: np.array(c, f).tobytes() for (n, f), c in zip(_INDEXES.items(), columns, strict=True)}
    head = spread.head
    body = {KEY: encode_manifest_header(spread.header)} | fields_of(head)
    body |= {"objects": list(head.objects), "ranged": head.ranged.packed()}
    body |= {"outline": msgpack.packb(encode_outline(spread.outline)), "indexes": indexes}
    return frame_of(MAJOR_WITH_INDEXES, 0, msgpack.packb(body))


def decode_spread(buf: Any) -> Spread:
    """Return the MANIFEST in `buf`; errors as `decode_manifest`."""
    body = body_of(buf, majors=(MAJOR_WITH_INDEXES,))
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
        columns = [np.frombuffer(fields["indexes"][name], form).tolist() for name, form in _INDEXES.items()]
        spread = Spread(
            head=head_from(fields),
            outline=decode_outline(msgpack.unpackb(fields["outline"])),
            indexes=[IndexEntry(*one) for one in zip(*columns, strict=True)],
        )
        spread.check()
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        broken_schema(error)
    return spread
