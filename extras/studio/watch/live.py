"""The live display: a thread draws what the last step was, some times a second, on the terminal.

The training thread only sets a reference. A terminal that has gone or blocks costs the display, not the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from typing import Any

from flashckpt.shm.agent_folder import agent_folder, note_display
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.nonfatal import CLEAR, write_all
from flashckpt.trainer.watch.engine import Events
from flashckpt.trainer.watch.figures import Figures, StepPace, progress_text

REFRESH_S = 0.5
_JOIN_S = 2.0
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_SHOWN_EVENTS = 5


class LiveDisplay:
    """Draws until it is closed."""

    def __init__(self, stream: Any, *, steps: int, events: Events) -> None:
        from flashckpt.trainer.watch import panel  # rich is imported where something is drawn, and before it is

        self._panel = panel
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._steps, self._events, self._pace = steps, events, StepPace()
        self._last: tuple[StepRecord, Figures] | None = None
        self._is_gone = False
        self._closing = threading.Event()
        self._hangup: Any = None
        if (folder := agent_folder()) is not None:
            with contextlib.suppress(OSError):
                note_display(folder)
        else:
            self._outlive_terminal()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def show(self, record: StepRecord, figures: Figures) -> None:
        """Show a step from the next time on that it is drawn."""
        self._pace.add(record.seconds)
        self._last = record, figures

    def close(self) -> None:
        """Remove the display and leave one line about the last step."""
        self._closing.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # it is while the terminal is held (Ctrl-S)
            last = self._last
            self._write(CLEAR + (f"{progress_text(*last, steps=self._steps, left_s=self._left_s())}\n" if last else ""))
        if self._hangup is not None:
            signal.signal(signal.SIGHUP, self._hangup)
            self._hangup = None

    def draw(self) -> str:
        """Return what is written to draw the display once, the cursor back at its beginning."""
        size = _size(self._fd)
        record, figures = self._last or (None, None)
        view = self._panel.View(
            record=record,
            figures=figures,
            steps=self._steps,
            left_s=self._left_s(),
            events=self._events.newest(_SHOWN_EVENTS),
        )
        lines = self._panel.render(view, width=size.columns, height=size.lines, encoding=self._encoding)
        body = "".join(f"\r\n{line}" for line in lines)
        return f"{CLEAR}{_NO_WRAP}{body}{_WRAP}\r\x1b[{len(lines)}A"

    def _run(self) -> None:
        while not self._closing.wait(REFRESH_S) and not self._is_gone:
            self._write(self.draw())

    def _left_s(self) -> float:
        return self._pace.left_s(self._steps - self._last[0].step) if self._last else 0.0

    def _write(self, text: str) -> None:
        """Write in one call, so that lines of other processes are before it or behind it."""
        if self._is_gone:
            return
        try:
            write_all(self._fd, text.encode(self._encoding, "replace"))
        except OSError as error:
            self._is_gone = error.errno not in (errno.EAGAIN, errno.EINTR)

    def _outlive_terminal(self) -> None:
        """Let the run continue when its terminal is closed; under dlrun ranks have a session without one."""
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                self._hangup = signal.signal(signal.SIGHUP, self._hung_up)

    def _hung_up(self, *_: object) -> None:
        self._is_gone = True


def _size(fd: int) -> os.terminal_size:
    """Return the size of the window now: it is asked each time, since ranks under dlrun get no SIGWINCH."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(fd)
        if size.columns and size.lines:
            return size
    return os.terminal_size((80, 24))
