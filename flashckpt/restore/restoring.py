"""The course of a restore on one rank: publish, choose together, fill, give values back, begin a new life.

Order: inventory (collective); choice (pure); coverage vote per candidate (collective); fill; vote that all
filled (collective); claim of the generation (rank 0, then collective); lineage written; abandoned slots EMPTY.
A death before the lineage is written leaves everything as it was, so the next start chooses the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashckpt import exchange
from flashckpt.checkpoint import root_view
from flashckpt.checkpoint.retention import reading
from flashckpt.checkpoint.root_view import RootView
from flashckpt.core.layout import boxes_by_name
from flashckpt.core.reshard import plan_reads
from flashckpt.core.superblock import boot_id
from flashckpt.errors import DamagedError, FlashckptError, RootError, ShardGapError
from flashckpt.memory.job import GenerationRecord, JobDirectory
from flashckpt.memory.segment import Segment
from flashckpt.report import RestoreReport
from flashckpt.restore import live_state, new_life
from flashckpt.restore.fill import RestoreCounts, Target, fill
from flashckpt.restore.restore_point import (
    Candidates,
    Inventory,
    candidates,
    local_world,
    memory_is_current,
    nothing_there,
)
from flashckpt.restore.sources import MemorySource, Source, StorageSource
from flashckpt.tracking.placement import boxes_of, shard_of
from flashckpt.tracking.tracked import Tracked

_log = logging.getLogger("flashckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller of `restore()` wants.

    Attributes:
        root: Root URL to read from.
        step, generation: Only these, or None for the newest.
        only: A pattern over names, or None.
        strict: Names that no source has are an error.
        threads: Threads of a fill; None chooses.
    """

    root: str
    step: int | None = None
    generation: int | None = None
    only: str | None = None
    strict: bool = True
    threads: int | None = None

    @property
    def is_partial(self) -> bool:
        """Whether a new lineage begins with it."""
        return self.only is not None


@dataclass(kw_only=True)
class Outcome:
    """What a restore ended with.

    Attributes:
        report: None on a fresh start.
        record: The life that begins.
        superseded: Identity of the checkpoint on storage that was restored from, or None.
        inventories: Of all ranks.
    """

    report: RestoreReport | None
    record: GenerationRecord
    superseded: tuple[int, int] | None
    inventories: list[Inventory]


