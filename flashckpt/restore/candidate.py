"""One candidate on one rank, step by step: what is required of it, the plan, the memory it fills, values, the report.

Each step takes values and returns one; what a step cannot do it raises. The coordinator runs the votes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flashckpt.core.manifest import Manifest, by_design
from flashckpt.core.shard import split_owner
from flashckpt.errors import FlashckptError, TensorMismatchError
from flashckpt.planning.box_match import has_same_regions
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.planning.read_plan import ReadPlan, SourceNames, plan_reads
from flashckpt.planning.selection import Candidate, RestoreRequest, SlotLocation
from flashckpt.printable import counted
from flashckpt.report import RestoreReport
from flashckpt.restore import live_memory, votes
from flashckpt.restore.candidate_sources import CandidateSources
from flashckpt.restore.executor import Phases, RemoteFetcher, RestoreCounts, execute
from flashckpt.restore.live_memory import LiveMemory
from flashckpt.restore.program import Program, compare
from flashckpt.restore.requirements import LiveState, Requirements, Wanted, requirements
from flashckpt.restore.sources import Source
from flashckpt.restore.values import (
    Applied,
    Values,
    apply_values,
    half_restored,
    missing_error,
    missing_values,
    unnamed_values,
    value_tensors,
)
from flashckpt.restore.votes import Rejection, attempted
from flashckpt.shm.segment import Segment
from flashckpt.state import value_reader
from flashckpt.state.optimizer_state import in_program_order
from flashckpt.state.registry import StateRegistry


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """What all steps of one candidate are about.

    Attributes:
        state: What they consist of now, or why that cannot be said: raised by the first step that needs it, so that this
            rank votes like any other.
        locations: Every slot that holds it, the same list on every rank; empty on one node.
        phases: Counts seconds.
        own: The segment that this process owns, if any.
    """

    tracked: StateRegistry
    state: LiveState | Rejection
    request: RestoreRequest
    candidate: Candidate
    locations: Sequence[SlotLocation]
    node: int
    phases: Phases
    own: Segment | None = None

    @property
    def live(self) -> LiveState:
        """The state to be filled; raises what reading it raised."""
        if isinstance(self.state, Rejection):
            raise self.state.error
        return self.state

    def read_again(self) -> Attempt:
        """Return the attempt with live state as it is now: one that failed may have made state."""
        return replace(self, state=read_state(self.tracked, self.phases))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.tracked.world.rank

    @property
    def may_ask(self) -> bool:
        """Whether another node holds a part of the candidate."""
        return any(location.node != self.node for location in self.locations)

    @property
    def is_strict(self) -> bool:
        """Whether live state and the source must have the same names."""
        return self.request.strict and self.request.only is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A candidate with everything that is known before the first byte is read.

    Attributes:
        required: What this rank requires of it.
        plan: Which bytes of which source fill that: of `sources.all`, in their order.
        program: How the program that took the snapshot compares with this one.
        comparison: Names that the sources have, and names that this rank has.
        left_behind: Names that the sources have and no rank has.
    """

    sources: CandidateSources
    values: Values
    required: Requirements
    plan: ReadPlan
    program: Program
    only: Wanted
    comparison: votes.NameComparison
    left_behind: Sequence[str] = ()

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Of all sources."""
        return [source.manifest for source in self.sources.all]

    def is_whole(self, candidate: Candidate) -> bool:
        """Whether the sources are all of the snapshot."""
        return candidate.is_common or bool(self.sources.storage)


def read_state(tracked: StateRegistry, phases: Phases) -> LiveState | Rejection:
    """Return what the live objects consist of now, or why that cannot be said."""
    with phases("structure"):
        return attempted(lambda: LiveState.read(tracked))


def prepare(attempt: Attempt, sources: CandidateSources, *, exact: bool, named_by: Sequence[Source]) -> Prepared:
    """Find what is required of the sources and plan it; the names and values of `named_by` count, see `requirements` for `exact`.

    Raises:
        TensorMismatchError: A live tensor has another dtype or shape than the candidate's, or an optimizer other groups.
    """
    tracked = attempt.tracked
    for source in sources.storage:
        source.bring_both(tracked.aliases)
    manifests = [source.manifest for source in named_by]
    with attempt.phases("requirements"):
        names = SourceNames(manifests)
        values = Values(manifests, names, attempt.rank)
        if attempt.is_strict:
            _refuse_another_base(tracked, values)
        program = compare(tracked, values.recorded, values.find, names, attempt.request.only)
        if attempt.is_strict and program.refusals:
            raise program.refusals[0]
        only = program.wanted(attempt.request.only)
        in_values = value_tensors(tracked, values)
        required = requirements(attempt.live, names, manifests, in_values=in_values, only=only, exact=exact)
        if exact:
            known = names.index
            lost = [PeerQuery(split_owner(n)[0], n, None) for n in sorted(in_values) if n not in known]
            required = replace(required, unnamed=(*required.unnamed, *lost))
    with attempt.phases("plan"):
        sources = _brought(sources, required)
        every = sources.all
        tables = [source.manifest.table for source in every]
        plan = plan_reads(required.wanted, tables, names=[source.name for source in every])
    with attempt.phases("names"):
        comparison = votes.compare_names(attempt.live, names, manifests, required, only)
        has_all_values = bool(sources.storage) or (attempt.candidate.is_common and not attempt.may_ask)
        if has_all_values and attempt.request.only is None:
            required = required.with_missing(votes.ungrouped(tracked, manifests, only))
    return Prepared(
        sources=sources,
        values=values,
        required=required,
        plan=plan,
        program=program,
        only=only,
        comparison=comparison,
    )


def _brought(sources: CandidateSources, required: Requirements) -> CandidateSources:
    """Return the sources with the rows that are asked for; without a root that cannot be read, where memory may do without."""
    try:
        for source in sources.storage:
            source.bring(required.wanted)
    except (FlashckptError, OSError):
        if not sources.memory and not sources.peers:
            raise
        return replace(sources, storage=())
    return sources


def _refuse_another_base(tracked: StateRegistry, values: Values) -> None:
    """Raise TensorMismatchError where what `exclude=` leaves out is not what it was when the snapshot was taken."""
    changed = tracked.changed_left_out(values.recorded(value_reader.LEFT_OUT_KEY)) if tracked.exclusion else []
    if changed:
        raise TensorMismatchError(
            f"{changed[0]!r} is left out by exclude= and is not the tensor that the snapshot was taken with",
            found=f"other elements, dtype or shape in {counted(len(changed), 'parameter')} that exclude= leaves out",
            expected="the base model of that run, loaded before restore()",
            state="Nothing was read.",
            remedy="load the base model that the run began with; restore(strict=False) continues on this one",
        )


def queries(attempt: Attempt, prepared: Prepared, *, has_asked: bool) -> list[PeerQuery]:
    """Return what of the candidate this node and what other nodes sent so far does not hold.

    Args:
        attempt: The candidate.
        prepared: Planned over memory first, storage last: what is planned from storage is asked for as well.
        has_asked: Other nodes were asked before: a value that was asked for once is nowhere.
    """
    plan, near = prepared.plan, len(prepared.sources.memory) + len(prepared.sources.peers)
    boxes = [(gap.target, gap.box) for gap in plan.gaps]
    boxes += [(read.target, read.box) for read in plan.reads if read.source >= near] if prepared.sources.storage else []
    found = list(prepared.required.unnamed)
    for target, box in boxes:
        shard = plan.wanted.shard(target)
        part = replace(shard, offsets=box.offsets, lengths=box.lengths)
        found.append(PeerQuery(split_owner(shard.fqn)[0], shard.fqn, part))
    if not has_asked:
        found += unnamed_values(attempt.tracked, prepared.values, prepared.only)
    return found


def lacks_values(attempt: Attempt, prepared: Prepared) -> list[str]:
    """Return the groups, objects and extra state that are missing, where that is not allowed."""
    is_whole = prepared.is_whole(attempt.candidate)
    lost = missing_values(attempt.tracked, prepared.values, prepared.only, program=prepared.program, is_whole=is_whole)
    return lost if not is_whole or attempt.is_strict else []


def require_covered(attempt: Attempt, prepared: Prepared) -> Prepared:
    """Check that nothing is missing, as no live tensor was written yet; return what was given.

    Raises:
        ShardGapError: The sources do not cover what is required, or values are missing.
        SamplerStateError: What is missing is the place of a loader on another number of ranks.
    """
    required, is_whole = prepared.required, prepared.is_whole(attempt.candidate)
    if (required.missing and attempt.is_strict) or required.unnamed:
        here = sorted(prepared.comparison.foreign)
        raise missing_error(required.missing or [required.unnamed[0].filed_under], here, is_whole=is_whole)
    if lost := lacks_values(attempt, prepared):
        for name in [name for name in lost if is_whole and name in attempt.tracked.objects]:
            prepared.values.refuse_other_places(attempt.tracked, name, attempt.tracked.objects[name])
        raise missing_error(lost, [], is_whole=is_whole)
    prepared.plan.require_complete([source.name for source in prepared.sources.all])
    return prepared


def fill(attempt: Attempt, prepared: Prepared, remote: RemoteFetcher | None) -> RestoreReport:
    """Fill live state: memory, bytes, values. Every rank is in its exchange meanwhile if `remote` is given.

    Raises:
        DamagedError: A range is damaged in its last source.
        ShardGapError: A value turned out to be missing.
    """
    stateless = [optimizer for optimizer in attempt.tracked.all_optimizers() if not optimizer.state]
    with attempt.phases("allocate"):
        memory: LiveMemory = live_memory.allocate(prepared.required)
    with attempt.phases("read"):
        try:
            counts = execute(prepared.plan, memory.destinations, prepared.sources.all, remote=remote)
        finally:
            memory.settle()
        memory.finish()
    if attempt.request.only is None:
        attempt.tracked.by_design = by_design([source.manifest for source in prepared.sources.all])
    with attempt.phases("values"):
        step, program = attempt.candidate.identity.step, prepared.program
        applied = apply_values(
            attempt.tracked, prepared.values, memory.in_values, program=program, step=step, only=prepared.only
        )
        for optimizer in stateless:
            in_program_order(optimizer)
    if applied.missing and (not prepared.is_whole(attempt.candidate) or attempt.is_strict):
        raise half_restored(applied.missing)  # settings that are tensors: known only now
    with attempt.phases("report"):
        return _report(attempt, prepared, counts, applied)


def _report(attempt: Attempt, prepared: Prepared, counts: RestoreCounts, applied: Applied) -> RestoreReport:
    return RestoreReport(
        step=attempt.candidate.identity.step,
        generation=attempt.candidate.identity.generation,
        life=0,
        tier_bytes=dict(counts.needed_bytes),
        missing=(*prepared.required.missing, *applied.missing),
        unexpected=(*prepared.left_behind, *prepared.program.left_behind()),
        overruled=tuple(applied.overruled),
        damaged=tuple(counts.damaged),
        read_bytes={tier: n for tier, n in counts.read_bytes.items() if n},
        reseeded=tuple(applied.reseeded),
        is_same_layout=_is_same_layout(attempt, prepared),
    )


def _is_same_layout(attempt: Attempt, prepared: Prepared) -> bool:
    size, sources = attempt.tracked.world.size, prepared.sources.all
    own = next((source for source in sources if source.manifest.rank == attempt.rank), None)
    if own is None:
        return bool(sources) and sources[0].manifest.world_size == size
    if own.manifest.world_size != size:
        return False
    # another node sent only the rows that were asked for, and a replica has only those that few nodes hold
    is_part = own.tier == "peer" or own.manifest.is_part
    return has_same_regions(prepared.required.wanted, own.manifest.table, common_only=is_part)
