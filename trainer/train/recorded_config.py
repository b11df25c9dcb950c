"""Finds the configuration that was recorded with the newest state of a run, to explain why it cannot be restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.core.manifest import Manifest
from flashckpt.core.superblock import SlotState
from flashckpt.errors import FlashckptError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import job_id, open_in_rank

RECORD = "run"


def recorded_config(
    root: str, job: str | None, storage_options: Mapping[str, Any], *, is_near_enough: bool = False
) -> dict[str, Any] | None:
    """Return the recorded values of the newest snapshot or checkpoint; None if none is readable.

    Args:
        root: Of the run.
        job: Its id, or None.
        storage_options: Of its store.
        is_near_enough: Storage is asked only where there is no snapshot in this node's memory.
    """
    found = [*_in_memory(root, job)]
    if not found or not is_near_enough:
        found += _on_storage(root, storage_options)
    newest = max(found, key=lambda manifest: manifest.identity, default=None)
    if newest is None:
        return None
    record = newest.values.get(RECORD)
    return dict(record["config"]) if isinstance(record, dict) and "config" in record else None


def _in_memory(root: str, job: str | None) -> Iterator[Manifest]:
    with contextlib.suppress(FlashckptError, OSError):
        for path in JobDirectory.open(job_id(root, job), create=False).segments():
            with contextlib.suppress(FlashckptError, OSError):
                yield from _of_segment(Segment.attach(path))


def _of_segment(segment: Segment) -> Iterator[Manifest]:
    try:
        for slot, header in enumerate(segment.headers()):
            pin = segment.pin(slot) if header.state == SlotState.COMPLETE else None
            if pin is not None:
                try:
                    yield pin.manifest()
                finally:
                    pin.close()
    finally:
        segment.close()


def _on_storage(root: str, storage_options: Mapping[str, Any]) -> Iterator[Manifest]:
    with contextlib.suppress(FlashckptError, OSError):
        store = open_in_rank(root, storage_options)
        for info in list_checkpoints(store):
            if not info.problem:
                yield read_manifest(store, info)
                return
