"""When to restart and when to give up: a restart budget that progress refills, and repeated errors."""

from __future__ import annotations

from dataclasses import dataclass

RESTARTS = 10
"""Restarts allowed without progress if --max-restarts is not given."""
REFILL_STEPS = 20
"""New steps between two failures that refill the budget."""
ESCALATE = 3
"""How often the same failure at one step restarts the job from one state further back."""
HANG = "the ranks hang"
"""Stands for an error's text where there is none."""
REFILL_S = 600.0
"""Seconds between two failures that refill it if the script reports no steps and --max-restarts is not given."""
LONGEST_PAUSE_S = 15.0
"""Failures that may pass, one after another, are restarted 1, 2, 4, ... seconds after the start before, at most this."""


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    """Whether to restart, `pause_s` from now; `reason` is for the user, `repeats` says that the script keeps failing at one step.

    `back` above 0: from a state older than the one before, from 2 on from a checkpoint, without the samples of the steps
    `leave_out`, the first and the last; (0, 0): with all. Where it is one step, ranks know better which.
    """

    restart: bool
    reason: str
    repeats: bool = False
    pause_s: float = 0.0
    back: int = 0
    leave_out: tuple[int, int] = (0, 0)


class Budget:
    """Counts the restarts of a job.

    Args:
        limit: Restarts without progress (--max-restarts); None: RESTARTS, and crash loops are also detected in scripts
            that report no steps: there REFILL_S of running count as progress, and the same error twice in a row
            without progress ends the job. With a number such a script gets that many restarts in all, as in torchrun.
        refill_steps: New steps beyond the highest one of all failures so far that refill it; 0: never.
    """

    def __init__(self, limit: int | None, *, refill_steps: int = REFILL_STEPS) -> None:
        self._chosen = limit is not None
        self.limit = self.left = RESTARTS if limit is None else limit
        self._refill_steps = refill_steps
        self._highest = -1
        self._last: tuple[str, int] | None = None
        self._passing = 0
        self._back: dict[tuple[str, int], int] = {}
        self._silent = "", -1

    def spend(self, *, fingerprint: str, step: int, ran_s: float = 0.0, may_pass: bool = False) -> RestartDecision:
        """Record one failure and decide whether to restart.

        Args:
            fingerprint: The text by which two errors are the same (a traceback); "" for anything but the script's own error.
            step: The step the failing rank had completed; -1 if the script reports no steps, which never refills by steps.
            ran_s: Seconds from the start of the workers to the failure.
            may_pass: The storage or network that the script needs cannot be reached now: this is no crash loop, and is not restarted at once.
        """
        self._passing = self._passing + 1 if may_pass else 0
        counted = step >= 0
        rested = not counted and not self._chosen and self._refill_steps > 0 and ran_s >= REFILL_S
        this = (fingerprint, step)
        if fingerprint and this == self._last and (counted or not (self._chosen or rested)):
            where = f"at step {step}" if counted else "before any progress"
            return RestartDecision(
                restart=False,
                repeats=True,
                reason=f"not restarting: the script failed with the same error {where} twice{self._tried(this)}",
            )
        self._last = this
        refilled = rested or (self._highest >= 0 and 0 < self._refill_steps <= step - self._highest)
        self._highest = max(self._highest, step)
        if refilled:
            self.left = self.limit
        if self.left == 0:
            return RestartDecision(restart=False, reason=self._spent())
        self.left -= 1
        again = f" (the budget was refilled to {self.limit}: the job had made progress)" if refilled else ""
        left = f"{self.left} of {self.limit} restarts are left{again}"
        pause_s = max(0.0, min(2.0 ** (self._passing - 1), LONGEST_PAUSE_S) - ran_s) if may_pass else 0.0
        when = f" in {pause_s:.0f} s" if pause_s >= 0.5 else ""
        why = ", since this may pass" if may_pass else ""
        return RestartDecision(restart=True, reason=f"restarting all workers{when}{why}, {left}", pause_s=pause_s)

    def go_back(self, *, fingerprint: str, step: int, limit: int) -> RestartDecision | None:
        """Return the decision to try one state further back after the same failure at the same step; None after `limit` times.

        Args:
            fingerprint: The text that `spend` got; `HANG` where the ranks hang.
            step: The step that it got.
            limit: The number of --escalate.
        """
        taken = self._back.get((fingerprint, step), 0)
        if taken >= limit:
            return None
        self._back[fingerprint, step] = taken + 1
        # the same samples once more: it may have been the machine; then without those to blame, then without all since then
        leave_out = (0, 0) if not taken else (step + 1, step + 1) if taken == 1 else (0, step + 1)
        which = f"since then, up to step {step + 1}," if taken > 1 else "to blame"
        without = f", and the samples {which} left out where a tracked sampler can do so" if taken else ""
        why = f"the same failure at step {step} again: the state may be bad, so restarting from one state further back"
        reason = f"{why}{without} ({taken + 1} of {limit}, --escalate)"
        return RestartDecision(restart=True, back=taken + 1, leave_out=leave_out, reason=reason)

    def stays(self, kind: str, step: int) -> RestartDecision | None:
        """Return the decision to end a job that fails so at one step from every state that was tried; None where none was."""
        tried = self._tried((kind, step))
        reason = f"not restarting: {kind} at step {step} again and again{tried}"
        return RestartDecision(restart=False, repeats=True, reason=reason) if tried else None

    def _tried(self, this: tuple[str, int]) -> str:
        count = self._back.get(this, 0)
        return f", and again from {count} older state{'s' if count > 1 else ''}" if count else ""

    def comes_again(self, kind: str, step: int) -> bool:
        """Take note of a failure without an error's text, "" for any other; whether the one before was like it, at the same step."""
        before, self._silent = self._silent, (kind, step)
        return bool(kind) and before == self._silent

    def _spent(self) -> str:
        """Return why there is no restart, and what to do about it."""
        if self.limit == 0:
            return (
                "not restarting: --max-restarts is 0"
                f" (without the option dlrun restarts up to {RESTARTS} times without progress)"
            )
        steps = f" without {self._refill_steps} new steps between them" if self._refill_steps else ""
        return (
            f"not restarting: all {self.limit} restarts were used{steps}"
            " (the cause is above; --max-restarts N allows more)"
        )
