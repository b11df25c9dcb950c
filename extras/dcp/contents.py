"""What a checkpoint holds in dcp's words, and non-tensor state in ours: skeletons instead of pickles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import split_owner
from flashckpt.core.values import RESERVED
from flashckpt.dcp.names import GROUPS, STATE, Path, default_path, to_dcp
from flashckpt.errors import UnsupportedStateError
from flashckpt.state import pytree

RECORD = "dcp"
"""Key of the value that says what dcp wrote: optimizer names, leaves by dcp's name, paths that are not the default."""


@dataclass(kw_only=True)
class Contents:
    """One checkpoint as dcp sees it.

    Attributes:
        tensors: dcp's name -> name in the table.
        values: dcp's name -> skeleton (`trees.put_together` gives the value).
        paths: dcp's name -> place in the nested state dict.
        save_id: What dcp's writer called its save; "" for a Checkpointer's.
        is_typed: As in `contents_of`.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    save_id: str = ""
    is_typed: bool = False


def contents_of(manifest: Manifest, rank: int = 0, *, is_typed: bool = False) -> Contents:
    """Return what a checkpoint holds, whoever wrote it.

    Args:
        manifest: Of the checkpoint.
        rank: Of per-rank state take that of this one, else the first one's.
        is_typed: An empty dict, and one whose keys are not all strings, is one value: dcp's names have no place for it.
    """
    records = [value for key, value in sorted(manifest.values.items()) if key.partition("@")[0] == RECORD]
    return (
        _written_by_dcp(manifest, records, is_typed=is_typed)
        if records
        else _written_by_us(manifest, rank, is_typed=is_typed)
    )


def _written_by_dcp(manifest: Manifest, records: Iterable[Mapping[str, Any]], *, is_typed: bool) -> Contents:
    found = Contents(is_typed=is_typed)
    labels: list[str] = []
    paths: dict[str, Path] = {}
    for record in records:
        labels = labels or list(record["labels"])
        paths |= {key: tuple(path) for key, path in record["paths"].items()}
        found.values |= record["values"]
        found.save_id = found.save_id or record.get("save_id", "")  # rank 0 records it; older checkpoints have none
    inside = _inside(found.values)
    found.tensors = {to_dcp(name, labels): name for name in manifest.table.fqns if name not in inside}
    # a group's tensor, such as a learning rate on the device, keeps dcp's name
    keys = [*found.tensors, *found.values]
    found.paths = {key: paths.get(key, default_path(key, labels)) for key in keys}
    tensors = {found.paths[key][0] for key in found.tensors}
    for top in {path[0] for key, path in found.paths.items() if key in found.values} - tensors if is_typed else ():
        if (whole := manifest.values.get(str(top))) is not None:  # as a Checkpointer would have recorded it
            for key in [key for key in found.values if found.paths[key][0] == top]:
                del found.values[key], found.paths[key]
            _flatten(whole, (top,), found)
    return found


def _written_by_us(manifest: Manifest, rank: int, *, is_typed: bool) -> Contents:
    found = Contents(is_typed=is_typed)
    values = _of_rank(manifest.values, rank)
    labels = [key.removesuffix(".groups") for key in values if key.endswith(".groups") and key.count(".") == 1]
    inside = _inside(manifest.values)
    for key, value in values.items():
        if key == "aliases" or key.startswith("."):  # what no track name can be says something of the snapshot
            continue
        if key.removesuffix(".groups") in labels:
            label = key.removesuffix(".groups")
            groups = [group for one in value for group in one]
            _flatten({GROUPS: groups}, (label,), found)
        else:
            _flatten(value, default_path(to_dcp(key, labels), labels), found)
    names = _of_rank({name: name for name in manifest.table.fqns if name not in inside}, rank)
    aliases = manifest.aliases
    names |= {alias: names[name] for alias, name in aliases.items() if name in names}
    for name, held in names.items():
        label, _, rest = name.partition(".")
        key = f"{label}.{STATE}.{rest}" if label in labels else name  # tensors of groups are in values
        found.tensors[key] = held
        found.paths[key] = default_path(key, labels)
    return found


def _of_rank(named: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return entries by name without `@...`: the common one, else this rank's, else the first."""
    found: dict[str, Any] = {}
    for _, key in sorted(((split_owner(key)[1] != "", not key.endswith(f"@rank{rank}")), key) for key in named):
        found.setdefault(split_owner(key)[0], named[key])
    return found


