"""Log lines of the daemon: each one names its generation, rank and step.

2026-11-20 13:35:07 INFO [gen 2 | rank 5 | step 1200] 512.0 MB in 1 pack after 0.4 s
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from flashckpt.errors import FlashckptError
from flashckpt.logs import PrintableFormatter
from flashckpt.nonfatal import log_stream
from flashckpt.shm.private import open_file, private_directory

_where: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("flashckpt_where", default=())
LOG_BYTES = 4 << 20
"""Size at which the log is turned over: it lies in memory beside the snapshots."""
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
    handler = logging.StreamHandler(log_stream(""))
    handler.addFilter(WhereFilter())
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def turn_over(path: Path, *, streams: Sequence[int] = (1, 2), limit: int = LOG_BYTES) -> bool:
    """Begin a new log where the present one has grown past `limit`; that one becomes NAME.1, and the one before it goes.

    What writes to the descriptors, the C library and faulthandler included, continues in the new file.

    Args:
        path: The log, in a directory of our own.
        streams: Descriptors of it; nothing is done if the first of them is something else.
        limit: Bytes.

    Returns:
        Whether there is a new log.
    """
    held = os.fstat(streams[0])
    if held.st_size <= limit:
        return False
    with contextlib.suppress(OSError, FlashckptError), private_directory(path.parent) as inside:
        if not os.path.samestat(held, os.stat(path.name, dir_fd=inside, follow_symlinks=False)):
            return False
        os.rename(path.name, f"{path.name}.1", src_dir_fd=inside, dst_dir_fd=inside)
        new = open_file(path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=inside)
        for stream in streams:
            os.dup2(new, stream)
        os.close(new)
        return True
    return False  # the directory has gone, or memory is full: another turn tries again
