"""A web server of files that is away when a test says so."""

from __future__ import annotations

import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server:
    """Serves the files of a folder with ranges, unless it is away: "503", "429", "cut" (half an answer), "closed" (none).

    Also "reset": half an answer, and the connection is reset.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.away, self.asked, self.away_after, self.away_with = folder, "", 0, 0, "503"
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer in one piece

            def do_GET(self) -> None:
                owner.answer(self)

            def do_HEAD(self) -> None:
                owner.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        if self.away_after and self.asked > self.away_after:
            self.away = self.away_with
        path = self.folder / request.path.strip("/")
        if self.away == "closed":
            request.close_connection = True
            return
        status = int(self.away) if self.away.isdigit() else 200 if path.is_file() else 404
        size = path.stat().st_size if status == 200 else 0
        first, last = 0, size
        if size and (wanted := request.headers.get("Range")):
            begin, end = wanted.removeprefix("bytes=").split("-")
            first, last, status = int(begin), min(int(end) + 1, size), 206
        request.send_response(status)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(last - first))
        if status == 206:
            request.send_header("Content-Range", f"bytes {first}-{last - 1}/{size}")
        request.end_headers()
        if request.command == "GET":
            data = b""
            if last > first:
                with path.open("rb") as file:
                    file.seek(first)
                    data = file.read(last - first)
            is_half = self.away in ("cut", "reset")
            request.wfile.write(data[: len(data) // 2] if is_half else data)
            request.close_connection = is_half
        if self.away == "reset":
            request.wfile.flush()
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(request.connection.detach())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


__all__ = ["Server"]
