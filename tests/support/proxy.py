"""A TCP proxy in front of a server: refuses, cuts, slows or stalls connections, and counts what passes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_BODY = (
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)
EXPIRED = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)


class Proxy:
    """Forwards to `endpoint`; attributes may be set at any time.

    Attributes:
        bytes_s: Bandwidth in each direction, bytes per second; None: unlimited.
        is_stalled: Accept and read requests, answer nothing.
        cut_after: Close a connection once the server sent this many bytes on it; None: never.
        cuts: How many more connections `cut_after` applies to.
        refused_key: Requests signed with this access key are answered "403 ExpiredToken" and go no further; None: all pass.
        rewrite: Called with each block of an answer, returns what is passed on in its place (as long); None: all as it is.
        uploaded: Bytes from clients so far.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.bytes_s: float | None = None
        self.is_stalled = False
        self.cut_after: int | None = None
        self.cuts = 1_000_000
        self.refused_key: str | None = None
        self.rewrite: Callable[[bytes], bytes] | None = None
        self.uploaded = 0
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen on the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._port = listener.getsockname()[1]
        self._listener = listener
        thread = threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True)
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Close the port and every connection, as a server that dies."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._threads.clear()

    def __enter__(self) -> Proxy:  # noqa: PYI034 -- Self is not in typing before Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target, timeout=30) as server:
            self._sockets |= {client, server}
            try:
                self._pump(client, server)
            finally:
                self._sockets -= {client, server}

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        answered = 0
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select(timeout=60):
                    source: socket.socket = key.fileobj  # type: ignore[assignment]
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if self.bytes_s is not None:
                        time.sleep(len(data) / self.bytes_s)
                    if source is client:
                        self.uploaded += len(data)
                        if self.refused_key is not None and f"Credential={self.refused_key}/".encode() in data:
                            client.sendall(EXPIRED)
                            return
                        if not self.is_stalled:
                            server.sendall(data)
                        continue
                    answered += len(data)
                    data = data if self.rewrite is None else self.rewrite(data)
                    if self.cut_after is not None and answered > self.cut_after and self.cuts > 0:
                        self.cuts -= 1
                        client.sendall(data[: len(data) // 2])
                        return
                    client.sendall(data)
