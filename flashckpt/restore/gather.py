"""What there is to restore from: every node's memory and lineage, and what the root knows. All ranks together."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from flashckpt import collectives, errors
from flashckpt.checkpoint import catalog, root_records
from flashckpt.checkpoint.root_records import read_generations
from flashckpt.core.lineage import BEGINNING, Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.environment import env
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, RootError
from flashckpt.faults import crash_point
from flashckpt.planning.inventory import HeldSlot, Inventory, Member, unpack_all
from flashckpt.planning.selection import Candidates, RestoreRequest, RootSummary, refuse_damage, require_same_request
from flashckpt.report import guarded
from flashckpt.shm.agent_folder import agent_folder, bad_steps, has_missed, note_waiting, ranks_key, read_job
from flashckpt.shm.control import Control, ControlView
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.shm.segment_file import boot_id
from flashckpt.state.placement import World

CLAIMS = "claims"
"""File of a job directory from right before its generation is claimed on the root until its lineage is written here."""
_log = guarded(logging.getLogger("flashckpt"))


def gather(
    directory: JobDirectory, request: RestoreRequest, options: Mapping[str, Any], *, need_bytes: int, free_bytes: int
) -> list[Inventory]:
    """Publish what this node has; return what all have. Collective.

    `need_bytes` are those of one slot of this rank that are not reserved yet, `free_bytes` the room on the node.

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
        restart=_restarts(directory) if env.FLASHCKPT_RESTART else 0,
        need_bytes=need_bytes,
        free_bytes=free_bytes,
        members=tuple(_members(directory)),
        host=socket.gethostname(),
        request=request.text,
        committed=_committed(directory),
        damage=damage,
        back=env.FLASHCKPT_BACK,
        bad=_bad_steps(),
        leave_out=_leave_out(),
        restore_step=env.FLASHCKPT_RESTORE_STEP,
        has_claimed=(directory.path / CLAIMS).exists(),
    )
    found = [mine] if collectives.is_alone() else unpack_all(gathered(mine.pack(), ranks_key()))
    refuse_damage(found, directory.job)
    require_same_request(found)
    return found


def _bad_steps() -> tuple[int, int]:
    return (env.FLASHCKPT_BACK and (folder := agent_folder()) and bad_steps(folder)) or (0, 0)


def _leave_out() -> tuple[int, int]:
    first, _, last = env.FLASHCKPT_LEAVE_OUT.partition("-")
    return int(first or 0), int(last or 0)


def _restarts(directory: JobDirectory) -> int:
    """Return the restarts of this node's agent; 0 while no rank below it has begun this job.

    Then a start before this one died on the way, perhaps behind its claim on the root: memory does not know of it.
    Below 0 where the job ran without this node meanwhile: memory knows nothing of what was committed then.
    """
    folder = env.FLASHCKPT_AGENT_DIR
    with contextlib.suppress(OSError):
        if folder and read_job(Path(folder)) != directory.path:
            return 0
        if folder and has_missed(Path(folder)):
            return -env.FLASHCKPT_RESTART
    return env.FLASHCKPT_RESTART


def require_same(request: RestoreRequest) -> None:
    """Check that all ranks were asked for the same. Collective; raises DisagreementError on every rank."""
    requests = collectives.all_gather(request.text)
    require_same_request([Inventory(node="", request=text) for text in requests])


def ask_root(request: RestoreRequest, options: Mapping[str, Any], *, is_rank_0: bool) -> RootSummary:
    """Let rank 0 look at the root; everybody gets its answer. Collective."""
    view = catalog.read_root(request.root, options) if is_rank_0 else None
    if view is not None and collectives.is_alone():
        return view
    return RootSummary.unpack(collectives.from_rank_0(view and view.pack()))


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
        with catalog.open_root(root, options) as store:
            newest = max(read_generations(store), key=lambda claim: claim.number, default=None)
        if newest is not None and ran == {newest.number}:
            return replace(newest, claimed=True)
    return None


