"""Whether a snapshot that was just copied holds NaN or infinity: a few elements of a few tensors, others each time.

What it covers: parameters and state of optimizers, of types that numpy has and bfloat16. Training that has diverged shows
it everywhere at once; a single element is found when its turn comes, or not at all in a tensor of many elements.
"""

from __future__ import annotations

import numpy as np

from flashckpt.snapshot.copy import Buffer
from flashckpt.snapshot.copy_plan import CopyPlan

_ROWS, _ELEMENTS = 64, 32
_KINDS = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}


class FiniteWatch:
    """Looks at snapshots until it has found something."""

    def __init__(self) -> None:
        self._plan: CopyPlan | None = None
        self._rows = np.zeros(0, np.int64)
        self._next, self._looks, self._is_reported = 0, 0, False

    def look(self, plan: CopyPlan, buffer: Buffer) -> str:
        """Return the name of a tensor that is not finite, the first time that one is seen; "" else."""
        if self._is_reported:
            return ""
        if plan is not self._plan:
            fenced = plan.layout.structure.fenced[plan.layout.row_tensors]
            self._plan, self._rows = plan, np.flatnonzero(fenced & (plan.layout.table.nbytes > 0))
        table = plan.layout.table
        chosen = np.roll(self._rows, -self._next)[:_ROWS]
        self._next = (self._next + _ROWS) % max(1, len(self._rows))
        self._looks += 1
        for row in chosen.tolist():
            held = buffer.array[int(table.byte_offset[row]) :][: int(table.nbytes[row])]
            if not _is_finite(held, table.dtypes[int(table.dtype_id[row])], self._looks):
                self._is_reported = True
                return table.fqn(row)
        return ""


def _is_finite(data: np.ndarray, dtype: str, look: int) -> bool:
    if (kind := _KINDS.get(dtype)) is None:
        return True
    held = data.view(kind)
    step = max(1, len(held) // _ELEMENTS)
    some = held[look % step :: step]
    return bool(((some & 0x7F80) != 0x7F80).all() if dtype == "bfloat16" else np.isfinite(some).all())


__all__ = ["FiniteWatch"]
