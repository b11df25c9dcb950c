"""What the root knows, as rank 0 asks it on a cold start: committed checkpoints and claimed generations. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashckpt.checkpoint.catalog import list_checkpoints, read_generations
from flashckpt.errors import FlashckptError
from flashckpt.planning.root_view import RootView
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

_log = logging.getLogger("flashckpt")


@contextmanager
def opened(root: str, options: Mapping[str, Any]) -> Iterator[Store]:
    """Open a root for the length of a `with` block."""
    store = open_store(root, **options)
    try:
        yield store
    finally:
        store.close()


def look(root: str, options: Mapping[str, Any]) -> RootView:
    """Ask the root; an unreachable one gives a view with `error` set, for memory may do without it."""
    try:
        with opened(root, options) as store:
            infos = sorted(list_checkpoints(store), key=lambda i: (i.generation, i.step), reverse=True)
            claims = read_generations(store)
            is_empty = not infos and not any(name.startswith("step-") for name in store.folders())
    except (FlashckptError, OSError) as error:
        _log.warning("the root %s cannot be asked: %s", root, str(error).splitlines()[0])
        return RootView(error=str(error))
    return RootView(
        committed=tuple((i.generation, i.step) for i in infos),
        prefixes=tuple(i.prefix for i in infos),
        claims=tuple((c.generation, c.parent) for c in claims),
        is_empty=is_empty,
    )
