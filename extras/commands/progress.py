"""What is shown of work that takes long: a bar with rate and remaining time on standard error, once it has taken two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from flashckpt.cli.output import OutputConsole

AFTER_S = 2.0


@contextmanager
def progress(what: str, total: int = 0, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Give a function to report the bytes that were done, from any thread; nothing is shown where standard error is no terminal.

    Args:
        what: The work, one word.
        total: Bytes in all.
        quiet: Show nothing.
    """
    console = OutputConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn(what), *columns, console=console, transient=True)
    task, began_s, lock = bar.add_task("", total=total), time.monotonic(), threading.Lock()

    def advance(nbytes: int) -> None:
        bar.advance(task, nbytes)
        with lock:
            if not bar.live.is_started and time.monotonic() - began_s >= AFTER_S:
                bar.start()

    try:
        yield advance
    finally:
        bar.stop()


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show that something works whose end is not known; nothing where standard error is no terminal."""
    console = OutputConsole(stderr=True)
    with nullcontext() if quiet or not console.is_terminal else console.status(what):
        yield
