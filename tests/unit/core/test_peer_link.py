"""What a stranger can do to an authenticated connection: nothing but end it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import pytest

from flashckpt.errors import ConfigError
from flashckpt.framing import FrameError
from flashckpt.replicate import peer_link
from flashckpt.replicate.peer_link import PeerLink, StrangerError

SECRET = b"correct-horse-battery-staple"
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def later() -> Iterator[Callable[..., Future[PeerLink]]]:
    with ThreadPoolExecutor(2) as pool:
        yield lambda *args, **named: pool.submit(enter, *args, **named)


def enter(
    sock: socket.socket,
    *,
    accepts: bool,
    secret: bytes = SECRET,
    purpose: str = "replicas",
    job: str = "run7",
    timeout_s: float = 20,
    most: int = 1000,
) -> PeerLink:
    try:
        return peer_link.authenticate(
            sock, accepts=accepts, secret=secret, purpose=purpose, job=job, timeout_s=timeout_s, most=most
        )
    except BaseException:
        sock.close()
        raise


def linked(pair: Pair, later: Callable[..., Future[PeerLink]]) -> tuple[PeerLink, PeerLink]:
    one, two = later(pair[0], accepts=False), later(pair[1], accepts=True)
    return one.result(), two.result()


def wire(pair: Pair, later: Callable[..., Future[PeerLink]], message: object) -> tuple[PeerLink, bytes]:
    """Return the receiving side of a link, and the bytes of a message that were taken off the line before it."""
    sender, receiver = linked(pair, later)
    sender.send(message, 5)
    return receiver, pair[1].recv(5000)


def test_both_sides_prove_the_secret_and_exchange_messages(pair: Pair, later: Callable[..., Future[PeerLink]]) -> None:
    one, two = linked(pair, later)
    for message in ({"a": [1, b"x"]}, "", 7):
        one.send(message, 5)
        assert two.receive(5) == message
        two.send([message], 5)
        assert one.receive(5) == [message]
    with pytest.raises(ValueError, match="longer than the bound of 1000"):
        one.send(b"x" * 1000, 5)
    one.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        two.receive(5)


@pytest.mark.parametrize("other", [{"secret": b"another secret of a job"}, {"purpose": "other"}, {"job": "run8"}])
@pytest.mark.parametrize("accepts", [False, True])
def test_another_secret_purpose_or_job_is_refused_by_both_sides(
    pair: Pair, later: Callable[..., Future[PeerLink]], other: dict[str, object], accepts: bool
) -> None:
    good, bad = later(pair[0], accepts=accepts), later(pair[1], accepts=not accepts, **other)
    for side in (good, bad):
        with pytest.raises(ConnectionError):
            side.result()


@pytest.mark.parametrize("accepts", [False, True])
def test_what_a_side_sends_does_not_answer_it(
    pair: Pair, later: Callable[..., Future[PeerLink]], accepts: bool
) -> None:
    side = later(pair[0], accepts=accepts)
    pair[1].sendall(pair[1].recv(32))
    with pytest.raises(StrangerError, match="own nonce"):
        side.result()


def test_two_sides_of_one_role_do_not_answer_each_other(pair: Pair, later: Callable[..., Future[PeerLink]]) -> None:
    sides = [later(sock, accepts=False) for sock in pair]  # a reflection over two connections to the same node
    for side in sides:
        with pytest.raises(ConnectionError):
            side.result()


def test_a_recorded_handshake_is_of_no_use(pair: Pair, later: Callable[..., Future[PeerLink]]) -> None:
    left, right = socket.socketpair()
    recorded = bytearray()
    with left, right:
        victim, honest = later(pair[0], accepts=True), later(left, accepts=False)
        recorded += right.recv(32)  # the honest side's nonce, then its proof for the victim's nonce
        pair[1].sendall(recorded)
        right.sendall(pair[1].recv(32))
        recorded += (proof := right.recv(32))
        pair[1].sendall(proof)
        right.sendall(pair[1].recv(32))
        assert victim.result()
        assert honest.result()
    one, two = socket.socketpair()
    with one, two:
        again = later(one, accepts=True)
        two.sendall(recorded)
        with pytest.raises(StrangerError, match="does not know the key"):
            again.result()


def test_a_handshake_that_ends_early_or_is_too_slow_ends_at_its_deadline(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    one, two = socket.socketpair()
    with one, two:
        cut = later(one, accepts=True)
        two.sendall(b"x" * 40)
        two.close()
        with pytest.raises(ConnectionError):
            cut.result()
    slow, ended = later(pair[0], accepts=True, timeout_s=0.3), threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            try:
                pair[1].send(b"x")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            slow.result()
    finally:
        ended.set()
        dripping.join()


def test_messages_that_were_changed_repeated_or_sent_back_are_refused(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    receiver, data = wire(pair, later, {"step": 5})
    for at in range(len(data)):
        one, two = socket.socketpair()
        changed = PeerLink(two, b"", receiver._receiving, 1000)
        with one, two:
            one.sendall(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            one.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                changed.receive(5)
    pair[0].sendall(data)
    assert receiver.receive(5) == {"step": 5}
    pair[0].sendall(data)
    with pytest.raises(StrangerError, match="not the one"):
        receiver.receive(5)


def test_a_message_does_not_count_as_one_of_the_other_direction(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    sender, _ = linked(pair, later)
    sender.send("text", 5)
    pair[1].sendall(pair[1].recv(5000))
    with pytest.raises(StrangerError, match="not the one"):
        sender.receive(5)


def test_a_length_beyond_the_bound_is_refused_before_memory_is_taken(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    _, receiver = linked(pair, later)
    pair[0].sendall(bytes(32) + (1 << 60).to_bytes(8, "little"))
    with pytest.raises(FrameError, match="longer than the bound of 1000"):
        receiver.receive(5)


def test_a_message_that_does_not_arrive_whole_ends_at_its_deadline(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    receiver, data = wire(pair, later, "text")
    pair[0].sendall(data[:-1])
    with pytest.raises(TimeoutError):
        receiver.receive(0.1)


def test_a_signed_message_that_is_not_msgpack_is_refused(
    pair: Pair, later: Callable[..., Future[PeerLink]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = linked(pair, later)
    with monkeypatch.context() as patch:
        patch.setattr(msgpack, "packb", lambda _: b"\xc1")
        sender.send(None, 5)
    with pytest.raises(StrangerError, match="not msgpack"):
        receiver.receive(5)


@pytest.mark.parametrize("secret", [b"", b"short"])
def test_without_a_secret_nothing_is_sent(pair: Pair, secret: bytes) -> None:
    with pytest.raises(ConfigError, match=r"without a key \(replicas\)"):
        enter(pair[0], accepts=True, secret=secret)
    assert pair[1].recv(1) == b""


def test_bytes_behind_a_message_are_signed_in_their_place(pair: Pair, later: Callable[..., Future[PeerLink]]) -> None:
    one, two = linked(pair, later)
    into = bytearray(3)
    one.send_bytes(memoryview(b"abc"), 5)
    two.receive_bytes(memoryview(into), 5)
    assert into == b"abc"
    one.send_bytes(memoryview(b"abc"), 5)
    wire = pair[1].recv(100)
    pair[0].sendall(wire[:-1] + b"d")
    with pytest.raises(StrangerError):
        two.receive_bytes(memoryview(into), 5)


def test_a_message_after_many_bytes_is_not_waited_for_as_long_as_they_were(
    later: Callable[..., Future[PeerLink]],
) -> None:
    """The kernel is asked to wake the receiver for 64 KiB at once; of what comes after it a single byte wakes it again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = socket.create_connection(server.getsockname()), server.accept()[0]
    one, two = linked(pair, later)
    data, into = os.urandom(300_001), bytearray(300_001)
    sent = threading.Thread(target=one.send_bytes, args=(memoryview(data), 5))
    sent.start()
    two.receive_bytes(memoryview(into), 5)
    sent.join()
    assert into == data
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    one.send({"a": 1}, 5)
    assert two.receive_map(5) == {"a": 1}
    for end in pair:
        end.close()


def test_closer_bound_of_one_message_holds_and_a_map_is_a_map(
    pair: Pair, later: Callable[..., Future[PeerLink]]
) -> None:
    one, two = linked(pair, later)
    one.send([1], 5)
    with pytest.raises(StrangerError, match="not a map"):
        two.receive_map(5)
    one.send({"a": b"x" * 100}, 5)
    with pytest.raises(FrameError, match="bound of 50"):
        two.receive_map(5, 50)
