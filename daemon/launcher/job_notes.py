"""Notes that the nodes of one job share through the rendezvous store, which lasts as long as the job.

Anybody who can reach the store can write to it, so notes are signed (sealed_store): a stranger's counts as absent.
"""

from __future__ import annotations

import contextlib
import time

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from flashckpt.daemon.launcher.sealed_store import SealedStore

_POLL_S = 0.05


class JobNotes:
    """Which numbers of nodes the job has trained on, which it has refused, and the exit code that ends it everywhere.

    Args:
        store: The rendezvous store.
        run_id: The job's id.
        secret: The job's secret; without one (b"") notes are not signed.

    Attributes:
        code: The exit code that ends the job on all nodes, as far as this node knows; 0 for none.
    """

    def __init__(self, store: Store, run_id: str, secret: bytes = b"") -> None:
        self._store, self._prefix = SealedStore(store, secret, f"job {run_id}"), f"flashckpt.job.{run_id}"
        self.code = 0

    def note_trained(self) -> None:
        """Record that some generation of the job has trained a step."""
        self._note("trained", "1")

    def has_trained(self) -> bool:
        """Return whether any generation of the job has trained a step."""
        return self._noted("trained") is not None

    def refuse(self, size: int) -> None:
        """Record that the job's layout does not fit `size` nodes."""
        self._note(f"refused.{size}", "1")

    def is_refused(self, size: int) -> bool:
        """Return whether the layout was recorded not to fit `size` nodes."""
        return self._noted(f"refused.{size}") is not None

    def end(self, code: int) -> None:
        """Record the exit code of a permanent error, so that all nodes end with it."""
        self.code = code
        with contextlib.suppress(DistError):  # the store is gone, but this node still knows the code
            self._note("end", str(code))

    def ended(self) -> int:
        """Return that exit code, 0 where none was noted or the store is gone."""
        try:
            self.code = int(self._noted("end") or self.code)
        except (DistError, ValueError):
            pass
        return self.code

    def leave(self, nodes: int, timeout_s: float) -> None:
        """Return once `nodes` nodes have called this, at the latest after `timeout_s` seconds.

        The store may end with the calling process: a node that has not read by then why the job ends never will.
        """
        until = time.monotonic() + timeout_s
        try:
            left = self._store.add(f"{self._prefix}.left", 1)
            while left < nodes and time.monotonic() < until:
                time.sleep(_POLL_S)
                left = self._store.add(f"{self._prefix}.left", 0)
        except DistError:
            return  # its host has left, so all nodes had arrived

    def _note(self, name: str, value: str) -> None:
        self._store.set(f"{self._prefix}.{name}", value)

    def _noted(self, name: str) -> str | None:
        """Return a note, None if there is none or a stranger wrote it."""
        key = f"{self._prefix}.{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None
