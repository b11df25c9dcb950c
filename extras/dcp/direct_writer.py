"""A checkpoint written without a slot: rows are read while their pack is written. For dcp and `import`. Torch-free.

The write order is that of a persist: packs, this writer's index, MANIFEST by one conditional write. Only the
rows of one part are in memory at a time; digests are taken from the bytes on their way into the pack.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flashckpt.checkpoint.catalog import newest_checkpoint
from flashckpt.checkpoint.root_records import check_fence, claim_generation, newest_generation, prefix_of
from flashckpt.checkpoint.writer import commit
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import SMALL_BYTES, Shard, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import DamagedError, FormatVersionError, JobInUseError
from flashckpt.faults import crash_point
from flashckpt.native import digest_ranges
from flashckpt.planning.packs import PACK_BYTES, index_name, pack_name
from flashckpt.shm.job_directory import jobs_in_memory
from flashckpt.storage.factory import root_url
from flashckpt.storage.store import PART_BYTES, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedRow:
    """One box of a tensor and where its bytes come from.

    Attributes:
        read: `read(start, stop)` gives those bytes of the row-major box; called in order from 0 on, `start` a
            multiple of PART_BYTES, and from 0 again where an upload has to be repeated.
    """

    shard: Shard
    read: Callable[[int, int], memoryview]


def held_while_read(load: Callable[[], memoryview]) -> Callable[[int, int], memoryview]:
    """Return a `StreamedRow.read` that loads the whole box at its first byte and lets go of it after its last."""
    held: list[memoryview] = []

    def read(start: int, stop: int) -> memoryview:
        if start == 0 or not held:
            held[:] = [load()]
        view = held[0][start:stop]
        if stop == len(held[0]):
            held.clear()
        return view

    return read


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSlot:
    """The destination of one save: chosen once by the coordinator, the same on all writers.

    Attributes:
        claim: The generation that writes; it fences older writers.
        world_size: Number of writers; their ranks are 0 to world_size - 1.
    """

    claim: Generation
    step: int
    world_size: int

    @property
    def prefix(self) -> str:
        """Folder of the checkpoint."""
        return prefix_of(self.claim.number, self.step)


_claims: dict[str, tuple[Generation, int]] = {}
"""This process's generation on each root, and the last step saved in it."""


def begin(store: Store, step: int | None, *, world_size: int) -> CheckpointSlot:
    """Return where to save: within one generation steps only grow, and no folder is used twice.

    A process keeps its generation while the steps of its saves on a root grow; a step at or below the last one
    (after going back to an older checkpoint, or the same step again) begins the next generation, so that the
    newest save is always the newest checkpoint and nothing is overwritten.

    Args:
        store: The root, writable.
        step: The step, or None for the one after the newest checkpoint's (1 on an empty root).
        world_size: Number of writers.

    Raises:
        JobInUseError: A job on this machine trains on this root; its daemon would be fenced off.
        FencedError: Another generation has claimed the root since this process saved to it.
        RootError, StoreError: The root cannot be used.
    """
    refuse_running_job(store.url)
    if step is None:
        newest = newest_checkpoint(store)
        step = 1 if newest is None else newest.step + 1
    claim, last = _claims.get(store.url, (None, 0))
    if claim is not None:
        check_fence(store, claim)
    if claim is None or step <= last or claim.world_size != world_size:
        claim = _claim(store, world_size)
    _claims[store.url] = claim, step
    return CheckpointSlot(claim=claim, step=step, world_size=world_size)


def _claim(store: Store, world_size: int) -> Generation:
    claim = Generation(number=1, token=secrets.token_hex(8), world_size=world_size, created_s=time.time())
    while True:
        claim = replace(claim, number=newest_generation(store) + 1)
        if claim_generation(store, claim):
            return claim


def refuse_running_job(url: str) -> None:
    """Raise JobInUseError where a job of this machine, or its daemon, writes to a root."""
    for directory in jobs_in_memory()[0]:
        try:
            config = directory.read_config()
        except (DamagedError, FormatVersionError):
            continue
        if config is not None and root_url(config.root) == root_url(url) and directory.daemon_alive():
            raise JobInUseError(
                f"{url} is the root of a job that is running on this machine",
                found=f"job {config.job}, its daemon is alive",
                state="Nothing was written: a save from here would stop that job from writing to its root.",
                remedy="save to another root, or wait until the job and its daemon have ended (flashckpt status)",
            )


