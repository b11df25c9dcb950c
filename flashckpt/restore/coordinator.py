"""The restore of all ranks together: gather, select, then one candidate after another until every rank has filled one.

Each step takes values and returns a result or a `Rejection`; here are only the votes between the steps. Order for a
candidate: MANIFEST from rank 0; what each rank requires, and its plan; vote; where somebody lacks something, the
exchange with other nodes and a vote; names that no rank has; fill; vote. Then the generation is claimed and the lineage
written. A death before the lineage is written leaves everything as it was, so the next start chooses the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flashckpt.core.lineage import BEGINNING, Generation
from flashckpt.core.settings import checked
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, FlashckptError, StoreError, may_pass
from flashckpt.planning.inventory import Inventory, is_restart, local_world, memory_is_current, node_names
from flashckpt.planning.selection import (
    Candidate,
    Candidates,
    RestoreRequest,
    RootSummary,
    emptied,
    missing_on_root,
    no_such_checkpoint,
    select,
    slot_locations,
    unreachable,
)
from flashckpt.report import RestoreReport, guarded
from flashckpt.restore import gather
from flashckpt.restore.candidate import Attempt, read_state
from flashckpt.restore.candidate_restore import Rejected, restore_candidate
from flashckpt.restore.candidate_sources import NodeReader, share_manifest
from flashckpt.restore.executor import Phases, collector_paused
from flashckpt.restore.gather import Patience
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.state.placement import current_world, trainable
from flashckpt.state.registry import StateRegistry
from flashckpt.storage.factory import check_options, root_url

_log = guarded(logging.getLogger("flashckpt"))

__all__ = ["RestoreCoordinator", "RestoreOutcome", "RestoreRequest"]


@dataclass(frozen=True, kw_only=True)
class RestoreOutcome:
    """What a restore ended with.

    Attributes:
        report: None on a fresh start.
        superseded: Id of the checkpoint on storage that was restored from, or None.
    """

    report: RestoreReport | None
    record: Generation
    superseded: SnapshotId | None
    inventories: list[Inventory]


class _Search(NamedTuple):
    """How far the candidates were tried.

    Attributes:
        found: All candidates, as they were last selected.
        root: What the root knows; None where it was not asked.
        restored: The candidate that every rank filled, or None.
        report: What this rank did for it.
        error: Why the first one worth naming was rejected, or None; raised where none could be filled.
    """

    found: Candidates
    root: RootSummary | None
    restored: Candidate | None = None
    report: RestoreReport | None = None
    error: FlashckptError | None = None


@dataclass(frozen=True, kw_only=True)
class RestoreCoordinator:
    """One restore of one rank. Call `gather`, then `run`; or `read` alone.

    Attributes:
        directory: The job's memory on this node; None reads the root alone.
        patience: With storage that cannot be reached now.
    """

    tracked: StateRegistry
    directory: JobDirectory | None
    options: Mapping[str, Any]
    request: RestoreRequest
    phases: Phases = field(default_factory=Phases)
    patience: Patience = field(default_factory=Patience)

    def gather(self, need_bytes: int, free_bytes: int) -> list[Inventory]:
        """Publish what this node has; return what all have. Collective; arguments and errors as `gather.gather`."""
        assert self.directory is not None
        with self.phases("inventory"):
            return gather.gather(
                self.directory, self.request, self.options, need_bytes=need_bytes, free_bytes=free_bytes
            )

    def run(self, inventories: list[Inventory], *, own: Segment | None = None) -> RestoreOutcome:
        """Restore, or find that there is nothing to restore; claim the generation that begins. Collective.

        Args:
            inventories: Of all ranks.
            own: The segment this process owns already (a second descriptor would be refused by the lock of the first).

        Raises:
            NoCheckpointError: The wanted step exists nowhere.
            ShardGapError: Something exists and none of it covers the state.
            RootError: The root cannot be asked and memory does not cover the state; StoreError: nor after waiting for it.
        """
        if self.request.fresh and not is_restart(inventories):
            return self.begin_fresh(inventories, parent=BEGINNING, own=own)
        search = self._found(inventories, own)
        if search.restored is None:
            self._refuse_silent_fresh_start(search, explicit=self._is_explicit)
        parent = None if search.restored is None or self.request.is_partial else search.restored.identity
        record = self._claim(search.found, parent, inventories, search.root, own)
        superseded = parent if search.restored is not None and search.restored.on_root else None
        report = search.report
        if report is not None:
            report = replace(report, life=record.number, seconds=self.phases.report())
        return RestoreOutcome(report=report, record=record, superseded=superseded, inventories=inventories)

    def _found(self, inventories: list[Inventory], own: Segment | None) -> _Search:
        """Search, and again while what the search fails at may pass. Collective."""
        while True:
            root = None
            if self._is_explicit or not memory_is_current(inventories) or any(i.back for i in inventories):
                root = self._ask_root()
                while not self._is_explicit and root.error and self._again(root):  # others may have gone on since
                    root = self._ask_root()
                if not self._is_explicit:
                    _refuse_emptied_root(self.request, inventories, root)
            search = self._search(inventories, root, own)
            one, is_newest = search.restored, search.error is None
            is_good = is_newest and one is not None and not one.is_suspect and not search.found.is_behind(one)
            if is_good or search.root is None or not self._again(search.root):
                return search

    def begin_fresh(
        self, inventories: list[Inventory], *, parent: SnapshotId | None = None, own: Segment | None = None
    ) -> RestoreOutcome:
        """Begin without restoring anything of this job (a warm start fills the state from elsewhere). Collective.

        Args:
            inventories: Of all ranks.
            parent: BEGINNING abandons what is there; None leaves it to be chosen by a later restore.
            own: As in `run`.

        Raises:
            RootError: The root cannot be asked or written.
        """
        root = self._ask_root()
        while root.error and parent is not None and self._again(root):
            root = self._ask_root()
        if root.error and parent is not None:
            raise unreachable(self.request.root, root, "and a run that starts fresh takes its number from there")
        record = self._claim(select(inventories, root), parent, inventories, root, own)
        return RestoreOutcome(report=None, record=record, superseded=None, inventories=inventories)

    def read(self) -> RestoreReport:
        """Fill live state from the root alone and begin nothing (read-only access). Collective; errors as `run`."""
        gather.require_same(self.request)
        search = self._found([], None)
        if search.report is None:
            self._refuse_silent_fresh_start(search, explicit=True)
            raise AssertionError
        return replace(search.report, life=0, seconds=self.phases.report())

    # -- candidates --------------------------------------------------------------------------------------

    @collector_paused()
    def _search(self, inventories: Sequence[Inventory], root: RootSummary | None, own: Segment | None) -> _Search:
        """Try candidates in their order until every rank could fill one.

        The root is asked as soon as memory alone does not do: it may hold what is missing of the very same snapshot.
        """
        error: FlashckptError | None = None
        rejected: list[Rejected] = []
        tried: set[tuple[SnapshotId, bool]] = set()
        while True:
            with self.phases("decide"):
                found = self._select(inventories, root)
            left = [c for c in found.found if (c.identity, c.on_root) not in tried]
            doubtful = not left or left[0].is_unfinished or left[0].is_suspect or found.is_behind(left[0])
            if root is None and (doubtful or tried):
                root = self._ask_root()
                continue
            if not left:
                _say(rejected, but=str(error))
                return _Search(found, root, error=error)
            candidate = left[0]
            tried.add((candidate.identity, candidate.on_root))
            answer = self._try(candidate, inventories, root, own)
            if not isinstance(answer, Rejected):
                _say(rejected)
                sentences = (*(one.everywhere for one in rejected), *_left_aside(candidate, left))
                return _Search(found, root, candidate, replace(answer, passed_over=sentences), error)
            if candidate.on_root and self.patience.again(may_pass=may_pass(answer.error), why=answer.here):
                tried.discard((candidate.identity, True))  # an older one would lose steps for a moment's failure
                continue
            rejected.append(answer)
            if error is None and (candidate.is_whole or self._is_explicit):
                error = answer.error

    def _try(
        self, candidate: Candidate, inventories: Sequence[Inventory], root: RootSummary | None, own: Segment | None
    ) -> RestoreReport | Rejected:
        """Open one candidate, and close it again once all ranks have filled it or given it up. Collective."""
        names, world = node_names(inventories), self.tracked.world
        attempt = Attempt(
            tracked=self.tracked,
            state=read_state(self.tracked, self.phases),  # for each: one that failed may have made state
            request=self.request,
            candidate=candidate,
            locations=slot_locations(candidate, inventories) if len(names) > 1 else [],
            node=names.index(inventories[world.rank].node) if inventories else 0,
            phases=self.phases,
            own=own,
        )
        directory = self.directory
        segments = [] if directory is None else [*directory.segments(), *directory.replica_segments()]
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if candidate.on_root:
                assert root is not None
                prefix = root.prefixes[root.committed.index(candidate.identity)]
                first = local_world(inventories, world.rank)[0] if inventories else world.rank
                with self.phases("root"):
                    reader = NodeReader(world.rank, first)
                    checkpoint = share_manifest(self.request.root, self.options, prefix, reader, stack)
            return restore_candidate(attempt, segments, checkpoint, inventories, stack)

    def _select(self, inventories: Sequence[Inventory], root: RootSummary | None) -> Candidates:
        request = self.request
        return select(inventories, root or RootSummary(), step=request.step, generation=request.generation)

    def _ask_root(self) -> RootSummary:
        """Let rank 0 look at the root; everybody gets its answer. Collective."""
        with self.phases("root"):
            return gather.ask_root(self.request, self.options, is_rank_0=self.tracked.world.rank == 0)

    # -- the generation that begins ----------------------------------------------------------------------

    def _claim(
        self,
        found: Candidates,
        parent: SnapshotId | None,
        inventories: Sequence[Inventory],
        root: RootSummary | None,
        own: Segment | None,
    ) -> Generation:
        """Claim a generation and write the lineage. Collective."""
        world = self.tracked.world
        assert self.directory is not None
        with self.phases("lineage"):
            can_claim = root is not None and not root.error
            where = self.request.root if can_claim else None
            while True:
                try:
                    record = gather.claim(self.directory, found, parent, world=world, root=where, options=self.options)
                    break
                except StoreError as error:  # on every rank
                    if not self.patience.again(may_pass=may_pass(error), why=str(error)):
                        raise
            ranks = local_world(inventories, world.rank)
            gather.begin(self.directory, record, rank=world.rank, ranks=ranks, own=own, found=found)
        return record

    def _again(self, root: RootSummary) -> bool:
        return root.may_pass and self.patience.again(may_pass=True, why=root.error)  # the same on all ranks

    @property
    def _is_explicit(self) -> bool:
        return self.request.step is not None or self.request.generation is not None

    def _refuse_silent_fresh_start(self, search: _Search, *, explicit: bool) -> None:
        """Raise where something was to be restored and nothing was."""
        if search.error is not None:
            raise search.error
        if search.root is not None and search.root.error:
            raise unreachable(self.request.root, search.root, "and memory holds none that is whole")
        if explicit:
            step = self.request.step if self.request.step is not None else -1
            raise no_such_checkpoint(step, self.request.generation, search.found, self.request.root)


def _left_aside(restored: Candidate, left: Sequence[Candidate]) -> list[str]:
    """Return a sentence for each newer candidate that is suspect."""
    newer = [one.identity for one in left if one.is_suspect and one.identity > restored.identity]
    what = "holds NaN or infinity in parameters or optimizer state that were finite before"
    return [f"{id_} {what}; to have it nevertheless: restore(step={id_.step})" for id_ in newer]


def _say(rejected: Sequence[Rejected], but: str = "") -> None:
    """Log why candidates were given up, without what is going to be raised: that is shown then."""
    for one in rejected:
        if str(one.error) != but:
            _log.warning("%s", one.here)


def _refuse_emptied_root(request: RestoreRequest, inventories: Sequence[Inventory], root: RootSummary) -> None:
    """Refuse to continue from memory, or to start fresh, silently where the root has lost its checkpoints."""
    if not any(inventory.committed for inventory in inventories):
        return
    found = select(inventories, root)
    if (missing := missing_on_root(inventories, root, found)) is not None:
        raise emptied(request.root, missing, found)


class Reader:
    """Reads checkpoints and changes nothing: for evaluation, export, another program. Made by `readonly`."""

    def __init__(self, root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._root, self._options = root_url(root), checked("storage_options", storage_options)
        check_options(self._root, self._options)
        self._things: dict[str, Any] = {}
        self._mesh: Any = None

    def track(self, *, mesh: Any = None, **things: Any) -> None:
        """Name the objects to fill, as `Checkpointer.track`; its other settings are of runs that take snapshots.

        Raises:
            ConfigError: One of them is given.
        """
        if settings := [name for name in ("rng", "replicated_over", "fenced", "exclude") if name in things]:
            raise ConfigError(
                f"readonly() has no {settings[0]}= in track()",
                found=f"{settings[0]}={things[settings[0]]!r}",
                expected="mesh=, and the objects to fill by name",
                state="Nothing was read.",
                remedy="leave it out: random state belongs to the run that continues, and what is not tracked stays as it is",
            )
        self._mesh = mesh if mesh is not None else self._mesh
        self._things |= things

    def restore(
        self,
        step: int | None = None,
        generation: int | None = None,
        only: str | None = None,
        strict: bool = True,
    ) -> RestoreReport:
        """Fill the tracked objects from storage. Collective; arguments and errors as `Checkpointer.restore`.

        Raises:
            NoCheckpointError: There is none.
        """
        tracked = StateRegistry(current_world(self._mesh))
        for name, thing in self._things.items():
            tracked.add(name, thing)
        request = RestoreRequest(root=self._root, step=step, generation=generation, only=only, strict=strict)
        with trainable(tracked.parts()):
            return RestoreCoordinator(tracked=tracked, directory=None, options=self._options, request=request).read()
