"""The page, in one file or over HTTP: on the loopback address and with a token, unless `--host` names another address; live by server-sent events."""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flashckpt.printable import to_json

EVERY_S = 2.0
"""Seconds between two looks at the root and the memory, however many pages are open."""
MOST_PAGES = 16
"""Pages that are kept up to date at a time."""
_FOLDER = Path(__file__).parent


class Dashboard(ThreadingHTTPServer):
    """Serves one job until `shutdown`."""

    daemon_threads = True

    def __init__(self, look: Callable[[], dict[str, Any]], host: str = "127.0.0.1", port: int = 0) -> None:
        self.token = secrets.token_urlsafe(16)
        self.pages = threading.BoundedSemaphore(MOST_PAGES)
        self._look, self._lock = look, threading.Lock()
        self._found: dict[str, Any] = {}
        self._looked_s = float("-inf")
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_port}/?token={self.token}"
        self.hosts = {f"{name}:{self.server_port}" for name in (host, "localhost", "127.0.0.1")}

    def document(self) -> dict[str, Any]:
        """Return what was seen at most EVERY_S ago."""
        with self._lock:
            if time.monotonic() - self._looked_s >= EVERY_S:
                self._found, self._looked_s = self._look(), time.monotonic()
            return self._found


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = 10.0
    server_version, sys_version = "flashckpt", ""

    def do_GET(self) -> None:
        """Answer with the page or its events; without the token, or under another name (DNS rebinding), with 403."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        if self.headers.get("Host", "") not in self.server.hosts or not self._is_token(given):
            self._send(403, "text/plain", "403: use the address that flashckpt dashboard printed, with its token\n")
        elif parts.path == "/":
            events = f"/events?token={self.server.token}"
            self._send(200, "text/html", render(self.server.document(), events=events))
        elif parts.path == "/events":
            self._events()
        else:
            self._send(404, "text/plain", "404: there is one page\n")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _send(self, code: int, kind: str, text: str) -> None:
        raw = text.encode()
        self._begin(code, kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _begin(self, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)

    def _events(self) -> None:
        if not self.server.pages.acquire(blocking=False):
            self._send(503, "text/plain", f"503: {MOST_PAGES} pages are open\n")
            return
        try:
            self._begin(200, "text/event-stream")
            self.end_headers()
            while True:
                self.wfile.write(f"data: {to_json(self.server.document())}\n\n".encode())
                self.wfile.flush()
                time.sleep(EVERY_S)
        except OSError:  # the page was closed
            self.close_connection = True
        finally:
            self.server.pages.release()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@functools.cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def render(document: dict[str, Any], *, events: str = "") -> str:
    """Return the page of a document.

    Args:
        document: Of `PageSource.document`.
        events: Where it gets newer documents from; "" for a page that stays as it is.
    """
    data = to_json(document | {"events": events}).replace("<", "\\u003c")  # no text of others ends the element
    page = _asset("page.html").replace("{{POLICY}}", policy(connect=bool(events)))
    page = page.replace("{{STYLE}}", _asset("page.css")).replace("{{SCRIPT}}", _asset("page.js"))
    return page.replace("{{DATA}}", data)  # last: what is in it is not looked at again


def policy(*, connect: bool) -> str:
    """Return the Content-Security-Policy: this style and this program run, nothing else, and nothing is fetched elsewhere."""
    style, script = (_digest(_asset(name)) for name in ("page.css", "page.js"))
    connected = "; connect-src 'self'" if connect else ""
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{style}'; script-src '{script}'{connected}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
