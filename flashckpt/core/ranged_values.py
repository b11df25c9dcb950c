"""Values that only their own rank asks for, as byte ranges of an object instead of a part of MANIFEST. Pure.

The state of a rank's generators is 10 KB. In the MANIFEST of 16,384 ranks that is 160 MB, which every rank would read
and decode for the one entry that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashckpt.core.digest import digest
from flashckpt.core.values import pack_values, unpack_values
from flashckpt.errors import DamagedError

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
