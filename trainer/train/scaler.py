"""The factor of the loss under float16, whose smallest numbers gradients would fall below. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FIRST, LARGEST = 2.0**12, 2.0**24
GROW_AFTER = 200
"""Steps without overflow after which the factor doubles."""


class LossScaler:
    """Halves the factor when gradients overflow, and doubles it after `GROW_AFTER` steps without.

    Every rank holds the same norm, so every rank has the same factor. It is part of each snapshot.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._steps = enabled, 0
        self.scale = FIRST if enabled else 1.0

    def overflowed(self, loss: float, norm: float) -> bool:
        """Note a step's totals; return whether the gradients overflowed for the factor's sake, so the step is skipped.

        At a factor of 1 nothing is left to halve: what is not finite then is for the guard to judge, as is the loss.
        """
        if not self._enabled or not math.isfinite(loss):
            return False
        if math.isfinite(norm):
            self._steps += 1
            if self._steps >= GROW_AFTER:
                self.scale, self._steps = min(2 * self.scale, LARGEST), 0
            return False
        if self.scale <= 1.0:
            return False
        self.scale, self._steps = self.scale / 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; {} where nothing is scaled."""
        return {"scale": self.scale, "steps": self._steps} if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from recorded values, if both runs scale."""
        if self._enabled and state:
            self.scale, self._steps = float(state["scale"]), int(state["steps"])
