"""When to restart and when to give up: the budget that progress refills, and errors that repeat themselves."""

from __future__ import annotations

from dataclasses import dataclass

REFILL_STEPS = 20
"""New steps between two failures that give the whole budget back."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether to restart; `reason` is for the user, `repeats` that the script fails by itself at one step."""

    restart: bool
    reason: str
    repeats: bool = False


class Budget:
    """Counts the restarts of a job.

    Args:
        limit: Restarts without progress (--max-restarts).
        refill_steps: New steps beyond the highest one of all failures so far that refill it; 0: never.
    """

    def __init__(self, limit: int, *, refill_steps: int = REFILL_STEPS) -> None:
        self.limit = self.left = limit
        self._refill_steps = refill_steps
        self._highest = -1
        self._last: tuple[str, int] | None = None

    def spend(self, *, fingerprint: str, step: int) -> Verdict:
        """Judge one failure.

        Args:
            fingerprint: What makes two errors the same (a traceback); "" for anything but the script's own error.
            step: The step the failing rank had completed; -1 where nobody counts, which never refills.
        """
        this = (fingerprint, step)
        if fingerprint and step >= 0 and this == self._last:
            return Verdict(
                restart=False,
                repeats=True,
                reason=f"the same error at step {step} twice: it is the script's, no restart",
            )
        self._last = this
        refilled = self._highest >= 0 and 0 < self._refill_steps <= step - self._highest
        self._highest = max(self._highest, step)
        if refilled:
            self.left = self.limit
        if self.left == 0:
            return Verdict(restart=False, reason=f"no restart of {self.limit} is left: the job ends")
        self.left -= 1
        again = f" (all {self.limit} were given back: the job had made progress)" if refilled else ""
        left = f"{self.left} of {self.limit} restarts are left{again}"
        return Verdict(restart=True, reason=f"restarting all workers, {left}")
