"""A terminal for tests: a pty, and the screen that what is written to it makes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterator
from typing import Any

_PARTS = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n])")


class Screen:
    """Rows of characters, with all that has scrolled out above them.

    Knows what the display uses: carriage return, line feed, erase below, cursor up, no wrapping, colours. Anything
    else is an error of the test that feeds it.
    """

    def __init__(self, columns: int = 80, height: int = 24) -> None:
        self.columns, self.height = columns, height
        self.rows, self.row, self.column, self.wraps = [""], 0, 0, True

    @property
    def lines(self) -> list[str]:
        """Everything from the first row on, without empty rows."""
        return [text.rstrip() for text in self.rows if text.strip()]

    def feed(self, text: str) -> None:
        """Show what was written."""
        end = 0
        for part in _PARTS.finditer(text):
            assert part.start() == end, f"not understood: {text[end : part.start()]!r}"
            end = part.end()
            mode, numbers, order, back, down, char = part.groups()
            if order:
                self._order(mode, numbers, order)
            elif back:
                self.column = 0
            elif down:
                self._down()
            else:
                self._put(char)
        assert end == len(text), f"not understood: {text[end:]!r}"

    def _order(self, mode: str, numbers: str, order: str) -> None:
        if mode:
            assert (numbers, order) in {("7", "l"), ("7", "h")}, f"mode {numbers}{order}"  # ?25l would hide the cursor
            self.wraps = order == "h"
        elif order == "A":
            self.row = max(self.row - int(numbers or 1), len(self.rows) - self.height, 0)
        elif order == "J":
            assert not numbers
            del self.rows[self.row + 1 :]
            self.rows[self.row] = self.rows[self.row][: self.column]
        else:
            assert order == "m", order

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _put(self, char: str) -> None:
        if self.column >= self.columns:
            if not self.wraps:
                return
            self._down()
            self.column = 0
        text = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = text[: self.column] + char + text[self.column + 1 :]
        self.column += 1


class Terminal:
    """A pty with a window of some size.

    Attributes:
        end: The descriptor that a program takes for its terminal.
        screen: What is on it.
        written: All that came, as text.
    """

    def __init__(self, columns: int = 80, height: int = 24) -> None:
        self._ours, self.end = pty.openpty()
        self.screen, self.written, self._rest = Screen(columns, height), "", b""
        self.resize(columns, height)

    def resize(self, columns: int, height: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", height, columns, 0, 0))
        self.screen.columns, self.screen.height = columns, height

    def read(self, wait_s: float = 0.0) -> None:
        """Show what has been written since the last call."""
        while select.select([self._ours], [], [], wait_s)[0]:
            try:
                self._rest += os.read(self._ours, 65536)
            except OSError:  # nobody has the other end open any more
                return
            text = self._rest.decode(errors="ignore")
            if not self._rest.endswith((b"\n", b"A", b"m", b"J")) and len(self._rest) < 65536:
                continue  # in the middle of something
            self.screen.feed(text)
            self.written, self._rest = self.written + text, b""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._ours)
        self._ours = -1

    def stream(self) -> Any:
        """Return its end as a text stream, which the caller closes."""
        return os.fdopen(os.dup(self.end), "w", encoding="utf-8")

    def close(self) -> None:
        """Close both ends."""
        for fd in (self._ours, self.end):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._ours = self.end = -1


@contextlib.contextmanager
def terminal(columns: int = 80, height: int = 24) -> Iterator[Terminal]:
    """Open a terminal."""
    found = Terminal(columns, height)
    try:
        yield found
    finally:
        found.close()
