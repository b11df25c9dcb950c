"""The start of a worker group: what all ranks know, which snapshot they choose, the generation that begins.

The choice, the reading of the root, the claim and the emptying of slots are the product's. Here is only what
`restore.coordinator` does between them, for all ranks at once; live state is a line of text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashckpt.checkpoint.catalog import read_root
from flashckpt.checkpoint.retention import reading
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest
from flashckpt.core.records import digest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FlashckptError, may_pass
from flashckpt.planning.inventory import Inventory, left_out, memory_is_current, node_names, unpack_all
from flashckpt.planning.selection import Candidate, Candidates, RootSummary, missing_on_root, refuse_damage, select
from flashckpt.restore import gather
from flashckpt.shm import agent_folder
from flashckpt.shm.segment import Segment
from simulation import seams
from simulation.clock import CLOCK
from simulation.machines import Node, Rank
from simulation.states import State, bytes_of
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job

_ROOT = "sim://root"


class RestoreFailed(Exception):  # noqa: N818
    """The start ends, and the agents try again; `may_pass`: for want of storage; `is_empty`: the root has lost its checkpoints."""

    may_pass = is_empty = False


class UncoveredError(DamagedError):
    """Not all of a state is in the replicas that are left of it."""


@dataclass(frozen=True)
class Restored:
    """What a start began with."""

    record: Generation
    identity: SnapshotId | None
    source: str
    chain: str
    data: str
    has_begun: bool = False  # each rank for itself
    left_out: tuple[int, int] = (0, 0)  # the steps whose samples are


class Restore:
    """One start.

    Args:
        job: The job.
        ranks: The ranks that start.
        step: Only this one is wanted; None: the newest.
    """

    def __init__(self, job: Job, ranks: list[Rank], step: int | None) -> None:
        self.job, self.ranks, self.step = job, ranks, step
        self._passed_over = False
        self._data = self._token = ""

    def run(self) -> Restored:
        """Restore all ranks together, or raise RestoreFailed."""
        job = self.job
        for rank in self.ranks:
            _call(rank, partial(rank.open_memory, len(self.ranks)))
        job.write_config(self.ranks)
        CLOCK.scheduler.sleep(0.2)
        try:
            inventories = self._gather()
            refuse_damage(inventories, "job")
            best = job.rules.best_for({str(rank.node.folder) for rank in self.ranks}, prefers_clean=True)
            root = None
            back = max(one.back for one in inventories)
            if self.step is not None or not memory_is_current(inventories) or back:
                root = self._ask(inventories)
            candidate, chain, root, found = self._search(inventories, root)
            identity = candidate.identity if candidate is not None else None
            if identity is None and self.step is not None:
                raise RestoreFailed(f"step {self.step} is no longer there")
            if identity is None and root is not None and root.error:
                raise RestoreFailed("the root cannot be asked, and memory holds none")
            # without an answer of the root memory goes on, whatever others did meanwhile: it is fenced once the root is there
            if not self._passed_over and not (candidate is not None and root is not None and root.error):
                state = None if identity is None else State.of(identity, self._token)
                asked = root is not None and not root.error
                job.rules.restored(
                    state,
                    chain,
                    best=best,
                    wanted=self.step,
                    asked=asked,
                    records=[one.generation for one in inventories if one.generation],
                    back=back,
                )
            record = self._claim(found, identity, root)
        except FlashckptError as error:
            raise failed(error) from error
        source = "fresh" if candidate is None else "storage" if candidate.on_root else "memory"
        data = self._data if identity is not None else ""
        return Restored(record, identity, source, chain, data, left_out=left_out(inventories))

    # -- what there is ---------------------------------------------------------------------------------------

    def _gather(self) -> list[Inventory]:
        """Return what all ranks publish, packed and unpacked as it is sent."""
        return unpack_all([self._inventory(rank.node).pack() for rank in self.ranks])

    def _inventory(self, node: Node) -> Inventory:
        directory = node.directory
        lineage, damage = gather._lineage(directory, _ROOT, {})
        return Inventory(
            node=f"{node.name}.{node.life}", slots=tuple(gather._slots(directory)), generation=lineage,
            restart=seams.under_agent(node.agent_folder, node.restart, lambda: gather._restarts(directory)), members=tuple(gather._members(directory)), host=node.name,
            committed=gather._committed(directory), damage=damage, back=node.way_back.back, leave_out=node.way_back.leave_out,
            has_claimed=(directory.path / gather.CLAIMS).exists(),
        )  # fmt: skip

    def _ask(self, inventories: Sequence[Inventory]) -> RootSummary:
        """Look at the root, with patience."""
        for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0):
            root = RootSummary.unpack(read_root(_ROOT, {}).pack())
            if not root.may_pass:
                break
            CLOCK.scheduler.sleep(pause_s)
        is_emptied = missing_on_root(inventories, root, select(inventories, root)) is not None
        if is_emptied and self.step is None:
            if not self.job.counts["operator"]:
                raise Violation("a root that is not empty is not called so", str(self.job.rules.committed))
            error = RestoreFailed("the root holds no checkpoint, although some were committed on it")
            error.is_empty = True
            raise error
        return root

    def _search(self, inventories: Sequence[Inventory], root: RootSummary | None) -> tuple[Any, str, Any, Any]:
        """Try candidates in their order, as `RestoreCoordinator._search`."""
        tried: set[tuple[SnapshotId, bool]] = set()
        while True:
            found = select(inventories, root or RootSummary(), step=self.step)
            left = [c for c in found.found if (c.identity, c.on_root) not in tried]
            if root is None and (
                not left or left[0].is_unfinished or left[0].is_suspect or tried or found.is_behind(left[0])
            ):
                root = self._ask(inventories)
                continue
            if not left:
                return None, "", root, found
            candidate = left[0]
            tried.add((candidate.identity, candidate.on_root))
            try:
                return candidate, self._read(candidate, inventories), root, found
            except FlashckptError as error:
                self.job.say("ranks", f"cannot use {candidate.identity}: {str(error).splitlines()[0]}")
                is_rotten = candidate.identity in self.job.rules.rotten
                if candidate.is_common and not is_rotten and not isinstance(error, UncoveredError):
                    raise Violation("what memory calls whole is whole", f"{candidate.identity}: {error}") from error
                if candidate.on_root and may_pass(error):
                    raise RestoreFailed("the root does not answer") from error
                self._passed_over = self._passed_over or candidate.is_whole

    # -- one candidate ---------------------------------------------------------------------------------------

    def _read(self, candidate: Candidate, inventories: Sequence[Inventory]) -> str:
        """Read all of a candidate, from memory where it is common, and compare it with its digests."""
        if candidate.is_common:
            return self._read_memory(candidate, inventories)
        if not candidate.on_root:
            raise DamagedError("memory does not cover the state")
        store = self.job.connect(self.ranks[0].process)
        with reading(store, prefix_of(*candidate.identity)) as manifest:
            self._check(manifest, lambda name: store.get(f"{prefix_of(*candidate.identity)}/{name}"))
            self._data, self._token = str(manifest.values["data"]), manifest.token
            return str(manifest.values["chain"])

    def _read_memory(self, candidate: Candidate, inventories: Sequence[Inventory]) -> str:
        names, chains, held, rows = node_names(inventories), set(), set(), set[tuple[str, int]]()
        nodes = {f"{rank.node.name}.{rank.node.life}": rank.node for rank in self.ranks}
        for holder in candidate.holders:
            if holder.rank in held:
                continue
            pin = _pin(nodes[names[holder.node]], holder.rank, candidate)
            if pin is None:
                raise DamagedError(f"rank {holder.rank} no longer holds it")
            with pin:
                manifest = pin.manifest()
                whole = bytearray(pin.nbytes)
                pin.read_into(0, memoryview(whole))
                self._check(manifest, lambda _, whole=whole: bytes(whole))
                rows |= {(manifest.table.fqn(row), holder.rank) for row in range(len(manifest.table))}
                self.job.note("replicas read", manifest.is_part)
                chains.add(str(manifest.values["chain"]))
                self._data, self._token = str(manifest.values["data"]), manifest.token
            held.add(holder.rank)
        if {rank for name, rank in rows if name == "weight"} != {*range(manifest.world_size)}:
            raise Violation("what memory calls whole is whole", f"{candidate.identity}: {sorted(rows)}")
        if len(rows) == len(held):
            raise UncoveredError("replicas alone lack what all ranks hold alike")
        if len(chains) != 1:
            raise Violation("one state per id", f"{candidate.identity} is of {len(chains)} states in memory")
        return chains.pop()

    @staticmethod
    def _check(manifest: Manifest, read: Any) -> None:
        """Compare bytes with digests, as a restore does, and with the truth."""
        table, objects = manifest.table, dict[str, bytes]()
        for row in range(len(table.nbytes)):
            name = manifest.objects[int(table.object_id[row])] if manifest.objects else ""
            if name not in objects:
                objects[name] = read(name)
            start, nbytes = int(table.byte_offset[row]), int(table.nbytes[row])
            raw = objects[name][start : start + nbytes]
            if digest(raw) != int(manifest.digests[int(table.first_chunk[row])]):
                raise DamagedError(f"{table.fqn(row)} is damaged")
            rank = int(table.offsets[table.dim_start[row]]) if table.fqn(row) == "weight" else -1
            if raw != bytes_of(str(manifest.values["chain"]), rank)[0 if rank >= 0 else 1]:
                raise Violation("what is restored is what was trained", f"{manifest.identity}, {table.fqn(row)}")

    # -- the generation that begins --------------------------------------------------------------------------

    def _claim(self, found: Candidates, parent: SnapshotId | None, root: RootSummary | None) -> Generation:
        """Claim a generation and write the lineage, as `gather.claim` and `gather.begin`."""
        world = len(self.ranks)
        self.job.rules.goes_on_in({str(rank.node.folder) for rank in self.ranks})
        token = f"{self.job.random.getrandbits(64):016x}"
        wanted = Generation(number=found.next_generation, token=token, parent=parent, world_size=world)
        if root is not None and not root.error:
            try:
                number = gather._claim_on_root(self.ranks[0].node.directory, _ROOT, {}, wanted)
                wanted = replace(wanted, number=number, claimed=True)
            except (FlashckptError, OSError):
                if parent is None:
                    raise
        wanted = replace(wanted, line=() if wanted.claimed else found.line)
        state = None if parent is None else State.of(parent, self._token)
        self.job.rules.begins(wanted, is_on_root=wanted.claimed, parent=state, starts=True)
        mates: dict[int, list[int]] = {}
        for rank in self.ranks:
            mates.setdefault(rank.node.index, []).append(rank.rank)
        for rank in self.ranks:
            own = rank.segments.segment
            directory, ranks = rank.node.directory, mates[rank.node.index]
            _call(rank, partial(gather.begin, directory, wanted, rank=rank.rank, ranks=ranks, own=own, found=found))
            if rank.local == 0:
                folder: Any = rank.node.agent_folder
                _call(rank, partial(agent_folder.write_job, folder, directory.path))
            CLOCK.scheduler.sleep(min(0.02, 1 / len(self.ranks)))  # each for itself: of many none waits for all
        return wanted


def failed(error: Exception) -> RestoreFailed:
    """Return how a start ends."""
    found = RestoreFailed(str(error).splitlines()[0])
    found.may_pass, found.is_empty = may_pass(error), "holds no checkpoint, although" in str(error)
    return found


def _call(rank: Rank, work: Callable[[], object]) -> None:
    """Let a rank do something; all of them fail where it is dead, and would wait for it in vain."""
    if not rank.process.alive:
        raise RestoreFailed(f"rank {rank.rank} is gone")
    CLOCK.scheduler.call_as(rank.process, work)


def _pin(node: Node, rank: int, candidate: Candidate) -> Any:
    kept = [path for path in node.directory.replica_segments() if path.name.startswith(f"r{rank:05d}-")]
    for path in [*node.directory.segments(rank=rank), *kept]:
        with contextlib.suppress(FileNotFoundError), contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                is_its = not candidate.mark or header.mark in (0, candidate.mark)
                if header.is_complete and is_its and header.identity == candidate.identity:
                    return segment.pin(slot)
    return None


__all__ = ["Restore", "RestoreFailed", "Restored", "failed"]
