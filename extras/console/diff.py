"""`flashckpt diff`: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.console import Group

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.cli.common import (
    Command,
    choose,
    complete_step,
    json_option,
    jumps,
    new_table,
    numbers_of,
    open_root,
    root_options,
    show,
)
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.core.shard_table import ShardTable, chunk_counts, ranges
from flashckpt.printable import counted, plain, printable
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.store import Store

BLOCK_BYTES = 32 << 20
"""Most bytes of one checkpoint that are compared at a time: bounds the memory of a comparison."""


def compare(a: StorageSource, b: StorageSource) -> dict[str, Any]:
    """Return what differs: names only one side has, tensors with their distance, values by key."""
    names_a, names_b = set(a.manifest.table.fqns), set(b.manifest.table.fqns)
    both = sorted(names_a & names_b)
    values_a, values_b = a.manifest.values, b.manifest.values
    differing = [key for key in sorted(values_a.keys() | values_b.keys()) if not _equal(values_a, values_b, key)]
    found = _tensors(a, b, both)
    return {
        "a": a.name,
        "b": b.name,
        "only_a": sorted(names_a - names_b),
        "only_b": sorted(names_b - names_a),
        "equal": len(both) - len(found),
        "groups": _groups(both, found),
        "tensors": found,
        "values": {key: [plain(values_a.get(key)), plain(values_b.get(key))] for key in differing},
    }


def _groups(both: Sequence[str], found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by tracked name how many tensors both have, how many of them differ, and which does most."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn in both:
        groups.setdefault(fqn.partition(".")[0], {"tensors": 0, "differing": 0, "most": "", "max_abs": 0.0})[
            "tensors"
        ] += 1
    for one in found:
        group = groups[one["fqn"].partition(".")[0]]
        group["differing"] += 1
        if (one["max_abs"] or 0.0) >= group["max_abs"]:
            group |= {"most": one["fqn"], "max_abs": one["max_abs"] or 0.0}
    return groups


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


# -- tensors ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Difference:
    """What was found of one tensor so far."""

    kind: str
    differing: int = 0
    elements: int = 0
    largest: float = 0.0

    def add(self, x: np.ndarray, y: np.ndarray, dtype: str) -> None:
        """Count the bytes of one block of both sides."""
        self.elements += len(x) // ITEMSIZE[dtype]
        if np.array_equal(x, y):
            return
        unequal = (x.reshape(-1, ITEMSIZE[dtype]) != y.reshape(-1, ITEMSIZE[dtype])).any(axis=1)
        self.differing += int(unequal.sum())
        numbers = [_numbers(one, dtype) for one in (x, y)]
        if numbers[0] is not None and numbers[1] is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.abs(numbers[0][unequal] - numbers[1][unequal])
                self.largest = max(
                    self.largest, float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))
                )


def _tensors(a: StorageSource, b: StorageSource, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what differs among the tensors that both have, in the order of their names."""
    other_kind: dict[str, dict[str, Any]] = {}
    wanted: list[Shard] = []
    for fqn in _of_other_digests(a, b, names):
        shards = [source.manifest.table.shard(source.manifest.table.rows(fqn)[0]) for source in (a, b)]
        kinds = [_kind(shard) for shard in shards]
        if kinds[0] == kinds[1]:
            wanted.append(shards[0])
        else:
            other_kind[fqn] = {"fqn": fqn, "kind": kinds, "differing": None, "elements": None, "max_abs": None}
    found = {shard.fqn: _Difference(_kind(shard)) for shard in wanted}
    for batch in _batches(wanted):
        for shard, x, y in zip(batch, _read(a, batch), _read(b, batch), strict=True):
            found[shard.fqn].add(x, y, shard.dtype)
    documents = other_kind | {fqn: _document(fqn, one) for fqn, one in found.items() if one.differing}
    return [documents[fqn] for fqn in names if fqn in documents]


def _document(fqn: str, found: _Difference) -> dict[str, Any]:
    return {
        "fqn": fqn,
        "kind": [found.kind],
        "differing": found.differing,
        "elements": found.elements,
        "max_abs": found.largest if np.isfinite(found.largest) else None,
    }


