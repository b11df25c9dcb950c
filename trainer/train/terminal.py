"""Where a live display may be drawn, and how several processes share one terminal with it.

The display occupies the end of the screen, and the cursor rests at the beginning of its first line, which is empty.
Whoever has lines to say writes CLEAR in front of them, in the same write: the display vanishes, the lines take its
place, and it is drawn again below them. The cursor is never hidden and nobody remembers where the display is, so a
process may die at any instant, and the window may change its size. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from flashckpt.environment import Environment, env

CLEAR = "\r\x1b[J"
"""To the beginning of the line; erase from there to the end of the screen."""


def terminal_of(display: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the standard stream on which the live display is drawn, None for plain lines.

    Standard error if it is a terminal, else standard output. Nothing is drawn by a process in the background of its
    terminal, nor, unless `display` is "live", where colours or movements of the cursor are not wanted.
    """
    values = env if environ is None else Environment(environ)
    if display == "plain" or (display == "auto" and _is_unwanted(values)):
        return None
    for stream in (sys.stderr, sys.stdout):
        if is_terminal(stream) and not _is_in_background(stream):
            return stream
    return None


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; False for one that is closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


def _is_unwanted(values: Environment) -> bool:
    return bool(values.CI or values.NO_COLOR) or values.TERM == "dumb"


def _is_in_background(stream: Any) -> bool:
    """Whether the shell has this process in the background; ranks under dlrun have no terminal that could say so."""
    with contextlib.suppress(OSError, ValueError):
        return os.tcgetpgrp(stream.fileno()) != os.getpgrp()
    return False
