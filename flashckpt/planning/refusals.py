"""What a restore refuses before it chooses anything, the same on every rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, DisagreementError, FlashckptError, NoCheckpointError, RootError, StoreError
from flashckpt.planning.inventory import Inventory
from flashckpt.planning.root_view import RootSummary
from flashckpt.planning.selection import Candidates


def refuse_damage(inventories: Sequence[Inventory], job: str) -> None:
    """Refuse to choose while some node's lineage is unknown: a snapshot that was rolled back could be chosen again.

    Raises:
        DamagedError: There is such a node; names it. On every rank.
    """
    for rank, inventory in enumerate(inventories):
        if inventory.damage:
            raise DamagedError(
                "the record of which run the snapshots in memory belong to cannot be read",
                found=f"{inventory.host or 'the node'} of rank {rank}: {inventory.damage}",
                state="Nothing was restored, and nothing was changed.",
                remedy=f"on that machine: flashckpt forget --job {job} --apply; what is committed on storage is restored then",
            )


def require_same_request(inventories: Sequence[Inventory]) -> None:
    """Check that all ranks were asked for the same.

    Raises:
        DisagreementError: They were not; names the first rank that differs from rank 0, and both requests. On every rank.
    """
    for rank, inventory in enumerate(inventories):
        if inventory.request != inventories[0].request:
            raise DisagreementError(
                "ranks were asked to restore different things",
                found=f"rank {rank}: {inventory.request}",
                expected=f"rank 0: {inventories[0].request}",
                state="Nothing was restored.",
                remedy="call restore() with the same arguments, and Checkpointer with the same root, on every rank",
            )


def missing_on_root(inventories: Sequence[Inventory], root: RootSummary, found: Candidates) -> SnapshotId | None:
    """Return the newest checkpoint that some node knows to be committed, where the root holds no checkpoint at all.

    None where the root could not be asked, holds checkpoints (damaged ones too), or none was committed on this line.
    """
    if root.error or not root.is_empty:
        return None
    committed = {i.committed for i in inventories if i.committed is not None}
    return max((i for i in committed if not is_rolled_back(i, found.lineage)), default=None)


def emptied(root: str, missing: SnapshotId, found: Candidates) -> RootError:
    """Return the error for a root that is empty although checkpoints were committed on it."""
    held = next((c.identity for c in found.found if c.is_whole), None)
    ways = [
        "mount or put back the root",
        "to start fresh: restore(fresh=True), or on every node: flashckpt forget ROOT --apply",
    ]
    if held is not None:
        ways.append("to continue from memory, on every node: flashckpt forget ROOT --keep-memory --apply")
    return RootError(
        f"the root {root} holds no checkpoint, although some of this job were committed on it",
        found="no checkpoint" if held is None else f"no checkpoint; in memory {held}",
        expected=f"{missing}, or a newer one",
        state="Nothing was restored; snapshots in memory are untouched.",
        remedy="; ".join(ways),
    )


def no_such_checkpoint(
    step: int | None, generation: int | None, found: Candidates | None, root: str
) -> NoCheckpointError:
    """Return the error for an explicit request that nothing answers."""
    wanted = f"step {step}" if generation is None else f"step {step} of generation {generation}"
    return NoCheckpointError(
        f"no snapshot or checkpoint of {wanted} exists",
        found=", ".join(str(c.identity) for c in found.found[:8]) if found else "none",
        state="Nothing was restored.",
        remedy=f"flashckpt ls {root}",
    )


def unreachable(root: str, view: RootSummary, why: str) -> FlashckptError:
    """Return the error for a root that must be asked and cannot be: a permanent one, unless that may pass."""
    kind: type[FlashckptError] = StoreError if view.may_pass else RootError
    return kind(
        f"the root {root} cannot be asked for checkpoints, {why}",
        found="; ".join(line.strip() for line in view.error.splitlines()[:2]),
        state="Nothing was restored: a fresh start could repeat a run that is already on storage.",
        remedy="make the root reachable, or start with another root",
    )
