"""What a candidate is read from: pinned slots of this node, its packs on the root; opened, and closed together."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from flashckpt import collectives
from flashckpt.checkpoint import catalog
from flashckpt.checkpoint.catalog import manifest_from, read_manifest_bytes
from flashckpt.checkpoint.retention import leased
from flashckpt.checkpoint.spread_reads import read_part, with_values
from flashckpt.core.manifest import Manifest
from flashckpt.core.schema import HEADER, figures_from
from flashckpt.core.shard_table import ShardTable, columns_of, raw_bytes, table_from_columns
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import IndexEntry, Spread, is_spread
from flashckpt.core.values import pack_values, ranged_from, unpack_values
from flashckpt.errors import FlashckptError, NoCheckpointError
from flashckpt.framing import frame, split
from flashckpt.planning.selection import Candidate, SlotLocation
from flashckpt.report import guarded
from flashckpt.restore.peers import PeerSource
from flashckpt.restore.sources import MemorySource, Source, StorageSource
from flashckpt.restore.votes import Rejection, attempted
from flashckpt.shm.segment import Pin, Segment
from flashckpt.storage.store import Store

_log = guarded(logging.getLogger("flashckpt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSources:
    """The sources of one candidate on one rank.

    Attributes:
        memory: Slots of this node, this rank's own first.
        peers: Slots of other nodes, as far as they were asked for.
        storage: The checkpoint, if it is committed and can be read.
    """

    memory: tuple[MemorySource, ...] = ()
    peers: tuple[PeerSource, ...] = ()
    storage: tuple[StorageSource, ...] = ()

    @property
    def all(self) -> list[Source]:
        """All of them, nearest first."""
        return [*self.memory, *self.peers, *self.storage]

    def with_peers(self, peers: Sequence[PeerSource]) -> CandidateSources:
        """Return them with other nodes' slots."""
        return replace(self, peers=tuple(peers))


SHARED_FROM = 4 << 20
"""Bytes of a MANIFEST from which on it is decoded once per node."""


class Checkpoint(NamedTuple):
    """A candidate on the root.

    Attributes:
        root, options: The root, and how to open it.
        nbytes: Of MANIFEST; 0 where rank 0 could not read it.
        manifest: MANIFEST as rank 0 read it; empty where it is shared, or was not read.
        shared: Where the first rank of this node has it decoded; empty where it has not.
        rejection: Why it could not be read, on the rank that tried.
    """

    root: str
    options: Mapping[str, Any]
    prefix: str
    nbytes: int
    manifest: bytes
    shared: str
    rejection: Rejection | None


class NodeReader(NamedTuple):
    """Which ranks read a MANIFEST: `rank` is this one, `first` the first of its node."""

    rank: int
    first: int


def share_manifest(
    root: str, options: Mapping[str, Any], prefix: str, reader: NodeReader, stack: contextlib.ExitStack
) -> Checkpoint:
    """Let rank 0 read MANIFEST and take a lease for all; give it to every rank. Collective.

    A lease per rank would be as many objects to write and to renew. What is large goes to no rank over the network: the first
    rank of each node reads it as well, and decodes it for the others.
    """

    def read() -> bytes:
        store = stack.enter_context(catalog.open_root(root, options))
        stack.enter_context(leased(store, prefix))
        return read_manifest_bytes(store, prefix)

    found = attempted(read) if reader.rank == 0 else b""
    rejection = found if isinstance(found, Rejection) else None
    raw = b"" if isinstance(found, Rejection) else found
    frame, nbytes = collectives.from_rank_0([raw[: HEADER.size], len(raw)])
    checkpoint = Checkpoint(root, options, prefix, nbytes, b"", "", rejection)
    if not nbytes:
        return checkpoint
    if nbytes < SHARED_FROM or is_spread(frame):
        return checkpoint._replace(manifest=collectives.bytes_from_rank_0(raw))
    mine = attempted(lambda: _shared(checkpoint, raw, frame, stack)) if reader.rank == reader.first else ""
    failed = mine if isinstance(mine, Rejection) else None
    paths = collectives.all_gather("" if isinstance(mine, Rejection) else mine)
    return checkpoint._replace(shared=paths[reader.first], rejection=failed)


