"""The writer of one slot: from WRITING to COMPLETE or EMPTY. The write order is in `segment`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from flashckpt.core.records import digest
from flashckpt.core.superblock import SegmentSpec, SlotHeader, SlotState
from flashckpt.errors import SharedMemoryError
from flashckpt.faults import crash_point


class SlotWriter:
    """One snapshot being written. Ends with `commit` or `discard`; if the process dies the slot stays WRITING, unreadable.

    Attributes:
        data: Writable bytes of the data area; do not use views of it after commit or discard.
        follows: Whether some of `data` was still kept by a persister when it began.
        still_read: Returns the bytes of `data` that are, as (start, stop): never to be written.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        buffer: memoryview,
        slot: int,
        header: SlotHeader,
        *,
        put: Callable[[SlotHeader], SlotHeader],
        release: Callable[[], None],
        still_read: Callable[[], tuple[int, int]] = lambda: (0, 0),
        follows: bool = False,
    ) -> None:
        """Made by `Segment.begin`. `put` writes one copy of the slot's header; `release` gives up the lease."""
        self._spec, self._buffer, self.slot, self.header = spec, buffer, slot, header
        self._put, self._release, self.still_read, self.follows = put, release, still_read, follows
        start = spec.data_at(slot)
        self.data = buffer[start : start + spec.data_capacity]

    def commit(self, manifest: bytes, *, data_bytes: int | None = None, suspect: int = 0) -> SlotHeader:
        """Write the manifest and set the slot COMPLETE: from then on the snapshot exists.

        Args:
            manifest: `encode_manifest(...)`.
            data_bytes: Used bytes of the data area; all of it if None.
            suspect: As in the header.

        Raises:
            SharedMemoryError: The manifest or the data do not fit into their area; the snapshot is discarded.
        """
        spec = self._spec
        if data_bytes is not None and data_bytes > spec.data_capacity:
            self.discard()
            raise SharedMemoryError(
                f"the snapshot of step {self.header.step} does not fit into its slot",
                found=f"{data_bytes} bytes",
                expected=f"at most {spec.data_capacity} bytes",
                state="That snapshot was discarded; earlier ones are intact.",
            )
        if len(manifest) > spec.manifest_capacity:
            self.discard()
            raise SharedMemoryError(
                f"the manifest of step {self.header.step} does not fit into its slot",
                found=f"{len(manifest)} bytes",
                expected=f"at most {spec.manifest_capacity} bytes",
                state="That snapshot was discarded; earlier ones are intact.",
                remedy="track less non-tensor state, or hold large values as tensors",
            )
        crash_point("slot.before-manifest")
        at = spec.manifest_at(self.slot)
        self._buffer[at : at + len(manifest)] = manifest
        crash_point("slot.before-complete")
        header = replace(
            self.header,
            state=SlotState.COMPLETE,
            manifest_bytes=len(manifest),
            manifest_digest=digest(manifest),
            data_bytes=spec.data_capacity if data_bytes is None else data_bytes,
            suspect=suspect,
        )
        header = self._put(header)  # THE commit point of the memory tier: one write of one header copy
        crash_point("slot.after-complete")
        self._end()
        return header

    def discard(self) -> None:
        """Discard the snapshot and set the slot EMPTY."""
        self._put(replace(self.header, state=SlotState.EMPTY))
        self._end()

    def leave(self) -> None:
        """Give the slot up as it is: it stays WRITING, unreadable, until somebody writes it."""
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(BufferError):  # a tensor over the slot may still hold the view
            self.data.release()
        self._release()
