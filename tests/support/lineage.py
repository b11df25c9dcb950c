"""The rule of the restore point in one line, as tests expect it of the product's choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashckpt.core.lineage import HasLineage, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId


def newest(identities: Iterable[SnapshotId], generations: Sequence[HasLineage] = ()) -> SnapshotId | None:
    """Return the identity of the highest generation, then the highest step, that was not abandoned."""
    return max((i for i in identities if not is_rolled_back(i, generations)), default=None)
