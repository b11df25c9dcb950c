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

    No intervention lasts for ever: `max_skipped` steps in a row that did not train, for whatever reason, end the run,
    and so does one rollback more than `max_rollbacks`. An accepted step makes up for skipped ones, `window` accepted steps
    that were not reached before for rollbacks. What a skipped step showed is in the windows all the same: a level that
    stays is no spike for long.

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
        self.since_rollback = 0
        self.reached = 0
        self._step, self._before = 0, 0

    def admit(self, loss: float, norm: float, *, step: int) -> bool:
        """Return whether the optimizer may step, unless the step turns out to be a spike that is skipped.

        Raises:
            DivergedError: `max_skipped` steps in a row did not train.
        """
        self._step, self._before = step, self.in_a_row
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self._count_skip("was not finite", loss, norm, expected="finite numbers")
        return False

    def skip_spike(self, loss: float, norm: float) -> None:
        """Count a spike that is not trained.

        Raises:
            DivergedError: `max_skipped` steps in a row did not train.
        """
        self._count_skip("spiked or was not finite", loss, norm, expected=self._usual())
        self._see(loss, norm)

    def _count_skip(self, what: str, loss: float, norm: float, *, expected: str) -> None:
        self.skipped += 1
        self.in_a_row = self._before + 1
        if self.in_a_row >= self.config.max_skipped:
            raise DivergedError(
                f"loss or gradient {what} for {self.in_a_row} steps in a row",
                found=f"step {self._step}: loss {loss}, gradient norm {norm}",
                expected=expected,
                state=f"The parameters are those of step {self._step - self.in_a_row}, the last that was accepted.",
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
            self.since_rollback += 1
            if self.since_rollback >= self.config.window:
                self.rollbacks = 0

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
        return self.in_a_row, self.rollbacks, self.reached

    def keep_budget(self, budget: tuple[int, int, int]) -> None:
        """Continue with a budget after a rollback has brought back earlier counters."""
        self.in_a_row, self.rollbacks, self.reached = budget
        self.since_rollback = 0

    def count_rollback(self, *, step: int, loss: float, norm: float) -> None:
        """Count one rollback.

        Raises:
            DivergedError: `max_rollbacks` are used up.
        """
        self.rollbacks += 1
        self.reached, self.in_a_row = max(self.reached, step), self._before
        if self.rollbacks > self.config.max_rollbacks:
            raise DivergedError(
                f"the loss or the gradient norm spiked again after {self.config.max_rollbacks} rollbacks",
                found=f"step {step}: loss {loss}, gradient norm {norm}",
                expected=self._usual(),
                state="The parameters are those of the step before.",
                remedy=_REMEDY,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the window."""
        return {
            "window": list(self.window),
            "norms": list(self.norms),
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "since_rollback": self.since_rollback,
            "reached": self.reached,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with recorded counters."""
        self.window = [float(value) for value in state["window"]]
        self.norms = [float(value) for value in state.get("norms", [])]
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self.rollbacks = int(state["rollbacks"])
        self.since_rollback, self.reached = int(state.get("since_rollback", 0)), int(state.get("reached", 0))
