"""The course of a restore on one rank: publish, choose together, fill, give values back, begin a new life.

Order: inventory (collective); choice (pure); vote per candidate who has what it needs (collective); where somebody
has not, the exchange with other nodes (collectives); fill; vote that all filled (collective); claim of the generation
(rank 0, then collective); lineage written; abandoned slots EMPTY. A death before the lineage is written leaves
everything as it was, so the next start chooses the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashckpt import collectives
from flashckpt.checkpoint import root_summary
from flashckpt.core.generation import Generation
from flashckpt.core.lineage import BEGINNING
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DisagreementError, FlashckptError, RootError, ShardGapError, TensorMismatchError
from flashckpt.logs import guarded
from flashckpt.planning.root_view import RootSummary
from flashckpt.planning.selection import (
    Candidate,
    Candidates,
    Inventory,
    RestoreRequest,
    candidates,
    emptied,
    host_names,
    local_world,
    memory_is_current,
    missing_on_root,
    no_such_checkpoint,
    node_names,
    refuse_damage,
    require_same_request,
    slot_locations,
)
from flashckpt.report import RestoreReport
from flashckpt.restore import claim, unexpected
from flashckpt.restore.candidate import CandidateRestore, CandidateState
from flashckpt.shm.control import Control
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.shm.segment_file import boot_id
from flashckpt.state.registry import StateRegistry

_log = guarded(logging.getLogger("flashckpt"))
_TIERS = ("memory", "peer", "storage")
_REASON_CHARS = 300
"""Most of an error that every rank is told."""

__all__ = ["RestoreCoordinator", "RestoreOutcome", "RestoreRequest"]


@dataclass(kw_only=True)
class RestoreOutcome:
    """What a restore ended with.

    Attributes:
        report: None on a fresh start.
        record: The life that begins.
        superseded: Identity of the checkpoint on storage that was restored from, or None.
        inventories: Of all ranks.
    """

    report: RestoreReport | None
    record: Generation
    superseded: SnapshotId | None
    inventories: list[Inventory]


@dataclass(kw_only=True)
class RestoreCoordinator:
    """One restore of one rank. Call `inventory`, then `run`.

    Attributes:
        tracked: The live objects.
        directory: The job's memory on this node; None reads the root alone.
        options: Storage options.
        request: What is wanted.
    """

    tracked: StateRegistry
    directory: JobDirectory | None
    options: dict[str, Any]
    request: RestoreRequest
    own: Segment | None = None
    """The segment this process owns already (a lock of its own would keep a second descriptor out)."""
    seconds: dict[str, float] = field(default_factory=dict)
    root: RootSummary = field(default_factory=RootSummary)
    asked_root: bool = False
    started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    # -- what is there -----------------------------------------------------------------------------------

    def inventory(self, need_bytes: int, free_bytes: int) -> list[Inventory]:
        """Publish what this node has; return what all have. Collective.

        Raises:
            DamagedError: A node's record of its generation cannot be read. On every rank.
            DisagreementError: The ranks were asked for different things. On every rank.
        """
        assert self.directory is not None
        with self.phase("inventory"):
            status = self.directory.path.stat()
            record, damage = self._lineage()
            mine = Inventory(
                node=f"{boot_id().hex()}:{status.st_dev}:{status.st_ino}",
                slots=tuple(self._slots()),
                generation=record,
                restart=int(os.environ.get("FLASHCKPT_RESTART") or 0),
                need_bytes=need_bytes,
                free_bytes=free_bytes,
                members=tuple(self._members()),
                host=socket.gethostname(),
                request=self.request.wish,
                committed=self._committed(),
                damage=damage,
            )
            found = [Inventory.unpack(packed) for packed in collectives.all_gather(mine.pack())]
        refuse_damage(found, self.directory.job)
        require_same_request(found)
        return found

    def _lineage(self) -> tuple[Generation | None, str]:
        """Return this node's record of the generation, and what is wrong with it: an error here would leave others waiting."""
        assert self.directory is not None
        try:
            return self.directory.read_generation(), ""
        except (FlashckptError, OSError) as error:
            known = isinstance(error, FlashckptError)
            return None, f"{error.problem}: {error.found}" if known else str(error)  # type: ignore[union-attr]  # known says so

    def _committed(self) -> SnapshotId | None:
        """Return the newest checkpoint that the daemon of this node knew of on the root."""
        assert self.directory is not None
        with contextlib.suppress(FlashckptError, OSError):
            status = self.directory.read_status()
            return None if status is None else status.committed
        return None

    def _members(self) -> Iterator[tuple[int, int]]:
        """Return (generation, rank) of every rank that last ran here: who is not lost with another node."""
        assert self.directory is not None
        with contextlib.suppress(FlashckptError, OSError):
            control = Control.open(self.directory.control_path)
            for index in range(control.rows):
                row = control.row(index)
                if row.world_size:
                    yield row.generation, row.rank

    def _segments(self) -> list[Path]:
        return [] if self.directory is None else self.directory.segments()

    def _slots(self) -> Iterator[tuple[int, int, int, int, int, SnapshotId | None]]:
        for path in self._segments():
            try:
                with contextlib.closing(Segment.attach(path)) as segment:
                    for h in segment.headers():
                        if h.is_complete:
                            yield h.rank, h.generation, h.step, h.world_size, segment.spec.layout_hash, h.parent
            except FileNotFoundError:
                continue
            except FlashckptError as error:
                _log.warning("%s is left out: %s", path, error.problem)

    def _ask_root(self) -> None:
        """Let rank 0 look at the root once; everybody gets its answer. Collective."""
        if not self.asked_root:
            with self.phase("root"):
                view = root_summary.read_root(self.request.root, self.options).pack() if self._is_rank_0 else None
                self.root = RootSummary.unpack(collectives.from_rank_0(view))
                self.asked_root = True

    @property
    def _is_rank_0(self) -> bool:
        return self.tracked.world.rank == 0

    # -- choice ------------------------------------------------------------------------------------------

    def run(self, inventories: list[Inventory]) -> RestoreOutcome:
        """Restore, or find that there is nothing to restore; claim the life that begins. Collective.

        Raises:
            NoCheckpointError: The wanted step exists nowhere.
            ShardGapError: Something exists and none of it covers the state.
            RootError: The root cannot be asked and memory does not cover the state.
        """
        if self.request.fresh and not memory_is_current(inventories):
            return self.start_anew(inventories, parent=BEGINNING)
        explicit = self.request.step is not None or self.request.generation is not None
        if explicit or not memory_is_current(inventories):
            self._ask_root()
            if not explicit:
                self._refuse_emptied_root(inventories)
        found, done = self._try_all(inventories)
        if done is None:
            self._refuse_silent_fresh_start(found, explicit=explicit)
        parent = None if done is None or self.request.is_partial else done[0].identity
        with self.phase("lineage"):
            record = self._begin_life(found.life, parent, inventories)
        superseded = parent if done is not None and done[0].on_root else None
        self.seconds["total"] = time.perf_counter() - self.started
        final = None if done is None else _with(done[1], record.number, self.seconds)
        return RestoreOutcome(report=final, record=record, superseded=superseded, inventories=inventories)

    def _try_all(self, inventories: Sequence[Inventory]) -> tuple[Candidates, tuple[Candidate, RestoreReport] | None]:
        """Try candidates in their order until every rank could fill one.

        The root is asked as soon as memory alone does not do: it may hold what is missing of the very same snapshot.
        """
        self._last_error: FlashckptError | None = None
        self._passed: list[str] = []
        tried: set[tuple[SnapshotId, bool]] = set()
        while True:
            with self.phase("decide"):
                found = candidates(inventories, self.root, step=self.request.step, generation=self.request.generation)
            fresh = [c for c in found.found if (c.identity, c.on_root) not in tried]
            if not self.asked_root and (not fresh or fresh[0].is_unfinished or tried):
                self._ask_root()
                continue
            if not fresh:
                return found, None
            tried.add((fresh[0].identity, fresh[0].on_root))
            report = self._try(fresh[0], inventories)
            if report is not None:
                return found, (fresh[0], replace(report, passed_over=tuple(self._passed)))

    def _begin_life(self, number: int, parent: SnapshotId | None, inventories: Sequence[Inventory]) -> Generation:
        record = claim.claim(
            number,
            parent,
            world=self.tracked.world,
            root=self.request.root if self.asked_root and not self.root.error else None,
            options=self.options,
        )
        assert self.directory is not None
        ranks = local_world(inventories, self.tracked.world.rank)
        claim.begin(self.directory, record, rank=self.tracked.world.rank, ranks=ranks, own=self.own)
        return record

    def start_anew(self, inventories: list[Inventory], parent: SnapshotId | None = None) -> RestoreOutcome:
        """Begin without restoring anything of this job (a warm start fills the state from elsewhere). Collective.

        Args:
            inventories: Of all ranks.
            parent: BEGINNING abandons what is there; None leaves it to be chosen by a later restore.

        Raises:
            RootError: The root cannot be asked or written.
        """
        self._ask_root()
        if self.root.error and parent is not None:
            raise self._unreachable("and a run that begins anew takes its number from there")
        number = candidates(inventories, self.root).life
        record = self._begin_life(number, parent, inventories)
        return RestoreOutcome(report=None, record=record, superseded=None, inventories=inventories)

    def read(self) -> RestoreReport:
        """Fill live state from the root alone and begin no life (read-only access). Collective; errors as `run`."""
        wishes = collectives.all_gather(self.request.wish)
        require_same_request([Inventory(node="", request=wish) for wish in wishes])
        self._ask_root()
        found, done = self._try_all([])
        if done is None:
            self._refuse_silent_fresh_start(found, explicit=True)
            raise AssertionError
        self.seconds["total"] = time.perf_counter() - self.started
        return _with(done[1], 0, self.seconds)

    def _refuse_silent_fresh_start(self, found: Candidates, *, explicit: bool) -> None:
        if self._last_error is not None:
            raise self._last_error
        if self.root.error and not found.found:
            raise self._unreachable("and memory holds none")
        if explicit:
            step = self.request.step if self.request.step is not None else -1
            raise no_such_checkpoint(step, self.request.generation, found, self.request.root)

    def _unreachable(self, why: str) -> RootError:
        return RootError(
            f"the root {self.request.root} cannot be asked for checkpoints, {why}",
            found="; ".join(line.strip() for line in self.root.error.splitlines()[:2]),
            state="Nothing was restored: a fresh start could repeat a run that is already on storage.",
            remedy="make the root reachable, or start with another root",
        )

    def _refuse_emptied_root(self, inventories: Sequence[Inventory]) -> None:
        """Refuse to go on from memory, or to begin anew, without a word where the root has lost its checkpoints."""
        found = candidates(inventories, self.root)
        if (missing := missing_on_root(inventories, self.root, found)) is not None:
            raise emptied(self.request.root, missing, found)

    # -- one candidate -----------------------------------------------------------------------------------

    def _try(self, candidate: Candidate, inventories: Sequence[Inventory]) -> RestoreReport | None:
        """Fill live state from one candidate, if every rank can. Collective: two votes, more where nodes exchange."""
        names = node_names(inventories)
        rank = self.tracked.world.rank
        with contextlib.ExitStack() as stack:
            attempt = CandidateRestore(
                tracked=self.tracked,
                segments=self._segments(),
                request=self.request,
                options=self.options,
                root=self.root,
                candidate=candidate,
                places=slot_locations(candidate, inventories) if len(names) > 1 else [],
                node=names.index(inventories[rank].node) if inventories else 0,
                stack=stack,
                phase=self.phase,
            )
            attempt.share_manifest()
            states = self._vote(attempt, attempt.prepare(), attempt.counts)
            if CandidateState.ASKS in states and CandidateState.FAILED not in states:
                states = self._exchange(attempt, stack, spare=False)
            report = None
            if CandidateState.FAILED not in states:
                self._refuse_unexpected(attempt)
                report, states = self._fill(attempt)
                if CandidateState.FAILED in states and len({place.node for place in attempt.places}) > 1:
                    states = self._exchange(attempt, stack, spare=report is None)
                    if CandidateState.FAILED not in states:
                        report, states = self._fill(attempt)
            if CandidateState.FAILED in states or report is None:
                self._note(candidate, attempt.error, states.index(CandidateState.FAILED))
                return None
            return replace(report, nodes=_by_node(inventories, self._amounts))

    def _refuse_unexpected(self, attempt: CandidateRestore) -> None:
        """Find what no rank has of the candidate. Collective where some rank does not have all that it knows of.

        Raises:
            UnexpectedStateError: There is some, and it was not allowed. On every rank; an older candidate is not tried:
                it is the program that is another one.
        """
        if not any(mine for mine, _ in self._amounts):
            return
        mine, own = attempt.held - attempt.own, attempt.own
        attempt.unexpected = unexpected.nowhere(mine, own, counts=[count for _, count in self._amounts])
        if not attempt.is_strict:
            return
        told = collectives.all_gather([len(attempt.unexpected), attempt.unexpected[:5]])
        names = sorted({name for _, some in told for name in some})
        generation, step = attempt.candidate.identity
        unexpected.refuse(names, max(count for count, _ in told), f"step {step} of generation {generation}")

    def _exchange(self, attempt: CandidateRestore, stack: contextlib.ExitStack, *, spare: bool) -> list[int]:
        """Find on other nodes what somebody lacks; return every rank's state then. Collective."""
        group = collectives.HostGroup()
        stack.callback(group.close)
        return self._vote(attempt, attempt.ask(group, spare=spare), attempt.counts)

    def _fill(self, attempt: CandidateRestore) -> tuple[RestoreReport | None, list[int]]:
        """Fill live state; return this rank's report and every rank's state. Collective."""
        report = attempt.fill()
        tiers = report.tier_bytes if report is not None else {}
        amounts = [tiers.get(tier, 0) for tier in _TIERS]
        return report, self._vote(attempt, CandidateState.FAILED if report is None else CandidateState.READY, amounts)

    def _vote(self, attempt: CandidateRestore, state: CandidateState, amounts: Sequence[int] = ()) -> list[int]:
        """Tell all ranks this one's state, and why it failed; return every rank's. Collective.

        Raises:
            DisagreementError: Another rank tries another candidate; names it. On every rank.
            TensorMismatchError: A live tensor of some rank has another form than the candidate's. On every rank: an older
                candidate might fit by chance, and everything since would be lost.
        """
        identity, error = attempt.candidate.identity, attempt.error
        reason = str(error).replace("\n", "; ")[:_REASON_CHARS] if error is not None else ""
        told = collectives.all_gather([*identity, int(state), reason, list(amounts)])
        for rank, (generation, step, _, _, _) in enumerate(told):
            if (generation, step) != (told[0][0], told[0][1]):
                raise DisagreementError(
                    "Ranks disagree on what to restore",
                    found=f"rank {rank}: step {step} of generation {generation}",
                    expected=f"rank 0: step {told[0][1]} of generation {told[0][0]}",
                    state="Nothing was restored.",
                    remedy="start the job again; the same versions of the program must run on every node",
                )
        self._reasons, self._amounts = [one[3] for one in told], [one[4] for one in told]
        states = [one[2] for one in told]
        if CandidateState.MISMATCH not in states:
            return states
        if isinstance(error, TensorMismatchError):
            raise error
        first = states.index(CandidateState.MISMATCH)
        raise TensorMismatchError(
            f"step {identity[1]} of generation {identity[0]} is not of this program: rank {first} says why",
            found=self._reasons[first],
            state="Nothing was restored.",
        )

    def _note(self, candidate: Candidate, error: Exception | None, rank: int) -> None:
        """Remember why a candidate is passed over: this rank's own error, and what the first failing rank said.

        What is left of a snapshot and is not enough stands in nobody's way: without anything older the job starts anew.
        """
        reason = self._reasons[rank]
        what = f"step {candidate.identity[1]} of generation {candidate.identity[0]} is not restored"
        _log.warning("%s: %s", what, error if error is not None else f"rank {rank}: {reason}")
        self._passed.append(f"{what}: rank {rank}: {reason}")
        explicit = self.request.step is not None or self.request.generation is not None
        if self._last_error is None and (candidate.is_whole or explicit):
            known = isinstance(error, FlashckptError)
            self._last_error = error if known else ShardGapError(f"{what}: rank {rank}", found=reason)  # type: ignore[assignment]  # known says so


def _by_node(inventories: Sequence[Inventory], amounts: Sequence[Sequence[int]]) -> dict[str, dict[str, int]]:
    """Return the bytes per tier that the ranks of each node restored."""
    labels, index = host_names(inventories), {name: k for k, name in enumerate(node_names(inventories))}
    found: dict[str, dict[str, int]] = {label: {} for label in labels}
    for inventory, one in zip(inventories, amounts, strict=False):
        tiers = found[labels[index[inventory.node]]]
        for tier, nbytes in zip(_TIERS, one, strict=True):
            if nbytes:
                tiers[tier] = tiers.get(tier, 0) + nbytes
    return found


def _with(report: RestoreReport, life: int, seconds: dict[str, float]) -> RestoreReport:
    return replace(report, life=life, seconds=dict(seconds))