def write(
    store: Store, place_: CheckpointSlot, rank: int, rows: Sequence[StreamedRow], values: dict[str, object], *, job: str
) -> Manifest:
    """Write the packs and the index of one writer; return the index. Nothing is visible before `finish`.

    Args:
        store: The root.
        place_: From `begin`.
        rank: This writer's rank.
        rows: Boxes that this writer writes; no other writer writes the same ones.
        values: Non-tensor state, msgpack types.
        job: The program that wrote it ("dcp", "import").

    Raises:
        UnsupportedStateError: A value cannot be held; names its key. Before anything is written.
        RootError, StoreError: The storage failed.
    """
    table = ShardTable.from_shards([], [])
    claim = place_.claim
    index = Manifest(
        job=job,
        generation=claim.number,
        step=place_.step,
        parent=claim.parent,
        world_size=place_.world_size,
        rank=rank,
        writers=list(range(place_.world_size)),
        coordinates={},
        table=table,
        digests=np.zeros(0, np.uint64),
        values=values,
    )
    encode_manifest(index)
    written = _write_packs(store, place_.prefix, rank, rows)
    index = replace(index, table=written[0], digests=written[1], objects=written[2])
    crash_point("save.before-index")
    store.put(f"{place_.prefix}/{index_name(rank)}", encode_manifest(index))
    return index


def finish(store: Store, place_: CheckpointSlot) -> None:
    """Make the checkpoint exist once all writers have written. Called by the coordinator alone.

    Raises:
        FencedError: A newer generation has claimed the root meanwhile.
        PersistError, DamagedError, ShardGapError: As `persist.commit`.
    """
    check_fence(store, place_.claim)
    crash_point("save.before-commit")
    commit(store, place_.prefix, range(place_.world_size))


def _write_packs(
    store: Store, prefix: str, rank: int, rows: Sequence[StreamedRow]
) -> tuple[ShardTable, np.ndarray, list[str]]:
    ordered = sorted(rows, key=lambda row: row.shard.nbytes <= SMALL_BYTES)  # large ones first, as `place` lays them
    shards: list[Shard] = []
    offsets: list[int] = []
    objects: list[int] = []
    names: list[str] = []
    digests: list[np.ndarray] = []
    for number, group in enumerate(_groups(ordered)):
        placement = place([row.shard for row in group])
        stream = _PackStream(group, placement.offsets, placement.total)
        if placement.total:
            names.append(pack_name(rank, number))
            store.put_object(f"{prefix}/{names[-1]}", stream, placement.total)
        shards += [row.shard for row in group]
        offsets += placement.offsets.tolist()
        objects += [number] * len(group)
        digests += stream.digests
    table = ShardTable.from_shards(shards, offsets, object_ids=np.array(objects, np.int32))
    return table, np.concatenate(digests) if digests else np.zeros(0, np.uint64), names


def _groups(rows: Sequence[StreamedRow]) -> Iterator[list[StreamedRow]]:
    group: list[StreamedRow] = []
    size = 0
    for row in rows:
        if group and size and size + row.shard.nbytes > PACK_BYTES:
            yield group
            group, size = [], 0
        group.append(row)
        size += row.shard.nbytes
    if group:
        yield group


class _PackStream:
    """The bytes of one pack, at most PART_BYTES at a time; starts over on each `iter()`.

    Attributes:
        digests: Per row, those of the chunks that the last pass has read.
    """

    def __init__(self, rows: Sequence[StreamedRow], offsets: np.ndarray, total: int) -> None:
        self._rows, self._offsets, self._total = rows, offsets, total
        self.digests = [np.zeros(0, np.uint64) for _ in rows]

    def __iter__(self) -> Iterator[memoryview]:
        small, at = bytearray(), 0
        for number in np.argsort(self._offsets, kind="stable").tolist():
            row, start = self._rows[number], int(self._offsets[number])
            nbytes = row.shard.nbytes
            if not nbytes:
                continue
            small += bytes(start - at)
            at = start + nbytes
            if nbytes > SMALL_BYTES:
                if small:
                    yield memoryview(bytes(small))
                    small.clear()
                yield from self._parts(number, row, nbytes)
            else:
                view = row.read(0, nbytes)
                self.digests[number] = chunk_digests(view)
                small += view
                if len(small) >= PART_BYTES:
                    yield memoryview(bytes(small))
                    small.clear()
        yield memoryview(bytes(small) + bytes(self._total - at))

    def _parts(self, number: int, row: StreamedRow, nbytes: int) -> Iterator[memoryview]:
        found = []
        for start in range(0, nbytes, PART_BYTES):
            view = row.read(start, min(start + PART_BYTES, nbytes))
            found.append(digest_ranges(view, [0], [view.nbytes]))
            yield view
            crash_point("save.during-pack")
        self.digests[number] = np.concatenate(found)
