"""What a restart would choose if every snapshot were whole: the oracle of the histories that tests invent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId


def newest(identities: Iterable[SnapshotId], generations: Sequence[Generation] = ()) -> SnapshotId | None:
    """Return the id of the highest generation, then the highest step, that was not rolled back."""
    return max((i for i in identities if not is_rolled_back(i, generations)), default=None)
