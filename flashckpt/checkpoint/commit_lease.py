"""The lease of the node that commits a checkpoint: numbered objects in its folder, of which the highest counts.

A number is taken by one conditional write and never again. To renew a lease its object is written again, which changes
the time that the storage shows. The text in it names the holder, so that a persister that starts again knows its own.
"""

from __future__ import annotations

from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

_NAME = "committer."


class LeaseObjects:
    """The leases that a node sees, and those it takes. `holder` is what marks them as its own: one line of text."""

    def __init__(self) -> None:
        self._holders: dict[str, bytes] = {}

    def read(self, store: Store, identity: SnapshotId, holder: str) -> tuple[int, float, bool]:
        """Return (number of the newest lease, time of its object, whether it is `holder`'s); number -1: there is none."""
        found = store.list(f"{prefix_of(*identity)}/{_NAME}")
        if not found:
            return -1, 0.0, False
        newest = max(found, key=lambda info: info.key)
        is_own = self._holder_of(store, newest.key) == holder.encode()
        return int(newest.key.rpartition(".")[2]), newest.mtime, is_own

    def take(self, store: Store, identity: SnapshotId, number: int, holder: str) -> bool:
        """Take the lease of this number; False where another node was faster."""
        crash_point("lease.before-take")
        taken = store.put_if_absent(_key(identity, number), holder.encode())
        crash_point("lease.after-take")
        return taken

    def renew(self, store: Store, identity: SnapshotId, number: int, holder: str) -> None:
        """Show that the holder is alive."""
        store.put(_key(identity, number), holder.encode())

    def _holder_of(self, store: Store, key: str) -> bytes:
        """Return what a lease says; it is read once."""
        if key not in self._holders:
            try:
                self._holders = {key: store.get(key)}  # of the newest alone
            except ObjectMissingError:
                return b""
        return self._holders[key]


def _key(identity: SnapshotId, number: int) -> str:
    return f"{prefix_of(*identity)}/{_NAME}{number:06d}"
