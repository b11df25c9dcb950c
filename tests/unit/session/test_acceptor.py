"""Listeners outlive what strangers do to them: idle, dripping and reset connections, and refused descriptors and threads."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.ranks import wait_for

from flashckpt import acceptor
from flashckpt.acceptor import Acceptor, most_connections
from flashckpt.daemon.persister.metrics import Endpoint
from flashckpt.replicate import peer_link
from flashckpt.replicate.receiver import Listener
from flashckpt.replicate.records import ReplicaSession

KEY = b"k" * 32
SESSION = ReplicaSession(
    generation=1,
    node=0,
    addresses=("a 1", "b 2"),
    domains=("a", "b"),
    ranks=("0", "1"),
    replicas=1,
    secret={"key": KEY},
)


class Host:
    slots: Any = None
    session = SESSION

    def kept(self) -> None:
        return None

    def take_report(self, node: int, report: Any) -> Any:
        raise NotImplementedError


class Numbers:
    def numbers(self) -> Mapping[str, float]:
        return {"failures": 3.0}


@contextlib.contextmanager
def replicas() -> Iterator[tuple[int, Callable[[], bool]]]:
    listener = Listener(Host(), "127.0.0.1")

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", listener.port), timeout=5) as sock:
            peer_link.authenticate(sock, accepts=False, secret=KEY, purpose="replicas", job="generation 1", timeout_s=5)
            return True
        return False

    with contextlib.closing(listener):
        yield listener.port, answers


@contextlib.contextmanager
def scrapes() -> Iterator[tuple[int, Callable[[], bool]]]:
    endpoint = Endpoint(Numbers(), job="j", node=0, port=0)

    def answers() -> bool:
        with contextlib.suppress(OSError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5).read()
            return b"flashckpt_failures_total" in text
        return False

    with contextlib.closing(endpoint):
        yield endpoint.port, answers


def idle(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]


def reset(port: int) -> None:
    for words in (b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n", b"\0" * 100):
        sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        sock.sendall(words)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


@pytest.mark.parametrize("listener", [replicas, scrapes], ids=["replicas", "metrics"])
def test_idle_connections_of_a_stranger_neither_end_a_listener_nor_keep_others_out(
    listener: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with listener() as (port, answers):
        assert answers()
        held = idle(port, 3 * acceptor.UNPROVEN_PER_ADDRESS)
        wait_for(answers, what="an answer beside idle connections")
        reset(port)
        wait_for(answers, what="an answer after resets")
        for one in held:
            one.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("listener", [replicas, scrapes], ids=["replicas", "metrics"])
def test_connection_that_never_finishes_is_ended(listener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PROOF_S", 0.5)
    with listener() as (port, _):
        sock = socket.create_connection(("127.0.0.1", port), timeout=30)

        def is_ended() -> bool:
            try:
                sock.sendall(b"G")  # dripping
                sock.settimeout(0.05)
                return sock.recv(100) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_for(is_ended, what="its end")
        sock.close()


REFUSALS = {
    "EMFILE": OSError(errno.EMFILE, "too many open files"),
    "ENFILE": OSError(errno.ENFILE, "too many open files in system"),
    "ECONNABORTED": ConnectionAbortedError(errno.ECONNABORTED, "aborted"),
    "ENOBUFS": OSError(errno.ENOBUFS, "no buffer space"),
    "EPERM": OSError(errno.EPERM, "firewall"),
    "no thread": RuntimeError("can't start new thread"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_the_system_refuses_for_a_while_does_not_end_the_listener(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    error, left = REFUSALS[refusal], [3]

    class Refusing(socket.socket):
        def accept(self) -> Any:
            connection = super().accept()
            if left[0] and isinstance(error, OSError):
                left[0] -= 1
                connection[0].close()
                raise error
            return connection

    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "flashckpt-test" and left[0] and isinstance(error, RuntimeError):
            left[0] -= 1
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with Refusing(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        port = listening.getsockname()[1]
        one = Acceptor(listening, lambda sock, _: sock.sendall(b"hello"), name="flashckpt-test", most=8)

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                return sock.recv(5) == b"hello"
            return False

        wait_for(answers, what="an answer")
        assert left == [0]
        one.close()
        assert not one._thread.is_alive()
        wait_for(lambda: not one._open, what="the end of the last connection")


def test_no_more_connections_than_half_of_the_descriptors() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert most_connections(10**9) == (10**9 if soft == resource.RLIM_INFINITY else soft // 2)
    assert most_connections(1) == 1


def test_failure_of_a_connection_is_logged_and_ends_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with caplog.at_level(logging.ERROR), socket.create_server(("127.0.0.1", 0)) as listening:
        one = Acceptor(listening, fail, name="flashckpt-test", most=8)
        for number in (1, 2):
            socket.create_connection(listening.getsockname(), timeout=5).close()
            wait_for(lambda: caplog.text.count("ValueError: on purpose") == number, what="the line")  # noqa: B023
        one.close()
