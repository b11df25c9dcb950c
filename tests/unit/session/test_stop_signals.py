"""Who ends by a stop signal under dlrun: every signal x every handler of the program x rank, forked child, loader worker x agreed or not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.agents import pretend_agent

from flashckpt import stop_signals
from flashckpt.stop_signals import SIGNALS, DeferredSignals

LEFT, OWN = 7, 9
TORCH: Any = stop_signals._torch
NAMES = [number.name for number in SIGNALS[:3]]  # the others are no other case


@pytest.fixture(autouse=True)
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    monkeypatch.setattr(stop_signals, "_WORKER_S", 0.05)


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
    return DeferredSignals(control, row), control


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
        before = TORCH._set_worker_signal_handlers
        signals, _ = rank()
        signals.install()
        if where == "forked child":
            os._exit(end_of(lambda: itself(name)) % 256)
        if where == "after the session":
            signals.restore()
            assert TORCH._set_worker_signal_handlers is before
        itself(name)

    expected = default_of(name)
    assert end_of(work) == (expected % 256 if where == "forked child" else expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("after", "step", "paused", "stays"),
    [(5, 3, 0, True), (5, 5, 0, False), (5, 6, 0, False), (-1, 3, 0, False), (5, 3, 1, False)],
)
def test_loader_worker_stays_while_its_rank_needs_it(
    name: str, after: int, step: int, paused: int, stays: bool
) -> None:
    """From its rank, which ends it by SIGTERM, a signal comes when the session is over, or without any stop."""

    def work() -> None:
        rank(after, step, paused)[0].install()

        def worker() -> None:
            TORCH._set_worker_signal_handlers()
            itself(name)

        os._exit(end_of(worker) % 256)

    ended = 0 if name == "SIGTERM" else default_of(name)
    assert end_of(work) == (LEFT if stays else ended) % 256


@pytest.mark.parametrize("name", NAMES)
def test_loader_worker_waits_for_the_agent_to_choose_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "_WORKER_S", 30.0)

    def worker() -> None:
        signals, control = rank()
        signals.install()
        monkeypatch.setattr("time.sleep", lambda _: setattr(control, "stop_after", 9))
        TORCH._set_worker_signal_handlers()
        itself(name)

    assert end_of(worker) == LEFT
