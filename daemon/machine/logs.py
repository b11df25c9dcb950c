"""Log lines of the daemon: each one names its generation, rank and step.

2026-11-20 13:35:07 INFO [gen 2 | rank 5 | step 1200] 512.0 MB in 1 pack after 0.4 s
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from flashckpt.printable import PrintableFormatter

_where: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("flashckpt_where", default=())
FORMAT = "%(asctime)s %(levelname)s [%(where)s] %(message)s"


@contextlib.contextmanager
def log_context(*, generation: int | None = None, rank: int | None = None, step: int | None = None) -> Iterator[None]:
    """Within the block, lines of this thread carry these numbers; None leaves the outer value."""
    given = {name: value for name, value in (("gen", generation), ("rank", rank), ("step", step)) if value is not None}
    known = {**dict(_where.get()), **given}
    token = _where.set(tuple(known.items()))
    try:
        yield
    finally:
        _where.reset(token)


class WhereFilter(logging.Filter):
    """Adds `where` to every record: "gen 2 | rank 5 | step 1200", "-" for what is not known."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True."""
        known = dict(_where.get())
        record.where = " | ".join(f"{name} {known.get(name, '-')}" for name in ("gen", "rank", "step"))
        return True


def configure() -> None:
    """Write our lines to standard error, which is `daemon.log` in the job directory."""
    handler = logging.StreamHandler()
    handler.addFilter(WhereFilter())
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
