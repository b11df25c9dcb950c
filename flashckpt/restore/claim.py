"""The beginning of a generation: its number claimed, its lineage written, abandoned slots emptied."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt import collectives, errors
from flashckpt.checkpoint import generations, root_summary
from flashckpt.core.lineage import BEGINNING, Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError, RootError
from flashckpt.faults import crash_point
from flashckpt.logs import guarded
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.state.placement import World

_log = guarded(logging.getLogger("flashckpt"))


def claim(
    number: int, parent: SnapshotId | None, *, world: World, root: str | None, options: Mapping[str, Any]
) -> Generation:
    """Return the record of the generation that begins. Collective; only rank 0 talks to the root.

    Args:
        number: 1 + the largest generation seen anywhere; a higher one is taken if it is claimed already.
        parent: What was restored; None on a fresh start, BEGINNING on one that was asked for.
        world: The ranks.
        root: Where to claim it now; None leaves that to the daemon, before it persists anything.
        options: Storage options.

    Raises:
        RootError, StoreError: A fresh start whose root cannot be written. Raised on every rank.
    """
    token, claimed, error = secrets.token_hex(8), False, None
    if world.rank == 0 and root is not None:
        try:
            wanted = Generation(number=number, token=token, parent=parent, world_size=world.size)
            number, claimed = _claim_on_root(root, options, wanted), True
        except (FlashckptError, OSError) as problem:
            error = _packed(problem) if parent in (None, BEGINNING) else None
            _log.warning("generation %d is claimed later by the daemon: %s", number, str(problem).splitlines()[0])
    number, token, claimed, error = collectives.from_rank_0([number, token, claimed, error])
    if error is not None:
        raise _unpacked(error)
    return Generation(number=number, token=token, parent=parent, world_size=world.size, claimed=claimed)


def _claim_on_root(root: str, options: Mapping[str, Any], wanted: Generation) -> int:
    with root_summary.open_root(root, options) as store:
        while not generations.claim_generation(store, wanted):
            wanted = replace(wanted, number=generations.newest_generation(store) + 1)
        return wanted.number


def begin(directory: JobDirectory, record: Generation, *, rank: int, ranks: Sequence[int], own: Segment | None) -> None:
    """Write the lineage of this node, then empty the slots that it abandons.

    Args:
        directory: Of the job on this node.
        record: The generation that begins.
        rank: This rank; it empties its own slots.
        ranks: Ranks of this node; the first also empties those of ranks that are no more.
        own: The segment this process owns already.
    """
    crash_point("restore.before-lineage")
    if ranks[0] == rank:
        directory.write_generation(record)
    if record.parent is None:
        return
    for path in directory.segments():
        owner = int(path.name[1 : path.name.index("-")])
        if owner == rank or (owner not in ranks and ranks[0] == rank):
            _empty_abandoned(path, record, own if own is not None and own.path == path else None)
    crash_point("restore.after-lineage")


def _empty_abandoned(path: Path, record: Generation, own: Segment | None) -> None:
    with contextlib.suppress(FlashckptError, OSError), contextlib.ExitStack() as stack:
        segment = own or stack.enter_context(contextlib.closing(Segment.attach(path, writable=True)))
        for slot, header in enumerate(segment.headers()):
            if header.is_complete and is_rolled_back(header.identity, [record]):
                segment.mark_empty(slot)


def _packed(error: Exception) -> list[str]:
    kind = "StoreError" if errors.may_pass(error) else "RootError"
    if isinstance(error, FlashckptError):
        kind = kind if kind == "StoreError" else type(error).__name__
        return [kind, error.problem, error.found, error.expected, error.state, error.remedy]
    return [kind, str(error), "", "", "", ""]


def _unpacked(parts: Sequence[str]) -> FlashckptError:
    name, problem, found, expected, state, remedy = parts
    kind: Callable[..., FlashckptError] = getattr(errors, name, RootError)
    return kind(problem, found=found, expected=expected, state=state, remedy=remedy)
