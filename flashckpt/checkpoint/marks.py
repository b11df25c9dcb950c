"""Names of kept checkpoints: a keep mark that is not empty holds a name, and the value that it was given for. Torch-free.

A name moves by two writes: the new mark, then the old one goes. Whoever is killed between them leaves both; the newer one
has the name then, and the next move removes the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from flashckpt.checkpoint.catalog import CheckpointInfo
from flashckpt.checkpoint.history import read_history, read_series
from flashckpt.checkpoint.retention import KEEP, keep, unkeep
from flashckpt.checkpoint.root_records import TOMBSTONE, parse_prefix
from flashckpt.errors import ConfigError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

NAME = re.compile(r"(?!step-)[A-Za-z][A-Za-z0-9._-]{0,63}")


class Mark(NamedTuple):
    """A checkpoint that has a name: its folder, and the value it was given for; nan for none."""

    prefix: str
    value: float


def named_marks(store: Store) -> list[tuple[str, Mark]]:
    """Return all names with their marks, the newest checkpoint last."""
    found = []
    for info in store.list(KEEP):
        try:
            raw = store.get(info.key) if info.nbytes else b""
        except ObjectMissingError:
            continue
        if raw and not raw.startswith(TOMBSTONE):
            name, _, value = raw.decode(errors="replace").partition("\n")
            found.append((name, Mark(info.key[len(KEEP) :], _number(value))))
    return sorted(found, key=lambda one: parse_prefix(one[1].prefix) or (0, 0))


def names_of(store: Store) -> Mapping[str, Mark]:
    """Return who has each name."""
    return dict(named_marks(store))


def keep_as(store: Store, prefix: str, name: str, value: float = math.nan) -> None:
    """Keep a checkpoint under a name, and let go of the one that had it.

    Raises:
        ConfigError: It is kept already without a name, or the name cannot be one.
        NoCheckpointError: There is none, or it is being deleted.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            "a name of a checkpoint cannot be used", found=name,
            expected="a letter, then letters, digits, dots, dashes, at most 64",
        )  # fmt: skip
    before, mine = named_marks(store), f"{name}\n{value!r}".encode()
    if prefix in {mark.prefix for _, mark in before}:
        store.put(KEEP + prefix, mine)  # it has a mark, so that no deletion can claim it
    elif not keep(store, prefix, mine) and store.get(KEEP + prefix) != mine:
        raise ConfigError(
            f"{prefix} is kept already, without a name", state="It stays kept.",
            remedy="take that mark away first: flashckpt keep ... --remove",
        )  # fmt: skip
    crash_point("mark.after-name")
    for other, mark in before:
        if other == name and mark.prefix != prefix:
            unkeep(store, mark.prefix)


def best_of(store: Store, infos: list[CheckpointInfo], metric: str, *, highest: bool) -> Mark | None:
    """Return the checkpoint with the best value of what was logged as `metric` up to its step in its session; of equal ones the first."""
    best: Mark | None = None
    curves = {one.generation: read_series(store, one.key).get(metric, []) for one in read_history(store)}
    for info in sorted(infos, key=lambda info: info.identity):
        value = next((v for step, v in reversed(curves.get(info.generation, [])) if step <= info.step), math.nan)
        if not math.isnan(value) and (best is None or (value > best.value if highest else value < best.value)):
            best = Mark(info.prefix, value)
    return best


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
