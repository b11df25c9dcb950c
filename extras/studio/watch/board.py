"""Curves for TensorBoard. A full disk costs points, which are counted and reported; never the run."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Mapping
from typing import Any

from flashckpt.trainer.train.nonfatal import Nonfatal

logger = logging.getLogger(__name__)
BOARD_PATIENCE = 100
"""After a failure tensorboard is retried once every so many steps: a new writer costs a file and a thread."""
_FLUSH_S = 10
"""Seconds after which points are in the file: a killed rank loses no more of its curves."""


class Board:
    """A run's page in TensorBoard.

    Args:
        folder: The run's log folder.
        after: Step that was restored; points of later steps are removed, so that none is drawn twice.
    """

    def __init__(self, folder: str, after: int) -> None:
        self._folder, self._after = f"{folder}/tensorboard", after
        self._writer: Any = None
        self._writing = Nonfatal(self._folder)
        self._calls = 0  # since writing failed
        self._is_installed = True

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each named curve."""
        self._attempt(lambda: self._points(values, step), step, lines=len(values))

    def note(self, text: str, step: int) -> None:
        """Mark a step with a text, in the tab of texts."""
        self._attempt(lambda: self._writer.add_text("events", text, step), step, lines=1)

    def say(self, texts: Mapping[str, str], step: int) -> None:
        """Add a text under each name, as it is: markdown shows indented lines so."""
        shown = {name: "".join(f"    {line}\n" for line in text.splitlines()) for name, text in texts.items()}
        self._attempt(lambda: [self._writer.add_text(name, shown[name], step) for name in shown], step, len(shown))

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None and not self._writing.attempt(self._writer.close, lines=0):
            self._writing.lost += 1
        self._writing.report()

    def _attempt(self, write: Callable[[], object], step: int, lines: int) -> None:
        if self._is_installed and not self._writing.attempt(lambda: self._write(write, step), lines=lines):
            self._give_up()

    def _points(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _write(self, write: Callable[[], object], step: int) -> None:
        if self._writer is None:
            self._calls += 1
            if self._writing.lost and self._calls % BOARD_PATIENCE:
                raise OSError(errno.EAGAIN, "not writing for now")
            self._writer = _summary_writer(self._folder, self._after)
            self._is_installed = self._writer is not None
        if self._writer is not None:
            write()
            self._after = max(self._after, step)

    def _give_up(self) -> None:
        # Its thread died of the error; a new writer begins a new file after the last accepted point.
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writer.close()
        self._writer = None


def _summary_writer(folder: str, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("log.tensorboard is on, but tensorboard is not installed: pip install 'flashckpt[trainer]'")
        return None
    return SummaryWriter(log_dir=folder, purge_step=after + 1, flush_secs=_FLUSH_S)
