"""The start of a worker group by the product's own restore: every rank runs it, and they vote.

Gathering, choosing, sharing MANIFEST, opening, planning, the votes, the exchange between nodes, reading and checking, the claim and
what is emptied are the product's, over a group of the simulation. Only live state is simulated: of tensors and values it has as
many as the rank reads, and compares them with what was trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError, may_pass
from flashckpt.planning.inventory import left_out
from flashckpt.planning.read_plan import as_table
from flashckpt.planning.selection import Candidate, RestoreRequest, RootSummary
from flashckpt.restore import candidate, coordinator, gather, live_memory, sources, votes
from flashckpt.restore.candidate_restore import Rejected
from flashckpt.restore.coordinator import RestoreCoordinator
from flashckpt.restore.destinations import Destinations, Target
from flashckpt.restore.program import Program
from flashckpt.shm import agent_folder
from flashckpt.shm.lease import Pin
from flashckpt.shm.segment import Segment
from flashckpt.state.placement import World
from simulation import group, memory
from simulation.clock import CLOCK
from simulation.group import Group, GroupLostError
from simulation.machines import Rank
from simulation.restoring import Restored, failed
from simulation.states import State, bytes_of
from simulation.threads import Event
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job

_ROOT = "sim://root"


class Live:
    """In place of the tracked objects of one rank."""

    rng, aliases, optimizers, modules, exclusion, by_design = False, {}, {}, {}, frozenset(), None  # type: ignore[var-annotated]

    def __init__(self, start: Start, rank: int, size: int) -> None:
        self.start, self.world = start, World(rank=rank, size=size)
        self.objects = {"chain": object(), "data": object()}
        self.candidate = Candidate(identity=SnapshotId(0, 0))
        self.chain = self.data = self.token = ""
        self.rows: list[tuple[Shard, bytearray]] = []

    def key_of(self, name: str, _: object) -> str:
        return name

    def extra_states(self) -> list[Any]:
        return []

    all_optimizers = extra_states

    def required(self, manifests: Sequence[Manifest]) -> Any:
        """Return the rows that this rank is to have: of whoever had them, all of them among the ranks that there are."""
        rank, world = self.world.rank, self.start.world_of(self.candidate)
        for manifest in manifests:
            self.token = manifest.token
        own = range(rank, world, self.world.size)
        common: dict[str, Any] = {"dtype": "float32", "replica": 0}
        rows = [Shard(fqn="weight", global_shape=(world, 16), offsets=(k, 0), lengths=(1, 16), **common) for k in own]
        rows.append(Shard(fqn="bias", global_shape=(4,), offsets=(0,), lengths=(4,), **common))
        self.rows = [(one, bytearray(64 if one.fqn == "weight" else 16)) for one in rows]
        return _Required(wanted=as_table(rows), live=self)

    def take(self, values: Any) -> Any:
        """Take the values, and compare what was read with what was trained."""
        missing = [name for name in self.objects if not values.find(name)[0]]
        if missing:
            return SimpleNamespace(missing=missing, reseeded=[], overruled=[])
        self.chain, self.data = str(values.find("chain")[1]), str(values.find("data")[1])
        for shard, raw in self.rows:
            if raw != bytes_of(self.chain, shard.offsets[0])[0 if shard.fqn == "weight" else 1]:
                raise Violation("what is restored is what was trained", f"{self.candidate.identity}, {shard.fqn}")
        return SimpleNamespace(missing=[], reseeded=[], overruled=[])


@dataclass(frozen=True)
class _Required:
    """In place of `Requirements`."""

    wanted: Any
    live: Live
    missing: tuple[str, ...] = ()
    unnamed: tuple[Any, ...] = ()
    in_values: tuple[str, ...] = ()
    is_foreseen = False

    def with_missing(self, names: Sequence[str]) -> _Required:
        return replace(self, missing=tuple(names)) if names else self


class _Watched(RestoreCoordinator):
    """The product's restore of one rank, looked at where it decides."""

    def _try(self, candidate: Candidate, inventories: Any, root: RootSummary | None, own: Any) -> Any:
        live: Any = self.tracked
        live.start.moves_on(candidate)
        live.candidate = candidate
        answer = super()._try(candidate, inventories, root, own)
        if isinstance(answer, Rejected):
            live.start.rejected(candidate, answer)
        return answer

    def _claim(self, found: Any, parent: Any, inventories: Any, root: RootSummary | None, own: Any) -> Generation:
        live: Any = self.tracked
        live.start.decided(live, parent, inventories, root)
        return super()._claim(found, parent, inventories, root, own)


