"""Logging beside training: a log that cannot be written must not end a run."""

from __future__ import annotations

import contextlib
import logging
from typing import Any


class GuardedLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # not generic at run time before Python 3.11
    """A logger whose handlers may fail: a full disk, a closed standard error, a handler of the user's that raises.

    The handlers of the standard library pass over a write that fails, but not over a closed stream.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, or lose the line."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})  # the caller's line, not this one

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self.log(logging.ERROR, msg, *args, exc_info=exc_info, **kwargs)


def guarded(logger: logging.Logger) -> GuardedLogger:
    """Return a logger of the same name that never raises."""
    return GuardedLogger(logger, {})
