"""What the programs for a GPU share without torch: when they must have ended, and the device's path on a machine without one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

END_S = 2.0
"""Kept for the last write of the results and for the end of the process."""


def end_of(seconds: float) -> float:
    """Return when to end, by time.monotonic(): so many seconds from now, or with the part of `make gpu` that this is.

    The part's time began before this program was imported.
    """
    until = os.environ.get("GPU_TEST_UNTIL")
    left = seconds if until is None else min(seconds, float(until) - time.time())
    return time.monotonic() + left - END_S


def take_the_devices_path() -> None:
    """Let this process's host tensors take the path of device memory, so that it is run where there is no device."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from support.fake_cuda import install

    install(setattr)