def _shared(checkpoint: Checkpoint, raw: bytes, frame: bytes, stack: contextlib.ExitStack) -> str:
    """Decode MANIFEST for the ranks of this node; return where it is until the stack ends."""
    with catalog.open_root(checkpoint.root, checkpoint.options) as store:
        raw = raw or read_manifest_bytes(store, checkpoint.prefix)
        if raw[: len(frame)] != frame:
            raise NoCheckpointError(f"the MANIFEST of {checkpoint.prefix} is not the one that rank 0 has read")
        found = manifest_from(store.url, checkpoint.prefix, raw)
        assert isinstance(found, Manifest), "one that names indexes goes to every rank"
        fd = share(found)
    stack.callback(os.close, fd)
    return path_of(fd)


def _manifest_of(checkpoint: Checkpoint, store: Store) -> Manifest | Spread:
    if checkpoint.manifest:
        return manifest_from(store.url, checkpoint.prefix, checkpoint.manifest)
    try:
        return attach(checkpoint.shared)
    except OSError as error:  # another PID namespace, or a /proc that hides the processes of others
        _log.debug("MANIFEST is read again: %s", error)
        return manifest_from(store.url, checkpoint.prefix, read_manifest_bytes(store, checkpoint.prefix))


def open_memory(
    segments: Sequence[Path],
    id_: SnapshotId,
    rank: int,
    stack: contextlib.ExitStack,
    *,
    own: Segment | None = None,
    mark: int = 0,
) -> list[MemorySource]:
    """Return the slots of this node that hold a snapshot, this rank's own first. What is damaged is left out, and named.

    Args:
        segments: Of this node.
        id_: The candidate.
        rank: This rank.
        stack: Closes the sources.
        own: The segment that this process owns, if any: its mapping is read.
        mark: Only of a generation whose token has this one; 0: any.
    """
    found = []
    for segment, slot in complete_slots(segments, id_, stack, own, mark=mark):
        try:
            owner = own if own is not None and own.is_same(segment) else None
            source = MemorySource(segment, slot, identity=id_, owner=owner)
        except OSError:
            continue  # removed meanwhile
        except FlashckptError as error:  # nothing else would name it: what it holds only turns out to be missing
            _log.warning("slot %d of %s is left out: %s", slot, segment.path, error.problem)
            continue
        stack.callback(source.close)
        found.append(source)
    return sorted(found, key=lambda s: (s.manifest.rank != rank, s.manifest.rank))


def open_storage(checkpoint: Checkpoint, owner: str, stack: contextlib.ExitStack) -> StorageSource:
    """Return a checkpoint as a source, with the values that no other rank than `owner` asks for.

    Raises:
        FlashckptError, OSError: Its MANIFEST or the root cannot be read.
    """
    if checkpoint.rejection is not None:
        raise checkpoint.rejection.error
    if not checkpoint.manifest and not checkpoint.shared:
        reader = "the first rank of this node" if checkpoint.nbytes else "rank 0"
        raise NoCheckpointError(f"{reader} could not read MANIFEST of {checkpoint.prefix}")
    store = stack.enter_context(catalog.open_root(checkpoint.root, checkpoint.options))
    manifest = _manifest_of(checkpoint, store)
    if isinstance(manifest, Spread):
        source: StorageSource = SpreadSource(store, manifest, checkpoint.prefix, owner)
    else:
        manifest = with_values(store, checkpoint.prefix, manifest, owner=owner)
        source = StorageSource(store, manifest, checkpoint.prefix)
    stack.callback(source.close)
    return source


def complete_slots(
    segments: Sequence[Path],
    id_: SnapshotId,
    stack: contextlib.ExitStack,
    own: Segment | None = None,
    *,
    mark: int = 0,
) -> Iterator[tuple[Segment, int]]:
    """Yield (segment, slot) of every slot of this node that holds a snapshot; `own` is open already, and stays so."""
    for path in segments:
        with contextlib.suppress(FlashckptError, OSError):
            if own is not None and own.path == path:
                segment = own
            else:
                segment = stack.enter_context(contextlib.closing(Segment.attach(path)))
            for slot, header in enumerate(segment.headers()):
                if header.is_complete and header.identity == id_ and (not mark or header.mark in (0, mark)):
                    yield segment, slot


