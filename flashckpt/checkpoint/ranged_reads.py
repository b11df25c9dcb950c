"""Read the values that a MANIFEST names by range: all of them for a tool, this rank's own for a restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashckpt.checkpoint.root_records import parallel
from flashckpt.core.manifest import Manifest
from flashckpt.core.values import NO_RANGES
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.storage.store import Store

READ_BYTES = 8 << 20
"""Values of one object that are read by one request."""


def with_values(store: Store, prefix: str, manifest: Manifest, *, owner: str | None = None) -> Manifest:
    """Return a MANIFEST that holds its values itself.

    Args:
        store: The root.
        prefix: Folder of the checkpoint.
        manifest: The decoded manifest.
        owner: Only the values whose key ends with `@owner`; None: all.

    Raises:
        DamagedError: A value is missing or not what was written; the message names value and object.
        StoreError, RootError: The storage failed.
    """
    ranged = manifest.ranged
    if not len(ranged):
        return manifest
    entries = list(range(len(ranged))) if owner is None else ranged.of_owner(owner)
    found: dict[str, Any] = {}
    for values in parallel(lambda group: _read(store, prefix, manifest, group), list(_groups(manifest, entries))):
        found |= values
    return replace(manifest, values=manifest.values | found, ranged=NO_RANGES)


def _groups(manifest: Manifest, entries: Sequence[int]) -> Iterator[list[int]]:
    """Yield the entries of one request each: of one object, close together."""
    group: list[int] = []
    for entry in sorted(entries, key=manifest.ranged.range):
        number, offset, nbytes = manifest.ranged.range(entry)
        if group:
            first_number, first, _ = manifest.ranged.range(group[0])
            if number != first_number or offset + nbytes - first > READ_BYTES:
                yield group
                group = []
        group.append(entry)
    if group:
        yield group


def _read(store: Store, prefix: str, manifest: Manifest, entries: Sequence[int]) -> dict[str, Any]:
    places = [manifest.ranged.range(entry) for entry in entries]
    first, last = places[0][1], max(offset + nbytes for _, offset, nbytes in places)
    key, raw = f"{prefix}/{manifest.objects[places[0][0]]}", bytearray(last - first)
    try:
        store.get_range(key, first, memoryview(raw))
        parts = [bytes(raw[offset - first : offset - first + nbytes]) for _, offset, nbytes in places]
        return dict(manifest.ranged.value(entry, part) for entry, part in zip(entries, parts, strict=True))
    except (DamagedError, ObjectMissingError) as error:
        raise DamagedError(
            f"values of {prefix} in {store.url} cannot be read",
            found=f"{key}: {error.problem}" + (f" ({error.found})" if error.found else ""),
            state="Nothing was restored from it.",
            remedy=f"flashckpt ls {store.url} shows the checkpoints that are intact",
        ) from error
