"""The choice of the restore point: one pure function of what all ranks published, so that all choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.checkpoint.root_view import RootView
from flashckpt.core.lineage import SlotRecord, common, is_abandoned
from flashckpt.errors import NoCheckpointError
from flashckpt.memory.job import GenerationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one rank publishes: the COMPLETE slots of its node, its node's lineage, its need of memory.

    Attributes:
        node: Name of the node: equal for ranks that share a job directory.
        slots: (rank, generation, step, world size, layout hash, parent) of each COMPLETE slot.
        generation: (generation, parent) of the node's generation record, or None.
        restart: Restarts in the life of the rank's agent; above 0 the memory tier is current.
        need_bytes: Bytes of one slot of this rank that are not reserved yet.
        free_bytes: Room on the node before anybody reserves.
    """

    node: str
    slots: tuple[tuple[int, int, int, int, int, tuple[int, int] | None], ...] = ()
    generation: tuple[int, tuple[int, int] | None] | None = None
    restart: int = 0
    need_bytes: int = 0
    free_bytes: int = 0

    def pack(self) -> list[Any]:
        """Return it as msgpack types."""
        return [self.node, list(self.slots), self.generation, self.restart, self.need_bytes, self.free_bytes]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Inventory:
        """Return what `pack` packed."""
        node, slots, generation, restart, need, free = packed
        return cls(
            node=node,
            slots=tuple((r, g, s, w, h, _pair(p)) for r, g, s, w, h, p in slots),
            generation=None if generation is None else (generation[0], _pair(generation[1])),
            restart=restart,
            need_bytes=need,
            free_bytes=free,
        )


def _pair(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What may be restored, newest first, and the number of the life that begins.

    Attributes:
        identities: (generation, step), each with whether memory holds it whole and the root has it committed.
        life: Generation number to claim: 1 + the largest seen anywhere.
        lineage: Every generation known, for `is_abandoned`.
    """

    identities: tuple[tuple[tuple[int, int], bool, bool], ...]
    life: int
    lineage: tuple[GenerationRecord, ...]


def local_world(inventories: Sequence[Inventory], rank: int) -> list[int]:
    """Return the global ranks that share the node of `rank`, ascending."""
    return [r for r, i in enumerate(inventories) if i.node == inventories[rank].node]


def memory_is_current(inventories: Sequence[Inventory]) -> bool:
    """Tell whether this is a restart under a living agent: then storage holds nothing newer than memory."""
    return any(i.restart > 0 for i in inventories)


def candidates(
    inventories: Sequence[Inventory],
    root: RootView,
    *,
    step: int | None = None,
    generation: int | None = None,
) -> Candidates:
    """Return everything that could be restored, newest first; the same on every rank.

    Args:
        inventories: Of all ranks, in rank order.
        root: What the root knows; empty where it was not asked.
        step: Only this step.
        generation: Only this generation.
    """
    nodes = sorted({i.node for i in inventories})
    records = [
        SlotRecord(
            rank=r, node=nodes.index(i.node), generation=g, step=s, world_size=w, layout_hash=h, parent=p
        )
        for i in inventories
        for r, g, s, w, h, p in i.slots
    ]  # fmt: skip
    known: dict[int, tuple[int, int] | None] = {}
    for g, parent in [
        *root.claims,
        *(i.generation for i in inventories if i.generation is not None),
        *((r.generation, r.parent) for r in records),
    ]:
        known[g] = parent if parent is not None else known.get(g)
    lineage = tuple(GenerationRecord(generation=g, parent=p) for g, p in sorted(known.items()))
    in_memory, on_root = set(common(records)), set(root.committed)
    wanted = [
        i
        for i in sorted(in_memory | on_root, reverse=True)
        if step in (None, i[1]) and generation in (None, i[0])
    ]  # fmt: skip
    if step is None and generation is None:
        wanted = [i for i in wanted if not is_abandoned(i, lineage)]
    highest = max([*known, *(g for g, _ in on_root)], default=0)
    return Candidates(
        identities=tuple((i, i in in_memory, i in on_root) for i in wanted), life=highest + 1, lineage=lineage
    )


def nothing_there(step: int | None, generation: int | None, found: Candidates | None, root: str) -> NoCheckpointError:
    """Return the error for an explicit wish that nothing answers."""
    wish = f"step {step}" if generation is None else f"step {step} of generation {generation}"
    return NoCheckpointError(
        f"no snapshot or checkpoint of {wish} exists",
        found=", ".join(f"step {s} of generation {g}" for (g, s), _, _ in found.identities[:8]) if found else "none",
        state="Nothing was restored.",
        remedy=f"flashckpt ls {root}",
    )
