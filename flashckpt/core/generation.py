"""One generation: from one start of the worker group to its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation of the worker group; where only its lineage is known, the number and the parent.

    Attributes:
        number: Which one; 1 is the first.
        token: Random text of the claimer: tells two claims of one number apart, and "mine" after a lost answer.
        parent: The snapshot it was restored from; None on a fresh start, or where it ended before it had restored.
        world_size: Its ranks.
        claimed: Whether the number is claimed on the root; if not, the persister does so before it persists.
        created_s: Time of the claim, unix seconds.
    """

    number: int = field(metadata={"key": "generation"})
    token: str = ""
    parent: SnapshotId | None = None
    world_size: int = 1
    claimed: bool = False
    created_s: float = 0.0
