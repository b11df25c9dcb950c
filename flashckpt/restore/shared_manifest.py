"""A large MANIFEST, decoded once per node: the other ranks map what the first one has found whole.

At 16,384 ranks decoding takes 130 MB and a quarter of a second, in every rank. The first rank of a node writes the
columns into an anonymous file in memory, aligned, and the others open it by its descriptor in /proc: nothing has a
name, so nothing is left behind where one of them is killed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from flashckpt.core.manifest import Manifest
from flashckpt.core.ranged_values import ranged_from
from flashckpt.core.shard_table import columns_of, table_from_columns
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.values import pack_values, unpack_values
from flashckpt.framing import frame, split

_ALIGNED = 64


def share(manifest: Manifest) -> int:
    """Return the descriptor of a file in memory that holds a MANIFEST; the file goes with the last one that has it open."""
    digests = np.ascontiguousarray(manifest.digests, "<u8").tobytes()
    groups = {
        "table": columns_of(manifest.table),
        "ranged": manifest.ranged.packed(),
        "rest": {"digests": digests, **_fields(manifest)},
    }
    arrays = [(group, name, value) for group, entries in groups.items() for name, value in entries.items()]
    large = [(group, name, value) for group, name, value in arrays if type(value) is bytes]
    small = [[group, name, value] for group, name, value in arrays if type(value) is not bytes]
    places = list(_places([len(value) for _, _, value in large]))
    head = frame(msgpack.packb([small, [[g, n, at, len(v)] for (g, n, v), at in zip(large, places, strict=True)]]))
    start = -(-len(head) // _ALIGNED) * _ALIGNED
    fd = os.memfd_create("flashckpt-manifest", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(head)
            for (_, _, value), at in zip(large, places, strict=True):
                file.seek(start + at)
                file.write(value)
            file.truncate(max(file.tell(), start))
    except BaseException:
        os.close(fd)
        raise
    return fd


def path_of(fd: int) -> str:
    """Return the path by which other processes of this user on this node open it."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def attach(path: str) -> Manifest:
    """Return the MANIFEST in the file that another process made; its rows are mapped, not copied.

    Raises:
        OSError: The process has gone, or may not be looked at.
    """
    with Path(path).open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    head, behind = split(mapped)
    small, large = msgpack.unpackb(head)
    start = -(-(len(mapped) - len(behind)) // _ALIGNED) * _ALIGNED
    groups: dict[str, dict[str, Any]] = {"table": {}, "ranged": {}, "rest": {}}
    for group, name, value in small:
        groups[group][name] = value
    for group, name, at, nbytes in large:
        groups[group][name] = mapped[start + at : start + at + nbytes]
    rest = groups["rest"]
    values = unpack_values(rest.pop("values"))
    return Manifest(
        **rest
        | {
            "parent": rest["parent"] and SnapshotId(*rest["parent"]),
            "table": table_from_columns(groups["table"]),
            "digests": np.frombuffer(rest["digests"], np.uint64),
            "values": values,
            "ranged": ranged_from(groups["ranged"], objects=len(rest["objects"]), others=values),
        }
    )


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {
        "job": manifest.job,
        "generation": manifest.generation,
        "step": manifest.step,
        "parent": manifest.parent and list(manifest.parent),
        "world_size": manifest.world_size,
        "rank": manifest.rank,
        "writers": [int(rank) for rank in manifest.writers],
        "coordinates": manifest.coordinates,
        "objects": list(manifest.objects),
        "values": pack_values(manifest.values),
    }


def _places(sizes: list[int]) -> Iterator[int]:
    """Yield where each array begins, behind the head."""
    at = 0
    for nbytes in sizes:
        yield at
        at += -(-nbytes // _ALIGNED) * _ALIGNED
