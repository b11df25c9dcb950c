"""Foreign text (names in checkpoints, paths, library messages) made safe to print, and values made safe as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_MOST_INT_BITS = 14_000
"""Python refuses to write integers of more than 4300 decimal digits, as it takes quadratic time."""


def printable(text: object, *, keep: str = "") -> str:
    """Return `text` on one line that a terminal shows verbatim: unprintable characters become escape sequences."""
    found = text if isinstance(text, str) else _str(text)
    if found.isprintable():
        return found
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in found)


def _escaped(char: str) -> str:
    code = ord(char)
    named = {9: r"\t", 10: r"\n", 13: r"\r"}.get(code)
    return named or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def _str(value: object) -> str:
    try:
        return str(plain(value)) if isinstance(value, (int, list, tuple, Mapping)) else str(value)
    except ValueError:  # an integer that is too long, inside a value of another type
        return f"<{type(value).__name__}>"


def plain(value: Any) -> Any:
    """Return `value` in types that JSON has; others, very long integers and non-finite numbers become text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MOST_INT_BITS else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray, memoryview)) else _str(value)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON that every parser reads: no NaN, no infinity, no very long integer."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def counted(number: int, noun: str) -> str:
    """Return "1 shard", "2 shards"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