def pin_served(
    segments: Sequence[Path],
    candidate: Candidate,
    served: Mapping[int, int],
    memory: Sequence[MemorySource],
    stack: contextlib.ExitStack,
) -> dict[int, tuple[Pin, Manifest]]:
    """Pin every slot that this rank answers for.

    Args:
        segments: Of this node.
        candidate: What it holds.
        served: Rank that took the snapshot -> number of its slot among all of the candidate.
        memory: The same slots as sources.
        stack: Releases the pins.
    """
    manifests = {source.manifest.rank: source.manifest for source in memory}
    held = {}
    for segment, slot in complete_slots(segments, candidate.identity, stack, mark=candidate.mark):
        rank = segment.spec.rank
        if rank in served and rank in manifests and (pin := segment.pin(slot)) is not None:
            stack.callback(pin.close)
            held[served[rank]] = pin, manifests[rank]
    return held


def slots_served_by(locations: Sequence[SlotLocation], node: int, rank: int) -> dict[int, int]:
    """Return rank that took it -> number of the slot, for the slots of a node that `rank` answers for."""
    return {
        location.rank: number
        for number, location in enumerate(locations)
        if location.node == node and location.server == rank
    }


# -- A large MANIFEST, decoded once per node: the other ranks map what the first one has found whole ---------------
#
# At 16,384 ranks decoding takes 130 MB and a quarter of a second, in every rank. The first rank of a node writes
# the columns into an anonymous file in memory, aligned, and the others open it by its descriptor in /proc:
# nothing has a name, so nothing is left behind where one of them is killed.

_ALIGNED = 64


def share(manifest: Manifest) -> int:
    """Return the descriptor of a file in memory that holds a MANIFEST; the file goes with the last one that has it open."""
    digests = raw_bytes(np.ascontiguousarray(manifest.digests, "<u8"))
    groups = {
        "table": columns_of(manifest.table),
        "derived": {name: raw_bytes(np.ascontiguousarray(one)) for name, one in manifest.table.derived.items()},
        "ranged": manifest.ranged.packed(),
        "figures": {} if manifest.figures is None else manifest.figures.packed(),
        "rest": {"digests": digests, **_fields(manifest)},
    }
    arrays = [(group, name, value) for group, entries in groups.items() for name, value in entries.items()]
    large = [(group, name, value) for group, name, value in arrays if isinstance(value, (bytes, memoryview))]
    small = [[group, name, value] for group, name, value in arrays if not isinstance(value, (bytes, memoryview))]
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
    groups: dict[str, dict[str, Any]] = {"table": {}, "derived": {}, "ranged": {}, "figures": {}, "rest": {}}
    for group, name, value in small:
        groups[group][name] = value
    for group, name, at, nbytes in large:
        groups[group][name] = mapped[start + at : start + at + nbytes]
    rest = groups["rest"]
    values = unpack_values(rest.pop("values"))
    table = table_from_columns(groups["table"])
    kinds = {"follow": np.bool_}
    table.adopt({name: np.frombuffer(one, kinds.get(name, np.int64)) for name, one in groups["derived"].items()})
    figures = groups["figures"]
    return Manifest(
        **rest
        | {
            "parent": rest["parent"] and SnapshotId(*rest["parent"]),
            "table": table,
            "digests": np.frombuffer(rest["digests"], np.uint64),
            "values": values,
            "ranged": ranged_from(groups["ranged"], objects=len(rest["objects"]), others=values),
            "figures": figures_from(figures, len(table)) if figures else None,
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
        "token": manifest.token,
    }


def _places(sizes: list[int]) -> Iterator[int]:
    """Yield where each array begins, behind the head."""
    at = 0
    for nbytes in sizes:
        yield at
        at += -(-nbytes // _ALIGNED) * _ALIGNED


class SpreadSource(StorageSource):
    """A checkpoint whose MANIFEST names indexes: `manifest` has all names, and after `bring` the rows that were asked for.

    Where the layout has not changed these are in the index of this rank's node.

    Args:
        owner: The only rank whose values in ranges are asked for.
    """

    manifest: Manifest

    def __init__(self, store: Store, spread: Spread, prefix: str, owner: str) -> None:
        self._store, self._folder = store, prefix
        self._spread = replace(spread, head=with_values(store, prefix, spread.head, owner=owner))
        self._entries: list[IndexEntry] = []
        super().__init__(store, read_part(store, prefix, self._spread, []), prefix)

    @property
    def nbytes(self) -> int:
        """See StorageSource."""
        return int(self._spread.outline.nbytes)

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
