"""Tells the hook of each commit, from the persister of the first node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.hooks.sender import COMMITTED, Hook
from flashckpt.shm.inventory import NodeInventory
from flashckpt.shm.job_directory import JobConfig, JobDirectory

_log = logging.getLogger("flashckpt.daemon")


class CommitHook:
    """Extension of the persister. One that was restarted tells the newest commit of its generation again."""

    def __init__(self, directory: JobDirectory, wake: Callable[[], None]) -> None:
        del directory, wake
        self._hook = Hook(_log) if env.FLASHCKPT_HOOK else None
        self._sent: SnapshotId | None = None

    def turn(
        self, config: JobConfig, view: NodeInventory, record: Generation, committed: SnapshotId | None = None
    ) -> None:
        """Tell of a commit that is new."""
        del view
        if self._hook is None or config.node or committed is None or committed == self._sent:
            return
        self._sent = committed
        if committed.generation == record.number:  # else it was there before this session
            self._hook.tell(
                COMMITTED,
                id=f"{config.job}-{committed.generation}-{committed.step}",
                job=config.job,
                reason=f"step {committed.step} of generation {committed.generation} is on storage",
                root=config.root,
                **committed._asdict(),
            )

    def report(self, trouble: str) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """Return nothing."""
        del trouble
        return {}, {}

    def close(self) -> None:
        """Wait a moment for what is due."""
        if self._hook is not None:
            self._hook.close()
