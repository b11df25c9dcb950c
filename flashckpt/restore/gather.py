"""What there is to restore from: every node's memory and lineage, and what the root knows. All ranks together."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flashckpt import collectives
from flashckpt.checkpoint import root_summary
from flashckpt.checkpoint.generations import read_generations
from flashckpt.core.generation import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.logs import guarded
from flashckpt.planning.inventory import HeldSlot, Inventory, Member, unpack_all
from flashckpt.planning.refusals import refuse_damage, require_same_request
from flashckpt.planning.root_view import RootSummary
from flashckpt.planning.selection import RestoreRequest
from flashckpt.restore import membership
from flashckpt.shm.control import Control, ControlView
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.job_key import ranks_key
from flashckpt.shm.segment import Segment
from flashckpt.shm.segment_file import boot_id

_log = guarded(logging.getLogger("flashckpt"))


def gather(
    directory: JobDirectory, request: RestoreRequest, options: Mapping[str, Any], *, need_bytes: int, free_bytes: int
) -> list[Inventory]:
    """Publish what this node has; return what all have. Collective.

    Args:
        directory: The job's memory on this node.
        request: What this rank was asked for.
        options: Storage options.
        need_bytes: Bytes of one slot of this rank that are not reserved yet.
        free_bytes: Room on the node.

    Raises:
        DamagedError: A node's record of its generation cannot be read, and the root does not have it. On every rank.
        DisagreementError: The ranks were asked for different things. On every rank.
        ConfigError: A rank does not have the key of the job. On every rank.
    """
    status = directory.path.stat()
    lineage, damage = _lineage(directory, request.root, options)
    mine = Inventory(
        node=f"{boot_id().hex()}:{status.st_dev}:{status.st_ino}",
        slots=tuple(_slots(directory)),
        generation=lineage,
        restart=env.FLASHCKPT_RESTART,
        need_bytes=need_bytes,
        free_bytes=free_bytes,
        members=tuple(_members(directory)),
        host=socket.gethostname(),
        request=request.text,
        committed=_committed(directory),
        damage=damage,
    )
    found = unpack_all(membership.gathered(mine.pack(), ranks_key()))
    refuse_damage(found, directory.job)
    require_same_request(found)
    return found


def require_same(request: RestoreRequest) -> None:
    """Check that all ranks were asked for the same. Collective; raises DisagreementError on every rank."""
    requests = collectives.all_gather(request.text)
    require_same_request([Inventory(node="", request=text) for text in requests])


def ask_root(request: RestoreRequest, options: Mapping[str, Any], *, is_rank_0: bool) -> RootSummary:
    """Let rank 0 look at the root; everybody gets its answer. Collective."""
    view = root_summary.read_root(request.root, options).pack() if is_rank_0 else None
    return RootSummary.unpack(collectives.from_rank_0(view))


def _lineage(directory: JobDirectory, root: str, options: Mapping[str, Any]) -> tuple[Generation | None, str]:
    """Return the lineage of this node, and why it cannot be read: an error here would leave others waiting."""
    try:
        return directory.read_generation(), ""
    except DamagedError as error:
        if (claim := _claimed(directory, root, options)) is not None:
            with contextlib.suppress(FlashckptError, OSError):
                directory.write_generation(claim)
                _log.warning("%s: it was replaced by what the root says of generation %d", error.problem, claim.number)
                return claim, ""
        return None, f"{error.problem}: {error.found}"
    except FlashckptError as error:
        return None, f"{error.problem}: {error.found}"
    except OSError as error:
        return None, str(error)


def _claimed(directory: JobDirectory, root: str, options: Mapping[str, Any]) -> Generation | None:
    """Return the root's record of the generation that last ran here, if that is the newest of both."""
    with contextlib.suppress(FlashckptError, OSError):
        ran = {row.generation for row in ControlView(directory.control_path).rows() if row.world_size}
        ran |= {slot.generation for slot in _slots(directory) if slot.generation > max(ran, default=0)}
        with root_summary.open_root(root, options) as store:
            newest = max(read_generations(store), key=lambda claim: claim.number, default=None)
        if newest is not None and ran == {newest.number}:
            return replace(newest, claimed=True)
    return None


def _committed(directory: JobDirectory) -> SnapshotId | None:
    """Return the newest checkpoint that the daemon of this node knew of on the root."""
    with contextlib.suppress(FlashckptError, OSError):
        status = directory.read_status()
        return None if status is None else status.committed
    return None


def _members(directory: JobDirectory) -> Iterator[Member]:
    """Yield every rank that last ran here: who is not lost with another node."""
    with contextlib.suppress(FlashckptError, OSError):
        control = Control.open(directory.control_path)
        for index in range(control.rows):
            row = control.row(index)
            if row.world_size:
                yield Member(row.generation, row.rank)


def _slots(directory: JobDirectory) -> Iterator[HeldSlot]:
    for path in (*directory.segments(), *directory.replica_segments()):
        try:
            with contextlib.closing(Segment.attach(path)) as segment:
                for h in segment.headers():
                    if h.is_complete:
                        layout = segment.spec.layout_hash
                        yield HeldSlot(h.rank, h.generation, h.step, h.world_size, layout, h.parent)
        except FileNotFoundError:
            continue
        except FlashckptError as error:
            _log.warning("%s is left out: %s", path, error.problem)
