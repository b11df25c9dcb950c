"""Standard streams that were closed before the program started (`>&-`)."""

from __future__ import annotations

import os
import sys


def fill_closed() -> None:
    """Open /dev/null in place of closed standard streams, or the next file or socket would get their descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(number, True)  # noqa: FBT003 -- of the standard library
        if getattr(sys, name) is None:
            stream = os.fdopen(
                number, "w" if number else "r", closefd=False, encoding="utf-8", errors="backslashreplace"
            )
            setattr(sys, name, stream)
