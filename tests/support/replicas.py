"""Several nodes without torch whose persisters replicate to each other, on the loopback address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.service import Daemon
from flashckpt.replicate import records
from flashckpt.replicate.partners import partner_map
from flashckpt.replicate.records import ReplicaRows, ReplicaSession
from flashckpt.replicate.replica_rows import ReplicaMap, row_keys
from flashckpt.replicate.service import ReplicationService
from flashckpt.shm import private
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from support.memory_tier import FakeJob
from support.ranks import wait_for

ADDRESS = "127.0.0.1"


class Replicating:
    """Nodes of one job, one FakeJob each, and the records that ranks write at the start of a session."""

    def __init__(self, folder: Path, nodes: int, *, per_node: int = 1, replicas: int = 1, **options: Any) -> None:
        self.replicas, self.per_node, self.every, self.rate = replicas, per_node, 1, 0
        self.jobs = []
        for node in range(nodes):
            memory = folder / f"node{node}"
            memory.mkdir()
            os.environ["FLASHCKPT_SHM_DIR"] = str(memory)
            ranks = range(per_node * node, per_node * (node + 1))
            self.jobs.append(
                FakeJob(
                    str(folder / "root"), world=nodes * per_node, ranks=list(ranks), nodes=nodes, node=node,
                    replicate=replicas, replica_address=ADDRESS, **options,
                )
            )  # fmt: skip
        for job in self.jobs[1:]:
            job.record = self.jobs[0].record
            job.directory.write_generation(job.record)

    def write_session(self, *, restored: SnapshotId | None = None, domains: Sequence[str] | None = None) -> None:
        """What `restore()` writes once all persisters listen."""
        endpoints = [records.read_endpoint(job.directory) for job in self.jobs]
        names = tuple(domains or [f"host{node}" for node in range(len(self.jobs))])
        node_of = [node for node in range(len(self.jobs)) for _ in range(self.per_node)]
        ranks = {rank.rank: rank for job in self.jobs for rank in job.ranks}
        known = ReplicaMap(
            node_of=node_of, domains=names, partners=partner_map(names, self.replicas), replicas=self.replicas
        )
        keys = {number: row_keys(rank.table) for number, rank in ranks.items()}
        masks = known.masks(keys)
        for node, job in enumerate(self.jobs):
            for rank in job.ranks:
                found = ReplicaRows.of(job.record.number, keys[rank.rank], masks[rank.rank])
                private.write_record(records.rows_path(job.directory, rank.rank), found)
            session = ReplicaSession(
                generation=job.record.number,
                node=node,
                addresses=tuple(f"{ADDRESS} {one.port if one else 0}" for one in endpoints),
                domains=names,
                ranks=tuple(" ".join(str(r.rank) for r in one.ranks) for one in self.jobs),
                replicas=self.replicas,
                every=self.every,
                rate=self.rate,
                restored=restored,
                secret={"key": b"k" * 32},
            )
            private.write_record(records.session_path(job.directory), session)

    def step(self, step: int) -> bool:
        done = [job.step(step) for job in self.jobs]
        return all(done)

    def begin_again(self, parent: SnapshotId | None) -> None:
        """Another generation of the same ranks."""
        number = self.jobs[0].record.number + 1
        for job in self.jobs:
            job.restart(number, parent)
        for job in self.jobs:
            job.record = replace(job.record, token=self.jobs[0].record.token)
            job.directory.write_generation(job.record)


def turn_all(daemons: Sequence[Daemon], condition: Callable[[], object], what: str) -> None:
    """Turn all persisters until the condition holds."""

    def once() -> object:
        for daemon in daemons:
            daemon.turn()
        return condition()

    wait_for(once, what=what)


def replication(daemon: Daemon) -> ReplicationService:
    found = daemon.extensions.each["replicas"]
    assert isinstance(found, ReplicationService)
    return found


def everywhere(daemon: Daemon) -> SnapshotId | None:
    return replication(daemon).state().everywhere


def replicas_of(directory: JobDirectory) -> dict[tuple[int, SnapshotId], Manifest]:
    """Return the COMPLETE replicas that a node keeps, by rank and id; every byte is verified."""
    found = {}
    for path in directory.replica_segments():
        with contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                pinned = segment.pin(slot) if header.is_complete else None
                if pinned is not None:
                    with pinned:
                        found[segment.spec.rank, header.identity] = verified(pinned)
    return found


def verified(pinned: object) -> Manifest:
    from flashckpt.native import digest_ranges
    from flashckpt.replicate.slots import chunk_ranges

    manifest: Manifest = pinned.manifest()  # type: ignore[attr-defined]
    starts, sizes = chunk_ranges(manifest)
    assert np.array_equal(digest_ranges(pinned.data, starts, sizes), manifest.digests)  # type: ignore[attr-defined]
    return manifest


@contextlib.contextmanager
def memory_of(folder: Path) -> Iterator[None]:
    before = os.environ["FLASHCKPT_SHM_DIR"]
    os.environ["FLASHCKPT_SHM_DIR"] = str(folder)
    try:
        yield
    finally:
        os.environ["FLASHCKPT_SHM_DIR"] = before