class Start:
    """One start: all ranks restore together, or all of them end.

    Args:
        job: The job.
        ranks: The ranks that start.
        step: Only this one is wanted; None: the newest.
    """

    def __init__(self, job: Job, ranks: list[Rank], step: int | None) -> None:
        self.job, self.ranks, self.step = job, ranks, step
        self.group = Group(job, ranks)
        self._best: State | None = None
        self._decided: tuple[Any, ...] | None = None
        self._record: Generation | None = None
        self._state: State | None = None
        self._excused, self._began_s = False, CLOCK.scheduler.now
        self._failed: tuple[SnapshotId | None, bool] = None, False  # what was given up last, and whether for a moment
        self._begun: list[Restored] = []
        self._news = Event()

    # -- what ranks do -----------------------------------------------------------------------------------------

    def run(self) -> Restored:
        """Run all ranks, the first one here; return what they begin with, or raise RestoreFailed."""
        job = self.job
        for rank in self.ranks:
            starts[rank.process] = self, rank
        job.write_config(self.ranks)
        # before anybody looks: replicas still arrive while ranks gather
        self._best = job.rules.best_for({str(rank.node.folder) for rank in self.ranks}, prefers_clean=True)
        waiting, job.on_start = job.on_start, []
        for work in waiting:
            work(self.ranks)
        for rank in self.ranks[1:]:
            CLOCK.scheduler.spawn(rank.process, partial(self._beside, rank), delay_s=job.random.random() * 0.5)
        try:
            self._run(self.ranks[0])
        except (FlashckptError, GroupLostError) as error:
            raise failed(error) from error
        while len(self._begun) < len(self.ranks):
            self._news.clear()
            self._news.wait(1e9)
        return self._begun[0]

    def _beside(self, rank: Rank) -> None:
        try:
            self._run(rank)
        except (FlashckptError, GroupLostError) as error:
            self.job.start_failed(rank.process, failed(error))

    def _run(self, rank: Rank) -> None:
        """What `restore()` does of one rank, as `session.opening` has it."""
        live: Any = Live(self, rank.rank, len(self.ranks))
        request = RestoreRequest(root=_ROOT, step=self.step)
        directory = rank.node.directory
        ours = _Watched(tracked=live, directory=directory, options={}, request=request)
        inventories = ours.gather(0, 1 << 30)
        segment = rank.open_memory(len(self.ranks))
        try:
            outcome = ours.run(inventories, own=segment)
        except AssertionError as error:
            raise Violation("a restore says why it ends", f"rank {rank.rank}: {error!r}") from error
        if rank.local == 0:
            folder: Any = rank.node.agent_folder
            agent_folder.write_job(folder, directory.path)
        self._begins(rank, live, outcome)

    def _begins(self, rank: Rank, live: Live, outcome: Any) -> None:
        record, identity = outcome.record, None if outcome.report is None else live.candidate.identity
        if record != self._record:
            raise Violation("all ranks begin the same", f"rank {rank.rank}: {record}; the first one: {self._record}")
        source = "fresh" if identity is None else "memory" if outcome.superseded is None else "storage"
        chain, data = (live.chain, live.data) if identity is not None else ("", "")
        restored = identity if source == "memory" else None
        without = left_out(outcome.inventories) if identity is not None else (0, 0)
        rank.begin_life(record, chain, data, restored, outcome.superseded, self.job.setup.per_node, without)
        self.job.note("ranks that voted")
        self._begun.append(Restored(record, identity, source, chain, data, has_begun=True, left_out=without))
        self._news.set()

    # -- what is looked at -------------------------------------------------------------------------------------

    def world_of(self, candidate: Candidate) -> int:
        """Return of how many ranks a candidate is: live state knows its own shapes."""
        truth, state = self.job.rules.truth, self.job.rules.committed.get(candidate.identity)
        if state is None or candidate.mark not in (0, state.mark):
            state = next(one for one in truth if one.identity == candidate.identity and candidate.mark in (0, one.mark))
        return truth[state][1]

    def rejected(self, candidate: Candidate, answer: Rejected) -> None:
        """All ranks gave a candidate up."""
        job, identity, rules = self.job, candidate.identity, self.job.rules
        job.say("ranks", f"cannot use {identity}: {str(answer.error).splitlines()[0]}")
        job.note("candidates given up")
        own = [
            path
            for rank in self.ranks
            for path in rank.node.directory.segments()
            if any(one.identity == identity for one in rules.held_in(str(path)))
        ]
        if candidate.is_common and identity not in rules.rotten and own and not may_pass(answer.error):
            raise Violation("what memory calls whole is whole", f"{identity}: {answer.error}")
        if candidate.is_common and not may_pass(answer.error) and self._lies_whole(candidate):
            raise Violation("what lies whole somewhere is restored", f"{identity}: {answer.error}")
        self._excused = self._excused or candidate.is_whole
        self._failed = identity, candidate.on_root and may_pass(answer.error)

    def _lies_whole(self, candidate: Candidate) -> bool:
        """Whether all of a candidate is in memory here without a damage, in whichever slots."""
        state = State(candidate.identity, candidate.mark)
        if state not in self.job.rules.truth:
            return False
        chain, world = self.job.rules.truth[state]
        found = set[int]()
        for directory in [rank.node.directory for rank in self.ranks]:
            for path in (*directory.segments(), *directory.replica_segments()):
                with contextlib.closing(Segment.attach(path)) as segment:
                    for slot, header in enumerate(segment.headers()):
                        if header.is_complete and State(header.identity, header.mark) == state:
                            at, row = segment.spec.data_at(slot), bytes_of(chain, header.rank)
                            raw: Any = memory.FILES.find(segment.path).buffer[at : at + header.data_bytes]  # type: ignore[arg-type]
                            found |= {header.rank} if row[0] in raw else set()
                            found |= {-1} if row[1] in raw else set()
        return found == {-1, *range(world)}

    def moves_on(self, candidate: Candidate | None) -> None:
        """A rank tries the next candidate, or has all that it needs."""
        (identity, is_for_now), waited_s = self._failed, CLOCK.scheduler.now - self._began_s
        if is_for_now and waited_s < gather.PATIENCE_S and (candidate is None or candidate.identity != identity):
            raise Violation("a moment's failure costs no steps", f"{identity} was given up after {waited_s:.0f} s")

    def decided(self, live: Live, parent: SnapshotId | None, inventories: Any, root: RootSummary | None) -> None:
        """A rank knows what it has restored."""
        rules = self.job.rules
        if parent is None:
            self.moves_on(None)
            if root is None or root.error:
                raise Violation("a fresh start asks the root", "" if root is None else root.error)
        chain = live.chain if parent is not None else ""
        decided = parent, chain, live.data if parent is not None else "", live.candidate.on_root
        if self._decided is not None:
            if self._decided != decided:
                raise Violation("all ranks restore the same", f"rank {live.world.rank}: {decided}, not {self._decided}")
            return
        self._decided = decided
        self._state = None if parent is None else State.of(parent, live.token)
        best = self._best
        told = [rules.told[folder] for rank in self.ranks if (folder := str(rank.node.folder)) in rules.told]
        is_empty = root is not None and root.is_empty and not root.error and rules.is_emptied
        if is_empty and self.step is None and any(map(rules.is_on_line, told)):
            raise Violation(
                "an emptied root is told of", f"a start went on with {parent}, though {max(told)} was there"
            )
        # without an answer of the root memory goes on, whatever others did meanwhile: it is fenced once the root is there
        waited_s = CLOCK.scheduler.now - self._began_s
        is_behind = best is not None and (parent is None or parent < best.identity)
        if root is not None and root.may_pass and is_behind and waited_s < gather.PATIENCE_S and self.step is None:
            raise Violation("a moment's failure costs no steps", f"{parent} after {waited_s:.0f} s, not {best}")
        is_unsure = (root is not None and bool(root.error)) or (best is not None and rules.was_touched(best.identity))
        if not self._excused and not is_unsure:
            records, asked = [one.generation for one in inventories if one.generation], root is not None
            back = max(one.back for one in inventories)
            rules.restored(self._state, chain, best=best, wanted=self.step, asked=asked, records=records, back=back)
        rules.goes_on_in({str(rank.node.folder) for rank in self.ranks})

    def begins(self, record: Generation) -> None:
        """A rank is about to write the record of the generation."""
        if self._record is None:
            self._record = record
            self.job.rules.begins(record, is_on_root=record.claimed, parent=self._state, starts=True)


