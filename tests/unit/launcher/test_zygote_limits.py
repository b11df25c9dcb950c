"""No exchange with the zygote waits for ever: every exchange x every way not to answer, and a new one is used then."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from functools import partial
from typing import Any

import pytest
from support.ranks import wait_for
from support.sockets import Made, made, pair

from flashckpt.daemon.machine.process import has_ended, is_stopped
from flashckpt.daemon.zygote import messages
from flashckpt.daemon.zygote.client import Unavailable, WarmCopy, ZygoteClient, key_of

__all__ = ["made"]

SILENT = {
    "stopped": None,
    "hangs": None,
    "stopped in the middle of an answer": b"\x40" + bytes(7) + b"{",
    "hangs in the middle of an answer": b"\x40\x00",
    "answers nonsense": b"\x02" + bytes(7) + b"[]",
    "dead": None,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SLICE_S", 0.01)
    monkeypatch.setattr(messages, "STOPPED_S", 0.05)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by torch.compile in an earlier test of this process")


def worker() -> dict[str, Any]:
    return {"argv": ["x.py"], "module": False, "env": dict(os.environ)}


def silent(how: str, made: Made) -> tuple[socket.socket, int]:
    """A process in place of the zygote that does not answer, and the socket to it."""
    here, there = pair(made)
    process = subprocess.Popen(["sleep", "600"], pass_fds=[there.fileno()], start_new_session=True)
    made.callback(process.wait, 30)
    made.callback(process.kill)
    if (part := SILENT[how]) is not None:
        there.sendall(part)
    there.close()
    if how.startswith("stopped"):
        process.send_signal(signal.SIGSTOP)
        wait_for(partial(is_stopped, process.pid), what="the stop")
    if how == "dead":
        process.kill()
        process.wait(30)
    return here, process.pid


@pytest.mark.parametrize("how", SILENT)
@pytest.mark.parametrize("first", ["imports", "fork", "rehearse", "copy is made", "copy forks"])
def test_a_zygote_that_does_not_answer_is_killed_and_not_waited_for(
    how: str, first: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is silent, and so is the one that is started in its place: then interpreters are spawned."""
    for name in ("ANSWER_S", "READY_S"):
        monkeypatch.setattr(messages, name, 0.2)
    monkeypatch.setattr("flashckpt.daemon.zygote.client._TICK_S", 0.2)
    client = ZygoteClient(*(begun := silent(how, made)))
    starts: list[int] = []

    def start(self: ZygoteClient) -> None:
        starts.append(1)
        self._sock, self.pid = silent(how, made)
        self._ready = False

    monkeypatch.setattr(ZygoteClient, "_start", start)
    client._ready = first != "imports"
    if first.startswith("copy"):
        sock, pid = silent(how, made)
        client._warm = WarmCopy(sock, pid, key_of(worker()), is_asked=True, ready=first == "copy forks")
    if first == "rehearse":
        client.rehearse("module:function", worker(), is_asked=True)
        assert client._warm is None
    with pytest.raises(Unavailable, match="did not answer, twice"):
        client.fork([worker()])
    assert 1 <= len(starts) <= 2
    client.close()
    assert has_ended(begun[1])


def test_a_suspended_machine_is_no_silence(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """The clock jumps by an hour between two looks: what counts is how often was looked."""
    here, there = pair(made)
    clock = iter(range(0, 10**9, 3600))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    messages.send(there, {"pids": [1]})
    assert messages.exchange(here, os.getpid(), None, limit_s=1.0) == {"pids": [1]}


def test_a_zygote_that_only_takes_its_time_is_waited_for(made: Made) -> None:
    """Slower than a stop would be accepted, faster than the limit; and what does not read is no longer written to."""
    here, there = pair(made)
    pid = os.fork()
    if pid == 0:
        for _ in range(40):
            os.sched_yield()
        signal.sigtimedwait([], 0.3)
        messages.send(there, {"pids": [7]})
        os._exit(0)
    assert messages.exchange(here, pid, None) == {"pids": [7]}
    os.waitpid(pid, 0)
    sock, silent_pid = silent("stopped", made)
    huge = {"env": "x" * (4 << 20)}  # more than a socket takes
    assert messages.exchange(sock, silent_pid, huge, limit_s=0.2) is None
