"""Writes of logs that must never end a run: a full disk or a closed pipe costs lines, which are counted and reported.

Checkpoints are not written through this.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Nonfatal:
    """Counts lines that could not be written to one place; reports them when writing works again, and at the end.

    Args:
        place: Its name for the user: a file's path, "standard error".
        say: Reports the count; the log by default.
    """

    def __init__(self, place: str, say: Callable[[str], None] | None = None) -> None:
        self.place = place
        self.lost = 0
        self._error = ""
        self._say = say or (lambda text: logger.warning("%s", text))

    def attempt(self, write: Callable[[], object], lines: int = 1) -> bool:
        """Call `write` and return whether it worked; `lines` are counted as lost where it did not."""
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._error = getattr(error, "strerror", None) or str(error)
            if lines and not self.lost:
                self._say(f"{self.place} cannot be written ({self._error}): lines are lost until it can")
            self.lost += lines
            return False
        if lines:
            self.report(" before writing worked again")
        return True

    def report(self, ending: str = "") -> None:
        """Report how many lines were lost since the last report, if any."""
        if self.lost:
            count, self.lost = self.lost, 0
            self._say(f"{self.place}: {count} lines were lost{ending} ({self._error})")


class NonfatalFile(io.FileIO):
    """The raw file below a standard stream: what cannot be written is counted, and reported in the stream itself.

    Args:
        fd: Its descriptor, which stays open.
        place: Its name for the user.
        prefix: The words with which reports begin.
        reports: Descriptor that they go to in its place.
    """

    def __init__(self, fd: int, place: str, prefix: str = "", reports: int | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._prefix, self._reports = prefix, fd if reports is None else reports
        self._writing = Nonfatal(place, self._say)

    def write(self, data: Any) -> int:
        """Write all of `data`, or count its lines as lost."""
        raw = bytes(data)
        self._writing.attempt(lambda: write_all(self.fileno(), raw), raw.count(b"\n"))
        return len(raw)

    def report(self) -> None:
        """Report what was lost since the last report."""
        self._writing.report()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            write_all(self._reports, f"{self._prefix}{text}\n".encode())


def write_all(fd: int, data: bytes) -> None:
    """Write every byte.

    Raises:
        OSError: the disk is full; a part may have been written.
    """
    while data:
        written = os.write(fd, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def nonfatal_text(raw: NonfatalFile, name: str, *, encoding: str = "utf-8", errors: str = "strict") -> Any:
    """Return a text stream as `python -u` makes it, whose writes cost lines where they fail."""
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(
        raw,  # unbuffered, as python -u does it
        encoding=encoding,
        errors=errors,
        write_through=True,
        line_buffering=name == "stderr",
    )
    stream.mode = "w"  # type: ignore[misc]  # as the interpreter sets it
    return stream


def log_stream(prefix: str) -> Any:
    """Return standard error for the handler of a log."""
    return nonfatal_text(NonfatalFile(2, "standard error", prefix), "stderr", errors="backslashreplace")


def report_lost(stream: Any) -> None:
    """Report the lines that a stream of `nonfatal_text` lost since its last report; of another stream, nothing."""
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, NonfatalFile):
        raw.report()


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
