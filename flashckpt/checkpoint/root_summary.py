"""A summary of the root, as rank 0 reads it on a cold start: committed checkpoints and claimed generations. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.generations import read_generations
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError, may_pass
from flashckpt.planning.selection import RootSummary
from flashckpt.storage.factory import open_in_rank
from flashckpt.storage.store import Store

_log = logging.getLogger("flashckpt")


@contextmanager
def open_root(root: str, options: Mapping[str, Any]) -> Iterator[Store]:
    """Open a root in a rank for the length of a `with` block."""
    store = open_in_rank(root, options)
    try:
        yield store
    finally:
        store.close()


def read_root(root: str, options: Mapping[str, Any]) -> RootSummary:
    """Read the root; for an unreachable one return a view with `error` set, since memory may suffice."""
    try:
        with open_root(root, options) as store:
            infos = sorted(list_checkpoints(store), key=lambda i: (i.generation, i.step), reverse=True)
            claims = read_generations(store)
            is_empty = not infos and not any(name.startswith("step-") for name in store.folders())
    except (FlashckptError, OSError) as error:
        _log.warning("the root %s cannot be read: %s", root, str(error).splitlines()[0])
        return RootSummary(error=str(error), may_pass=may_pass(error))
    return RootSummary(
        committed=tuple(SnapshotId(i.generation, i.step) for i in infos),
        prefixes=tuple(i.prefix for i in infos),
        claims=tuple(claims),
        is_empty=is_empty,
        suspects=tuple(i.identity for i in infos if i.suspects),
    )
