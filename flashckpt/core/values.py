"""Non-tensor state as bytes: the types allowed, and the depth. Pure; msgpack, never pickle.

Depth is limited on both sides: a tuple is a message within a message, and a recursive decoder would overflow the
C stack. Here Python decodes tuples one level at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from flashckpt.errors import UnsupportedStateError

MAX_DEPTH = 64
"""Maximum nesting of dicts, lists and tuples, including the map of all values."""
RESERVED = ("aliases", "dcp", "rng")
"""Keys of values that say something of the whole snapshot, or of a rank: no tracked object can have such a name."""
_EXT_TUPLE, _EXT_BIG_INT = 1, 2
_CONTAINERS = frozenset((dict, list, tuple))
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def packed(value: Any) -> bytes:
    """Return the bytes of one value; TypeError, ValueError or OverflowError if it cannot be held."""
    return bytes(msgpack.packb(value, strict_types=True, default=_pack_ext))


def pack_values(values: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest's values.

    Raises:
        UnsupportedStateError: A value is not of the allowed types, or nested too deeply; names its key.
    """
    if (path := _too_deep(values)) is not None:
        raise UnsupportedStateError(
            f"the value of {path!r} cannot be held in a snapshot",
            found=f"dicts, lists and tuples nested more than {MAX_DEPTH} deep",
            expected=f"at most {MAX_DEPTH}",
            remedy="flatten it in the object's state_dict(), or leave it out of track()",
        )
    try:
        return packed(values)
    except (TypeError, ValueError, OverflowError) as error:
        path, bad = _unsupported(values) or ("", None)
        raise UnsupportedStateError(
            f"the value of {path!r} cannot be held in a snapshot",
            found=type(bad).__name__ if path else str(error),
            expected="None, bool, int, float, str, bytes, or a list, tuple or dict of them; or a tensor",
            remedy="convert it in the object's state_dict, or leave it out of track()",
        ) from None


def unpack_values(raw: Any) -> dict[str, Any]:
    """Return the values that `pack_values` packed; ValueError or TypeError if the bytes are not values."""
    found = _resolve(_unpacked(raw), 1)
    if type(found) is not dict or not all(type(key) is str for key in found):
        raise ValueError("the values are not a map of names")
    return found


class _Tuple(NamedTuple):
    """The bytes of a tuple that is not decoded yet."""

    data: bytes


def _unpacked(raw: Any) -> Any:
    return msgpack.unpackb(raw, strict_map_key=False, ext_hook=_unpack_ext)


def _unpack_ext(code: int, data: bytes) -> Any:
    if code == _EXT_TUPLE:
        return _Tuple(data)
    if code == _EXT_BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    raise ValueError(f"unknown extension type {code}")


def _resolve(node: Any, depth: int) -> Any:
    """Decode the tuples in `node` and check every type; recursion is bounded by MAX_DEPTH."""
    if type(node) in _PLAIN:
        return node
    if depth > MAX_DEPTH:
        raise ValueError(f"values nested more than {MAX_DEPTH} deep")
    if type(node) is dict:
        if not _PLAIN.issuperset(map(type, node)):
            return {_resolve(key, depth + 1): _resolve(item, depth + 1) for key, item in node.items()}
        if not _PLAIN.issuperset(map(type, node.values())):
            for key, item in node.items():
                node[key] = _resolve(item, depth + 1)
        return node
    if type(node) is _Tuple:
        node = _unpacked(node.data)
        if type(node) is not list:
            raise ValueError("a tuple that holds no list")
        return tuple(_resolve(item, depth + 1) for item in node)
    if type(node) is list:
        return node if _PLAIN.issuperset(map(type, node)) else [_resolve(item, depth + 1) for item in node]
    raise ValueError(f"a value of {type(node).__name__}")


def _pack_ext(value: Any) -> Any:
    if type(value) is tuple:
        return msgpack.ExtType(_EXT_TUPLE, packed(list(value)))
    if type(value) is int:  # beyond 64 bits, as in numpy's PCG64 state
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_EXT_BIG_INT, value.to_bytes(size, "little", signed=True))
    raise TypeError(type(value).__name__)


def _items(node: Any) -> Any:
    return node.items() if type(node) is dict else enumerate(node)


def _too_deep(values: dict[str, Any]) -> str | None:
    """Return the (start of the) path of a value that is nested too deeply; None if there is none."""
    nodes: list[tuple[Any, int]] = [(values, 1)]
    while nodes:
        node, depth = nodes.pop()
        if depth > MAX_DEPTH:
            break
        items = node.values() if type(node) is dict else node
        nodes += [(item, depth + 1) for item in items if type(item) in _CONTAINERS]
    else:
        return None
    todo: list[tuple[Any, str, int]] = [(values, "", 1)]
    while todo:  # a second pass, with names: state that nests this deeply is rare
        node, path, depth = todo.pop()
        if depth > MAX_DEPTH:
            return path if len(path) <= 80 else f"{path[:80]}..."
        for key, item in _items(node):
            if type(item) in _CONTAINERS:
                todo.append((item, _join(path, key, type(node) is dict), depth + 1))
    return None


def _unsupported(values: dict[str, Any]) -> tuple[str, Any] | None:
    """Return path and value of the first value that msgpack has no type for."""
    todo: list[tuple[Any, str]] = [(values, "")]
    while todo:
        node, path = todo.pop()
        children = []
        for key, item in _items(node):
            where = _join(path, key, type(node) is dict)
            if type(node) is dict and type(key) not in (str, int, bytes):
                return where, key
            if type(item) in _CONTAINERS:
                children.append((item, where))
            elif type(item) not in _PLAIN or _is_unencodable(item):
                return where, item
        todo += reversed(children)
    return None


def _is_unencodable(item: Any) -> bool:
    """Return whether it is text that UTF-8 cannot encode (a lone surrogate)."""
    return type(item) is str and any("\ud800" <= char <= "\udfff" for char in item)


def _join(path: str, key: Any, is_dict: bool) -> str:
    if not is_dict:
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)