def _committed(directory: JobDirectory) -> SnapshotId | None:
    """Return the newest checkpoint that the daemons of this node knew of on the root, also where it is there no more."""
    with contextlib.suppress(FlashckptError, OSError):
        status = directory.read_status()
        return None if status is None else status.once_committed or status.committed
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
                        yield HeldSlot(h.rank, *h.identity, h.world_size, layout, h.parent, h.suspect, h.mark)
        except FileNotFoundError:
            continue
        except FlashckptError as error:
            _log.warning("%s is left out: %s", path, error.problem)


# -- The first exchange of a restore, in which every rank proves that it has the key of the job. All ranks together
#
# gloo and NCCL admit whoever reaches them. So nothing of the state is sent, and nothing that arrives is used,
# before each rank has signed what all ranks have said: their numbers, and a number drawn by each for this restore
# alone. What passes after that is not signed.

_NONCE = 32
_NONE = bytes(_NONCE)
"""In place of a drawn number, where a rank has no key."""


def gathered(mine: Any, key: bytes) -> list[Any]:
    """Return every rank's value (msgpack types), once all ranks have proved that they have the key. Collective.

    Where no rank has one, nothing is proved, and nothing more is exchanged.

    Raises:
        ConfigError: A rank does not have this rank's key. On every rank that has it, or has none.
    """
    raw = collectives.all_gather_bytes((os.urandom(_NONCE) if key else _NONE) + msgpack.packb(mine))
    if any(part[:_NONCE] != _NONE for part in raw):
        _verify(raw, key)
    return [msgpack.unpackb(part[_NONCE:], strict_map_key=False) for part in raw]


def _verify(raw: Sequence[bytes], key: bytes) -> None:
    """Prove to all ranks that this one has the key, and have them prove it. Before anything of theirs is decoded."""
    spoken = b"".join(hashlib.sha256(part).digest() for part in raw)
    proofs = collectives.all_gather_bytes(proof(key, collectives.rank(), spoken))
    expected = [proof(key, rank, spoken) for rank in range(len(raw))]
    strangers = [r for r, theirs in enumerate(proofs) if not key or not hmac.compare_digest(theirs, expected[r])]
    if strangers:
        raise _refusal(strangers, key)


def proof(key: bytes, rank: int, spoken: bytes) -> bytes:
    """Return what proves that a rank has the key and heard the same as the others; b"" without a key."""
    return hmac.digest(key, b"restore %d " % rank + spoken, "sha256") if key else b""


def _refusal(strangers: Sequence[int], key: bytes) -> ConfigError:
    state = "Nothing was restored, and no state was sent."
    remedy = "give all nodes the same FLASHCKPT_JOB_SECRET, and close their ports to others"
    if not key:
        return ConfigError("this rank has no job secret, and other ranks have one", state=state, remedy=remedy)
    ranks = ", ".join(map(str, strangers[:8])) + (" and others" if len(strangers) > 8 else "")
    return ConfigError(
        f"not every rank has proved that it belongs to this job: rank {ranks} did not",
        expected="every rank with the key that is made of the job secret",
        state=state,
        remedy=remedy,
    )


# -- How a start waits for storage that cannot be reached now: all ranks together, with growing pauses, for a
#    bounded time

PATIENCE_S = 60.0
"""Seconds of waiting in one start; then it ends with exit code 41, and dlrun starts the ranks again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class Patience:
    """The waits of one start. Rank 0's clock counts, so that all ranks decide the same."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def again(self, *, may_pass: bool, why: str) -> bool:
        """Wait a moment and return True where some rank's failure may pass and time is left. Collective.

        Args:
            may_pass: Whether this rank failed by something that may pass.
            why: What to log.
        """
        until = self._until or time.monotonic() + PATIENCE_S
        votes = collectives.all_gather([may_pass, until - time.monotonic()])
        left_s = float(votes[0][1])
        if left_s <= 0 or not any(vote[0] for vote in votes):
            return False
        if may_pass and self._until is None:
            _log.warning("storage cannot be reached, trying again for %.0f s: %s", left_s, why.partition("\n")[0])
        self._until = until
        if (folder := agent_folder()) is not None:
            with contextlib.suppress(OSError):
                note_waiting(folder)
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


# -- The beginning of a generation: its number claimed, its lineage written, abandoned slots emptied ---------------


