"""Accepting connections of anybody: bounded, and ended by nothing but `close`. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from flashckpt.report import guarded

PAUSE_S = 0.2
"""Seconds without accepting after the system has refused a descriptor or a thread."""
PROOF_S = 15.0
"""Seconds after which a connection that has not been called proven is ended."""
UNPROVEN_PER_ADDRESS = 16
"""Connections of one address that have not proven themselves; with one more, the oldest of them is ended."""
_log = guarded(logging.getLogger(__name__))


def most_connections(wanted: int) -> int:
    """Return how many connections may be open: no more than half of this process's descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if limit == resource.RLIM_INFINITY else max(1, min(wanted, limit // 2))


class Acceptor:
    """Gives each connection to a listening socket a thread.

    Strangers can connect as well: those that say nothing make place for the next ones, and are ended after a while.

    Args:
        listening: The socket; the caller closes it, after `close`.
        serve: Called with a connection and its address; the connection is closed when it returns.
    """

    def __init__(
        self, listening: socket.socket, serve: Callable[[socket.socket, Any], None], *, name: str, most: int
    ) -> None:
        self._listening, self._serve, self._name, self._most = listening, serve, name, most_connections(most)
        self._open: set[socket.socket] = set()
        self._unproven: dict[socket.socket, tuple[str, float]] = {}  # oldest first: address, since when
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}s", daemon=True)
        self._thread.start()

    def proven(self, connection: socket.socket) -> None:
        """Say that a connection is no stranger's: it may stay."""
        with self._lock:
            self._unproven.pop(connection, None)

    def drop(self) -> None:
        """End every connection; their threads end."""
        with self._lock:
            for connection in self._open:
                _end(connection)

    def close(self) -> None:
        """Accept no more, and end every connection."""
        self._closed.set()
        _end(self._listening)  # wakes the thread
        self.drop()
        self._thread.join(PROOF_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listening.settimeout(1.0 if self._unproven else None)
                connection, address = self._listening.accept()
            except TimeoutError:
                self._expire()
            except OSError as error:  # no descriptor left, or the other side has gone again
                self._pause(error)
            else:
                self._admit(connection, address)

    def _admit(self, connection: socket.socket, address: Any) -> None:
        connection.setblocking(True)  # noqa: FBT003 -- its only argument
        self._expire()
        if not self._has_place(connection, str(address[0])):
            connection.close()
            return
        try:
            threading.Thread(target=self._run_one, args=(connection, address), name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._forget(connection)
            self._pause(error)

    def _has_place(self, connection: socket.socket, host: str) -> bool:
        """Note a connection if there is a place for it; the oldest stranger gives way where there are too many."""
        with self._lock:
            same = [other for other, (of, _) in self._unproven.items() if of == host]
            if len(same) >= UNPROVEN_PER_ADDRESS:
                self._end_unproven(same[0])
            if len(self._open) >= self._most:
                if self._unproven:
                    self._end_unproven(next(iter(self._unproven)))
                return False
            self._open.add(connection)
            self._unproven[connection] = host, time.monotonic()
        return True

    def _expire(self) -> None:
        with self._lock:
            due_s = time.monotonic() - PROOF_S
            for connection in [one for one, (_, since_s) in self._unproven.items() if since_s < due_s]:
                self._end_unproven(connection)

    def _end_unproven(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        _end(connection)

    def _pause(self, error: Exception) -> None:
        if not self._closed.is_set():
            _log.debug("%s: a connection was not accepted: %s", self._name, error)
            self._closed.wait(PAUSE_S)

    def _run_one(self, connection: socket.socket, address: Any) -> None:
        try:
            self._serve(connection, address)
        except OSError as error:
            _log.debug("%s: a connection ended: %s", self._name, error)
        except Exception:  # noqa: BLE001 -- a thread that must not end unseen
            _log.exception("%s: a connection failed", self._name)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._unproven.pop(connection, None)
        connection.close()


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
