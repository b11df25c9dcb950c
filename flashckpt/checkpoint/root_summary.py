"""What the root knows, as rank 0 asks it on a cold start: committed checkpoints and claimed generations. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashckpt.checkpoint.catalog import list_checkpoints, read_generations
from flashckpt.errors import FlashckptError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

_log = logging.getLogger("flashckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RootView:
    """Committed checkpoints and claims, as (generation, step) and (generation, parent).

    Attributes:
        committed: Identities of valid checkpoints, newest first.
        prefixes: Where each lies below the root.
        claims: Generations claimed on the root, with what they were restored from.
        error: Why the root could not be asked; "" if it answered.
        is_empty: It holds nothing of any checkpoint, not even of a damaged or unfinished one.
    """

    committed: tuple[tuple[int, int], ...] = ()
    prefixes: tuple[str, ...] = ()
    claims: tuple[tuple[int, tuple[int, int] | None], ...] = ()
    error: str = ""
    is_empty: bool = False

    def pack(self) -> list[Any]:
        """Return it as msgpack types."""
        return [list(self.committed), list(self.prefixes), list(self.claims), self.error, self.is_empty]

    @classmethod
    def unpack(cls, packed: list[Any]) -> RootView:
        """Return what `pack` packed."""
        committed, prefixes, claims, error, is_empty = packed
        return cls(
            committed=tuple((g, s) for g, s in committed),
            prefixes=tuple(prefixes),
            claims=tuple((g, None if p is None else (p[0], p[1])) for g, p in claims),
            error=error,
            is_empty=is_empty,
        )


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
