"""Removal of superseded segments, of an earlier generation or layout, under invariant M1."""

from __future__ import annotations

import contextlib
import logging

from flashckpt.core.lineage import Generation
from flashckpt.errors import DamagedError, FormatVersionError, JobInUseError
from flashckpt.shm.inventory import Identity, NodeInventory, SlotEntry
from flashckpt.shm.segment import Segment

_log = logging.getLogger(__name__)


def superseded(view: NodeInventory, record: Generation, committed: Identity | None) -> list[SlotEntry]:
    """Return one slot of each segment that may go: all it holds is older than what every rank is known to hold.

    Known to be held is a common snapshot of the current generation where all its ranks are on this node,
    else a committed checkpoint of the current generation. Pure.

    Args:
        view: This node's slots.
        record: The current generation; only what is older than its own first common snapshot may go.
        committed: Newest id on the root.
    """
    known = [identity for identity in view.common() if identity[0] == record.number]
    if committed is not None and committed[0] == record.number:
        known.append(committed)
    if not known:
        return []
    newest = max(known)
    by_path: dict[str, list[SlotEntry]] = {}
    for held in view.slots:
        by_path.setdefault(str(held.path), []).append(held)
    return [
        group[0]
        for group in by_path.values()
        if all(held.header.generation < record.number and held.header.identity < newest for held in group)
    ]


def retire(view: NodeInventory, record: Generation, committed: Identity | None) -> int:
    """Unlink superseded segments that no live process owns and no reader holds; return how many went."""
    count = 0
    for held in superseded(view, record, committed):
        try:
            with contextlib.closing(Segment.attach(held.path)) as segment:
                if segment.is_owned or segment.busy():
                    continue
                segment.unlink()
        except (FileNotFoundError, DamagedError, FormatVersionError, JobInUseError, OSError) as error:
            _log.debug("%s stays: %s", held.path.name, error)
            continue
        count += 1
        _log.info("retired %s: every rank holds a newer snapshot", held.path.name)
    return count