def _inside(values: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that are parts of values."""
    return {name for value in values.values() for name in pytree.tensor_names(value)}


def _flatten(skeleton: Any, path: Path, found: Contents) -> None:
    """Add the leaves below `path`, cut where dcp cuts: dicts always, lists only where a dict or tensor is inside."""
    key = ".".join(map(str, path))
    if found.paths.get(key, path) != path:
        raise UnsupportedStateError(
            f"two values would have the name {key!r}",
            found=f"places {found.paths[key]!r:.100} and {path!r:.100}",
            expected="keys that differ when they are joined with dots",
            state="Nothing was read.",
            remedy="export to safetensors, or leave the object out with --only",
        )
    mark = skeleton.get(pytree._MARK) if isinstance(skeleton, dict) else None  # noqa: SLF001 -- the format of skeletons is one
    if mark == "tensor":
        found.tensors[key], found.paths[key] = skeleton["name"], path
    elif isinstance(skeleton, dict) and mark is None and (skeleton or not found.is_typed):
        for name, item in skeleton.items():
            _flatten(item, (*path, str(name)), found)
    elif mark == "dict" and not found.is_typed:
        for name, item in skeleton["items"]:
            _flatten(item, (*path, str(name)), found)
    elif isinstance(skeleton, list) and _has_parts(skeleton):
        for i, item in enumerate(skeleton):
            _flatten(item, (*path, i), found)
    else:
        found.values[key], found.paths[key] = skeleton, path


def _has_parts(items: list[Any]) -> bool:
    plain = {"scalar", "dtype", "device", "array", "bytes_io"}
    return any(
        (isinstance(item, dict) and item.get(pytree._MARK) not in plain)  # noqa: SLF001 -- as above
        or (isinstance(item, list) and _has_parts(item))
        for item in items
    )


def take_apart(value: Any, key: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return `trees.take_apart` of one leaf of a state dict; UnsupportedStateError names its key."""
    try:
        return pytree.flatten(value, key)
    except UnsupportedStateError as error:
        raise UnsupportedStateError(
            error.problem.replace("in a snapshot", "in a checkpoint"),
            found=error.found,
            expected=error.expected,
            state="Nothing was written.",
            remedy="convert it before the save, or leave the key out of the state dict; flashckpt never pickles",
        ) from None


def values_for_checkpointer(
    leaves: Mapping[str, Any], paths: Mapping[str, Path], labels: Iterable[str]
) -> dict[str, Any]:
    """Return non-tensor state as a Checkpointer would have recorded it, so that `restore()` finds it.

    Args:
        leaves: dcp's name -> tensor or other value, of this rank.
        paths: dcp's name -> place in the nested state dict.
        labels: Optimizers.
    """
    values: dict[str, Any] = {}
    by_top: dict[str, list[str]] = {}
    for key in leaves:
        by_top.setdefault(str(paths[key][0]), []).append(key)
    for top, keys in by_top.items():
        others = [key for key in keys if not isinstance(leaves[key], torch.Tensor)]
        if not others or top in RESERVED or "@" in top:
            continue
        if top in labels:
            values[f"{top}.groups"] = _groups(top, keys, leaves, paths)
        elif len(keys) > 2 * len(others) or any(leaf.startswith("_extra_state") for leaf in _last(others)):
            values |= {key: take_apart(leaves[key], key)[0] for key in others}  # a module with some extra state
        else:
            values[top] = take_apart(_nested(keys, leaves, paths), top)[0]
    return values


def _last(keys: Iterable[str]) -> list[str]:
    return [key.rpartition(".")[2] for key in keys]


def _nested(keys: Iterable[str], leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    root: dict[Any, Any] = {}
    for key in keys:
        node = root
        path = paths[key]
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaves[key]
    return _lists(next(iter(root.values())))


def _lists(node: Any) -> Any:
    """Turn dicts whose keys are 0, 1, 2, ... back into lists, and the steps of MultiStepLR, which dcp made strings, into ints."""
    if type(node) is not dict:
        return node
    if set(map(type, steps := node.get("milestones", ()))) == {str} and all(map(str.isdecimal, steps)):
        node = node | {"milestones": {int(step): count for step, count in steps.items()}}
        return {key: value if key == "milestones" else _lists(value) for key, value in node.items()}
    if node and all(type(key) is int for key in node):
        return [_lists(node[key]) for key in sorted(node)]
    return {key: _lists(value) for key, value in node.items()}


def _groups(top: str, keys: Iterable[str], leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """Return `<optimizer>.groups`: [[{hyperparameters, "params": names}, ...]], one inner list per optimizer.

    A flat state dict (one entry per parameter and hyperparameter) gives one group per parameter.
    """
    groups: dict[int | str, dict[str, Any]] = {}
    for key in keys:
        rest = key.removeprefix(f"{top}.{GROUPS}.")
        if rest == key:
            continue
        number = paths[key][2] if len(paths[key]) > 3 else None
        if isinstance(number, int):
            group = groups.setdefault(number, {})
            name = ".".join(map(str, paths[key][3:]))
        else:
            parameter, _, name = rest.rpartition(".")
            group = groups.setdefault(parameter, {"params": [parameter]})
        group[name] = take_apart(leaves[key], key)[0]
    for group in groups.values():
        group["params"] = [str(name) for name in group.get("params", [])]
    return [[groups[number] for number in sorted(groups, key=str if _is_flat(groups) else int)]]


def _is_flat(groups: Mapping[int | str, Any]) -> bool:
    return any(isinstance(number, str) for number in groups)
