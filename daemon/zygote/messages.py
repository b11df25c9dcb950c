"""Messages between dlrun and its zygote: length-prefixed JSON on a socket pair, nothing executable.

Environment variables may hold bytes that are not UTF-8; JSON carries the surrogate escapes through.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from flashckpt.errors import DamagedError

_LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20
"""Longest message that is accepted: many times the environments of all ranks of a node."""


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; raises OSError if the other side is gone."""
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None when the other side has closed (also in mid-message).

    Raises:
        DamagedError: Not a message; nothing that follows on this socket can be trusted.
    """
    head = _read(sock, _LENGTH.size)
    if head is None:
        return None
    (nbytes,) = _LENGTH.unpack(head)
    if nbytes > MAX_BYTES:
        raise _damaged(f"a message of {nbytes} bytes", f"at most {MAX_BYTES} bytes")
    body = _read(sock, nbytes)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error), "a JSON object") from error
    if not isinstance(message, dict):
        raise _damaged(type(message).__name__, "a JSON object")
    return message


def _damaged(found: str, expected: str) -> DamagedError:
    return DamagedError("a message between dlrun and its zygote is damaged", found=found, expected=expected)


def _read(sock: socket.socket, nbytes: int) -> bytes | None:
    parts: list[bytes] = []
    while nbytes:
        try:
            part = sock.recv(min(nbytes, 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)
