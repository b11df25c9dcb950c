"""A checkpoint whose MANIFEST names indexes, as a source: of the rows it has those that a rank wants, once it is known which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashckpt.checkpoint.ranged_reads import with_values
from flashckpt.checkpoint.spread_reads import read_part
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.spread import IndexEntry, Spread
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.store import Store


class SpreadSource(StorageSource):
    """See StorageSource. `manifest` has all names, and after `bring` the rows that were asked for.

    Where the layout has not changed these are in the index of this rank's node.

    Args:
        store: The opened root.
        spread: The decoded MANIFEST.
        prefix: Folder of the checkpoint.
        owner: The only rank whose values in ranges are asked for.
    """

    manifest: Manifest

    def __init__(self, store: Store, spread: Spread, prefix: str, owner: str) -> None:
        self._store, self._folder = store, prefix
        self._spread = replace(spread, head=with_values(store, prefix, spread.head, owner=owner))
        self._entries: list[IndexEntry] = []
        super().__init__(store, read_part(store, prefix, self._spread, []), prefix)

    def bring(self, wanted: ShardTable | None) -> None:
        """See StorageSource; DamagedError, StoreError or RootError where an index cannot be read."""
        entries = list(self._spread.indexes) if wanted is None else self._spread.near(wanted)
        if not set(entries) <= set(self._entries):
            self.manifest = read_part(self._store, self._folder, self._spread, entries)
            self._entries = entries

    def bring_both(self, aliases: Mapping[str, str]) -> None:
        """See StorageSource."""
        known = self._spread.outline.kinds
        if any(one in known and other in known for one, other in aliases.items()):
            self.bring(None)
