"""How names of torch.distributed.checkpoint map on ours, and back. Pure.

dcp flattens nested state dicts by joining keys with dots. Where a top-level name X holds an optimizer's state
dict (`X.param_groups...` exists), dcp says `X.state.<parameter>.<key>` and we say `X.<parameter>.<key>`. All
other names are the same, so `{"model": ..., "optimizer": ...}` is what a Checkpointer tracks as model and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

Path = tuple[str | int, ...]

STATE, GROUPS = "state", "param_groups"


def optimizer_labels(keys: Iterable[str]) -> list[str]:
    """Return the top-level names that hold an optimizer's state dict, sorted."""
    heads = {tuple(key.split(".", 2)[:2]) for key in keys}
    return sorted(head[0] for head in heads if len(head) == 2 and head[1] == GROUPS and "@" not in head[0])


def to_ours(key: str, labels: Iterable[str]) -> str:
    """Return the name under which a tensor or value of dcp's name `key` is kept."""
    label, _, rest = key.partition(".")
    if label in labels and rest.startswith(f"{STATE}."):
        return f"{label}.{rest.removeprefix(f'{STATE}.')}"
    return key


def to_dcp(name: str, labels: Iterable[str]) -> str:
    """Return dcp's name of our `name`: the inverse of `to_ours`."""
    label, _, rest = name.partition(".")
    if label in labels and rest and not rest.startswith(f"{GROUPS}."):
        return f"{label}.{STATE}.{rest}"
    return name


def default_path(key: str, labels: Iterable[str]) -> Path:
    """Return where the value of `key` lies in the nested state dict, if nobody says otherwise.

    `model.layers.0.w` -> ("model", "layers.0.w"), `optimizer.state.layers.0.w.exp_avg` -> ("optimizer", "state",
    "layers.0.w", "exp_avg"), `optimizer.param_groups.0.lr` -> ("optimizer", "param_groups", 0, "lr").
    """
    label, dot, rest = key.partition(".")
    if not dot:
        return (key,)
    if label in labels:
        kind, _, inner = rest.partition(".")
        if kind == STATE and "." in inner:
            parameter, _, leaf = inner.rpartition(".")
            return label, STATE, parameter, leaf
        if kind == GROUPS:
            number, _, leaf = inner.partition(".")
            if number.isdigit() and leaf:
                return label, GROUPS, int(number), leaf
    return label, rest
