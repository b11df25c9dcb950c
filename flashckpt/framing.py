"""Length-prefixed bytes, in memory and on stream sockets: the length, little-endian, then as many bytes (torch-free)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

LENGTH = struct.Struct("<Q")
SHORT_LENGTH = struct.Struct("<I")
"""Length in files of the job directory whose format is older than this module."""
_PART_BYTES = 1 << 20
Raw = TypeVar("Raw", bytes, memoryview)
Wait = Callable[[socket.socket], object]
"""Called before each read of a socket: returns when it may be read, or raises; it bounds how long that takes."""


class FrameError(ConnectionError):
    """A frame is longer than the reader takes; nothing that follows on this connection can be trusted."""


class Deadline:
    """A wait that ends at one time for all that is read or written, however slowly the other side sends."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def __call__(self, sock: socket.socket) -> None:
        """Give the socket the time that is left; TimeoutError where none is."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side did not answer in time")
        sock.settimeout(left)


def frame(data: bytes, length: struct.Struct = LENGTH) -> bytes:
    """Return `data` behind its length."""
    return length.pack(len(data)) + data


def split(raw: Raw, length: struct.Struct = LENGTH) -> tuple[Raw, Raw]:
    """Return the data of the frame at the beginning of `raw`, and what follows. struct.error where there is no length."""
    start = length.size
    (nbytes,) = length.unpack_from(raw)
    return raw[start : start + nbytes], raw[start + nbytes :]


def receive(sock: socket.socket, most: int, wait: Wait | None = None) -> bytes:
    """Return the data of the next frame.

    Args:
        sock: To the other side.
        most: Bytes that are accepted; no memory is taken for more.
        wait: None leaves it to the time-out of the socket.

    Raises:
        FrameError: It is longer.
        ConnectionResetError: The other side closed the connection before the end of it.
        OSError: The connection is gone, or what `wait` raises.
    """
    (nbytes,) = LENGTH.unpack(read(sock, LENGTH.size, wait))
    if nbytes > most:
        raise FrameError(f"a message of {nbytes} bytes is longer than the bound of {most} bytes")
    return read(sock, nbytes, wait)


def read(sock: socket.socket, nbytes: int, wait: Wait | None = None) -> bytes:
    """Return the next `nbytes` bytes; arguments and errors as for `receive`."""
    data = bytearray()
    while len(data) < nbytes:
        if wait is not None:
            wait(sock)
        part = sock.recv(min(nbytes - len(data), _PART_BYTES))
        if not part:
            raise ConnectionResetError("the other side closed the connection in the middle of a message")
        data += part
    return bytes(data)
