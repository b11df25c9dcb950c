"""What to do about a bad step: non-finite values are skipped on all ranks, spikes of loss and gradient norm are detected.

Pure decisions from numbers that are equal on all ranks, so all ranks decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from flashckpt.errors import DivergedError
from flashckpt.trainer.config import GuardConfig


class Guard:
    """Counts skipped steps and compares loss and gradient norm with windows of recent ones.

    Its state is part of every checkpoint, so a resumed run decides like the unbroken one.
    """

    flashckpt_replicated = True

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.window: list[float] = []
        self.norms: list[float] = []
        self.skipped = 0
        self.in_a_row = 0
        self.rollbacks = 0

    def admit(self, loss: float, norm: float, *, step: int) -> bool:
        """Return whether the optimizer may step.

        Raises:
            DivergedError: `max_skipped` steps in a row were not finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.config.max_skipped:
            raise DivergedError(
                f"loss or gradient was not finite for {self.in_a_row} steps in a row",
                found=f"step {step}: loss {loss}, gradient norm {norm}",
                expected="finite numbers",
                state="The parameters are those of the last finite step.",
                remedy="lower optim.lr, raise optim.warmup_steps, or look at the samples of these steps in the trace",
            )
        return False

    def is_spike(self, loss: float) -> bool:
        """Return whether `loss` is far outside the window: median +- `spike_mads` median deviations."""
        if len(self.window) < self.config.window:
            return False
        middle = statistics.median(self.window)
        deviation = statistics.median(abs(value - middle) for value in self.window)
        return abs(loss - middle) > self.config.spike_mads * max(deviation, 0.01 * abs(middle))

    def is_norm_spike(self, norm: float) -> bool:
        """Return whether a gradient norm is far above the window: `norm_mads` median deviations, if that is above 0."""
        if not self.config.norm_mads or len(self.norms) < self.config.window:
            return False
        middle = statistics.median(self.norms)
        deviation = statistics.median(abs(value - middle) for value in self.norms)
        return norm - middle > self.config.norm_mads * max(deviation, 0.01 * middle)

    def record(self, loss: float, norm: float) -> None:
        """Add an accepted step's loss and gradient norm to the windows."""
        self.window = [*self.window, loss][-self.config.window :]
        self.norms = [*self.norms, norm][-self.config.window :]

    def forget(self) -> None:
        """Begin new windows: what follows is not to be compared with what was."""
        self.window, self.norms = [], []

    def count_rollback(self, *, step: int, loss: float, norm: float) -> None:
        """Count one rollback.

        Raises:
            DivergedError: `max_rollbacks` are used up.
        """
        self.rollbacks += 1
        if self.rollbacks > self.config.max_rollbacks:
            raise DivergedError(
                f"the loss or the gradient norm spiked again after {self.config.max_rollbacks} rollbacks",
                found=f"step {step}: loss {loss}, gradient norm {norm}",
                expected=f"about {statistics.median(self.window):.4f}, {statistics.median(self.norms):.4f}",
                remedy="lower optim.lr, or look at the samples in spikes.jsonl",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the window."""
        return {
            "window": list(self.window),
            "norms": list(self.norms),
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with recorded counters."""
        self.window = [float(value) for value in state["window"]]
        self.norms = [float(value) for value in state.get("norms", [])]
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self.rollbacks = int(state["rollbacks"])
