"""Ranks without torch: segments filled by hand, so that daemons, restores and the command can be tested alone."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import Shard, layout_hash, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.acks import choose_slot
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.lease import Lease
from flashckpt.shm.segment import Segment, SegmentSpec, SlotPinned
from flashckpt.storage.factory import root_digest
from support.memory import request_of


def content(fqn: str, shape: tuple[int, ...], generation: int, step: int) -> np.ndarray:
    """Return the float32 tensor that every fake rank holds a part of: known from name and identity alone."""
    seed = [generation, step, *fqn.encode()]
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def split(fqn: str, shape: tuple[int, ...], ranks: int) -> list[Shard]:
    """Cut a tensor along dimension 0, one part per rank."""
    edges = [shape[0] * k // ranks for k in range(ranks + 1)]
    return [
        Shard(
            fqn=fqn,
            dtype="float32",
            global_shape=shape,
            offsets=(edges[k], *(0 for _ in shape[1:])),
            lengths=(edges[k + 1] - edges[k], *shape[1:]),
        )
        for k in range(ranks)
    ]


@dataclass
class FakeRank:
    """One rank's segment and what it writes into it."""

    directory: JobDirectory
    rank: int
    world: int
    shapes: dict[str, tuple[int, ...]]
    root: str
    slots: int = 3
    segment: Segment = field(init=False)
    shards: list[Shard] = field(init=False)

    def __post_init__(self) -> None:
        self.shards = [split(fqn, shape, self.world)[self.rank] for fqn, shape in self.shapes.items()]
        self.placement = place(self.shards)
        self.table = ShardTable.from_shards(self.shards, self.placement.offsets)
        layout = layout_hash(self.shards)
        path = self.directory.segment_path(self.rank, layout)
        if path.exists():
            self.segment = Segment.attach(path, writable=True)
            self.segment.own()
            return
        spec = SegmentSpec(
            job=self.directory.job,
            root_digest=root_digest(self.root),
            rank=self.rank,
            slots=self.slots,
            manifest_capacity=1 << 16,
            data_capacity=self.placement.total,
            layout_hash=layout,
        )
        self.segment = Segment.create(path, spec)

    def snapshot(
        self,
        generation: int,
        step: int,
        *,
        persist: bool,
        parent: SnapshotId | None = None,
        common: Collection[SnapshotId] = (),
    ) -> bool:
        """Write one snapshot as staging would; False if no slot is free (M1)."""
        segment = self.segment
        slot = choose_slot(segment.headers(), pinned=segment.busy(), common=common)
        if slot is None:
            return False
        request = request_of(
            generation, step, rank=self.rank, world_size=self.world, parent=parent, persist=persist
        )  # fmt: skip
        try:
            writer = segment.begin(slot, request)
        except SlotPinned:
            return False  # a persister was quicker: as staging, it takes the next snapshot
        digests = []
        for shard, at in zip(self.shards, self.placement.offsets.tolist(), strict=True):
            raw = self.bytes_of(shard, generation, step)
            writer.data[at : at + len(raw)] = raw
            digests.append(chunk_digests(raw))
        manifest = Manifest(
            job=self.directory.job,
            generation=generation,
            step=step,
            parent=parent,
            world_size=self.world,
            rank=self.rank,
            writers=list(range(self.world)),
            coordinates={},
            table=self.table,
            digests=np.concatenate(digests),
            values={"step": step, f"rng@rank{self.rank}": self.generator(generation, step)},
        )
        writer.commit(encode_manifest(manifest))
        self.directory.notify(self.rank)
        return True

    def generator(self, generation: int, step: int) -> bytes:
        """What stands for the state of this rank's generators."""
        return f"{generation} {step} {self.rank} ".encode() * 50

    @staticmethod
    def bytes_of(shard: Shard, generation: int, step: int) -> bytes:
        box = tuple(slice(a, a + n) for a, n in zip(shard.offsets, shard.lengths, strict=True))
        return content(shard.fqn, shard.global_shape, generation, step)[box].tobytes()


class FakeJob:
    """All ranks of one node (or of a whole job on one node).

    Args:
        root: Root URL or path.
        job: Job id.
        world: Ranks of the job.
        ranks: Ranks of this node; all if None.
        shapes: Tensors, split along dimension 0.
        options: Further fields of JobConfig.
    """

    def __init__(
        self,
        root: str,
        *,
        job: str = "fake",
        world: int = 2,
        ranks: Sequence[int] | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
        generation: int = 1,
        parent: SnapshotId | None = None,
        slots: int = 3,
        nodes: int = 1,
        **options: object,
    ) -> None:
        self.root, self.world = str(root), world
        self.directory = JobDirectory.open(job)
        self.shapes = shapes or {"w": (50, 40), "b": (7,)}
        self.config = JobConfig(job=job, root=self.root, world_size=world, node_count=nodes, **options)  # type: ignore[arg-type]  # names of its fields
        self.directory.write_config(self.config)
        self.generation, self.parent = generation, parent
        self.restart(generation, parent)
        self.ranks = [
            FakeRank(self.directory, rank, world, self.shapes, self.root, slots)
            for rank in (range(world) if ranks is None else ranks)
        ]
        self.live: Lease | None = self.directory.hold_live()

    def restart(self, generation: int, parent: SnapshotId | None) -> None:
        """Begin another generation with the same segments."""
        self.generation, self.parent = generation, parent
        self.record = Generation(number=generation, token=secrets.token_hex(8), parent=parent, world_size=self.world)
        self.directory.write_generation(self.record)

    def common(self) -> list[SnapshotId]:
        held = [{h.identity for h in rank.segment.headers() if h.is_complete} for rank in self.ranks]
        return sorted(set.intersection(*held))

    def step(self, step: int, *, persist: bool = False) -> bool:
        """Snapshot `step` on all ranks of the node; whether all could."""
        common = self.common()
        done = [
            rank.snapshot(self.generation, step, persist=persist, parent=self.parent, common=common)
            for rank in self.ranks
        ]
        return all(done)

    def die(self) -> None:
        """All ranks end: ownership and the live lock go, snapshots stay."""
        for rank in self.ranks:
            rank.segment.close()
        if self.live is not None:
            self.live.close()
            self.live = None