def claim(
    directory: JobDirectory,
    found: Candidates,
    parent: SnapshotId | None,
    *,
    world: World,
    root: str | None,
    options: Mapping[str, Any],
) -> Generation:
    """Return the record of the generation that begins. Collective; only rank 0 talks to the root.

    Args:
        directory: Of the job on this node.
        found: Says the number, 1 + the largest seen anywhere; a higher one is taken if it is claimed already.
        parent: What was restored; None on a fresh start, BEGINNING on one that was asked for.
        world: The ranks.
        root: Where to claim it now; None leaves that to the daemon, before it persists anything.
        options: Storage options.

    Raises:
        RootError, StoreError: A fresh start whose root cannot be written. Raised on every rank.
    """
    number, token, claimed, error = found.next_generation, secrets.token_hex(8), False, None
    if world.rank == 0 and root is not None:
        try:
            wanted = Generation(number=number, token=token, parent=parent, world_size=world.size)
            number, claimed = _claim_on_root(directory, root, options, wanted), True
        except (FlashckptError, OSError) as problem:
            error = _packed(problem) if parent in (None, BEGINNING) else None
            _log.warning("generation %d is claimed later by the daemon: %s", number, str(problem).splitlines()[0])
    number, token, claimed, error = collectives.from_rank_0([number, token, claimed, error])
    if error is not None:
        raise _unpacked(error)
    line = () if claimed else found.line
    return Generation(number=number, token=token, parent=parent, world_size=world.size, claimed=claimed, line=line)


def _claim_on_root(directory: JobDirectory, root: str, options: Mapping[str, Any], wanted: Generation) -> int:
    with contextlib.suppress(OSError):
        (directory.path / CLAIMS).touch()
    with catalog.open_root(root, options) as store:
        while not root_records.claim_generation(store, wanted):
            wanted = replace(wanted, number=root_records.newest_generation(store) + 1)
        return wanted.number


def begin(
    directory: JobDirectory,
    record: Generation,
    *,
    rank: int,
    ranks: Sequence[int],
    own: Segment | None,
    found: Candidates,
) -> None:
    """Write the lineage of this node, then empty the slots that it abandons.

    Args:
        directory: Of the job on this node.
        record: The generation that begins.
        found: Says which generations are known, and of which nothing counts. What the root alone knows to be rolled back would be
            taken by the next start, which does not ask it.
        rank: This rank; it empties its own slots.
        ranks: Ranks of this node; the first also empties those of ranks that are no more.
        own: The segment this process owns already.
    """
    crash_point("restore.before-lineage")
    if ranks[0] == rank:
        directory.write_generation(record)
    for path in directory.segments():
        owner = int(path.name[1 : path.name.index("-")])
        if owner == rank or (owner not in ranks and ranks[0] == rank):
            _empty_abandoned(path, record, own if own is not None and own.path == path else None, found)
    crash_point("restore.after-lineage")
    if ranks[0] == rank:
        (directory.path / CLAIMS).unlink(missing_ok=True)


def _empty_abandoned(path: Path, record: Generation, own: Segment | None, found: Candidates) -> None:
    with contextlib.suppress(FlashckptError, OSError), contextlib.ExitStack() as stack:
        segment = own or stack.enter_context(contextlib.closing(Segment.attach(path, writable=True)))
        for slot, header in enumerate(segment.headers()):
            is_lost = (header.generation, header.mark) in found.lost
            if header.is_complete and (is_lost or is_rolled_back(header.identity, [record, *found.lineage])):
                segment.mark_empty(slot)


def _packed(error: Exception) -> list[str]:
    kind = "StoreError" if errors.may_pass(error) else "RootError"
    if isinstance(error, FlashckptError):
        kind = kind if kind == "StoreError" else type(error).__name__
        return [kind, error.problem, error.found, error.expected, error.state, error.remedy]
    return [kind, str(error), "", "", "", ""]


def _unpacked(parts: Sequence[str]) -> FlashckptError:
    name, problem, found, expected, state, remedy = parts
    kind: Callable[..., FlashckptError] = getattr(errors, name, RootError)
    return kind(problem, found=found, expected=expected, state=state, remedy=remedy)
