"""One candidate on one rank: its sources opened, what they cover, what other nodes are asked for, live state filled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from flashckpt import collectives
from flashckpt.checkpoint import root_summary
from flashckpt.checkpoint.catalog import manifest_from, read_manifest_bytes
from flashckpt.checkpoint.retention import leased
from flashckpt.collectives import HostGroup
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard, boxes_by_name
from flashckpt.errors import FlashckptError, NoCheckpointError, ShardGapError, TensorMismatchError
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.planning.read_plan import plan_reads
from flashckpt.planning.root_view import RootSummary
from flashckpt.planning.selection import Candidate, RestoreRequest, SlotLocation
from flashckpt.report import RestoreReport
from flashckpt.restore import live_state, unexpected
from flashckpt.restore.destinations import Destinations, Target
from flashckpt.restore.executor import RestoreCounts, execute
from flashckpt.restore.peers import PeerExchange, Peers, PeerSource
from flashckpt.restore.sources import MemorySource, Source, StorageSource
from flashckpt.restore.values import Values, missing_values, restore_values, unnamed_values, value_tensors
from flashckpt.shm.segment import Pin, Segment
from flashckpt.state.placement import boxes_of, shard_of
from flashckpt.state.registry import StateRegistry
from flashckpt.state.structure import Structure

_MOST_ASKS = 2
"""Times other nodes are asked: the second time for tensors whose names came with the first answer."""


class CandidateState(IntEnum):
    """What a rank can do about a candidate."""

    FAILED = 0
    READY = 1
    ASKS = 2
    MISMATCH = 3


@dataclass(kw_only=True)
class CandidateRestore:
    """The restore of one candidate on one rank. Methods that say so are collectives.

    Attributes:
        tracked: The live objects.
        segments: Of this node.
        request: What is wanted.
        options: Of the storage.
        root: What the root knows.
        candidate: What is tried.
        places: Where memory holds it, the same list on every rank.
        node: Index of this rank's node.
        stack: Closes everything that is opened.
        phase: `with phase(name)` counts seconds.
        manifest: MANIFEST of the candidate as rank 0 read it; empty where that failed or it is on no root.
    """

    tracked: StateRegistry
    segments: Sequence[Path]
    request: RestoreRequest
    options: dict[str, Any]
    root: RootSummary
    candidate: Candidate
    places: Sequence[SlotLocation]
    node: int
    stack: contextlib.ExitStack
    phase: Callable[[str], contextlib.AbstractContextManager[None]]
    manifest: bytes = b""
    error: Exception | None = None
    memory: list[Source] = field(default_factory=list)
    peers: list[PeerSource] = field(default_factory=list)
    storage: list[Source] = field(default_factory=list)
    wished: live_state.Requirements | None = None
    held: set[str] = field(default_factory=set)
    """Names that the sources have."""
    own: set[str] = field(default_factory=set)
    """Names that this rank has."""
    unexpected: Sequence[str] = ()
    """Names that the sources have and no rank has."""
    _exchange: Peers | None = None
    _has_asked: bool = False
    _structure: Structure | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error instead of raising it: the ranks decide together what becomes of it."""
        try:
            yield
        except (FlashckptError, OSError) as error:
            self.error = self.error or error

    @property
    def _failure(self) -> CandidateState:
        """Which failure this rank's error is."""
        return CandidateState.MISMATCH if isinstance(self.error, TensorMismatchError) else CandidateState.FAILED

    @property
    def sources(self) -> list[Source]:
        """All sources, nearest first: own slot, the node's other slots, other nodes' slots, storage."""
        return [*self.memory, *self.peers, *self.storage]

    @property
    def may_ask(self) -> bool:
        """Whether another node holds a part of the candidate."""
        return any(place.node != self.node for place in self.places)

    # -- what there is -----------------------------------------------------------------------------------

    def share_manifest(self) -> None:
        """Let rank 0 read MANIFEST and take a lease for all; give it to every rank. Collective.

        It has 150 MB at 16,384 ranks, and a lease per rank would be as many objects to write and to renew.
        """
        if not self.candidate.on_root:
            return
        raw = b""
        if self.tracked.world.rank == 0:
            with self.phase("root"), self.noting():
                store = self.stack.enter_context(root_summary.open_root(self.request.root, self.options))
                self.stack.enter_context(leased(store, self._prefix))
                raw = read_manifest_bytes(store, self._prefix)
        self.manifest = collectives.bytes_from_rank_0(raw)

    @property
    def _prefix(self) -> str:
        return self.root.prefixes[self.root.committed.index(self.candidate.identity)]

    def prepare(self) -> CandidateState:
        """Open this node's slots and the checkpoint; return whether they are enough."""
        with self.phase("plan"), self.noting():
            self.memory = self._open_memory()
            if self.candidate.on_root:
                self.storage = self._open_root()
            if self.may_ask:
                wished, asks = self._asks()
                if asks:
                    return CandidateState.ASKS
                self._compare([source.manifest for source in self.memory], wished)
                self._refuse_missing_values()
                self.wished = wished  # all of it lies here, under its own name
            else:
                self.wished = self._covered()
        return self._failure if self.wished is None else CandidateState.READY

    def ask(self, group: HostGroup, *, spare: bool = False) -> CandidateState:
        """Ask the other nodes for what this one lacks; answer them. Collective.

        Args:
            group: Carries host memory.
            spare: Something here turned out damaged: ask for everything, to have another copy of whatever it is.
        """
        self.error, self.wished, self._structure = None, None, None
        with self.phase("peers"):
            self._exchange = Peers(group, self.places, self._serving(), rank=self.tracked.world.rank, node=self.node)
            for _ in range(_MOST_ASKS):
                wanted: list[PeerQuery] = []
                with self.noting():
                    wanted = self._asks(spare=spare)[1] if self.error is None else []
                if not group.total(len(wanted)):
                    break
                found = self._exchange.find(wanted)
                self.peers, self._has_asked = found if self.error is None else [], True
            if self.error is None:
                with self.noting():
                    self.wished = self._covered()
        return self._failure if self.wished is None else CandidateState.READY

    def _open_memory(self) -> list[Source]:
        found = []
        for segment, slot in self._slots():
            with contextlib.suppress(FlashckptError, OSError):
                source = MemorySource(segment, slot, identity=self.candidate.identity)
                self.stack.callback(source.close)
                found.append(source)
        rank = self.tracked.world.rank
        return [*sorted(found, key=lambda s: (s.manifest.rank != rank, s.manifest.rank))]

    def _slots(self) -> Iterator[tuple[Segment, int]]:
        for path in self.segments:
            with contextlib.suppress(FlashckptError, OSError):
                segment = self.stack.enter_context(contextlib.closing(Segment.attach(path)))
                for slot, header in enumerate(segment.headers()):
                    if header.is_complete and header.identity == self.candidate.identity:
                        yield segment, slot

    def _serving(self) -> dict[int, tuple[Pin, Manifest]]:
        """Take a lease on every slot that this rank answers for."""
        mine = {
            place.rank: number
            for number, place in enumerate(self.places)
            if place.node == self.node and place.server == self.tracked.world.rank
        }
        manifests = {source.manifest.rank: source.manifest for source in self.memory}
        held = {}
        for segment, slot in self._slots():
            rank = segment.spec.rank
            if rank in mine and rank in manifests and (pin := segment.pin(slot)) is not None:
                self.stack.callback(pin.close)
                held[mine[rank]] = pin, manifests[rank]
        return held

    def _open_root(self) -> list[Source]:
        try:
            if not self.manifest:
                raise self.error or NoCheckpointError(f"rank 0 could not read MANIFEST of {self._prefix}")
            store = self.stack.enter_context(root_summary.open_root(self.request.root, self.options))
            source = StorageSource(store, manifest_from(store.url, self._prefix, self.manifest), self._prefix)
        except (FlashckptError, OSError):
            if not self.places and not self.memory:
                raise
            self.error = None  # memory may do without the root
            return []
        self.stack.callback(source.close)
        return [source]

    # -- what is wanted ----------------------------------------------------------------------------------

    def _wishes(self, manifests: Sequence[Manifest], *, exact: bool) -> live_state.Requirements:
        if self._structure is None:
            self._structure = self.tracked.settled()[0]
        return live_state.requirements(self.tracked, self._structure, manifests, self.request.only, exact=exact)

    def _asks(self, *, spare: bool = False) -> tuple[live_state.Requirements, list[PeerQuery]]:
        """Return what is wanted, and what of it neither this node's memory nor what was found so far holds.

        With `spare`, what this node's memory holds does not count.
        """
        sources: list[Source] = [*self.memory, *self.peers]
        manifests = [source.manifest for source in sources]
        wished = self._wishes(manifests, exact=True)
        values = Values(sources, self.tracked.world.rank)
        shards = [*wished.shards, *(target.shard for target in self._value_tensors(values, sources)[1])]
        asks = list(wished.unnamed)
        near = [source.manifest.table for source in (self.peers if spare else sources)]
        for target, (offsets, lengths) in plan_reads(shards, near).gaps:
            shard = shards[target]
            asks.append((shard.fqn.partition("@")[0], shard.fqn, replace(shard, offsets=offsets, lengths=lengths)))
        names = live_state.Names(manifests)
        tensors = value_tensors(self.tracked, values)
        asks += [(n.partition("@")[0], n, None) for n in tensors if n not in names.known]
        if not self._has_asked:  # a value that was asked for once is nowhere
            asks += unnamed_values(self.tracked, values, self.request.only)
        return wished, asks

    def _covered(self) -> live_state.Requirements:
        """Return what is wanted; raise where the sources do not cover it."""
        manifests = [source.manifest for source in self.sources]
        is_whole = self._is_whole
        wished = self._wishes(manifests, exact=not is_whole)
        self._compare(manifests, wished)
        if (wished.missing and self.is_strict) or wished.unnamed:
            here = sorted(self.held - self.own)
            raise missing_error(wished.missing or [wished.unnamed[0][0]], here, is_whole=is_whole)
        self._refuse_missing_values()
        names = [s.name for s in self.sources]
        plan_reads(wished.shards, [m.table for m in manifests], names=names).require_complete(names)
        return wished

    @property
    def _is_whole(self) -> bool:
        """Whether the sources are all of the snapshot."""
        return self.candidate.is_common or bool(self.storage)

    def _refuse_missing_values(self) -> None:
        """Raise where groups, objects or extra state are missing: now, as no live tensor was written yet."""
        values = Values(self.sources, self.tracked.world.rank)
        missing = missing_values(self.tracked, values, self.request.only)
        if missing and (not self._is_whole or self.is_strict):
            raise missing_error(missing, [], is_whole=self._is_whole)

    @property
    def counts(self) -> list[int]:
        """How many names the sources have and this rank has not, and how many it has: what the ranks tell each other."""
        return [len(self.held - self.own), len(self.own)]

    @property
    def is_strict(self) -> bool:
        """Whether live state and the source must have the same names."""
        return self.request.strict and self.request.only is None

    def _compare(self, manifests: Sequence[Manifest], wished: live_state.Requirements) -> None:
        """Note which names the sources have and which this rank has: `unexpected` follows from all ranks' together."""
        assert self._structure is not None
        held = unexpected.held_names(self.tracked, manifests)
        self.own = unexpected.own_names(self.tracked, self._structure, live_state.Names(manifests), wished, held)
        self.held = {name for name in held if live_state.is_wanted(name, self.request.only)}
        has_all_values = bool(self.storage) or (self.candidate.is_common and not self.may_ask)
        if has_all_values and self.request.only is None:
            wished.missing = sorted({*wished.missing, *unexpected.ungrouped(self.tracked, manifests)})

    # -- filling -----------------------------------------------------------------------------------------

    def fill(self) -> RestoreReport | None:
        """Fill live state; None where it failed, and `error` says why. Collective if other nodes were asked."""
        report = None
        rounds = None if self._exchange is None else PeerExchange(self._exchange, self.sources)
        with self.noting():
            report = self._fill(rounds)
        if rounds is not None:
            rounds.drain()
        return report

    def _fill(self, rounds: PeerExchange | None) -> RestoreReport:
        assert self.wished is not None
        sources, landing = self.sources, live_state.HostStaging()
        values = Values(sources, self.tracked.world.rank)
        with self.phase("plan"):
            targets = [landing.target(w.shard, w.tensor, w.box) for w in self.wished.wants if w.tensor is not None]
            for absent in self.wished.absent_state:
                tensor = absent.allocate()
                targets += [landing.target(s, tensor, b) for s, b in zip(absent.shards, absent.boxes, strict=True)]
            loose, loose_targets = self._value_tensors(values, sources)
        with self.phase("read"):
            everything = [*targets, *loose_targets]
            plan = plan_reads([t.shard for t in everything], [s.manifest.table for s in sources])
            plan.require_complete([s.name for s in sources])
            counts = execute(plan, Destinations.of(everything), sources, remote=rounds)
            landing.finish()
        with self.phase("values"):
            missing, reseeded = restore_values(
                self.tracked,
                values,
                _Loose(loose),
                step=self.candidate.identity[1],
                only=self.request.only,
            )
        if missing and (not self._is_whole or self.is_strict):  # settings that are tensors: known only now
            raise half_restored(missing)
        return self._report(counts, missing, reseeded)

    def _value_tensors(self, values: Values, sources: Sequence[Source]) -> tuple[dict[str, torch.Tensor], list[Target]]:
        """Return the tensors inside values, unfilled, and their targets."""
        names = live_state.Names([s.manifest for s in sources])
        loose: dict[str, torch.Tensor] = {}
        targets = []
        for name in sorted(value_tensors(self.tracked, values)):
            if name in names.known:  # no other: names inside values are told apart behind the coordinate
                shard = names.shard(name)
                tensor = loose[name] = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
                (box,) = boxes_of(name, tensor)
                targets.append(Target(shard=shard_of(name, shard.dtype, box, 0), buffer=live_state.bytes_of(tensor)))
        return loose, targets

    def _report(self, counts: RestoreCounts, missing: Sequence[str], reseeded: Sequence[str]) -> RestoreReport:
        assert self.wished is not None
        return RestoreReport(
            step=self.candidate.identity[1],
            generation=self.candidate.identity[0],
            life=0,
            tier_bytes=dict(counts.needed_bytes),
            missing=(*self.wished.missing, *missing),
            unexpected=tuple(self.unexpected),
            damaged=tuple(counts.damaged),
            read_bytes={tier: n for tier, n in counts.read_bytes.items() if n},
            manifest_bytes=len(self.manifest),
            reseeded=tuple(reseeded),
            is_same_layout=self._is_same_layout(self.wished.shards),
        )

    def _is_same_layout(self, wanted: Sequence[Shard]) -> bool:
        world = self.tracked.world
        own = next((source for source in self.sources if source.manifest.rank == world.rank), None)
        if own is None:
            return bool(self.sources) and self.sources[0].manifest.world_size == world.size
        table, boxes = own.manifest.table, boxes_by_name(wanted)
        held = boxes_by_name(map(table.shard, range(len(table))))
        if own.tier == "peer":  # it told only of the rows that it was chosen for
            boxes = {fqn: boxes[fqn] for fqn in held if fqn in boxes}
        return own.manifest.world_size == world.size and all(held.get(fqn) == boxes[fqn] for fqn in boxes)


class _Loose:
    """Gives the tensors inside values by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, name: str) -> torch.Tensor:
        """Return a filled tensor; ShardGapError if no source has it."""
        if name not in self._tensors:
            raise half_restored([name])
        return self._tensors[name]


def half_restored(names: Sequence[str]) -> ShardGapError:
    """Return the error for what turned out missing when live tensors were written already."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        expected=", ".join(names[:5]),
        state="Live state is a mixture and must not be trained on.",
        remedy="build the program as the run that took the snapshot did, and start it again",
    )


def missing_error(names: Sequence[str], unexpected: Sequence[str], *, is_whole: bool) -> ShardGapError:
    """Return the error for names that no source has."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if not is_whole:
        return ShardGapError(
            f"{names[0]!r}{more} is in no memory that can be reached",
            found="a snapshot of which some ranks are lost, and which is not committed on storage",
            expected=", ".join(names[:5]),
            state="Nothing was restored from it.",
            remedy="an older snapshot or checkpoint is tried next",
        )
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        found=f"instead: {', '.join(unexpected[:5])}" if unexpected else "",
        expected=", ".join(names[:5]),
        state="Nothing was restored.",
        remedy="restore(strict=False) leaves such state as it is; restore(only='model.*') takes a part",
    )