starts: dict[Any, tuple[Start, Rank]] = {}
"""The start of each process that is in one, and its rank."""


# -- in place of live state, and of the environment of a rank ------------------------------------------------------


class _Environment:
    """What an agent gives its ranks."""

    FLASHCKPT_RESTORE_STEP, LOCAL_WORLD_SIZE = -1, 1

    @property
    def FLASHCKPT_BACK(self) -> int:
        return int(_rank().node.way_back.back) if CLOCK.scheduler.process in starts else 0

    @property
    def FLASHCKPT_LEAVE_OUT(self) -> str:
        return "{}-{}".format(*_rank().node.way_back.leave_out) if CLOCK.scheduler.process in starts else ""

    @property
    def FLASHCKPT_RESTART(self) -> int:
        return _rank().node.restart if CLOCK.scheduler.process in starts else self._old.FLASHCKPT_RESTART

    @property
    def FLASHCKPT_AGENT_DIR(self) -> str:
        return str(_rank().node.agent_folder) if CLOCK.scheduler.process in starts else self._old.FLASHCKPT_AGENT_DIR

    def __init__(self, old: Any) -> None:
        self._old = old


def _rank() -> Rank:
    return starts[CLOCK.scheduler.process][1]


def _where() -> bytes:
    return f"{_rank().node.name}.{_rank().node.life}".encode()


