"""What the slots of this node hold, read from their headers; the view of the daemon and the command. Takes no lock."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Pin, Segment, SlotHeader, SlotState

Identity = SnapshotId
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEntry:
    """One slot of one segment, with the header that was read."""

    path: Path
    slot: int
    rank: int
    header: SlotHeader

    @property
    def written_s(self) -> float:
        """Unix seconds of the last write to its segment; now, where that was removed after it was read."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return time.time()


@dataclass(frozen=True, kw_only=True)
class NodeInventory:
    """All slots of this node at one moment.

    Args:
        slots: Every slot that was ever written.
        lineage: Generations of the job as far as known here; snapshots they rolled back are left out.
        reserved_bytes: Shared memory of all segments.
        least_slots: Slots of the segment that has fewest; 0 without any.
    """

    slots: Sequence[SlotEntry]
    lineage: Sequence[Generation] = ()
    reserved_bytes: int = 0
    least_slots: int = 0
    _holders: dict[Identity, dict[int, SlotEntry]] = field(default_factory=dict)
    _ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by generation
    _complete: list[Identity] = field(default_factory=list)  # a turn asks for it a dozen times

    def __post_init__(self) -> None:
        ranks: dict[int, set[int]] = defaultdict(set)
        holders: dict[Identity, dict[int, SlotEntry]] = defaultdict(dict)
        for held in self.slots:
            ranks[held.header.generation].add(held.rank)
            if held.header.is_complete and not is_rolled_back(held.header.identity, self.lineage):
                holders[held.header.identity][held.rank] = held
        self._holders.update(holders)
        self._ranks.update((generation, tuple(sorted(found))) for generation, found in ranks.items())
        whole = (one for one, of_ranks in holders.items() if len(of_ranks) == len(ranks[one.generation]))
        self._complete.extend(sorted(whole))

    def newest_generation(self) -> int:
        """Return the newest generation that has begun a snapshot here; 0 if none has."""
        return max(self._ranks, default=0)

    def ranks(self, generation: int) -> tuple[int, ...]:
        """Return the ranks of this node that have begun a snapshot in `generation`, ascending."""
        return self._ranks.get(generation, ())

    def world_size(self, generation: int) -> int:
        """Return the size of the worker group of `generation`; 0 if nothing is known of it."""
        return max((held.header.world_size for held in self.slots if held.header.generation == generation), default=0)

    def complete(self) -> list[Identity]:
        """Return the snapshots that every rank of this node holds whole, ascending."""
        return list(self._complete)

    def common(self) -> list[Identity]:
        """Return the snapshots that every rank of the job holds, where all ranks are on this node, ascending."""
        return [identity for identity in self.complete() if self.is_whole(identity[0])]

    def is_whole(self, generation: int) -> bool:
        """Return whether all ranks of the worker group of `generation` are on this node."""
        return len(self.ranks(generation)) == self.world_size(generation) > 0

    def flagged(self) -> list[Identity]:
        """Return the complete snapshots that are to be persisted, ascending.

        One rank that says so is enough: it may have skipped the persist step that the others took, and
        have the next snapshot persisted instead.
        """
        return [
            identity
            for identity in self.complete()
            if any(held.header.persist for held in self._holders[identity].values())
        ]

    def suspect(self) -> list[Identity]:
        """Return the complete snapshots in which numbers became NaN or infinite on a rank of this node, ascending."""
        return [one for one in self.complete() if any(held.header.suspect for held in self._holders[one].values())]

    def holders(self, identity: Identity) -> dict[int, SlotEntry]:
        """Return rank -> slot for the ranks that hold one snapshot."""
        return self._holders.get(identity, {})

    def may_hold(self, rank: int, identity: Identity) -> bool:
        """Return whether a rank holds a snapshot, is writing it, or may still reach it in the current generation."""
        if rank in self.holders(identity):
            return True
        headers = [held.header for held in self.slots if held.rank == rank]
        if any(header.identity == identity and header.state is SlotState.WRITING for header in headers):
            return True
        newest = max((header.identity for header in headers), default=identity)
        current = max((record.number for record in self.lineage), default=0)
        return newest < identity and identity[0] >= current


def scan(directory: JobDirectory, lineage: Sequence[Generation] = ()) -> NodeInventory:
    """Read the headers of all segments in the job directory; unreadable ones are skipped and logged."""
    slots: list[SlotEntry] = []
    reserved = least = 0
    for path in directory.segments():
        with contextlib.ExitStack() as stack:
            try:
                segment = stack.enter_context(contextlib.closing(Segment.attach(path)))
                headers = segment.headers()
                reserved += path.stat().st_blocks * 512
                least = min(least or segment.spec.slots, segment.spec.slots)
            except FileNotFoundError:
                continue
            except (DamagedError, FormatVersionError, OSError) as error:
                _say_once(path.name, str(error).splitlines()[0])
                continue
            slots += [
                SlotEntry(path=path, slot=slot, rank=segment.spec.rank, header=header)
                for slot, header in enumerate(headers)
                if header.sequence
            ]
    return NodeInventory(slots=slots, lineage=lineage, reserved_bytes=reserved, least_slots=least)


def pin(held: SlotEntry) -> Pin | None:
    """Take a lease on a slot if it still holds the same snapshot."""
    try:
        with contextlib.closing(Segment.attach(held.path)) as segment:
            taken = segment.pin(held.slot)
    except (FileNotFoundError, DamagedError, OSError):
        return None
    if taken is not None and taken.header.identity != held.header.identity:
        taken.close()
        return None
    return taken


def pin_all(view: NodeInventory, identity: Identity, ranks: Sequence[int]) -> dict[int, Pin] | None:
    """Take leases on one snapshot of all `ranks`, or take none and return None if one of them is gone."""
    pins: dict[int, Pin] = {}
    for rank in ranks:
        held = view.holders(identity).get(rank)
        taken = None if held is None else pin(held)
        if taken is None:
            release(pins)
            return None
        pins[rank] = taken
    return pins


def release(pins: dict[int, Pin]) -> None:
    """Release all leases."""
    for taken in pins.values():
        taken.close()
    pins.clear()


@functools.lru_cache(
    maxsize=64
)  # the daemon polls several times a second, for days, and its log takes shared memory, too
def _say_once(name: str, why: str) -> None:
    _log.warning("%s cannot be read and is ignored: %s", name, why)
