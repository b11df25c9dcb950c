"""A rank under dlrun leaves stop signals to its agent, and so do its loader workers, forked or spawned.

Schedulers signal every process of a job, in any order and not at one moment. The agent then chooses the step after which all
ranks stop: a rank that ended at once, or lost a loader worker, would make a failure of it. Handlers that the program has set stay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import _utils

from flashckpt.errors import DamagedError
from flashckpt.shm.agent_folder import agent_folder
from flashckpt.shm.control import CLOSED, Control, ControlRow

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
AGENT_S = 15.0
"""Seconds in which the agent has to have chosen a step: without one the signal was for this process alone, and ends it."""

_torch: Any = _utils.signal_handling
_loops: Any = _utils.worker
_current: DeferredSignals | None = None
_is_hooked = False


class DeferredSignals:
    """The stop signals of one rank while its session lasts; does nothing without an agent or outside of the main thread.

    Args:
        control: The page on which the agent writes the step to stop after.
        row: This rank's row of the control page.
        path: The page's path, for workers that are spawned; and `index`: of the row.
    """

    def __init__(self, control: Control, row: ControlRow, path: Path, index: int) -> None:
        self._control, self._row = control, row
        self._place = str(path), index
        self._old: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._mark_workers: Any = None
        self._loop: WorkerLoop | None = None

    def install(self) -> None:
        """Take over the signals that would end this process."""
        global _is_hooked  # noqa: PLW0603 -- hooks of a fork cannot be taken back
        if agent_folder() is None or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._old[number] = signal.signal(number, self._on_signal)
                signal.siginterrupt(number, False)  # noqa: FBT003
        self._take_workers()
        self._loop = _loops._worker_loop = WorkerLoop(_loops._worker_loop, (*self._place, tuple(self._old)))  # noqa: SLF001
        if not _is_hooked:
            os.register_at_fork(after_in_child=_in_child)
            _is_hooked = True

    def _take_workers(self) -> None:
        """Have the workers that are forked from this process call `_in_worker`, and this process if it is one."""
        global _current
        _current, self._mark_workers = self, _torch._set_worker_signal_handlers  # noqa: SLF001 -- what every loader worker calls first
        _torch._set_worker_signal_handlers = self._in_worker  # noqa: SLF001

    @classmethod
    def spawned(cls, path: str, index: int, numbers: tuple[int, ...]) -> None:
        """Do in a worker that was spawned what a forked one has from its rank."""
        with contextlib.suppress(OSError, DamagedError, IndexError):
            control = Control.open(path)
            signals = cls(control, control.row(index), Path(path), index)
            signals._old = dict.fromkeys(numbers)
            signals._take_workers()

    def restore(self) -> None:
        """Put back what was there, where it was not changed meanwhile."""
        global _current  # noqa: PLW0603
        if _current is not self or threading.current_thread() is not threading.main_thread():
            return
        _current = None
        self._reset()
        if _torch._set_worker_signal_handlers == self._in_worker:  # noqa: SLF001
            _torch._set_worker_signal_handlers = self._mark_workers  # noqa: SLF001
        if self._loop is not None and _loops._worker_loop is self._loop:  # noqa: SLF001
            _loops._worker_loop = self._loop.inner  # noqa: SLF001

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
        self._await_agent(number)

    def _await_agent(self, number: int) -> None:
        self._seen.add(number)
        timer = threading.Timer(AGENT_S, self._was_for_this_process_alone, [number])
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # a limit on threads must not end training here: the second signal does
            timer.start()

    def _was_for_this_process_alone(self, number: int) -> None:
        if _current is self and self._control.stop_after < 0:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _in_worker(self) -> None:
        """Stand in for torch's function in a loader worker of this rank."""
        self._mark_workers()
        self._seen = set()
        for number in {signal.SIGTERM, *self._old}:  # torch's function has set the first one, whatever the rank has
            signal.signal(number, self._on_signal_in_worker)

    def _on_signal_in_worker(self, number: int, _frame: types.FrameType | None) -> None:
        """Stay as long as the rank may need this worker; else end as without us. Data is made meanwhile: the rank waits for it.

        The rank ends its workers by SIGTERM alone, and not before it has stopped or its session is over: any other signal,
        however late, is the scheduler's.
        """
        after = self._control.stop_after
        if after < 0 and number not in self._seen and self._row.paused != CLOSED:
            self._await_agent(number)
        elif number == signal.SIGTERM and (self._row.step >= after or self._row.paused == CLOSED):
            os._exit(0)  # as torch's own handler does
        elif after < 0:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)


class WorkerLoop:
    """torch's loop of a loader worker, which a worker that is spawned finds with the stop signals of its rank."""

    def __init__(self, inner: Callable[..., None], place: tuple[str, int, tuple[int, ...]]) -> None:
        self.inner, self._place = inner, place

    def __call__(self, *arguments: Any) -> None:
        """Run in a worker that was forked."""
        self.inner(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Be torch's loop of the process that unpickles this."""
        return _loop_of_spawned, self._place


def _loop_of_spawned(path: str, index: int, numbers: tuple[int, ...]) -> Any:
    DeferredSignals.spawned(path, index, numbers)
    return _loops._worker_loop  # noqa: SLF001


def _in_child() -> None:
    """Give a forked process the signals that it would have without us: its parent may end it by one."""
    if _current is not None:
        with contextlib.suppress(ValueError):
            _current._reset()  # noqa: SLF001