def _kind(shard: Shard) -> str:
    return f"{shard.dtype} {list(shard.global_shape)}"


def _of_other_digests(a: StorageSource, b: StorageSource, names: Sequence[str]) -> list[str]:
    """Return the names of tensors that are not known to be equal by the digests of the same shards."""
    if _same_rows(a.manifest.table, b.manifest.table):
        table = a.manifest.table
        counts = chunk_counts(table.nbytes)
        unequal = (a.manifest.digests != b.manifest.digests)[ranges(table.first_chunk, counts)]
        ids = np.unique(np.repeat(table.fqn_id, counts)[unequal])
        return sorted(table.fqns[number] for number in ids.tolist())
    return [fqn for fqn in names if _entries(a, fqn) != _entries(b, fqn)]


def _same_rows(a: ShardTable, b: ShardTable) -> bool:
    """Whether two tables hold the same shards row by row, so that their digests can be compared at once."""
    columns = ("fqn_id", "dtype_id", "ndim", "nbytes", "first_chunk", "global_shape", "offsets", "lengths")
    return (a.fqns, a.dtypes) == (b.fqns, b.dtypes) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in columns
    )


def _entries(source: StorageSource, fqn: str) -> tuple[str, list[Any]]:
    """Return kind and shards of a tensor with their digests: equal ones need not be read."""
    table, digests = source.manifest.table, source.manifest.digests
    entries, kind = [], ""
    for row in table.rows(fqn):
        first, shard = int(table.first_chunk[row]), table.shard(row)
        count = int(chunk_counts(table.nbytes[row : row + 1])[0])
        entries.append((shard.offsets, shard.lengths, digests[first : first + count].tobytes()))
        kind = _kind(shard)
    return kind, sorted(entries)


# -- reading ----------------------------------------------------------------------------------------------


