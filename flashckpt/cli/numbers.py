"""What the command shows of a checkpoint's numbers: largest magnitude and norm per tensor, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest

JUMP = 10.0
"""By which factor the norm of a tensor must grow or shrink to be shown."""


def numbers_of(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return by tensor its largest magnitude (None: not finite), its norm, and whether it became non-finite.

    Integers, and tensors of a checkpoint of an earlier release, are left out.
    """
    figures, table = manifest.figures, manifest.table
    if figures is None:
        return {}
    found = {}
    for fqn in table.fqns:
        rows = np.asarray(table.rows(fqn), np.int64)
        rows = rows[figures.largest[rows] >= 0]
        if not len(rows):
            continue
        largest = float(figures.largest[rows].max())
        norm = float(np.sqrt(np.square(figures.norm[rows].astype(np.float64)).sum()))
        finite = bool(np.isfinite(largest))
        found[fqn] = {
            "largest": largest if finite else None,
            "norm": norm if finite and np.isfinite(norm) else None,
            "suspect": bool(figures.suspect[rows].any()),
        }
    return found


def words_of(numbers: dict[str, Any] | None) -> str:
    """Return the figures of one tensor as people read them; "" for none."""
    if numbers is None:
        return ""
    if numbers["suspect"]:
        return "NOT FINITE, and was before"
    if numbers["largest"] is None:
        return "not finite, as in the first snapshot"
    norm = "" if numbers["norm"] is None else f", norm {numbers['norm']:.3g}"
    return f"up to {numbers['largest']:.3g}{norm}"


def jumps(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors that became non-finite, or whose norm is JUMP times that of before, or a JUMPth."""
    found = []
    for fqn in sorted(before.keys() & after.keys()):
        old, new = before[fqn]["norm"], after[fqn]["norm"]
        became_bad = after[fqn]["suspect"] or (before[fqn]["largest"] is not None and after[fqn]["largest"] is None)
        if became_bad or (old and new and not 1 / JUMP < new / old < JUMP):
            found.append({"fqn": fqn, "norm": [old, new], "suspect": after[fqn]["suspect"]})
    return found
