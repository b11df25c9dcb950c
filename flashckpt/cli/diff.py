"""`flashckpt diff`: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from rich.console import Group

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.cli.common import Command, choose, json_option, new_table, open_root, root_options, show
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.printable import counted, plain, printable
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.store import Store

BLOCK_BYTES = 32 << 20
"""Most bytes of one tensor that are compared at a time: bounds the memory of a diff."""

_SHOWN = 60
"""Characters that are shown of a value."""
_ABSENT = "(absent)"


@click.command(cls=Command)
@root_options
@click.argument("first", metavar="STEP_A")
@click.argument("second", metavar="STEP_B")
@click.option("--other", "other_root", metavar="ROOT_B", help="Root of STEP_B  [default: ROOT]")
@json_option
def diff(*, root: str, options: tuple[str, ...], first: str, second: str, other_root: str | None, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor; other layouts of the same tensors compare equal.

    Exit code 1 if they differ, 0 if all tensors and values are equal.

    Examples:
      flashckpt diff /checkpoints/run7 100 120
      flashckpt diff /checkpoints/run7 120 120 --other /checkpoints/run8
    """
    store = open_root(root, options)
    a = _source(store, first)
    b = _source(store if other_root is None else open_root(other_root, options), second)
    document = compare(a, b)
    show(document, as_json=as_json, table=lambda: _table(document))
    return 1 if any(document[key] for key in ("only_a", "only_b", "tensors", "values")) else 0


def compare(a: StorageSource, b: StorageSource) -> dict[str, Any]:
    """Return what differs: names only one side has, tensors with their distance, values by key."""
    names_a, names_b = set(a.manifest.table.fqns), set(b.manifest.table.fqns)
    both = sorted(names_a & names_b)
    values_a, values_b = a.manifest.values, b.manifest.values
    differing = [key for key in sorted(values_a.keys() | values_b.keys()) if not _equal(values_a, values_b, key)]
    return {
        "a": a.name,
        "b": b.name,
        "only_a": sorted(names_a - names_b),
        "only_b": sorted(names_b - names_a),
        "equal": len(both) - len(found := [one for one in (_tensor(a, b, fqn) for fqn in both) if one]),
        "tensors": found,
        "values": {key: [plain(values_a.get(key)), plain(values_b.get(key))] for key in differing},
    }


def _equal(a: dict[str, Any], b: dict[str, Any], key: str) -> bool:
    return key in a and key in b and same(a[key], b[key])


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal, also in kind: NaN equals NaN, 1 is not 1.0, 0.0 is not -0.0."""
    if type(x) is not type(y):
        return False
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return repr(x) == repr(y) if isinstance(x, float) else bool(x == y)


def _source(store: Store, step: str) -> StorageSource:
    info = choose(store, step)
    return StorageSource(store, read_manifest(store, info), info.prefix)


def _tensor(a: StorageSource, b: StorageSource, fqn: str) -> dict[str, Any] | None:
    shard_a, shard_b = (s.manifest.table.shard(s.manifest.table.rows(fqn)[0]) for s in (a, b))
    kinds = [f"{shard.dtype} {list(shard.global_shape)}" for shard in (shard_a, shard_b)]
    if kinds[0] != kinds[1]:
        return {"fqn": fqn, "kind": kinds, "differing": None, "elements": None, "max_abs": None}
    if _same_digests(a, b, fqn):
        return None
    differing = elements = 0
    largest = 0.0
    for shard in _blocks(shard_a):
        raw = [_read(source, shard) for source in (a, b)]
        items = [one.reshape(-1, ITEMSIZE[shard.dtype]) for one in raw]
        unequal = (items[0] != items[1]).any(axis=1)
        elements += len(unequal)
        differing += int(unequal.sum())
        x, y = (_numbers(one, shard.dtype) for one in raw)
        if x is not None and y is not None and unequal.any():
            with np.errstate(invalid="ignore", over="ignore"):
                largest = max(largest, float(np.nanmax(np.abs(x[unequal] - y[unequal]), initial=0.0)))
    if not differing:
        return None
    return {"fqn": fqn, "kind": kinds[:1], "differing": differing, "elements": elements, "max_abs": largest}


def _same_digests(a: StorageSource, b: StorageSource, fqn: str) -> bool:
    """Whether both hold the tensor in the same shards with the same digests: then nothing has to be read."""
    found = []
    for source in (a, b):
        table, digests = source.manifest.table, source.manifest.digests
        entries = []
        for row in table.rows(fqn):
            first, shard = int(table.first_chunk[row]), table.shard(row)
            chunks = -(-shard.nbytes // (1 << 20))
            entries.append((shard.offsets, shard.lengths, digests[first : first + chunks].tobytes()))
        found.append(sorted(entries))
    return found[0] == found[1]


def _blocks(shard: Shard) -> Iterator[Shard]:
    """Cut a whole tensor along its first dimension into blocks of about BLOCK_BYTES."""
    shape = shard.global_shape
    size = ITEMSIZE[shard.dtype]
    if not shape:
        yield Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=(), offsets=(), lengths=())
        return
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * size
    count = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, shape[0], count):
        offsets = (start, *(0 for _ in shape[1:]))
        lengths = (min(count, shape[0] - start), *shape[1:])
        yield Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=shape, offsets=offsets, lengths=lengths)


def _read(source: StorageSource, shard: Shard) -> np.ndarray:
    out = np.empty(shard.nbytes, np.uint8)
    execute_reads([Target(shard=shard, buffer=out.data)], [source])
    return out


def _numbers(raw: np.ndarray, dtype: str) -> np.ndarray | None:
    """Return the values as float64, None for types numpy does not know."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith(("float8", "float4", "complex")):
        return None
    found: np.ndarray = raw.view(np.dtype(dtype)).astype(np.float64)
    return found


def _table(document: dict[str, Any]) -> Group:
    title = f"{counted(document['equal'], 'tensor')} equal in {document['a']} and {document['b']}"
    tensors = new_table("TENSOR", ">DIFFERING", ">OF", ">MAX DIFFERENCE", "")
    for side, key in (("first", "only_a"), ("second", "only_b")):
        for fqn in document[key]:
            tensors.add_row(fqn, "", "", "", f"only in the {side}")
    for one in document["tensors"]:
        if one["differing"] is None:
            tensors.add_row(one["fqn"], "", "", "", " / ".join(one["kind"]))
        else:
            tensors.add_row(one["fqn"], str(one["differing"]), str(one["elements"]), f"{one['max_abs']:.3g}", "")
    values = new_table("VALUE", "FIRST", "SECOND")
    for key, (x, y) in document["values"].items():
        for name, left, right in differences(key, x, y):
            values.add_row(name, left, right)
    tables = [part for table in (tensors, values) if table.row_count for part in ("", table)]
    return Group(printable(title), *tables)


def differences(name: str, x: Any, y: Any) -> Iterator[tuple[str, str, str]]:
    """Give (name, first, second) for each part in which two plain values differ, shortened for people."""
    if isinstance(x, dict) and isinstance(y, dict):
        for key in dict.fromkeys([*x, *y]):
            if not (key in x and key in y and same(x[key], y[key])):
                yield from differences(f"{name}.{key}", x.get(key, _ABSENT), y.get(key, _ABSENT))
        return
    yield name, _short(x), _short(y)


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
