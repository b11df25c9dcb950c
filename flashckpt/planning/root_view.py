"""What a root holds of a job's checkpoints, as far as the choice of a restore point needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashckpt.core.lineage import Generation
from flashckpt.core.records import pack, unpack
from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSummary:
    """Committed checkpoints and claims.

    Attributes:
        committed: Ids of valid checkpoints, newest first.
        prefixes: The folder of each below the root.
        claims: Generations claimed on the root, with what they were restored from.
        error: Why the root could not be read; "" if it was.
        may_pass: Whether it may be readable a moment later.
        is_empty: It holds no trace of a checkpoint, not even of a damaged or unfinished one.
    """

    committed: tuple[SnapshotId, ...] = ()
    prefixes: tuple[str, ...] = ()
    claims: tuple[Generation, ...] = ()
    error: str = ""
    is_empty: bool = False
    may_pass: bool = False

    def pack(self) -> list[Any]:
        """Return it as msgpack types."""
        return [
            list(self.committed),
            list(self.prefixes),
            [pack(one) for one in self.claims],
            self.error,
            self.is_empty,
            self.may_pass,
        ]

    @classmethod
    def unpack(cls, packed: list[Any]) -> RootSummary:
        """Return what `pack` packed."""
        committed, prefixes, claims, error, is_empty, may_pass = packed
        return cls(
            committed=tuple(map(SnapshotId.of, committed)),
            prefixes=tuple(prefixes),
            claims=tuple(unpack(Generation, one) for one in claims),
            error=error,
            is_empty=is_empty,
            may_pass=may_pass,
        )
