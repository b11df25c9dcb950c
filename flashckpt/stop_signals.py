"""A rank under dlrun leaves stop signals to its agent, and so do its loader workers.

Schedulers signal every process of a job. The agent then chooses the step after which all ranks stop: a rank that ended at
once, or lost a loader worker, would make a failure of it. Handlers that the program has set stay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
from typing import Any

from torch.utils.data import _utils

from flashckpt.agent_folder import agent_folder
from flashckpt.shm.control import Control, ControlRow

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
AGENT_S = 15.0
"""Seconds in which the agent has to have chosen a step: without one the signal was for this rank alone, and ends it."""
_WORKER_S = 2.0

_torch: Any = _utils.signal_handling
_current: DeferredSignals | None = None
_is_hooked = False


class DeferredSignals:
    """The stop signals of one rank while its session lasts; does nothing without an agent or outside of the main thread.

    Args:
        control: The page on which the agent writes the step to stop after.
        row: Of this rank.
    """

    def __init__(self, control: Control, row: ControlRow) -> None:
        self._control, self._row = control, row
        self._old: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._mark_workers: Any = None

    def install(self) -> None:
        """Take over the signals that would end this process."""
        global _current, _is_hooked  # noqa: PLW0603 -- hooks of a fork cannot be taken back
        if agent_folder() is None or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._old[number] = signal.signal(number, self._on_signal)
                signal.siginterrupt(number, False)  # noqa: FBT003
        _current, self._mark_workers = self, _torch._set_worker_signal_handlers  # noqa: SLF001 -- what every loader worker calls first
        _torch._set_worker_signal_handlers = self._in_worker  # noqa: SLF001
        if not _is_hooked:
            os.register_at_fork(after_in_child=_in_child)
            _is_hooked = True

    def restore(self) -> None:
        """Put back what was there, where it was not changed meanwhile."""
        global _current  # noqa: PLW0603
        if _current is not self or threading.current_thread() is not threading.main_thread():
            return
        _current = None
        self._reset()
        if _torch._set_worker_signal_handlers == self._in_worker:  # noqa: SLF001
            _torch._set_worker_signal_handlers = self._mark_workers  # noqa: SLF001

    def _reset(self) -> None:
        for number, old in self._old.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, old)

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        """Ignore it once, and while a stop is agreed: the agent was signalled too. Else it does what it did."""
        if self._control.stop_after >= 0:
            return
        if number in self._seen:
            signal.signal(number, self._old[number])
            os.kill(os.getpid(), number)
            return
        self._seen.add(number)
        timer = threading.Timer(AGENT_S, self._was_for_this_rank_alone, [number])
        timer.daemon = True
        timer.start()

    def _was_for_this_rank_alone(self, number: int) -> None:
        if _current is self and self._control.stop_after < 0:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _in_worker(self) -> None:
        """Stand in for torch's function in a loader worker that was forked from this rank."""
        self._mark_workers()
        for number in {signal.SIGTERM, *self._old}:  # torch's function has set the first one, whatever the rank has
            signal.signal(number, self._on_signal_in_worker)

    def _on_signal_in_worker(self, number: int, _frame: types.FrameType | None) -> None:
        """Stay as long as the rank needs this worker for the steps until the one to stop after; else end as without us."""
        end = time.monotonic() + _WORKER_S
        while not self._row.paused and time.monotonic() < end:
            after = self._control.stop_after
            if 0 <= after <= self._row.step:
                break
            if after >= 0:
                return
            time.sleep(0.01)
        if number == signal.SIGTERM:  # from the rank: torch's own handler ends the worker with 0
            os._exit(0)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _in_child() -> None:
    """Give a forked process the signals that it would have without us: its parent may end it by one."""
    if _current is not None:
        with contextlib.suppress(ValueError):
            _current._reset()  # noqa: SLF001