def _batches(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Cut whole tensors into blocks, and give as many at a time as make BLOCK_BYTES: a call each would cost more than the bytes."""
    batch: list[Shard] = []
    room = BLOCK_BYTES
    for shard in shards:
        for block in _blocks(shard):
            if batch and block.nbytes > room:
                yield batch
                batch, room = [], BLOCK_BYTES
            batch.append(block)
            room -= block.nbytes
    if batch:
        yield batch


def _blocks(shard: Shard) -> Iterator[Shard]:
    """Cut a whole tensor along its first dimension into blocks of about BLOCK_BYTES."""
    shape = shard.global_shape
    if not shape:
        yield Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=(), offsets=(), lengths=())
        return
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * ITEMSIZE[shard.dtype]
    count = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, shape[0], count):
        offsets = (start, *(0 for _ in shape[1:]))
        lengths = (min(count, shape[0] - start), *shape[1:])
        yield Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=shape, offsets=offsets, lengths=lengths)


def _read(source: StorageSource, shards: Sequence[Shard]) -> list[np.ndarray]:
    ends = np.cumsum([shard.nbytes for shard in shards])
    parts = np.split(np.empty(int(ends[-1]), np.uint8), ends[:-1])
    targets = [Target(shard=shard, buffer=part.data) for shard, part in zip(shards, parts, strict=True)]
    execute_reads(targets, [source])
    return parts


def _numbers(raw: np.ndarray, dtype: str) -> np.ndarray | None:
    """Return the values as float64, None for types numpy does not know."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith(("float8", "float4", "complex")):
        return None
    found: np.ndarray = raw.view(np.dtype(dtype)).astype(np.float64)
    return found


_SHOWN = 60
"""Characters that are shown of a value."""
MOST = 10
"""Tensors that are shown, those that differ most; and the longest list that is compared item by item."""
_ABSENT = "(absent)"


@click.command(cls=Command)
@root_options
@click.argument("first", metavar="STEP_A", shell_complete=complete_step)
@click.argument("second", metavar="STEP_B", shell_complete=complete_step)
@click.option("--other", "other_root", metavar="ROOT_B", help="Root of STEP_B  [default: ROOT]")
@click.option("--all", "everything", is_flag=True, help="Show every tensor, not only those that differ most.")
@json_option
def diff(
    *,
    root: str,
    options: tuple[str, ...],
    first: str,
    second: str,
    other_root: str | None,
    everything: bool,
    as_json: bool,
) -> int:
    """Compare two checkpoints tensor by tensor; other layouts of the same tensors compare equal.

    Exit code 1 if they differ, 0 if all tensors and values are equal.

    Examples:
      flashckpt diff /checkpoints/run7 100 120
      flashckpt diff /checkpoints/run7 120 120 --other /checkpoints/run8
    """
    store = open_root(root, options)
    a = _source(store, first)
    b = _source(store if other_root is None else open_root(other_root, options), second)
    document = compare(a, b) | {"numbers": jumps(numbers_of(a.manifest), numbers_of(b.manifest))}
    show(document, as_json=as_json, table=lambda: _table(document, None if everything else MOST))
    return 1 if any(document[key] for key in ("only_a", "only_b", "tensors", "values")) else 0


def _source(store: Store, step: str) -> StorageSource:
    info = choose(store, step)
    return StorageSource(store, read_manifest(store, info), info.prefix)


def _table(document: dict[str, Any], most: int | None = MOST) -> Group:
    lines = [f"{counted(document['equal'], 'tensor')} equal in {document['a']} and {document['b']}"]
    for name, group in document.get("groups", {}).items():
        which = f", most {group['most']} by {group['max_abs']:.3g}" if group["differing"] else ""
        lines.append(f"  {name}: {group['differing']} of {counted(group['tensors'], 'tensor')} differ{which}")
    shown = sorted(document["tensors"], key=lambda one: (one["max_abs"] is not None, -(one["max_abs"] or 0.0)))[:most]
    if more := len(document["tensors"]) - len(shown):
        lines.append(f"  the {len(shown)} that differ most are shown, {more} more with --all")
    tensors = new_table("TENSOR", ">DIFFERING", ">OF", ">MAX DIFFERENCE", "")
    for side, key in (("first", "only_a"), ("second", "only_b")):
        for fqn in document[key]:
            tensors.add_row(fqn, "", "", "", f"only in the {side}")
    for one in shown:
        if one["differing"] is None:
            tensors.add_row(one["fqn"], "", "", "", " / ".join(one["kind"]))
        else:
            apart = "not finite" if one["max_abs"] is None else f"{one['max_abs']:.3g}"
            tensors.add_row(one["fqn"], str(one["differing"]), str(one["elements"]), apart, "")
    values = new_table("VALUE", "FIRST", "SECOND")
    for key, (x, y) in document["values"].items():
        for name, left, right in differences(key, x, y):
            values.add_row(name, left, right)
    numbers = new_table("NUMBERS", ">NORM BEFORE", ">NORM AFTER", "")
    for one in document.get("numbers", []):
        norms = ["not finite" if norm is None else f"{norm:.3g}" for norm in one["norm"]]
        numbers.add_row(one["fqn"], *norms, "suspect" if one["suspect"] else "")
    tables = [part for table in (tensors, numbers, values) if table.row_count for part in ("", table)]
    return Group(*map(printable, lines), *tables)


def differences(name: str, x: Any, y: Any) -> Iterator[tuple[str, str, str]]:
    """Give (name, first, second) for each part in which two plain values differ, shortened for people."""
    if isinstance(x, dict) and isinstance(y, dict):
        for key in dict.fromkeys([*x, *y]):
            if not (key in x and key in y and same(x[key], y[key])):
                yield from differences(f"{name}.{key}", x.get(key, _ABSENT), y.get(key, _ABSENT))
        return
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y) <= MOST:
        for number, (left, right) in enumerate(zip(x, y, strict=True)):
            if not same(left, right):
                yield from differences(f"{name}[{number}]", left, right)
        return
    yield name, _short(x), _short(y)


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
