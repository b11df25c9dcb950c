"""Logs of ranks (--log-dir, --redirects, --tee) on a disk without room: they go elsewhere, and the ranks start all the same."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import IO

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

_log = logging.getLogger("flashckpt.dlrun")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def logs_elsewhere(error: OSError, folder: Path) -> DefaultLogsSpecs:
    """Return where logs go while their folders cannot be made: to dlrun's own streams, error files to `folder`.

    Raises:
        OSError: `error`, where it is no lack of room: a wrong --log-dir.
    """
    if error.errno not in _NO_ROOM:
        raise error
    _log.warning(
        "the folders of the logs cannot be made (%s: %s): the ranks of this start write to dlrun's own streams",
        error.filename,
        error.strerror,
    )
    return DefaultLogsSpecs(log_dir=str(folder / "logs"))


def opened(path: str) -> IO[str] | None:
    """Open the log of a rank; None, dlrun's own stream, where there is none or no room for it."""
    if not path:
        return None
    try:
        return open(path, "w")  # noqa: PTH123 -- closed by the caller, once the rank has it
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _log.warning("%s cannot be opened (%s): its output continues here", path, error.strerror)
        return None
