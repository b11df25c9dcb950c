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

_REMEDY = (
    "lower optim.lr, or look at the samples in trace.jsonl and spikes.jsonl: with a changed setting the next start takes the "
    "loss that it restores as it is. To go back further: flashckpt forget ROOT --apply; older checkpoints: flashckpt ls ROOT"
)


class Guard:
    """Counts interventions and compares loss and gradient norm with windows of recent ones.

    No intervention lasts for ever, and no mixture of them does: skipped steps and rollbacks, for whatever reason, are paid
    from one budget of `max_interventions`, to which `window` accepted steps that were not reached before give one back. What
    a skipped step showed is in the windows all the same: a level that stays is no spike for long.

    Its state is part of every checkpoint, so a resumed run decides like the unbroken one.
    """

    flashckpt_replicated = True

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.window: list[float] = []
        self.norms: list[float] = []
        self.skipped = 0
        self.spent = 0
        self.earned = 0
        self.reached = 0
        self._step = 0

    def admit(self, loss: float, norm: float, *, step: int) -> bool:
        """Return whether the optimizer may step, unless the step turns out to be a spike that is skipped.

        Raises:
            DivergedError: it may not, and the budget is used up.
        """
        self._step = step
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self.skipped += 1
        self._spend("was not finite", loss, norm, expected="finite numbers")
        return False

    def skip_spike(self, loss: float, norm: float) -> None:
        """Count a spike that is not trained.

        Raises:
            DivergedError: the budget is used up.
        """
        self.skipped += 1
        self._spend("spiked", loss, norm, expected=self._usual())
        self._see(loss, norm)

    def count_rollback(self, loss: float, norm: float, *, step: int) -> None:
        """Count a spike, or a state that is not finite, for which the run is rolled back.

        Raises:
            DivergedError: the budget is used up.
        """
        self._step, is_spike = step, math.isfinite(loss) and math.isfinite(norm)
        expected = self._usual() if is_spike else "finite numbers"
        self._spend("spiked" if is_spike else "was not finite", loss, norm, expected=expected)
        self.reached = max(self.reached, self._step)

    def _spend(self, what: str, loss: float, norm: float, *, expected: str) -> None:
        self.spent += 1
        if self.spent > self.config.max_interventions:
            raise DivergedError(
                f"the loss or the gradient norm {what}, and the budget of interventions is used up",
                found=f"step {self._step}: loss {loss}, gradient norm {norm}; {self.config.max_interventions} steps skipped "
                f"or rolled back that accepted steps have not made up for ({self.config.window} for each)",
                expected=expected,
                state="The parameters are those of the last accepted step.",
                remedy=_REMEDY,
            )

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
        self._see(loss, norm)
        if self._step > self.reached:  # steps before a rollback that are trained again earn nothing
            self.reached = self._step
            self.earned += 1
            if self.earned >= self.config.window:
                self.spent, self.earned = max(0, self.spent - 1), 0

    def _see(self, loss: float, norm: float) -> None:
        self.window = [*self.window, loss][-self.config.window :]
        self.norms = [*self.norms, norm][-self.config.window :]

    def _usual(self) -> str:
        return f"about {statistics.median(self.window):.4f}, {statistics.median(self.norms):.4f}"

    def forget(self) -> None:
        """Begin new windows: what follows is not to be compared with what was."""
        self.window, self.norms = [], []

    def budget(self) -> tuple[int, int, int]:
        """Return what a rollback must not give back."""
        return self.spent, self.earned, self.reached

    def keep_budget(self, budget: tuple[int, int, int]) -> None:
        """Continue with a budget after a rollback has brought back earlier counters."""
        self.spent, self.earned, self.reached = budget

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the window."""
        return {
            "window": list(self.window),
            "norms": list(self.norms),
            "skipped": self.skipped,
            "spent": self.spent,
            "earned": self.earned,
            "reached": self.reached,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with recorded counters."""
        self.window = [float(value) for value in state["window"]]
        self.norms = [float(value) for value in state["norms"]]
        self.skipped = int(state["skipped"])
        self.spent, self.earned, self.reached = (int(state[name]) for name in ("spent", "earned", "reached"))
