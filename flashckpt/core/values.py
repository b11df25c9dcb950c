"""Non-tensor state as bytes: the types allowed, and the depth. Pure; msgpack, never pickle.

Depth is limited on both sides: a tuple is a message within a message, and a recursive decoder would overflow the
C stack. Here Python decodes tuples one level at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from flashckpt.core.records import digest
from flashckpt.errors import DamagedError, UnsupportedStateError

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
        for key, item in node.items():
            if type(item) not in _PLAIN:
                node[key] = _resolve(item, depth + 1)
        return node
    if type(node) is _Tuple:
        node = _unpacked(node.data)
        if type(node) is not list:
            raise ValueError("a tuple that holds no list")
        return (
            tuple(node) if _PLAIN.issuperset(map(type, node)) else tuple([_resolve(item, depth + 1) for item in node])
        )
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
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        # each once: a list that holds itself twice would double with every level
        parts = {
            id(part): part
            for node in level
            for part in (node.values() if type(node) is dict else node)
            if type(part) in _CONTAINERS
        }
        if not (level := list(parts.values())):
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


# -- Values that only their own rank asks for, as byte ranges of an object instead of a part of MANIFEST. Pure -----
#
# The state of a rank's generators is 10 KB. In the MANIFEST of 16,384 ranks that is 160 MB, which every rank
# would read and decode for the one entry that it needs.

OF_ONE_RANK = frozenset({"rng"})
"""What stands before "@" in the keys of values that no other rank ever asks for."""
_COLUMNS = {"object_id": "<i4", "offset": "<i8", "nbytes": "<i8", "digest": "<u8"}
_FARTHEST, _LARGEST = 1 << 62, 1 << 30


@dataclass(frozen=True, eq=False)
class RangedValues:
    """Where values are that a manifest does not hold itself. One entry per value in each column.

    Attributes:
        keys: Their keys; none of them is in the manifest's `values`.
        columns: `object_id` into the manifest's `objects`; `offset` and `nbytes` there; `digest` of those bytes.
    """

    keys: list[str] = field(default_factory=list)
    columns: dict[str, np.ndarray] = field(default_factory=lambda: {n: np.zeros(0, k) for n, k in _COLUMNS.items()})

    def __len__(self) -> int:
        return len(self.keys)

    def of_owner(self, suffix: str) -> list[int]:
        """Return the entries whose key ends with `@suffix`."""
        return [number for number, key in enumerate(self.keys) if key.partition("@")[2] == suffix]

    def range(self, entry: int) -> tuple[int, int, int]:
        """Return (object, offset, bytes) of an entry."""
        return tuple(int(self.columns[name][entry]) for name in ("object_id", "offset", "nbytes"))  # type: ignore[return-value]

    def value(self, entry: int, raw: bytes) -> tuple[str, Any]:
        """Return key and value of an entry from its bytes; DamagedError where they are not what was written."""
        key, expected = self.keys[entry], int(self.columns["digest"][entry])
        if (found := digest(raw)) != expected:
            raise DamagedError(
                f"the value {key!r} is damaged", found=f"digest {found:016x}", expected=f"digest {expected:016x}"
            )
        try:
            ((name, value),) = unpack_values(raw).items()
        except (ValueError, TypeError) as error:
            raise DamagedError(f"the value {key!r} does not follow its schema", found=str(error)[:200]) from error
        if name != key:
            raise DamagedError(f"the value {key!r} is damaged", found=f"the value {name!r} in its place")
        return key, value

    def in_objects(self, places: np.ndarray) -> RangedValues:
        """Return the entries with object n called `places[n]`."""
        if not self.keys:
            return self
        return RangedValues(self.keys, self.columns | {"object_id": places[self.columns["object_id"]]})

    def ends(self, objects: int) -> list[int]:
        """Return for each object of the manifest how many bytes of it the values need."""
        found = np.zeros(objects, np.int64)
        np.maximum.at(found, self.columns["object_id"], self.columns["offset"] + self.columns["nbytes"])
        return [int(end) for end in found]

    def packed(self) -> dict[str, Any]:
        """Return what is written of it."""
        return {
            "keys": self.keys,
            **{n: np.ascontiguousarray(self.columns[n], k).tobytes() for n, k in _COLUMNS.items()},
        }


NO_RANGES = RangedValues()


def cut(values: dict[str, Any], at: int) -> tuple[dict[str, Any], RangedValues, bytes]:
    """Return (values that stay, where the others are, their bytes), the bytes beginning at `at` in object 0."""
    stays = {key: value for key, value in values.items() if not _is_of_one_rank(key)}
    goes = {key: pack_values({key: value}) for key, value in values.items() if key not in stays}
    sizes = np.array([len(raw) for raw in goes.values()], np.int64)
    columns = {
        "object_id": np.zeros(len(goes), "<i4"),
        "offset": at + np.cumsum(sizes) - sizes,
        "nbytes": sizes,
        "digest": np.array([digest(raw) for raw in goes.values()], "<u8"),
    }
    return stays, RangedValues(list(goes), columns), b"".join(goes.values())


def concatenate(parts: Iterable[tuple[RangedValues, int]]) -> RangedValues:
    """Return the entries of several manifests.

    Args:
        parts: Of each one its entries, and by how much its objects are renumbered. Of equal keys the first one stays.
    """
    found = [(one, shift) for one, shift in parts if len(one)]
    if not found:
        return NO_RANGES
    columns = {name: np.concatenate([one.columns[name] for one, _ in found]) for name in _COLUMNS}
    columns["object_id"] = np.concatenate([one.columns["object_id"] + np.int32(shift) for one, shift in found])
    keys = [key for one, _ in found for key in one.keys]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    if len(first) == len(keys):
        return RangedValues(keys, columns)
    rows = sorted(first.values())
    return RangedValues([keys[row] for row in rows], {name: column[rows] for name, column in columns.items()})


def ranged_from(packed: Any, *, objects: int, others: Sequence[str] | dict[str, Any]) -> RangedValues:
    """Return what `packed()` gave; ValueError, TypeError or KeyError where it contradicts itself or its manifest.

    Args:
        packed: The map.
        objects: How many objects the manifest names.
        others: The keys of the values that the manifest holds itself.
    """
    keys = packed["keys"]
    if type(keys) is not list or not {str}.issuperset(map(type, keys)) or len(set(keys)) != len(keys):
        raise ValueError("the keys of ranged values are not a list of names, each once")
    if not set(keys).isdisjoint(others):
        raise ValueError("a value that is in the manifest and in a range")
    columns = {name: np.frombuffer(packed[name], kind) for name, kind in _COLUMNS.items()}
    if any(len(column) != len(keys) for column in columns.values()):
        raise ValueError("columns of ranged values of different lengths")
    for name, most in (("object_id", objects - 1), ("offset", _FARTHEST), ("nbytes", _LARGEST)):
        if keys and (columns[name].min() < 0 or columns[name].max() > most):
            raise ValueError(f"a ranged value with {name} {columns[name].max()}")
    return RangedValues(keys, columns)


def _is_of_one_rank(key: str) -> bool:
    base, at, _ = key.partition("@")
    return bool(at) and base in OF_ONE_RANK
