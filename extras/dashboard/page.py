"""The page as one file: HTML, style, program and data together, with nothing to be fetched."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from flashckpt.printable import to_json

_FOLDER = Path(__file__).parent


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