def _begin(directory: Any, record: Generation, **more: Any) -> None:
    if (found := starts.get(CLOCK.scheduler.process)) is not None:
        found[0].begins(record)
    _begin_of_product(directory, record, **more)


_begin_of_product = gather.begin


def _mapped(pin: Any, **_: object) -> memoryview:
    if pin._view is None:
        at = pin.spec.data_at(pin.slot)
        pin._view = memoryview(memory.FILES.descriptors[pin._fd].buffer)[at : at + pin.nbytes].toreadonly()
    view: memoryview = pin._view
    return view


def _allocated(required: _Required) -> Any:
    targets = [Target(shard=shard, buffer=memoryview(raw)) for shard, raw in required.live.rows]
    nothing = SimpleNamespace(settle=lambda: None, finish=lambda: None, in_values={})
    nothing.destinations = Destinations.of(targets)
    return nothing


def install() -> None:
    """Put simulated live state in place of that of torch, once per program."""
    group.install()
    here: dict[str, Any] = {
        "compare": lambda *_: Program(), "value_tensors": lambda *_: set(),
        "requirements": lambda live, names, manifests, **_: live.required(manifests),
        "apply_values": lambda tracked, values, *_, **__: tracked.take(values),
        "live_memory": SimpleNamespace(allocate=_allocated),
        "_is_same_layout": lambda *_: True,
    }  # fmt: skip
    candidate.__dict__.update(here, read_state=lambda tracked, _: tracked)
    comparison = votes.NameComparison(foreign=frozenset(), count=3, find_own=frozenset)
    votes.__dict__.update(compare_names=lambda *_: comparison, ungrouped=lambda *_: [])
    coordinator.__dict__["read_state"] = lambda tracked, _: tracked
    gather.__dict__.update(
        env=_Environment(gather.__dict__["env"]), boot_id=_where, ranks_key=lambda: b"key", begin=_begin
    )
    sources.__dict__["segment_file"] = SimpleNamespace(map_held=lambda *_: None)
    kind: Any = Pin
    kind.map = _mapped


def forget() -> None:
    """A simulation begins."""
    starts.clear()
    group.members.clear()


__all__ = ["Start", "forget", "install", "live_memory"]
