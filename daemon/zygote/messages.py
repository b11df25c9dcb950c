"""Messages between dlrun and its zygote: length-prefixed JSON on a socket pair, nothing executable.

Environment variables may hold bytes that are not UTF-8; JSON carries the surrogate escapes through.
"""

from __future__ import annotations

import json
import logging
import select
import socket
from typing import Any

from flashckpt import framing
from flashckpt.daemon.machine.process import is_stopped
from flashckpt.errors import DamagedError

MAX_BYTES = 64 << 20
"""Longest message that is accepted: many times the environments of all ranks of a node."""


ANSWER_S = 60.0
"""Seconds in which an answer is due; the first one comes after the imports, in READY_S."""
READY_S = 300.0
STOPPED_S = 10.0
"""Seconds after which a process that is stopped is not waited for any more."""
_SLICE_S = 0.5
_log = logging.getLogger("flashckpt.dlrun")


def exchange(
    sock: socket.socket,
    pid: int,
    message: dict[str, Any] | None,
    *,
    limit_s: float | None = None,
    fd: int = -1,
    who: str = "zygote",
) -> dict[str, Any] | None:
    """Send a message (None: nothing) and return the answer; None where the process is gone or does not answer in time.

    The caller then kills it: what it answers later would be taken for another answer.

    Args:
        sock: To the process.
        pid: The process.
        message: To send.
        limit_s: Seconds to wait, ANSWER_S by default. Slices of the wait are counted, not the clock: a suspended machine is no silence.
        fd: A descriptor to send after it.
        who: What the process is called in the log.
    """
    limit_s = limit_s or ANSWER_S
    try:
        if message is not None:
            sock.settimeout(limit_s)
            send(sock, message)
            if fd >= 0:
                socket.send_fds(sock, [b"f"], [fd])
            sock.settimeout(None)
        return receive(sock, _Limit(pid, limit_s))
    except TimeoutError:
        how = "it is stopped (SIGSTOP or a debugger)" if is_stopped(pid) else f"not within {limit_s:.0f} s"
        _log.warning("the %s, pid %d, does not answer (%s): it is killed", who, pid, how)
    except (OSError, DamagedError):
        pass
    return None


class _Limit:
    """Waits for a socket to be readable; TimeoutError once its process has used up its time, or was stopped for too long."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid, self._left_s, self._stopped_s = pid, limit_s, 0.0

    def __call__(self, sock: socket.socket) -> None:
        while not select.select([sock], [], [], _SLICE_S)[0]:
            self._left_s -= _SLICE_S
            self._stopped_s = self._stopped_s + _SLICE_S if is_stopped(self._pid) else 0.0
            if self._left_s <= 0 or self._stopped_s >= STOPPED_S:
                raise TimeoutError


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; raises OSError if the other side is gone."""
    sock.sendall(framing.frame(json.dumps(message).encode()))


def receive(sock: socket.socket, wait: framing.Wait | None = None) -> dict[str, Any] | None:
    """Return the next message, or None when the other side has closed (also in mid-message).

    Args:
        sock: To the other side.
        wait: Returns when `sock` is readable, or raises; None waits without a limit.

    Raises:
        DamagedError: Not a message; nothing that follows on this socket can be trusted.
    """
    try:
        body = framing.receive(sock, MAX_BYTES, wait)
    except framing.FrameError as error:
        raise _damaged(str(error), f"at most {MAX_BYTES} bytes") from error
    except ConnectionResetError:
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
