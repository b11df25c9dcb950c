"""How the commands print: tables that fit the terminal, text of others as it is, JSON that every parser reads."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.nonfatal import fill_closed
from flashckpt.printable import printable, to_json

_PIPE_WIDTH = 4000
"""Columns of output that is no terminal: programs such as grep want whole lines."""
_MANY_ROWS = 1000
"""Rows beyond which a table that fits is written by us, line by line: rich takes 0.7 ms for each."""
_LEAST_TEXT = 20
"""Columns that a column of text gets at least, if it has that much; narrower terminals get one block per row."""


class OutputConsole(Console):
    """A console that takes every string as it is, and lets `main` see that the reader of a pipe has gone."""

    def __init__(self, *, stderr: bool = False) -> None:
        """Print to the current standard output or error."""
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.width, self.soft_wrap = _PIPE_WIDTH, True

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error, which it would turn into exit code 1."""
        raise BrokenPipeError


class FittingTable(Table):
    """A table of text of others. Numbers are never cut, text folds; in too narrow a terminal every row is a block."""

    def __init__(self, *columns: str, title: str = "") -> None:
        """Take the headers; a column whose name starts with ">" holds numbers and is right-aligned."""
        super().__init__(
            title=printable(title) or None, box=None, pad_edge=False, title_justify="left", header_style="bold"
        )
        self._headers = [name.removeprefix(">") for name in columns]
        self._is_number = [name.startswith(">") for name in columns]
        self._texts: list[list[str]] = []
        for name, number in zip(self._headers, self._is_number, strict=True):
            self.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row of strings, each escaped where it is not printable."""
        texts = [printable(cell) for cell in cells]
        self._texts.append(texts)
        super().add_row(*texts, **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as a table where it fits, else as blocks."""
        if self._least_width() > options.max_width:
            return self._blocks()
        if len(self._texts) > _MANY_ROWS and sum(widths := self._full_widths()) + 2 * len(widths) <= options.max_width:
            return self._lines(widths)
        return super().__rich_console__(console, options)

    def _full_widths(self) -> list[int]:
        columns = zip(self._headers, *self._texts, strict=True)
        return [max(map(cell_len, column)) for column in columns]

    def _lines(self, widths: Sequence[int]) -> Iterator[Text | Segment]:
        if self.title:
            yield Text(str(self.title), style="table.title")
        yield Text(self._line(self._headers, widths), style="bold")
        yield Segment("".join(f"{self._line(row, widths)}\n" for row in self._texts))

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = []
        for text, width, is_number in zip(row, widths, self._is_number, strict=True):
            padding = " " * (width - cell_len(text))
            cells.append(f"{padding}{text}" if is_number else f"{text}{padding}")
        return "  ".join(cells)

    def _least_width(self) -> int:
        widths = []
        for k, (header, is_number) in enumerate(zip(self._headers, self._is_number, strict=True)):
            width = max((cell_len(row[k]) for row in [self._headers, *self._texts]), default=0)
            widths.append(width if is_number else max(cell_len(header), min(width, _LEAST_TEXT)))
        return sum(widths) + 2 * (len(widths) - 1)

    def _blocks(self) -> Iterator[Text]:
        if self.title:
            yield Text(str(self.title), overflow="fold")
        label = max(map(len, self._headers))
        for number, row in enumerate(self._texts):
            if number:
                yield Text("")
            for header, text in zip(self._headers, row, strict=True):
                if text:
                    yield Text(f"{header:<{label}}  {text}", overflow="fold")


def error_fields(error: FlashckptError) -> dict[str, Any]:
    """Return the parts of an error for JSON."""
    names = ("problem", "found", "expected", "state", "remedy")
    fields: dict[str, Any] = {name: getattr(error, name) for name in names}
    return fields | {"type": type(error).__name__, "exit_code": error.exit_code}


def print_error(fields: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print an error: one JSON document on standard output, or text on standard error; never fails itself."""
    try:
        if as_json:
            click.echo(to_json({"error": fields}))
        else:
            click.echo(printable(text, keep="\n"), err=True)
    except (OSError, ValueError):
        silence()


def print_traceback() -> None:
    """Print where an unforeseen error came from, if FLASHCKPT_TRACEBACK asks for it."""
    if env.FLASHCKPT_TRACEBACK:
        traceback.print_exc()


def flush() -> None:
    """Write out what is buffered, so that a full disk or a closed pipe is seen here and not at the interpreter's end."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def silence() -> None:
    """Point streams that cannot be written to nowhere: the interpreter would complain of them at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def prepare_streams() -> None:
    """Fill closed standard streams; accept any character whatever the locale."""
    fill_closed()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
