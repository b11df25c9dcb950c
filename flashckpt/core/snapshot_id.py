"""The id of a snapshot: which generation took it, and after which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_SLOTS, MAX_SLOTS = 2, 8
"""Snapshots of a rank that memory has room for."""


class SnapshotId(NamedTuple):
    """(generation, step): names a snapshot, and the checkpoint made from it, permanently. A later one is greater.

    On disk and on the wire it is a plain pair.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"step {self.step} of generation {self.generation}"

    @classmethod
    def of(cls, pair: Sequence[int]) -> SnapshotId:
        """Return the id that a record holds as a pair."""
        return cls(pair[0], pair[1])


NOTHING = SnapshotId(0, 0)
"""Before every snapshot."""
BEFORE_ALL = SnapshotId(0, -1)
"""Before `NOTHING` too: nothing is committed or given up yet."""
NEVER = SnapshotId(-1, -1)
"""The low watermark of a rank that has completed and skipped nothing yet."""


# -- What a snapshot is of, decided in one place and handed whole to its slot, its copy and its manifest. Pure -----


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """Everything that a slot and a manifest say beside tensors and values.

    Attributes:
        coordinates: Mesh coordinate of `rank` by dimension name; {} without a mesh.
        parent: The snapshot that this generation was restored from; None on a fresh start.
        persist: It is to become a checkpoint on storage.
        token: Of the generation, as it was drawn when that began.
    """

    id: SnapshotId
    job: str
    rank: int
    world_size: int
    coordinates: dict[str, int]
    parent: SnapshotId | None
    persist: bool
    token: str = ""
