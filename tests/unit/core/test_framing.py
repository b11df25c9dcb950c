"""A frame is read whole or not at all: every cut, the bound, and a side that sends byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from flashckpt import framing
from flashckpt.framing import SHORT_LENGTH, Deadline, FrameError, frame, split

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_bytes_of_a_frame_are_the_length_and_the_data() -> None:
    assert frame(b"abc") == b"\x03\0\0\0\0\0\0\0abc"
    assert frame(b"abc", SHORT_LENGTH) == b"\x03\0\0\0abc"
    assert split(frame(b"abc") + b"rest") == (b"abc", b"rest")
    parts = split(memoryview(frame(b"", SHORT_LENGTH) + b"rest"), SHORT_LENGTH)
    assert [bytes(part) for part in parts] == [b"", b"rest"]


def test_frames_follow_one_another_up_to_the_bound(pair: Pair) -> None:
    pair[0].sendall(frame(b"x" * 10) + frame(b"") + frame(b"y" * 11))
    assert [framing.receive(pair[1], 10) for _ in range(2)] == [b"x" * 10, b""]
    with pytest.raises(FrameError, match="a message of 11 bytes is longer than the bound of 10 bytes"):
        framing.receive(pair[1], 10)


@pytest.mark.parametrize("kept", range(10))
def test_a_frame_that_is_cut_is_not_returned(pair: Pair, kept: int) -> None:
    pair[0].sendall(frame(b"xy")[:kept])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="in the middle of a message"):
        framing.receive(pair[1], 10)


def test_bytes_that_come_one_by_one_do_not_extend_the_deadline(pair: Pair) -> None:
    ended = threading.Event()

    def drip() -> None:
        pair[0].sendall(frame(bytes(1 << 20))[:8])
        while not ended.wait(0.02):
            pair[0].send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            framing.receive(pair[1], 1 << 20, Deadline(0.2))
    finally:
        ended.set()
        dripping.join()
