"""What a snapshot is of, decided in one place and handed whole to its slot, its copy and its manifest. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """Everything that a slot and a manifest say beside tensors and values.

    Attributes:
        id: Generation and step.
        job: Job id.
        rank: Global rank.
        world_size: Ranks of the worker group.
        coordinates: Mesh coordinate of `rank` by dimension name; {} without a mesh.
        parent: The snapshot that this generation was restored from; None on a fresh start.
        persist: It is to become a checkpoint on storage.
    """

    id: SnapshotId
    job: str
    rank: int
    world_size: int
    coordinates: dict[str, int]
    parent: SnapshotId | None
    persist: bool
