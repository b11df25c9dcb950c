"""What must be true at every moment of a simulation, found out apart from the product's own decisions."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from flashckpt.checkpoint.root_records import TOMBSTONE, decode_claim, parse_prefix
from flashckpt.core.lineage import Generation
from flashckpt.core.records import mark_of
from flashckpt.core.snapshot_id import NOTHING, SnapshotId
from simulation import memory, watches, wholeness
from simulation.clock import CLOCK
from simulation.lineages import Lineages
from simulation.samples import Samples
from simulation.states import State
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job


KNOWN_AFTER_S = 60.0
"""Virtual seconds after which a claim is known to all that may write."""


class Rules(Lineages, Samples):
    """The truth about one simulation.

    Attributes:
        ever: All that ever were.
        kept: What an operator has marked, and was told so.
    """

    def __init__(self, job: Job) -> None:
        Lineages.__init__(self)
        Samples.__init__(self)
        self.job = job
        self.taken_at: dict[SnapshotId, float] = {}
        self.ever: set[SnapshotId] = set()
        self._claimed_s: dict[int, float] = {}  # when each was
        self._held: dict[str, frozenset[State]] = {}  # per segment
        self._segments: Counter[State] = Counter()  # how many hold it
        self.folders: set[str] | None = None  # of the machines of the present worker group; what others hold is lost
        self._named: set[SnapshotId] = set()  # on the root, though packs may be damaged
        self._best: State | None = None
        self.kept: set[SnapshotId] = set()
        self._buried: set[SnapshotId] = set()  # by the product
        self._everywhere = NOTHING  # in the generation that runs, with replicas
        self._promised: SnapshotId | None = None  # the same, until a node or a persister is lost
        self.renewed_s = defaultdict[str, list[float]](list)  # of each lease
        self._tombs_s: dict[SnapshotId, float] = {}  # when a tombstone was written in its place
        self._removed_s: dict[SnapshotId, float] = {}  # when a person removed it, or the storage lost some of it
        self.rotten: set[SnapshotId] = set()  # bits of it turned over in memory
        self._given_up = NOTHING  # the newest that was
        self.cut_short: dict[SnapshotId, float] = {}  # when its MANIFEST was
        self.discarded = set[SnapshotId]()  # by a rank, though to be persisted
        self.is_emptied = False  # the root, and nothing was committed since
        self.told: dict[str, SnapshotId] = {}  # what was said to be committed, by folder

    # -- lineage ---------------------------------------------------------------------------------------------

    def begins(
        self, record: Generation, *, is_on_root: bool, parent: State | None = None, starts: bool = False
    ) -> None:
        """A generation is written down somewhere; `starts`: all ranks go on with it now."""
        mark = mark_of(record.token)
        if starts and not self.says_the_same(record):
            raise Violation("a claim has its parent", f"generation {record.number} began with {record.parent}")
        self._begun[record.number][mark] = self._begun[record.number].get(mark) or parent
        if is_on_root:
            self.on_root[record.number] = record.parent
            self._claims[record.number] = mark
            self._claimed_s.setdefault(record.number, CLOCK.scheduler.now)
        self.parents.setdefault(record.number, record.parent)
        if starts:
            self._promised, self._everywhere = None, SnapshotId(record.number, -1)
            self._goes_on(record.number, mark)
            self.parents = self._ancestors(record.number, mark)
        self._best = self.best()

    def best(self) -> State | None:
        """Return the newest snapshot that memory or storage can prove, on the line of the newest generation."""
        return self.best_for(self.folders)

    def best_for(self, folders: set[str] | None, *, prefers_clean: bool = False) -> State | None:
        """Return the newest, or the newest clean one, that can be proved with the memory of some machines alone."""
        alive = self._alive(folders, prefers_clean=prefers_clean)
        clean = [one for one in alive if not self.is_bad(one)] if prefers_clean else []
        return max(clean or alive, default=None)

    def _alive(self, folders: set[str] | None, *, prefers_clean: bool = False) -> list[State]:
        """Return all that can be proved so, and that nothing has rolled back."""
        holders: dict[State, set[int]] = defaultdict(set)
        own = set[State]()  # some rank's own memory holds it: what all ranks hold alike is in no replica
        for text, ids in self._held.items():
            if folders is None or text.rpartition("/")[0].removesuffix("/replicas") in folders:
                own |= ids if "/replicas/" not in text else set()
                for one in ids:
                    holders[one].add(int(text.rpartition("/")[2][1:6]))
        found = [
            one
            for one, ranks in holders.items()
            if len(ranks) == self.truth[one][1]
            and one in own
            and self._counts(one)
            and not (prefers_clean and one.identity in self.rotten)
        ]
        bounds = self.line(max(self.parents, default=0), self.parents)
        return [
            one
            for one in [*found, *self.committed.values()]
            if one.identity.step <= bounds.get(one.identity.generation, -1)
        ]

    # -- memory ----------------------------------------------------------------------------------------------

    def taken(self, state: State, chain: str, world: int) -> None:
        """A rank begins a snapshot."""
        identity = state.identity
        if (identity.generation, state.mark) not in self._used:
            self._used.add((identity.generation, state.mark))
            self._best = self.best()
        self.taken_at.setdefault(identity, CLOCK.scheduler.now)
        known = self.truth.setdefault(state, (chain, world))
        if known != (chain, world):
            raise Violation("one state per id", f"{identity} was taken of two states")

    def segment_changed(self, path: memory.SimPath, headers: list[State]) -> None:
        """The headers of a segment were written."""
        text = str(path)
        before, after = self._held.get(text, frozenset()), frozenset(headers)
        if before == after:
            return
        self._held[text] = after
        self._segments.update(after - before)
        self._segments.subtract(before - after)
        if self._best not in before - after and all(self._segments[one] < self.truth[one][1] for one in after - before):
            return  # neither is anything gone that counted, nor anything new common
        found = self.best()
        if self._best is not None and (found is None or found.identity < self._best.identity):
            raise Violation(
                "M1", f"{self._best.identity} was common or committed, and {found and found.identity} is left"
            )
        self._best = found

    def held_in(self, path: str) -> frozenset[State]:
        """Return what a segment held when it was last looked at."""
        return self._held.get(path, frozenset())

    def goes_on_in(self, folders: set[str]) -> None:
        """A start has chosen: what machines hold that are not in it is lost."""
        self.folders = folders
        self._best = self.best()

    def memory_lost(self, prefix: str) -> None:
        """A machine is gone: nobody promised what was there alone."""
        self._held = {text: ids for text, ids in self._held.items() if not text.startswith(prefix)}
        self._segments = Counter(one for ids in self._held.values() for one in ids)
        self._best = found = self.best()
        promised, self._promised = self._promised, None
        if promised is not None and (found is None or found.identity < promised):
            raise Violation(
                "what was everywhere outlives a node", f"{promised} was, and {found and found.identity} is left"
            )

    def replicated(self, identity: SnapshotId | None) -> None:
        """A persister says that the partners of all nodes hold a snapshot of the generation that runs."""
        if identity is not None and self.job.ranks and identity.generation == self.job.ranks[0].record.number:
            self.job.counts["replicated"] += identity > self._everywhere
            if identity > self._everywhere:
                self._everywhere = self._promised = identity

    def persister_died(self) -> None:
        """What it pinned may be overwritten: nothing is promised until something newer is everywhere."""
        self._promised = None

    # -- storage ---------------------------------------------------------------------------------------------

    def root_changed(self, kind: str, key: str, before: bytes | None, after: bytes | None) -> None:
        """An object was written or removed."""
        folder, _, name = key.rpartition("/")
        if name == "MANIFEST" and (identity := parse_prefix(folder)) is not None:
            self._manifest_changed(identity, before, after)
        elif folder == "generations" and kind == "put" and before is not None and before != after:
            raise Violation("one claim per number", f"the claim {key} was written over")
        elif self.job.is_operator and kind == "delete":
            return
        elif folder == "intents" and kind == "delete" and not name.endswith(".abandoned"):
            watches.intent_closed(self.job, name, max(self._given_up, *self.ever, NOTHING))
        elif folder == "keep" and (after or b"").startswith(TOMBSTONE) and (identity := parse_prefix(name)):
            waiting, self.job.on_claim = self.job.on_claim, []
            for work in waiting:
                work(identity)
        elif name.startswith("committer.") and kind == "put":
            # renewed in a folder that was removed, or copied with it: looks alike
            if before is None and parse_prefix(folder) not in self._removed_s and not self.job.is_operator:
                watches.lease_taken(self.job, key)
            self.renewed_s[key].append(CLOCK.scheduler.now)
        elif folder == "intents" and kind == "put" and before is None:
            self._may_decide(name)
            begun = self.job.bucket.objects.get(key.removesuffix(".abandoned"))
            if name.endswith(".abandoned"):  # and nothing up to it is persisted any more
                self._given_up = max(self._given_up, watches.identity_of(name))
            if begun and name.endswith(".abandoned"):
                watches.given_up(self.job, name, after or b"", CLOCK.scheduler.now - begun[1])
        elif folder == "generations" and after is not None:
            self.begins(decode_claim(after, key, "sim"), is_on_root=True)
        elif kind == "delete" and (identity := parse_prefix(folder)) in self.committed and name.startswith("r"):
            raise Violation("no data goes before its tombstone", f"{key} was deleted while {folder} is committed")
        elif (identity := parse_prefix(folder)) in self.committed and name.startswith("r") and before != after:
            assert identity is not None
            wholeness.check(self.job, identity)

    def _calendar_s(self) -> float:
        return CLOCK.scheduler.now + self.job.skipped[1]

    def _manifest_changed(self, identity: SnapshotId, before: bytes | None, after: bytes | None) -> None:
        was = identity in self.committed
        if after is None and before is not None and before.startswith(TOMBSTONE) and not self.job.is_operator:
            watches.tombstone_goes(identity, self._calendar_s() - self._tombs_s.get(identity, -1e9))
        if after is not None and after.startswith(TOMBSTONE):
            self._tombs_s[identity] = self._calendar_s()
            self._given_up = max(self._given_up, watches.buried(self.job, identity, before))
        if after is not None and not after.startswith(TOMBSTONE):
            if before is not None and before != after and not self.job.is_operator:
                raise Violation("one committed state per id", f"MANIFEST of {identity} was replaced")
            if self.job.is_operator:
                return
            known = {number: parent for number, parent in self.on_root.items() if self._is_known(number)}
            # no storage fences who stops between its last look and the write; and no reader takes what comes of it
            stopped = "hang node at a point" in self.job.met
            is_over = identity.step > self.line(max(known, default=0), known).get(identity.generation, float("inf"))
            if is_over and not stopped:
                raise Violation("nothing that was rolled back is committed", f"{identity}")
            self.committed[identity] = wholeness.state_of(self.job, identity)
            self._named.add(identity)
            self.ever.add(identity)
            self.is_emptied = False
            if CLOCK.scheduler.now - self._removed_s.get(identity, -1e9) > self.look_s():  # since then it was looked at
                wholeness.check(self.job, identity)
            self._best = max(filter(None, (self._best, self.best())), default=None)
            self.job.committed(identity)
            return
        if was and not self.job.is_operator:
            self._may_go(identity)
            self._buried.add(identity)
        self.committed.pop(identity, None)
        self._named.discard(identity)
        self._best = self.best()

    def _is_known(self, number: int, after_s: float = KNOWN_AFTER_S) -> bool:
        """Whether whoever looks at the root has seen a claim: not one that comes between a look and what follows it."""
        return CLOCK.scheduler.now - self._claimed_s.get(number, 0.0) > after_s

    def _may_decide(self, name: str) -> None:
        """Somebody opens an intent."""
        process = CLOCK.scheduler.process
        record = None if process is None else watches.generation_of(self.job.nodes[process.node])
        newest = max(filter(self._is_known, self._claims), default=0)
        # no storage fences who stops between its last look and the write
        has_stopped = process is not None and CLOCK.scheduler.now - process.paused_until < self.look_s()
        if record is not None and record.number < newest and not name.startswith("ready") and not has_stopped:
            raise Violation("who is fenced decides nothing", f"intent {name} of {record.number}, not {newest}")

    def look_s(self) -> float:
        """Return seconds in which what was looked at may have changed before it is acted on."""
        return 8 * self.job.setup.latency_s * self.job.bucket.trouble.slowness

    def spoilt(self, identity: SnapshotId) -> None:
        """The storage loses some of what is being written."""
        self._removed_s[identity] = CLOCK.scheduler.now

    def was_touched(self, identity: SnapshotId) -> bool:
        """Whether a person deleted or damaged it."""
        return identity in self._removed_s

    def is_excused(self, identity: SnapshotId) -> bool:
        """Whether a snapshot was given up, or damaged by something else than the product."""
        return identity <= self._given_up or identity in self.rotten or self.was_touched(identity)

    def _may_go(self, identity: SnapshotId) -> None:
        """Retention buries a checkpoint."""
        setup, look_s = self.job.setup, self.look_s()  # from the last look at the claims to the tombstone
        seen = {one: parent for one, parent in self.on_root.items() if self._is_known(one, look_s)}
        bounds = self.line(max(seen, default=0), seen)
        states = self.committed
        there = self._named | {one for one, at_s in self._removed_s.items() if CLOCK.scheduler.now - at_s < look_s}
        alive = sorted((one for one in there if one.step <= bounds.get(one.generation, -1)), reverse=True)
        last = max(1, setup.keep_last or len(alive))
        if identity in alive[:last]:
            raise Violation("nothing that retention protects is deleted", f"{identity}, of {alive[:4]}")
        whole_s = 2 * look_s  # the newest is verified before the others, the catalogue, and the claim of this one
        if identity in [one for one in alive if CLOCK.scheduler.now - self.cut_short.get(one, 1e9) < whole_s][:last]:
            raise Violation("retention keeps the newest whole checkpoints", f"{identity}, of {alive[:4]}")
        if identity in [one for one in alive if one not in states or not self.is_bad(states[one])][:last]:
            raise Violation("retention keeps the newest clean checkpoints", f"{identity}, of {alive[:4]}")
        if setup.keep_every and identity.step % setup.keep_every == 0 and identity in alive:
            raise Violation("nothing that retention protects is deleted", f"{identity}: keep_every {setup.keep_every}")
        if identity in self.kept:
            raise Violation("nothing that retention protects is deleted", f"{identity} has a keep mark")

    def surplus(self) -> list[SnapshotId]:
        """Return what is on the root although retention does not keep it."""
        if (last := self.job.setup.keep_last) is None:
            return []
        bounds, every = self.line(max(self.on_root, default=0), self.on_root), self.job.setup.keep_every
        alive = {one for one in self.committed if one.step <= bounds.get(one.generation, -1)}
        ordered = sorted(self.committed, key=lambda one: (one in alive, one), reverse=True)
        clean = [one for one in ordered if not self.is_bad(self.committed[one])]
        keeps = {*ordered[:last], *clean[:last], *self.kept, *(one for one in alive if every and one.step % every == 0)}
        return sorted(self.committed.keys() - keeps)

    def marked(self, identity: SnapshotId) -> None:
        """`flashckpt keep` said that a checkpoint is kept."""
        if identity in self._buried:
            raise Violation("nothing that retention protects is deleted", f"{identity} was kept after its deletion")
        self.kept.add(identity)

    def removed_by_operator(self, identity: SnapshotId) -> None:
        """A person deleted or damaged a checkpoint."""
        self.committed.pop(identity, None)
        self._removed_s[identity] = CLOCK.scheduler.now
        self._best = self.best()

    def root_emptied(self) -> None:
        """A person, or a script, removed all that was on the root."""
        self._claims.clear()
        self.on_root.clear()
        self.kept.clear()
        self._best = self.best()

    # -- what is said ----------------------------------------------------------------------------------------

    def said(self, committed: SnapshotId | None, folder: str) -> None:
        """A persister says what is committed, in the folder of its job."""
        if committed is not None:
            self.told[folder] = committed
        if committed is not None and committed not in self.ever:
            raise Violation("only what is committed is called so", f"{committed}")

    def restored(
        self,
        state: State | None,
        chain: str,
        *,
        best: State | None,
        wanted: int | None,
        asked: bool,
        records: list[Generation],
        back: int = 0,
    ) -> None:
        """All ranks have restored.

        Args:
            state: What; None: they start fresh.
            chain: The state that they have now.
            best: The newest that could be proved when they began.
            wanted: The step that somebody asked for.
            asked: Whether the root has answered.
            records: What the nodes that start know of generations.
            back: How far back the agents ask to go.
        """
        if state is None:
            if best is not None:
                raise Violation("a restore takes the newest", f"a fresh start, although {best.identity} is there")
            return
        identity = state.identity
        if self.truth[state][0] != chain:
            raise Violation("what is restored is what was trained", f"{identity}")
        if wanted is not None:
            return
        known = self._claims | {one.number: mark_of(one.token) for one in records}
        newest = max(known, default=0)
        line = self._ancestors(newest, known.get(newest, 0), known)
        if identity.step > self.line(newest, line).get(identity.generation, -1):
            raise Violation("nothing that was rolled back is restored", f"{identity}")
        if back:
            watches.went_back(self, identity, back)
            return
        if asked and best is not None and identity.generation > max(self.parents, default=0):
            raise Violation("nothing that others went on without is restored", f"{identity}, not {best.identity}")
        if best is not None and self.is_bad(state) and not self.is_bad(best):
            raise Violation("a restore prefers what is clean", f"{identity}, although {best.identity} is there")
        if best is not None and identity < best.identity and not self.is_bad(best):
            raise Violation("a restore takes the newest", f"{identity}, although {best.identity} is there")
