"""What may be removed from host memory, and its removal. Torch-free; `flashckpt gc` and the daemon call it.

A segment whose owners are all dead is *resumable*, not garbage. It goes only when its job ended cleanly, when a
newer common snapshot of the same job exists (M1), or when it is older than FLASHCKPT_KEEP_DEAD (24 h).
"""

from __future__ import annotations

from collections.abc import Collection

Identity = tuple[int, int]


def is_retirable(complete: Collection[Identity], *, newest_common: Identity | None) -> bool:
    """Return whether a segment that no rank uses any more may go (M1): all it holds is older than a common snapshot.

    Args:
        complete: Identities of its COMPLETE slots.
        newest_common: Newest identity that every rank of the present worker group is known to hold.
    """
    return newest_common is not None and all(identity < newest_common for identity in complete)
