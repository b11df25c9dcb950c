"""One rank's side of benchmarks/trainer_speed.py: trains when it is its turn, and reports what that took. Standard library only.

The program writes the number of steps of a turn to the rank's standard input; at the end of the turn the rank writes
one JSON line to the descriptor in SPEED_ANSWERS. A rank that waits for its turn uses no processor. Input that ends ends the rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


class Over(Exception):  # noqa: N818 -- not an error
    """There are no more turns."""


class Turns:
    """Counts the steps of a turn, and their seconds."""

    def __init__(self) -> None:
        self._answers = os.fdopen(int(os.environ["SPEED_ANSWERS"]), "w", buffering=1)
        self._left, self._has_trained = 0, False
        self._began = self._cpu_s = self._data_s = 0.0
        self._imported_kb = _memory("VmRSS")
        self.data_s = 0.0
        """CPU seconds that the training thread spent on its batches, where the caller counts them."""

    def step_begins(self) -> None:
        """Begin a step: at the end of a turn, answer and wait for the next.

        Raises:
            Over: there is none.
        """
        if not self._left:
            if self._has_trained:
                self._answer()
            self._left = int(sys.stdin.readline() or 0)
            self._began, self._cpu_s, self._data_s = time.monotonic(), time.process_time(), self.data_s
            if not self._left:
                self._answer()
                raise Over
            self._has_trained = True
        self._left -= 1

    def _answer(self) -> None:
        answer = {
            "began": self._began,
            "ended": time.monotonic(),
            "cpu_s": self._cpu_s,  # at the beginning: what works on after the end of a turn belongs to it
            "data_s": self._data_s,
            "peak_kb": _memory("VmHWM"),
            "imported_kb": self._imported_kb,
        }
        self._answers.write(json.dumps(answer) + "\n")


def _memory(name: str) -> int:
    """Return a line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
