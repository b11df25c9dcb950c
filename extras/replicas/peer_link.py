"""An authenticated connection between two nodes of a job: both prove that they know the same secret (torch-free).

Each side sends a random nonce. The connecting side then sends an HMAC over its role, the purpose, the job and both
nonces; the accepting side verifies it before it answers with its own. The same values give one key per direction, with
which every later message is signed together with its number: nobody in between can change, repeat, drop or insert one
unnoticed. Nothing is encrypted: who can read the network can read the messages.
"""

from __future__ import annotations

import hmac
import os
import socket
from typing import Any

import msgpack

from flashckpt import framing
from flashckpt.errors import ConfigError
from flashckpt.framing import LENGTH, Deadline, frame

LEAST_SECRET = 16
"""Fewest bytes of a secret."""
MOST_BYTES = 64 << 20
"""Default bound of one message, in bytes."""
_NONCE, _MARK = 32, 32
_WAKE_BYTES = 64 << 10
_CONNECTS, _ACCEPTS = b"connects", b"accepts"


class StrangerError(ConnectionError):
    """The other side did not prove that it belongs to this job, or a message was not the one that it sent."""


class PeerLink:
    """Messages over an authenticated connection. Made by `authenticate`; for one thread at a time.

    It owns the connection; no message is longer than `most` bytes.
    """

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes, most: int) -> None:
        self._sock, self._sending, self._receiving, self._most = sock, sending, receiving, most
        self._sent = self._received = 0

    def send(self, message: Any, timeout_s: float) -> None:
        """Send a value of msgpack's types.

        Raises:
            ValueError: It is longer than the bound.
            OSError: The connection is gone, or the other side does not read (TimeoutError).
        """
        data = msgpack.packb(message)
        if len(data) > self._most:
            raise ValueError(f"a message of {len(data)} bytes is longer than the bound of {self._most} bytes")
        self._sock.settimeout(timeout_s)
        self._sock.sendall(_mark(self._sending, self._sent, data) + frame(data))
        self._sent += 1

    def send_bytes(self, data: memoryview, timeout_s: float) -> None:
        """Send bytes whose number the message before has announced; they are signed like a message. OSError as for `send`."""
        mark = _mark(self._sending, self._sent, data)
        self._sock.settimeout(timeout_s)
        self._sock.sendall(mark)
        self._sock.sendall(data)
        self._sent += 1

    def receive_bytes(self, into: memoryview, timeout_s: float) -> None:
        """Fill `into` with bytes that were sent by `send_bytes`. They are not to be used before this has returned.

        Raises:
            StrangerError: They are not the ones that the other side sent next.
            OSError: The connection is gone, or they did not arrive in time (TimeoutError).
        """
        wait = Deadline(timeout_s)
        mark = framing.read(self._sock, _MARK, wait)
        _read_into(self._sock, into, wait)
        if not hmac.compare_digest(mark, _mark(self._receiving, self._received, into)):
            raise StrangerError("message authentication failed")
        self._received += 1

    def receive_map(self, timeout_s: float, most: int | None = None) -> dict[Any, Any]:
        """Return the next message, which must be a map; else as `receive`."""
        found = self.receive(timeout_s, most)
        if type(found) is not dict:
            raise StrangerError(f"a message is {type(found).__name__}, not a map")
        return found

    def receive(self, timeout_s: float, most: int | None = None) -> Any:
        """Return the next message; the time-out is for the whole of it, `most` a closer bound than that of the link.

        Raises:
            StrangerError: It is not msgpack, or not the message that the other side sent next.
            OSError: The connection is gone, the message is too long (FrameError), or did not arrive in time (TimeoutError).
        """
        bound = self._most if most is None else min(most, self._most)
        wait = Deadline(timeout_s)
        mark = framing.read(self._sock, _MARK, wait)
        data = framing.receive(self._sock, bound, wait)
        if not hmac.compare_digest(mark, _mark(self._receiving, self._received, data)):
            raise StrangerError("a message is not the one that the other side sent")
        self._received += 1
        try:
            return msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise StrangerError("a message is not msgpack") from error

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def authenticate(
    sock: socket.socket,
    *,
    accepts: bool,
    secret: bytes,
    purpose: str,
    job: str,
    timeout_s: float,
    most: int = MOST_BYTES,
) -> PeerLink:
    """Return a link once both sides have proved that they know the secret. The secret itself is never sent.

    Args:
        sock: A connected stream socket.
        accepts: Whether this side accepted the connection; the other one connected.
        secret: The key that both sides have.
        purpose: The connection's purpose; both sides must name the same.
        job: Identity of the job; likewise.
        timeout_s: For the whole handshake, however slowly the other side sends.
        most: Bound of one message, in bytes.

    Raises:
        ConfigError: There is no secret, or it is too short.
        StrangerError: The other side does not know it, or means another purpose or job.
        OSError: The connection is gone, or the other side did not answer in time (TimeoutError).
    """
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"nodes cannot authenticate each other without a key ({purpose})",
            found=f"{len(secret)} bytes",
            expected=f"at least {LEAST_SECRET}",
            remedy="start the job again: its ranks make a key at each start",
        )
    wait = Deadline(timeout_s)
    mine = os.urandom(_NONCE)
    _write(sock, mine, wait)
    theirs = framing.read(sock, _NONCE, wait)
    if hmac.compare_digest(mine, theirs):
        raise StrangerError("the other side sent this side's own nonce back")
    nonces = theirs + mine if accepts else mine + theirs
    context = b"".join(frame(part) for part in (purpose.encode(), job.encode(), nonces))
    if not accepts:
        _write(sock, _proof(secret, _CONNECTS, context), wait)
    proof = framing.read(sock, _MARK, wait)
    if not hmac.compare_digest(proof, _proof(secret, _CONNECTS if accepts else _ACCEPTS, context)):
        raise StrangerError(
            f"the other side does not know the key ({purpose}): it is of another job or start, or has another job secret"
        )
    if accepts:
        _write(sock, _proof(secret, _ACCEPTS, context), wait)
    keys = [hmac.digest(secret, b"key " + role + b"\0" + context, "sha256") for role in (_CONNECTS, _ACCEPTS)]
    return PeerLink(sock, keys[accepts], keys[not accepts], most)


def _proof(secret: bytes, role: bytes, context: bytes) -> bytes:
    return hmac.digest(secret, b"proof " + role + b"\0" + context, "sha256")


def _mark(key: bytes, number: int, data: bytes | memoryview) -> bytes:
    found = hmac.new(key, LENGTH.pack(number), "sha256")
    found.update(data)
    return found.digest()


def _write(sock: socket.socket, data: bytes, wait: Deadline) -> None:
    wait(sock)
    sock.sendall(data)


def _read_into(sock: socket.socket, into: memoryview, wait: Deadline) -> None:
    """Fill `into`. The kernel wakes this side once per 64 KiB: woken for every packet, it cost more than all else of a transfer."""
    done = 0
    try:
        while done < len(into):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(into) - done, _WAKE_BYTES))
            wait(sock)
            count = sock.recv_into(into[done:])
            if not count:
                raise ConnectionResetError("the other side closed the connection in the middle of a message")
            done += count
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
