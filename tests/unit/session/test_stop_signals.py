"""Who ends by a stop signal under dlrun: every signal x every handler of the program x rank, forked child, loader worker x agreed or not."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.agents import pretend_agent

from flashckpt.session import stop_signals
from flashckpt.session.stop_signals import SIGNALS, DeferredSignals
from flashckpt.shm.control import CLOSED, Control

LEFT, OWN = 7, 9
TORCH: Any = stop_signals._torch
LOOPS: Any = stop_signals._loops
NAMES = [number.name for number in SIGNALS[:3]]  # the others are no other case


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))


def end_of(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process; return how it ended: LEFT where nothing ended it, negative by a signal, 1 by an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:  # noqa: BLE001 -- the status tells
            os._exit(1)
        os._exit(LEFT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def default_of(name: str) -> int:
    return 130 if name == "SIGINT" else -int(getattr(signal, name))


def rank(after: int = -1, step: int = 3, paused: int = 0) -> tuple[DeferredSignals, Any]:
    control: Any = SimpleNamespace(stop_after=after)
    row: Any = SimpleNamespace(step=step, paused=paused)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return DeferredSignals(control, row, Path("nowhere"), 0), control


def itself(name: str, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("after", "times", "stays"), [(-1, 1, True), (-1, 2, False), (5, 1, True), (5, 4, True)])
def test_rank_leaves_the_first_one_to_its_agent_and_all_once_a_stop_is_agreed(
    name: str, after: int, times: int, stays: bool
) -> None:
    def work() -> None:
        signals, _ = rank(after)
        signals.install()
        itself(name, times)

    assert end_of(work) == (LEFT if stays else default_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_rank_that_was_signalled_alone_ends_when_no_stop_is_agreed_in_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "AGENT_S", 0.01)

    def work() -> None:
        rank()[0].install()
        itself(name)
        threading.Event().wait(30)

    assert end_of(work) == default_of(name)


def test_limit_on_threads_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def work() -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        rank()[0].install()
        itself("SIGTERM")

    assert end_of(work) == LEFT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: os._exit(OWN)], ids=["ignored", "own"])
def test_handler_of_the_program_stays(name: str, handler: Any) -> None:
    def work() -> None:
        signals, _ = rank()
        signal.signal(getattr(signal, name), handler)
        signals.install()
        itself(name)

    assert end_of(work) == (LEFT if handler is signal.SIG_IGN else OWN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["forked child", "after the session", "without dlrun"])
def test_elsewhere_signals_do_what_they_did(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent ends its children by them, and a program without an agent is ended by them."""
    if where == "without dlrun":
        monkeypatch.delenv("FLASHCKPT_AGENT_DIR")

    def work() -> None:
        before, loop = TORCH._set_worker_signal_handlers, LOOPS._worker_loop
        signals, _ = rank()
        signals.install()
        if where == "forked child":
            os._exit(end_of(lambda: itself(name)) % 256)
        if where == "after the session":
            signals.restore()
            assert TORCH._set_worker_signal_handlers is before
            assert LOOPS._worker_loop is loop
        itself(name)

    expected = default_of(name)
    assert end_of(work) == (expected % 256 if where == "forked child" else expected)


def in_worker(name: str, times: int, after: int, step: int, paused: int, how: str, page: Path) -> int:
    """Signal a loader worker, forked from a rank or as a spawned one finds the rank; return how it ended."""

    def forked() -> None:
        rank(after, step, paused)[0].install()
        os._exit(end_of(worker) % 256)

    def spawned() -> None:
        control = Control.open(page, rows=2)
        control.stop_after, control.row(1).step, control.row(1).paused = after, step, paused
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of the suite has one of its own
        before = LOOPS._worker_loop
        signals = DeferredSignals(control, control.row(1), page, 1)
        signals.install()
        sent = pickle.dumps(LOOPS._worker_loop)
        signals.restore()
        os._exit(end_of(lambda: worker() if pickle.loads(sent) is before else os._exit(1)) % 256)

    def worker() -> None:
        TORCH._set_worker_signal_handlers()
        itself(name, times)

    return end_of(spawned if how == "spawned" else forked)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["forked", "spawned"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("after", "step", "paused", "times", "ends_by"),
    [
        (5, 3, 0, 3, ""),
        (5, 3, 1, 3, ""),
        (-1, 3, 0, 1, ""),
        (-1, 3, 1, 1, ""),
        (-1, 3, 0, 2, "SIGTERM SIGINT SIGUSR1"),
        (-1, 3, CLOSED, 1, "SIGTERM SIGINT SIGUSR1"),
        (5, 5, 0, 1, "SIGTERM"),
        (5, 6, 0, 1, "SIGTERM"),
        (5, 3, CLOSED, 1, "SIGTERM"),
    ],
)
def test_loader_worker_stays_while_its_rank_may_need_it(
    name: str, after: int, step: int, paused: int, times: int, ends_by: str, how: str, tmp_path: Path
) -> None:
    """From its rank comes SIGTERM alone, when the rank has stopped or its session is over; without a stop the second one counts."""
    ended = 0 if name == "SIGTERM" else default_of(name)
    found = in_worker(name, times, after, step, paused, how, tmp_path / "control")
    assert found == (ended if name in ends_by else LEFT) % 256


@pytest.mark.parametrize("name", NAMES)
def test_loader_worker_that_was_signalled_alone_ends_and_makes_data_until_then(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "AGENT_S", 0.01)

    def worker() -> None:
        rank()[0].install()
        TORCH._set_worker_signal_handlers()
        itself(name)  # a handler that waited for the agent would not return
        threading.Event().wait(30)

    assert end_of(worker) == (0 if name == "SIGTERM" else default_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_loader_worker_stays_where_a_step_is_chosen_after_the_signal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "AGENT_S", 0.05)

    def worker() -> None:
        signals, control = rank()
        signals.install()
        TORCH._set_worker_signal_handlers()
        itself(name)
        control.stop_after = 9
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join()

    assert end_of(worker) == LEFT
