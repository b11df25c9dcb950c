"""What the stores log while they are measured: warnings, and how often they tried again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class RetryCounter(logging.Handler):
    """Warnings of the stores, and how often they tried again."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.warnings: list[str] = []
        self.retries = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what matters of one record."""
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())
        elif "attempt" in str(record.msg):
            self.retries += 1


@contextmanager
def listening() -> Iterator[RetryCounter]:
    """Listen to what the stores log meanwhile."""
    said, logger = RetryCounter(), logging.getLogger("flashckpt")
    level = logger.level
    logger.addHandler(said)
    logger.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)
