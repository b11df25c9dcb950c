"""One rank of `flashckpt bench job`: real tensors, the product's own staging, slots and restore.

Run as `python -m flashckpt.bench.rank` by `flashckpt.bench.job`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt.bench.data import fill as fill_data
from flashckpt.bench.layouts import shards_of
from flashckpt.bench.measure import cpu_seconds, median
from flashckpt.bench.timed_store import timed
from flashckpt.bench.worker import Command, serve
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.core.digest import digest
from flashckpt.core.shard import Shard
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.snapshot_request import SnapshotRequest
from flashckpt.core.superblock import SegmentSpec
from flashckpt.errors import DamagedError
from flashckpt.planning.slot_policy import choose_slot
from flashckpt.restore.executor import RestoreCounts, Target, execute_reads
from flashckpt.restore.sources import MemorySource, StorageSource
from flashckpt.shm.segment import Segment
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.stager import Snapshot, Stager
from flashckpt.state.captured import Captured
from flashckpt.state.placement import Box
from flashckpt.state.state_layout import StateLayout
from flashckpt.state.structure import Entry, Structure, structure_of
from flashckpt.storage.factory import open_store

GENERATION = 1
_SQUARE = 192  # rows of the matrices that stand for forward and backward: milliseconds each


class Rank:
    """The state of one rank and everything that is done to it.

    Args:
        config: `shards` arguments, segment path, slots, storage URL and options.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.config, self.rank = config, int(config["rank"])
        self.shards = sorted(shards_of(config["table"], self.rank), key=lambda s: (s.fqn, s.offsets))
        self.tensors = [_tensor(shard) for shard in self.shards]
        self.plan = CopyPlan.of(StateLayout.of(_structure(self.shards, self.tensors)))
        self.segment: Segment | None = None
        self.stager = Stager(lambda _: None, lambda _, __: None)
        self.targets: list[Target] = []
        self._square = torch.randn(_SQUARE, _SQUARE)
        self._alone_s = 0.0

    def commands(self) -> dict[str, Command]:
        """Return what the parent may order."""
        names = ("ready", "reserve", "alone", "snapshot", "work", "restore_memory", "restore_storage", "verify", "peer")
        return {name: getattr(self, name) for name in names}

    def ready(self) -> Mapping[str, Any]:
        """Return the sizes of this rank's state."""
        return {
            "held_bytes": sum(shard.nbytes for shard in self.shards),
            "persisted_bytes": sum(shard.nbytes for shard in self.shards if shard.replica == 0),
            "tensors": len(self.shards),
        }

    def reserve(self) -> Mapping[str, Any]:
        """Make the segment and touch its pages; the restore targets are touched as well."""
        plan, spec_of = self.plan, self.config
        spec = SegmentSpec(
            job=spec_of["job"],
            root_digest=0,
            rank=self.rank,
            slots=spec_of["slots"],
            manifest_capacity=plan.layout.need(0).manifest_bytes,
            data_capacity=plan.layout.total,
            layout_hash=plan.layout.signature,
        )
        self.segment = Segment.create(spec_of["segment"], spec)
        started = time.perf_counter()
        self.segment.reserve()
        taken = time.perf_counter() - started
        self.targets = [Target(shard=shard, buffer=memoryview(bytearray(shard.nbytes))) for shard in self.shards]
        return {"seconds": taken, "bytes": spec.nbytes}

    def alone(self, seconds: float) -> Mapping[str, Any]:
        """Compute, and copy the state, with nothing beside it; later figures are compared with these."""
        loops = self._loops(lambda spent: spent >= seconds)
        self._alone_s = median(loops)
        started = time.perf_counter()
        for tensor, target in zip(self.tensors, self.targets, strict=True):
            np.copyto(np.frombuffer(target.buffer, np.uint8), _bytes(tensor))
        return {"loop_s": self._alone_s, "memcpy_s": time.perf_counter() - started}

    def snapshot(self, step: int, common: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """Take one snapshot as `Checkpointer.step` does, computing beside the copy."""
        assert self.segment is not None, "reserve first"
        self._change()
        known = {SnapshotId(int(g), int(s)) for g, s in common}
        slot = choose_slot(self.segment.headers(), pinned=self.segment.busy(), common=known)
        assert slot is not None, "a free slot: the parent lets every persist end"
        request = SnapshotRequest(
            id=SnapshotId(GENERATION, step),
            job=self.config["job"],
            rank=self.rank,
            world_size=self.config["ranks"],
            coordinates={},
            parent=None,
            persist=True,
        )
        cpu, started = cpu_seconds(), time.perf_counter()
        writer = self.segment.begin(slot, request)
        taken = self.stager.start(self.plan, writer, Captured(values={"step": step}, tensors={}), request)
        call_s = time.perf_counter() - started
        loops = self._loops(lambda _: taken.done.is_set())
        self.stager.finish()
        return self._snapshot_report(taken, call_s, loops, cpu_seconds() - cpu)

    def _snapshot_report(
        self, taken: Snapshot, call_s: float, loops: Sequence[float], cpu_s: float
    ) -> Mapping[str, Any]:
        if taken.error is not None:
            raise taken.error
        beside = self._lost(loops)
        return {
            "call_s": call_s,
            "beside_s": beside,
            "restorable_s": taken.done_s - taken.started_s,
            "copied_s": taken.copied_s - taken.started_s,
            "copy_cpu_s": taken.cpu_s,
            "cpu_s": cpu_s,
        }

    def work(self, until: str) -> Mapping[str, Any]:
        """Compute until the file `until` exists; return the loop time and how much longer it is than alone."""
        stop = Path(until)
        loops = self._loops(lambda _: stop.exists())
        return {"loop_s": median(loops), "uplift": median(loops) / self._alone_s - 1 if self._alone_s else 0.0}

    def restore_memory(self, step: int) -> Mapping[str, Any]:
        """Attach anew, as a restarted rank does, and fill the targets from the slot."""
        self._blank()
        started = time.perf_counter()
        segment = Segment.attach(self.config["segment"])
        try:
            slots = [i for i, h in enumerate(segment.headers()) if h.is_complete and h.identity == (GENERATION, step)]
            source = MemorySource(segment, slots[0], identity=SnapshotId(GENERATION, step))
            mapped_s = time.perf_counter() - started
            try:
                counts = execute_reads(self.targets, [source])
            finally:
                source.close()
        finally:
            segment.close()
        return _restored(counts, time.perf_counter() - started) | {"map_s": mapped_s}

    def restore_storage(self, prefix: str) -> Mapping[str, Any]:
        """Read the manifest and fill the targets from storage, as a rank on a new node does."""
        self._blank()
        store, times = timed(open_store(self.config["url"], **self.config["options"]))
        cpu, started = cpu_seconds(), time.perf_counter()
        store.folders()
        listed = time.perf_counter()
        manifest = read_manifest(store, prefix)
        known = time.perf_counter()
        counts = execute_reads(self.targets, [StorageSource(store, manifest, prefix)])
        taken = _restored(counts, time.perf_counter() - started)
        store.close()
        phases = {"list_s": listed - started, "manifest_s": known - listed, "cpu_s": cpu_seconds() - cpu}
        return taken | phases | {"parts_s": times.read_s}

    def verify(self) -> Mapping[str, Any]:
        """Compare what was restored with the live tensors, bit for bit.

        Raises:
            DamagedError: They differ: a bug of the product, which no figure may hide.
        """
        for shard, tensor, target in zip(self.shards, self.tensors, self.targets, strict=True):
            if not np.array_equal(_bytes(tensor), np.frombuffer(target.buffer, np.uint8)):
                raise DamagedError(f"rank {self.rank} restored other bytes than it held: {shard.fqn}")
        return {}

    def peer(self, name: str, directory: str) -> Mapping[str, Any]:
        """Write the state with another library, computing beside it where it lets us."""
        from flashckpt.bench import peers

        def beside(is_done: Callable[[], bool]) -> float:
            return self._lost(self._loops(lambda _: is_done()))

        return peers.write(self._state_dict(), rank=self.rank, name=name, directory=directory, beside=beside)

    def _lost(self, loops: Sequence[float]) -> float:
        """Return by how many seconds loops took longer than they take alone."""
        return sum(max(0.0, loop - self._alone_s) for loop in loops) if self._alone_s else 0.0

    def _state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{shard.fqn}@{shard.offsets}": t for shard, t in zip(self.shards, self.tensors, strict=True)}

    def _blank(self) -> None:
        for target in self.targets:
            np.frombuffer(target.buffer, np.uint8)[:] = 0
        gc.collect()

    def _change(self) -> None:
        """Change the low byte of one value per page, so that no storage can recognise what it holds already."""
        for tensor in self.tensors:
            _bytes(tensor)[::4096] += 1

    def _loops(self, is_over: Any) -> list[float]:
        """Multiply matrices until `is_over(seconds so far)`; return the seconds of each multiplication."""
        loops, started = [], time.perf_counter()
        while True:
            begin = time.perf_counter()
            torch.mm(self._square, self._square)
            now = time.perf_counter()
            loops.append(now - begin)
            if is_over(now - started):
                return loops


def _restored(counts: RestoreCounts, wall_s: float) -> dict[str, Any]:
    phases = {name: getattr(counts, name) for name in ("plan_s", "read_s", "verify_s", "copy_s", "threads")}
    return {"wall_s": wall_s, **phases, "bytes": sum(counts.needed_bytes.values())}


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).flatten().numpy()


def _tensor(shard: Shard) -> torch.Tensor:
    """Return a tensor of the shard's local box with realistic bits, the same on every rank that holds that box."""
    tensor = torch.empty(shard.lengths, dtype=getattr(torch, shard.dtype))
    fill_data(memoryview(_bytes(tensor)), shard.dtype, digest(f"{shard.fqn}{shard.offsets}".encode()))
    return tensor


def _structure(shards: Sequence[Shard], tensors: Sequence[torch.Tensor]) -> Structure:
    entries = []
    for shard, tensor in zip(shards, tensors, strict=True):
        box = Box(
            global_shape=shard.global_shape,
            offsets=shard.offsets,
            lengths=shard.lengths,
            starts=tuple(0 for _ in shard.lengths),
            replica=shard.replica,
        )
        entries.append(Entry(fqn=shard.fqn, tensor=tensor, dtype=shard.dtype, boxes=(box,), replicas=1, fenced=True))
    return structure_of(entries)


if __name__ == "__main__":
    serve(lambda config: Rank(config).commands())
