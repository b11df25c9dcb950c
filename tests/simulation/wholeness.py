"""What lies on the root as a checkpoint, read as a person would and compared with what was trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flashckpt.checkpoint.catalog import whole_manifest
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.core.manifest import Manifest, decode_manifest
from flashckpt.core.records import digest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import decode_spread, is_spread
from flashckpt.errors import FlashckptError, ObjectMissingError
from simulation.states import State, bytes_of
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job


def manifest_of(job: Job, identity: SnapshotId) -> Manifest:
    """Return a MANIFEST with all its rows, without a request: also one that names indexes. Errors as `whole_manifest`."""
    prefix, objects = prefix_of(*identity), job.bucket.objects

    def get(key: str) -> bytes:
        if key not in objects:
            raise ObjectMissingError(f"the object {key} is missing")
        return objects[key][0]

    store: Any = SimpleNamespace(get=get, url="sim://root")
    return whole_manifest(store, prefix, objects[f"{prefix}/MANIFEST"][0])


def check(job: Job, identity: SnapshotId) -> None:
    """Read a checkpoint as it lies there, and compare it with what was trained."""
    rules, prefix, objects = job.rules, prefix_of(*identity), job.bucket.objects
    state = rules.committed[identity]
    if state not in rules.truth:
        raise Violation("only what was taken is committed", f"{identity} was never taken")
    if rules.claimed_mark(identity.generation) not in (None, state.mark):
        raise Violation("one committed state per id", f"{identity} is of a generation that lost its number")
    chain, world = rules.truth[state]
    try:
        manifest = manifest_of(job, identity)
    except FlashckptError as error:
        raise Violation("what is committed is whole", f"MANIFEST of {identity}: {error}") from None
    table, names = manifest.table, manifest.objects
    if manifest.identity != identity or manifest.values.get("chain") != chain:
        raise Violation("what is committed is whole", f"MANIFEST of {identity} is of another state")
    rows = 0
    for row in range(len(table.nbytes)):
        name, start, nbytes = names[int(table.object_id[row])], int(table.byte_offset[row]), int(table.nbytes[row])
        raw = objects.get(f"{prefix}/{name}", (b"", 0.0))[0][start : start + nbytes]
        rank = int(table.offsets[table.dim_start[row]]) if table.fqn(row) == "weight" else -1
        wanted = bytes_of(chain, rank)[0 if rank >= 0 else 1]
        rows += rank >= 0
        if raw != wanted or digest(raw) != int(manifest.digests[int(table.first_chunk[row])]):
            raise Violation("what is committed is whole", f"{identity}: bytes of {table.fqn(row)}, rank {rank}")
    if rows != world:
        raise Violation("what is committed is whole", f"{identity}: {rows} of {world} ranks")
    job.note("commits that name indexes", is_spread(objects[f"{prefix}/MANIFEST"][0]))


def state_of(job: Job, identity: SnapshotId) -> State:
    """Return which of the generations with its number has committed a checkpoint."""
    raw = job.bucket.objects[f"{prefix_of(*identity)}/MANIFEST"][0]
    head = decode_spread(raw).head if is_spread(raw) else decode_manifest(raw, rows=False)
    return State.of(identity, head.token)
