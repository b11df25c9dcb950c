"""A record and its map: by declared fields, checked against the annotations, in one place."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from support.paths import ROOT

from flashckpt.core.records import pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import BEFORE_ALL, SnapshotId


@dataclass(frozen=True, kw_only=True, slots=True)
class Everything:
    number: int = field(metadata={"key": "generation"})
    name: str = "n"
    ratio: float = 0.5
    is_set: bool = True
    of: SnapshotId | None = None
    floor: SnapshotId = field(default=BEFORE_ALL, metadata={"least": -1})
    ranks: tuple[int, ...] = ()
    ids: tuple[SnapshotId, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


FULL = Everything(
    number=3, of=SnapshotId(1, 2), ranks=(0, 4), ids=(SnapshotId(2, 9),), options={"a": [1, "b"]}, limit=7
)


def through_msgpack(record: Any, **options: Any) -> Any:
    return unpack(type(record), unseal(seal(pack(record)), "it"), **options)


@pytest.mark.parametrize("record", [FULL, Everything(number=0)])
def test_a_record_comes_back_as_it_was(record: Everything) -> None:
    assert through_msgpack(record) == record
    assert type(through_msgpack(FULL).of) is SnapshotId


def test_the_map_has_the_declared_names_in_their_order() -> None:
    names = ["generation", "name", "ratio", "is_set", "of", "floor", "ranks", "ids", "options", "limit"]
    assert list(pack(FULL)) == names
    assert list(pack(FULL, leave_out=("ratio",))) == [name for name in names if name != "ratio"]
    assert msgpack.unpackb(msgpack.packb(pack(FULL)))["ids"] == [[2, 9]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation", True), ("generation", -1), ("generation", 1 << 63), ("generation", "3"), ("generation", 3.0),
        ("generation", None), ("name", b"n"), ("name", None), ("ratio", float("nan")), ("ratio", float("inf")),
        ("ratio", "1"), ("is_set", 1), ("of", [1]), ("of", [1, -1]), ("of", "12"), ("floor", [0, -2]), ("floor", None),
        ("ranks", 3), ("ranks", [0, "1"]), ("ranks", [-1]), ("ids", [[1, 2, 3]]), ("ids", {}), ("options", []),
        ("limit", False),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_range_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        unpack(Everything, {**msgpack.unpackb(msgpack.packb(pack(FULL))), key: value})


def test_a_name_that_is_not_there_is_an_error_unless_it_has_a_default_and_the_map_may_be_partial() -> None:
    with pytest.raises(KeyError, match="name"):
        unpack(Everything, {"generation": 3})
    assert unpack(Everything, {"generation": 3}, partial=True) == Everything(number=3)
    with pytest.raises(KeyError, match="generation"):
        unpack(Everything, {}, partial=True)


def test_names_of_a_later_release_are_left_out() -> None:
    assert unpack(Everything, {"generation": 3, "new": 1}, partial=True) == Everything(number=3)


def test_no_other_module_seals_a_map_that_it_wrote_by_hand() -> None:
    """Whoever seals a record packs it by its fields."""
    sealing = 0
    for folder in ("flashckpt", "daemon", "extras"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("seal", "records.seal"):
                    sealing += 1
                    assert ast.unparse(node.args[0]).startswith(("pack(", "records.pack(")), (
                        f"{path.name}: {node.lineno}"
                    )
    assert sealing >= 5
