"""The errors for what is wanted and nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.errors import ShardGapError


def half_restored(names: Sequence[str]) -> ShardGapError:
    """Return the error for what turned out missing when live tensors were written already."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        expected=", ".join(names[:5]),
        state="Live state is a mixture and must not be trained on.",
        remedy="build the program as the run that took the snapshot did, and start it again",
    )


def missing_error(names: Sequence[str], unexpected: Sequence[str], *, is_whole: bool) -> ShardGapError:
    """Return the error for names that no source has."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if not is_whole:
        return ShardGapError(
            f"{names[0]!r}{more} is in no memory that can be reached",
            found="a snapshot of which some ranks are lost, and which is not committed on storage",
            expected=", ".join(names[:5]),
            state="Nothing was restored from it.",
            remedy="an older snapshot or checkpoint is tried next",
        )
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        found=f"instead: {', '.join(unexpected[:5])}" if unexpected else "",
        expected=", ".join(names[:5]),
        state="Nothing was restored.",
        remedy="restore(strict=False) leaves such state as it is; restore(only='model.*') takes a part; where the snapshots were taken "
        "without frozen weights, give track() the same exclude=",
    )