@dataclass(kw_only=True)
class Course:
    """One restore of one rank. Call `inventory`, then `run`.

    Attributes:
        tracked: The live objects.
        directory: The job's memory on this node; None reads the root alone.
        options: Storage options.
        request: What is wanted.
    """

    tracked: Tracked
    directory: JobDirectory | None
    options: dict[str, Any]
    request: Request
    own: Segment | None = None
    """The segment this process owns already (a lock of its own would keep a second descriptor out)."""
    seconds: dict[str, float] = field(default_factory=dict)
    root: RootView = field(default_factory=RootView)
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
        """Publish what this node has; return what all have. Collective."""
        assert self.directory is not None
        with self.phase("inventory"):
            status = self.directory.path.stat()
            record = self.directory.read_generation()
            mine = Inventory(
                node=f"{boot_id().hex()}:{status.st_dev}:{status.st_ino}",
                slots=tuple(self._slots()),
                generation=None if record is None else (record.generation, record.parent),
                restart=int(os.environ.get("FLASHCKPT_RESTART") or 0),
                need_bytes=need_bytes,
                free_bytes=free_bytes,
            )
            return [Inventory.unpack(packed) for packed in exchange.all_gather(mine.pack())]

    def _segments(self) -> list[Path]:
        return [] if self.directory is None else self.directory.segments()

    def _slots(self) -> Iterator[tuple[int, int, int, int, int, tuple[int, int] | None]]:
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
                view = root_view.look(self.request.root, self.options).pack() if self._is_rank_0 else None
                self.root = RootView.unpack(exchange.from_rank_0(view))
                self.asked_root = True

    @property
    def _is_rank_0(self) -> bool:
        return self.tracked.world.rank == 0

    # -- choice ------------------------------------------------------------------------------------------

    def run(self, inventories: list[Inventory]) -> Outcome:
        """Restore, or find that there is nothing to restore; claim the life that begins. Collective.

        Raises:
            NoCheckpointError: The wanted step exists nowhere.
            ShardGapError: Something exists and none of it covers the state.
            RootError: The root cannot be asked and memory does not cover the state.
        """
        explicit = self.request.step is not None or self.request.generation is not None
        if explicit or not memory_is_current(inventories):
            self._ask_root()
        found, report = self._try_all(inventories)
        if report is None and not self.asked_root:
            self._ask_root()
            found, report = self._try_all(inventories)
        if report is None:
            self._refuse_silent_fresh_start(found, explicit=explicit)
        parent = None if report is None or self.request.is_partial else (report[0].generation, report[0].step)
        with self.phase("lineage"):
            record = self._begin_life(found.life, parent, inventories)
        superseded = parent if report is not None and parent is not None and report[1] else None
        self.seconds["total"] = time.perf_counter() - self.started
        final = None if report is None else _with(report[0], record.generation, self.seconds)
        return Outcome(report=final, record=record, superseded=superseded, inventories=inventories)

    def _try_all(self, inventories: Sequence[Inventory]) -> tuple[Candidates, tuple[RestoreReport, bool] | None]:
        """Try candidates newest first until every rank could fill one; (report, whether it is on storage)."""
        with self.phase("decide"):
            found = candidates(inventories, self.root, step=self.request.step, generation=self.request.generation)
        self._last_error: FlashckptError | None = None
        for identity, _in_memory, on_root in found.identities:
            report = self._try(identity, on_root=on_root)
            if report is not None:
                return found, (report, on_root)
        return found, None

    def _begin_life(
        self, number: int, parent: tuple[int, int] | None, inventories: Sequence[Inventory]
    ) -> GenerationRecord:
        record = new_life.claim(
            number,
            parent,
            world=self.tracked.world,
            root=self.request.root if self.asked_root and not self.root.error else None,
            options=self.options,
        )
        assert self.directory is not None
        ranks = local_world(inventories, self.tracked.world.rank)
        new_life.begin(self.directory, record, rank=self.tracked.world.rank, ranks=ranks, own=self.own)
        return record

    def start_anew(self, inventories: list[Inventory]) -> Outcome:
        """Begin a life without restoring anything of this job (a warm start fills the state from elsewhere). Collective."""
        self._ask_root()
        number = candidates(inventories, self.root).life
        record = self._begin_life(number, None, inventories)
        return Outcome(report=None, record=record, superseded=None, inventories=inventories)

    def read(self) -> RestoreReport:
        """Fill live state from the root alone and begin no life (read-only access). Collective; errors as `run`."""
        self._ask_root()
        found, report = self._try_all([])
        if report is None:
            self._refuse_silent_fresh_start(found, explicit=True)
            raise AssertionError
        self.seconds["total"] = time.perf_counter() - self.started
        return _with(report[0], 0, self.seconds)

    def _refuse_silent_fresh_start(self, found: Candidates, *, explicit: bool) -> None:
        if self._last_error is not None:
            raise self._last_error
        if self.root.error and not found.identities:
            raise RootError(
                f"the root {self.request.root} cannot be asked for checkpoints, and memory holds none",
                found=self.root.error.splitlines()[0],
                state="Nothing was restored: a fresh start could repeat a run that is already on storage.",
                remedy="make the root reachable, or start with another root",
            )
        if explicit:
            step = self.request.step if self.request.step is not None else -1
            raise nothing_there(step, self.request.generation, found, self.request.root)

    # -- one candidate -----------------------------------------------------------------------------------

    def _try(self, identity: tuple[int, int], *, on_root: bool) -> RestoreReport | None:
        """Fill live state from one identity, if every rank can. Collective: two votes."""
        with contextlib.ExitStack() as stack:
            wished: live_state.Wishes | None = None
            sources: list[Source] = []
            try:
                with self.phase("plan"):
                    sources = self._open(identity, stack, on_root=on_root)
                    wished = self._covered(sources)
            except (FlashckptError, OSError) as error:
                self._note(identity, error)
            if not _all(wished is not None):
                return None
            assert wished is not None
            report = None
            try:
                report = self._fill(identity, sources, wished)
            except (FlashckptError, OSError) as error:
                self._note(identity, error)
            return report if _all(report is not None) else None

    def _note(self, identity: tuple[int, int], error: Exception) -> None:
        _log.warning("step %d of generation %d is not restored: %s", identity[1], identity[0], error)
        if self._last_error is None:
            self._last_error = error if isinstance(error, FlashckptError) else DamagedError(str(error))

    def _open(self, identity: tuple[int, int], stack: contextlib.ExitStack, *, on_root: bool) -> list[Source]:
        """Return the sources of one identity, nearest first: own slot, the node's other slots, storage."""
        found: list[MemorySource] = []
        for path in self._segments():
            with contextlib.suppress(FlashckptError, OSError):
                segment = stack.enter_context(contextlib.closing(Segment.attach(path)))
                for slot, header in enumerate(segment.headers()):
                    if header.is_complete and header.identity == identity:
                        source = MemorySource(segment, slot, identity=identity)
                        stack.callback(source.close)
                        found.append(source)
        rank = self.tracked.world.rank
        sources: list[Source] = [*sorted(found, key=lambda s: (s.manifest.rank != rank, s.manifest.rank))]
        if on_root:
            sources += self._open_root(identity, stack, optional=bool(sources))
        return sources

    def _open_root(self, identity: tuple[int, int], stack: contextlib.ExitStack, *, optional: bool) -> list[Source]:
        prefix = self.root.prefixes[self.root.committed.index(identity)]
        try:
            store = stack.enter_context(root_view.opened(self.request.root, self.options))
            source = StorageSource(store, stack.enter_context(reading(store, prefix)), prefix)
        except (FlashckptError, OSError):
            if not optional:
                raise
            return []
        stack.callback(source.close)
        return [source]

    def _covered(self, sources: Sequence[Source]) -> live_state.Wishes:
        """Return what is wanted; raise where the sources do not cover it."""
        manifests = [s.manifest for s in sources]
        structure = self.tracked.structure(self.tracked.capture())
        wished = live_state.wishes(self.tracked, structure, manifests, self.request.only)
        if wished.missing and self.request.strict and self.request.only is None:
            raise _missing(wished.missing, wished.unexpected)
        plan_reads(wished.shards, [m.table for m in manifests], names=[s.name for s in sources])
        return wished

    def _fill(self, identity: tuple[int, int], sources: Sequence[Source], wished: live_state.Wishes) -> RestoreReport:
        landing = live_state.Landing()
        values = live_state.Values(sources, self.tracked.world.rank)
        with self.phase("plan"):
            targets = [landing.target(w.shard, w.tensor, w.box) for w in wished.wants if w.tensor is not None]
            for absent in wished.absent_state:
                tensor = absent.allocate()
                boxes = boxes_of(absent.fqn, tensor)
                targets += [landing.target(s, tensor, b) for s, b in zip(absent.shards, boxes, strict=True)]
            loose, loose_targets = self._value_tensors(values, sources)
        with self.phase("read"):
            counts = fill([*targets, *loose_targets], sources, threads=self.request.threads)
            landing.finish()
        with self.phase("values"):
            missing = live_state.restore_values(
                self.tracked, values, loose.__getitem__, step=identity[1], only=self.request.only
            )
        if missing and self.request.strict and self.request.only is None:
            raise _missing(missing, [])
        return self._report(identity, counts, wished, missing, sources)

    def _value_tensors(
        self, values: live_state.Values, sources: Sequence[Source]
    ) -> tuple[dict[str, torch.Tensor], list[Target]]:
        """Return the tensors inside values, unfilled, and their targets."""
        names = live_state.Names([s.manifest for s in sources])
        loose: dict[str, torch.Tensor] = {}
        targets = []
        for name in sorted(live_state.value_tensors(self.tracked, values)):
            if (known := names.find(name)) is not None:
                shard = names.shard(known)
                tensor = loose[name] = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
                (box,) = boxes_of(name, tensor)
                targets.append(Target(shard=shard_of(known, shard.dtype, box, 0), buffer=live_state.bytes_of(tensor)))
        return loose, targets

    def _report(
        self,
        identity: tuple[int, int],
        counts: RestoreCounts,
        wished: live_state.Wishes,
        missing: Sequence[str],
        sources: Sequence[Source],
    ) -> RestoreReport:
        own = next((s.manifest for s in sources if s.manifest.rank == self.tracked.world.rank), None)
        same = own is not None and own.world_size == self.tracked.world.size
        if own is not None:
            held = boxes_by_name(map(own.table.shard, range(len(own.table))))
            same = same and all(held.get(fqn) == boxes for fqn, boxes in boxes_by_name(wished.shards).items())
        elif sources:
            same = sources[0].manifest.world_size == self.tracked.world.size
        return RestoreReport(
            step=identity[1],
            generation=identity[0],
            life=0,
            tier_bytes=dict(counts.needed_bytes),
            missing=(*wished.missing, *missing),
            unexpected=tuple(wished.unexpected),
            damaged=tuple(counts.damaged),
            is_same_layout=same,
        )


def _all(mine: bool) -> bool:
    """Tell whether every rank says yes. Collective."""
    return all(exchange.all_gather(mine))


def _with(report: RestoreReport, life: int, seconds: dict[str, float]) -> RestoreReport:
    return replace(report, life=life, seconds=dict(seconds))


def _missing(names: Sequence[str], unexpected: Sequence[str]) -> ShardGapError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        found=f"instead: {', '.join(unexpected[:5])}" if unexpected else "",
        expected=", ".join(names[:5]),
        state="Nothing was restored.",
        remedy="restore(strict=False) leaves such state as it is; restore(only='model.*') takes a part",
    )
