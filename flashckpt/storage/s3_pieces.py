"""Parts of a multipart upload, cut from the buffers of a caller with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashckpt.storage.direct_io import extents
from flashckpt.storage.store import PART_BYTES


def pieces_of(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """Cut and join parts into bytes of PART_BYTES: S3 wants every part but the last at 5 MiB or more."""
    buffer = bytearray()
    for _, view in extents(parts, PART_BYTES):
        if not buffer and len(view) == PART_BYTES:
            yield bytes(view)
            continue
        buffer += view
        while len(buffer) >= PART_BYTES:
            yield bytes(memoryview(buffer)[:PART_BYTES])
            del buffer[:PART_BYTES]
    if buffer:
        yield bytes(buffer)


def drain(head: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces read ahead, letting go of each, then the rest: memory stays bounded."""
    while head:
        yield head.pop(0)
    yield from rest
