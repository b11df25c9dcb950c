"""Writes that must never end a run: a full disk or a closed pipe costs lines, which are counted and reported.

Checkpoints are not written through this. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from flashckpt.environment import Environment, env
from flashckpt.errors import FINAL_CODES, ConfigError, FlashckptError
from flashckpt.nonfatal import Nonfatal, write_all
from flashckpt.shm.agent_folder import agent_folder, has_display, write_permanent_error

__all__ = ["LineFile", "Nonfatal", "NonfatalStream", "nonfatal_stream", "nonfatal_streams", "write_all"]
CLEAR = "\r\x1b[J"
"""To the beginning of the line; erase from there to the end of the screen."""
_PATIENCE_S = 5.0


class LineFile:
    """A file to which lines are appended whole or not at all, without exceptions.

    It is opened by the first line for which that succeeds. One process writes it.
    """

    def __init__(self, path: str | os.PathLike[str], prepare: Callable[[int], None] | None = None) -> None:
        self._path, self._prepare = Path(path), prepare
        self._fd = -1
        self._writing = Nonfatal(str(path))
        self._writing.attempt(self._open, lines=0)

    def write(self, line: str) -> None:
        """Append one line, given without its end."""
        self._writing.attempt(lambda: self._append((line + "\n").encode()))

    def close(self) -> None:
        """Report what was lost, and close the file."""
        self._writing.report()
        if self._fd >= 0:
            self._writing.attempt(lambda: os.close(self._fd), lines=0)
            self._fd = -1

    def _open(self) -> None:
        if self._fd >= 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if self._prepare is not None:
                self._prepare(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _append(self, data: bytes) -> None:
        self._open()
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, size)  # remove a partial line: this needs no space
            raise


class NonfatalStream:
    """A text stream whose writes never raise; everything else is delegated.

    Args:
        stream: Standard output or standard error.
        place: Its name for the user.
        over_display: Write whole lines only, each in place of a live display that is then drawn again below.
    """

    def __init__(self, stream: TextIO, place: str, *, over_display: bool = False) -> None:
        self._stream, self._over_display = stream, over_display
        self._begun, self._turn = "", threading.Lock()
        self._fd = _descriptor(stream)
        self._writing = Nonfatal(place, self._say)

    def write(self, text: str) -> int:
        """Write `text`, or count its lines as lost."""
        if not self._over_display:
            return self._write(text)
        with self._turn:
            whole, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            self._write(CLEAR + whole + end)
        return len(text)

    def _write(self, text: str) -> int:
        lines = max(text.count("\n"), int(text.startswith("\r")))
        self._writing.attempt(lambda: self._put(text), lines)
        return len(text)

    def writelines(self, texts: Any) -> None:
        """Write each of `texts`."""
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        """Flush what was written to the stream itself."""
        self._writing.attempt(self._stream.flush, lines=0)

    def report(self) -> None:
        """Report in the stream itself how many lines were lost; end a line that was begun."""
        if self._begun:
            self.write("\n")
        self._writing.report()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _put(self, text: str) -> None:
        if self._fd >= 0:  # bypass the stream's buffer, which would keep what failed and reject what follows
            write_all(self._fd, text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        else:
            self._stream.write(text)
            self._stream.flush()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._put(text + "\n")


def _descriptor(stream: TextIO) -> int:
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):  # no file descriptor, or a file that is already full
        return -1


def nonfatal_stream(stream: Any, place: str, *, over_display: bool = False) -> NonfatalStream:
    """Return `stream` with writes that never raise."""
    if isinstance(stream, NonfatalStream):
        return stream
    return NonfatalStream(stream, place, over_display=over_display and is_terminal(stream))


@contextlib.contextmanager
def nonfatal_streams(*, over_display: bool = False) -> Iterator[None]:
    """Keep failing writes to the standard streams from ending the program, also at the final flush.

    Args:
        over_display: A rank may draw a live display on the terminal.
    """
    before = sys.stdout, sys.stderr
    guarded = (
        nonfatal_stream(sys.stdout, "standard output", over_display=over_display),
        nonfatal_stream(sys.stderr, "standard error", over_display=over_display),
    )
    sys.stdout, sys.stderr = guarded  # everything that print() and logging use of a stream
    try:
        yield
    finally:
        for stream in guarded:
            stream.report()
        sys.stdout, sys.stderr = (stream if _is_flushed(stream) else _nowhere() for stream in before)


def _is_flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # noqa: PTH123 -- stays open: the interpreter flushes it at exit


def terminal_of(display: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return the standard stream on which the live display is drawn, None for plain lines.

    Standard error if it is a terminal, else standard output. Nothing is drawn by a process in the background of its
    terminal, nor, unless `display` is "live", where colours or movements of the cursor are not wanted.
    """
    values = env if environ is None else Environment(environ)
    if display == "plain" or (display == "auto" and (bool(values.CI or values.NO_COLOR) or values.TERM == "dumb")):
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


def _is_in_background(stream: Any) -> bool:
    """Whether the shell has this process in the background; ranks under dlrun have no terminal that could say so."""
    with contextlib.suppress(OSError, ValueError):
        return os.tcgetpgrp(stream.fileno()) != os.getpgrp()
    return False


def report_once(error: FlashckptError) -> None:
    """Write `error` to standard error if this rank is the first to raise it; else wait until it is written.

    The first, not rank 0: dlrun ends all ranks as soon as one of them has failed. For the same reason the
    others wait: if they ended, the first one's message would be cut off.
    """
    error.settle()
    folder = agent_folder()
    if folder is None:
        with contextlib.suppress(ConfigError):  # of RANK itself
            if env.RANK and error.exit_code in FINAL_CODES:
                return
        _write(error)
        return
    marker = folder / f"reported-{env.FLASHCKPT_RESTART}-{error.exit_code}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        _wait(marker)
        return
    except OSError:  # no space, no folder: better reported twice than not at all
        _write(error)
        return
    _write(error)
    with contextlib.suppress(OSError):  # a full disk must not hide the exit code
        write_permanent_error(folder, error.exit_code)
        marker.write_text("reported")


def _write(error: FlashckptError) -> None:
    folder = agent_folder()
    stream = nonfatal_stream(sys.stderr, "standard error", over_display=folder is not None and has_display(folder))
    stream.write(f"{type(error).__name__}: {error}\n")


def _wait(marker: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        try:
            if marker.stat().st_size:
                return
        except OSError:
            return
        time.sleep(0.01)
