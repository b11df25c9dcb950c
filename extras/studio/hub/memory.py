"""Weights out of the memory of a job on this machine: its newest snapshot, while it trains. Torch-free.

The slots are pinned while they are read, as the persister does it: the job takes its next snapshot into another slot,
and where it has none free it skips one; training waits for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.core.shard import Shard
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, DamagedError, NoCheckpointError
from flashckpt.planning.read_plan import coverage
from flashckpt.restore.sources import MemorySource
from flashckpt.shm.inventory import NodeInventory, scan
from flashckpt.shm.job_directory import JobDirectory, jobs_in_memory
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import root_url
from flashckpt.trainer.hub.source import MODEL, RECORD, SavedWeights, held_name

_TRIES = 8


class LiveWeights(SavedWeights):
    """The model in a snapshot in this machine's memory; see WeightSource.

    Args:
        step: Of the snapshot; None: the newest.
        label: MODEL or AVERAGE.

    Raises:
        NoCheckpointError: There is no such job or snapshot here.
        ShardGapError: The ranks of this node hold a part of the model.
        ConfigError: The job is not of the trainer, or has no average.
    """

    may_be_part = True

    def __init__(self, job: str, step: int | None = None, label: str = MODEL) -> None:
        directory = _directory(job)
        identity, sources = _pinned(directory, step)
        with contextlib.ExitStack() as undo:
            for source in sources:
                undo.callback(source.close)
            super().__init__(sources, _values(sources), f"step {identity.step} in memory (job {job})", label)
            self._refuse_part()
            undo.pop_all()
        self.step = identity.step

    def _refuse_part(self) -> None:
        wanted = [
            Shard(
                fqn=held_name(name, self.label),
                dtype=self.dtype(name),
                global_shape=shape,
                offsets=(0,) * len(shape),
                lengths=shape,
            )
            for name, shape in self.shapes.items()
        ]
        _, missing = coverage(wanted, [source.manifest.table for source in self._sources])
        if missing:
            raise self._part(f"without {missing} bytes of it")


def job_of_root(root: str) -> str:
    """Return the id of the job on this machine that writes to a root.

    Raises:
        NoCheckpointError: There is none.
    """
    found, _ = jobs_in_memory()
    for directory in found:
        with contextlib.suppress(DamagedError, OSError):
            config = directory.read_config()
            if config is not None and root_url(config.root) == root_url(root):
                return directory.job
    raise NoCheckpointError(
        f"no job in this machine's memory writes to {root}",
        found=_names(),
        remedy="flashckpt status lists the jobs; without --live the newest checkpoint on storage is read",
    )


def is_in_memory(job: str) -> bool:
    """Return whether this machine's memory holds a job of that id."""
    return any(directory.job == job for directory in jobs_in_memory()[0])


def _directory(job: str) -> JobDirectory:
    for directory in jobs_in_memory()[0]:
        if directory.job == job:
            return directory
    raise NoCheckpointError(
        f"there is no job {job!r} in this machine's memory", found=_names(), remedy="flashckpt status lists the jobs"
    )


def _names() -> str:
    names = [directory.job for directory in jobs_in_memory()[0]]
    return f"jobs {', '.join(names[:8])}" if names else "no job"


def _pinned(directory: JobDirectory, step: int | None) -> tuple[SnapshotId, Sequence[MemorySource]]:
    """Return a snapshot and its slots, pinned: the newest that every rank of this node holds."""
    error: Exception | None = None
    for _ in range(_TRIES):  # a slot may be overwritten between the look and the pin
        record = directory.read_generation()
        view = scan(directory, [record] if record else [])
        wanted = [one for one in view.complete() if step in (None, one.step)]
        if not wanted:
            raise _nothing(directory, view, step)
        sources: list[MemorySource] = []
        try:
            for held in view.holders(wanted[-1]).values():
                with contextlib.closing(Segment.attach(held.path)) as segment:
                    sources.append(MemorySource(segment, held.slot, identity=wanted[-1]))
            return wanted[-1], sources
        except (DamagedError, OSError) as found:
            error = found
            for source in sources:
                source.close()
    raise NoCheckpointError(
        f"the snapshots of job {directory.job} are overwritten faster than they can be pinned",
        found=str(error).splitlines()[0],
        remedy="try again, or raise checkpoint.snapshot_every",
    )


def _nothing(directory: JobDirectory, view: NodeInventory, step: int | None) -> NoCheckpointError:
    there = ", ".join(str(one.step) for one in view.complete())
    return NoCheckpointError(
        f"job {directory.job} holds no complete snapshot in memory" + ("" if step is None else f" of step {step}"),
        found=f"steps {there}" if there else "none yet",
        remedy="wait for the next snapshot" if step is None else "choose one of these",
    )


def _values(sources: Sequence[MemorySource]) -> Mapping[str, Any]:
    """Return the values of the rank that recorded the run: one of them does."""
    for source in sources:
        if RECORD in source.manifest.values:
            return source.manifest.values
    raise ConfigError(
        "the snapshot in memory is not of this trainer",
        found="no configuration of a model in it",
        expected="a job of `python -m flashckpt.trainer`",
    )
