"""One life of the worker group, as it is claimed and written down."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """One life of the worker group.

    Attributes:
        generation: Its number.
        token: Random text that tells two claims of one number apart.
        parent: (generation, step) it was restored from; None on a fresh start.
        world_size: Its ranks.
        claimed: Whether the number is claimed on the root; if not, the daemon does so before it persists.
    """

    generation: int
    token: str = ""
    parent: SnapshotId | None = None
    world_size: int = 1
    claimed: bool = False
