"""`flashckpt diff`: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
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
from flashckpt.console.comparison import compare, same
from flashckpt.printable import counted, printable
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.store import Store

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
