"""Attempts that fail: how long to wait before the next one, what is logged of them, and when a fence does not count yet."""

from __future__ import annotations

import logging
import re
import time

from flashckpt.errors import FencedError, FlashckptError, StoreError

FENCE_GRACE_S = 3.0
"""How long a newer claim on the root may be ahead of this node's own record before it counts as a failure."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
"""Seconds to wait after the first, second, ... failure in a row."""
_log = logging.getLogger("flashckpt.daemon")


class Attempts:
    """The failures of one daemon.

    Attributes:
        failures: In all.
        error: Text of the last failure; "" once an attempt succeeded again.
        answered_ns: Newest request to retry that was there before the last failed attempt began.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.error = ""
        self.error_code = 0
        self.answered_ns = 0
        self._in_a_row = 0
        self._kind = ""
        self._again_s = 0.0
        self._begun_ns = 0  # newest request to retry before the present attempt began
        self._fenced: tuple[int, float] | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._in_a_row > 0

    def is_due(self, asked_ns: int) -> bool:
        """Whether the root may be asked now; the pause after a failure ends with a request to retry.

        Args:
            asked_ns: Time of the newest request to retry; 0 if none stands.
        """
        if asked_ns > self._begun_ns:
            self._again_s = 0.0  # until the attempt has failed: it takes more than one turn
        return time.monotonic() >= self._again_s

    def begin(self, asked_ns: int) -> None:
        """An attempt begins: what fails from here on began after that request."""
        self._begun_ns = asked_ns

    def failed(self, error: Exception, generation: int) -> bool:
        """Note that an attempt failed, log it when it is another failure than before; False if it is none yet."""
        if isinstance(error, FencedError) and self._is_passing(generation):
            return False
        self.failures += 1
        wait_s = BACKOFF_S[min(self._in_a_row, len(BACKOFF_S) - 1)]
        self._in_a_row += 1
        self._again_s = time.monotonic() + wait_s
        kind = _kind_of(error)
        if not self.error or kind != self._kind:
            _log.error("persist failed (training continues; it will be retried): %s", error)
        self.error, self._kind, self.answered_ns = str(error), kind, self._begun_ns
        self.error_code = error.exit_code if isinstance(error, FlashckptError) else StoreError.exit_code
        return True

    def went_well(self, *, is_over: bool) -> None:
        """Note that nothing failed; `is_over`: and that nothing is under way that still may."""
        self._fenced = None
        if self._in_a_row and is_over:
            _log.info("persist succeeded again")
            self._in_a_row, self.error, self.error_code = 0, "", 0

    def _is_passing(self, generation: int) -> bool:
        """Whether a fence is young: the next generation claims its number on the root before it says so to this node.

        Reported at once it would look like a failure of that generation, whose `wait()` reads the same status.
        """
        now = time.monotonic()
        if self._fenced is None or self._fenced[0] != generation:
            self._fenced = generation, now
        self._again_s = now + BACKOFF_S[0]
        return now - self._fenced[1] < FENCE_GRACE_S


def _kind_of(error: Exception) -> str:
    """Return the cause of a failure without the files, steps and numbers in it: the next attempt names others."""
    cause = error.found if isinstance(error, FlashckptError) and error.found else str(error)
    return re.sub(r"\S*[\d/]\S*", "...", cause.partition("\n")[0])
