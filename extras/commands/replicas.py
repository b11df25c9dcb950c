"""What the command shows of replicas: what this machine keeps of other nodes, and how far its own are with its partners."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from flashckpt import entry_points
from flashckpt.cli.common import human_bytes, jobs_on_this_machine
from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.plugin import ReplicaNodes
from flashckpt.shm.inventory import SlotEntry
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.private import DaemonStatus
from flashckpt.shm.segment import Segment


def replica_slots(directory: JobDirectory) -> Iterator[SlotEntry]:
    """Give the COMPLETE replicas that a job keeps on this node; segments that cannot be read are left out."""
    for path in directory.replica_segments():
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                if header.is_complete:
                    yield SlotEntry(path=path, slot=slot, rank=segment.spec.rank, header=header)


def kept_replicas(directory: JobDirectory, record: Generation | None) -> list[dict[str, Any]]:
    """Return, newest first, what is kept here of each other node, by snapshot, as JSON values."""
    session = _session(directory)
    found: dict[tuple[SnapshotId, str], list[SlotEntry]] = defaultdict(list)
    for held in replica_slots(directory):
        if not is_rolled_back(held.header.identity, [record] if record else []):
            found[held.header.identity, _name(session, held.rank)].append(held)
    return [
        {
            "generation": identity.generation,
            "step": identity.step,
            "node": node,
            "ranks": sorted({one.rank for one in held}),
            "nbytes": sum(one.header.data_bytes for one in held),
            "world_size": max(one.header.world_size for one in held),
            "created_s": max(one.written_s for one in held),
        }
        for (identity, node), held in sorted(found.items(), reverse=True)
    ]


def replication(
    directory: JobDirectory, daemon: DaemonStatus | None, record: Generation | None
) -> dict[str, Any] | None:
    """Return how far replication is, as JSON values; None for a job that replicates nothing and keeps nothing."""
    session, kept = _session(directory), kept_replicas(directory, record)
    if session is None and not kept:
        return None
    partners = session.partners[session.node] if session is not None else ()
    return {
        "partners": [session.name(node) for node in partners] if session is not None else [],
        "replicated": daemon.replicated if daemon else None,
        "lag_steps": daemon.replica_lag if daemon else 0,
        "lag_s": daemon.replica_lag_s if daemon else 0,
        "pending_bytes": daemon.replica_pending if daemon else 0,
        "problem": daemon.replica_problem if daemon else "",
        "kept": kept,
    }


def in_words(found: dict[str, Any] | None) -> str:
    """Return in one line which snapshot is with which partners, how far behind it is, and what is kept of others."""
    if found is None:
        return ""
    parts = [lag_in_words(found)] if found["partners"] else []
    kept: dict[str, int] = {}
    for one in found["kept"]:
        kept[one["node"] or "another node"] = kept.get(one["node"] or "another node", 0) + one["nbytes"]
    parts += [f"keeps {human_bytes(nbytes)} of {node}" for node, nbytes in sorted(kept.items())]
    return "; ".join([*parts, *([found["problem"]] if found["problem"] else [])])


def lag_in_words(found: dict[str, Any]) -> str:
    """Return which snapshot is with the partners, and how far behind the newest it is."""
    lag = f", {found['lag_steps']} steps and {found['lag_s']} s behind" if found["lag_steps"] else ""
    newest = found["replicated"]
    return f"{f'{newest[1]}.g{newest[0]}' if newest else 'none'} with {', '.join(found['partners'])}{lag}"


def lags(root: str) -> list[dict[str, Any]]:
    """Return, for each job of a root in this machine's memory that replicates, how far its replicas are, as JSON values."""
    found = []
    for directory in jobs_on_this_machine(root):
        state = replication(directory, directory.read_status(), directory.read_generation())
        if state is not None and state["partners"]:
            del state["kept"]
            found.append({"job": directory.job} | state)
    return found


def _session(directory: JobDirectory) -> ReplicaNodes | None:
    found: ReplicaNodes | None = None
    if (read := entry_points.optional("replica-session")) is not None:
        with contextlib.suppress(FlashckptError, OSError):
            found = read(directory)
    return found


def _name(session: ReplicaNodes | None, rank: int) -> str:
    """Return the name of the node of a rank; it may be of a generation with other ranks."""
    for node in range(len(session.ranks)) if session is not None else ():
        if session is not None and rank in session.ranks_of(node):
            return session.name(node)
    return ""
