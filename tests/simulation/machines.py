"""The machines of a job and what runs on them: a persister, ranks with their slots, the relay between the nodes."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import chunk_digests
from flashckpt.core.schema import TensorFigures
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.core.superblock import SegmentSpec, Superblock, encode_superblock
from flashckpt.daemon.persister.service import Daemon
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.sampler import ElasticSampler
from flashckpt.session.durability import Wanted
from flashckpt.shm.ack_relay import RESTS, AckRelay
from flashckpt.shm.acks import SnapshotAcks
from flashckpt.shm.control import PAGE, ROW_BYTES, Control
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.messages import MessageFiles
from flashckpt.shm.segment import Segment
from flashckpt.snapshot.segments import RankSegments
from simulation import memory, promises, relays, seams, watches
from simulation.clock import CLOCK, Killed, Process
from simulation.relays import Carrier
from simulation.samples import sampler_at
from simulation.states import State, table_of, whole_of

if TYPE_CHECKING:
    from simulation.job import Job

MANIFEST_BYTES, DATA_BYTES = 12 << 10, 4096


@dataclass(eq=False)
class Node:
    """One machine.

    Attributes:
        index: Its place in the job; also after it was replaced by another machine.
        life: Which machine it is.
        is_up: Whether it runs.
        agent: Process that starts ranks here; None where none runs.
        restart: Starts under this agent.
        agents: How many agents have run here.
        budget, steps, stores, way_back, went_back: What its agent decides with, and how often it went back after an error.
        failures: Of worker groups, that its agent has seen since the job came 20 steps further.
        highest: The most steps at one of them.
        persister: The daemon's process; None where none runs.
        relay: Of the first rank here.
        relay_saw, relay_has_rested: What its last turn was about, if it read anything, and whether there was nothing to wait for.
    """

    job: Job
    index: int
    life: int = 0
    is_up: bool = True
    agent: Process | None = None
    restart: int = 0
    agents: int = 0
    budget: Any = None
    steps: Any = None
    stores: Any = None
    way_back: Any = None
    went_back: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: int = 0
    highest: int = -1
    slowness: float = 1.0
    persister: Process | None = None
    daemon: Daemon | None = None
    relay: AckRelay | None = None
    relay_process: Process | None = None
    control: Control | None = None
    relayed_s: float = -1e9
    is_resting: bool = True
    relay_wakes: int = 0
    relay_saw: Any = None
    relay_has_rested: bool = False

    @property
    def folder(self) -> memory.SimPath:
        """The job directory."""
        return memory.SimPath(f"/n{self.index}.{self.life}/job")

    @property
    def directory(self) -> JobDirectory:
        """The product's view of it."""
        return JobDirectory(self.folder)  # type: ignore[arg-type]

    @property
    def agent_folder(self) -> memory.SimPath:
        """The folder of the agent that runs here."""
        return memory.SimPath(f"/n{self.index}.{self.life}/agent{self.agents}")

    @property
    def name(self) -> str:
        """For people, and as host name."""
        return f"n{self.index}"

    def make(self, rows: int) -> None:
        """Make the job directory where there is none yet, and its control page."""
        for name in ("", "/events", "/requests", "/replicas"):
            memory.FILES.folders.setdefault(f"{self.folder}{name}", {})
        if self.control is None or self.control.rows < rows:
            self.control = Control(mmap.mmap(-1, PAGE + rows * ROW_BYTES), rows)
            seams.controls[str(self.folder / "control")] = self.control

    def lose_memory(self) -> None:
        """Another machine takes its place."""
        memory.FILES.lose(str(self.folder.parent))
        self.life += 1
        self.control = None

    # -- persister -------------------------------------------------------------------------------------------

    def ensure_persister(self) -> None:
        """Start the persister where somebody wants one and none runs."""
        wanted = self.agent is not None and self.agent.alive
        if not self.is_up or not wanted or (self.persister is not None and self.persister.alive):
            return
        job = self.job
        process = self.persister = job.process(f"persister {self.name}", self.index)
        process.on_death.append(job.rules.persister_died)
        process.on_death.append(lambda: job.later(1.0 + job.random.random() * 2, self.ensure_persister))
        job.clock.scheduler.spawn(process, lambda: self._persist(process), delay_s=0.2 + job.random.random())

    def _persist(self, process: Process) -> None:
        lock = self.directory.hold_daemon()
        if lock is None:
            return
        times = DaemonTimeouts(linger_s=60.0, patience_s=300.0, grace_s=20.0)
        daemon = self.daemon = Daemon(self.directory, lock, times)
        files: Any = daemon._messages
        received = files.received

        def fresh(generation: int) -> Any:
            self.turn_relay_if_late()
            return received(generation)

        files.received = fresh
        daemon._wakeup.is_busy = lambda: _is_busy(daemon)  # type: ignore[attr-defined]
        self.job.say(process.name, "starts")
        daemon.run()
        lock.close()
        process.alive = False
        self.job.clock.scheduler.kill(process)
        for work in process.on_death:
            work()

    # -- relay -----------------------------------------------------------------------------------------------

    def turn_relay_if_late(self) -> None:
        """A relay turns once a second, whether it has something to say or not: only who reads it sees that."""
        process = self.relay_process
        is_late = CLOCK.scheduler.now - self.relayed_s > 0.9
        if is_late and process is not None and process.alive and process.paused_until <= CLOCK.scheduler.now:
            CLOCK.scheduler.call_as(process, self._turn_relay)

    def wake_relay(self, pause_s: float = 0.05) -> None:
        """Turn the relay soon, then ever more rarely until it has nothing more to learn."""
        process = self.relay_process
        self.relay_wakes += 1
        number = self.relay_wakes

        def turn() -> None:
            is_its = number == self.relay_wakes and process is self.relay_process and self.relay is not None
            if is_its and not self._turn_relay():
                self.wake_relay(min(2 * pause_s, 1.0))

        self.relay_rests = False
        self.job.later(pause_s, turn, process)

    @property
    def relay_rests(self) -> bool:
        """Whether its relay has nothing more to learn."""
        return self.is_resting

    @relay_rests.setter
    def relay_rests(self, rests: bool) -> None:
        self.is_resting = rests
        (self.job.resting.add if rests else self.job.resting.discard)(self.index)

    def _turn_relay(self) -> bool:
        self.relayed_s = CLOCK.scheduler.now
        assert self.relay is not None
        if relays.turns_in_vain(self):
            self.relay_rests = self.relay_has_rested
            return self.relay_rests
        try:
            self.relay_saw = relays.seen_by(self)
            self.relay_rests = self.relay_has_rested = self.relay.turn()
            self.relay_saw = None if self.relay._rested % RESTS else self.relay_saw
        except RuntimeError:
            self.relay_rests = False
        return self.relay_rests


def _is_busy(daemon: Daemon) -> bool:
    persisting = daemon.persisting
    if persisting is None:
        return True
    machine = persisting.negotiation
    is_wanting = (
        machine.persist is not None or machine.candidate is not None or any(map(machine._is_wanting, machine._heard))
    )
    return is_wanting or daemon.attempts.is_failing or daemon._stopping or daemon._goal is not None


@dataclass
class Rank:
    """One training process."""

    job: Job
    node: Node
    rank: int
    local: int
    process: Process
    record: Generation = field(default_factory=lambda: Generation(number=0))
    chain: str = ""
    data: str = ""
    superseded: SnapshotId | None = None
    writer: Any = None
    request: SnapshotRequest | None = None
    busy_until: float = 0.0
    has_taken: bool = False
    segments: RankSegments = field(init=False)
    acks: SnapshotAcks = field(init=False)
    sampler: ElasticSampler = field(init=False)
    wanted: Wanted = field(init=False)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.record.world_size

    def open_memory(self, world: int) -> Segment:
        """Take this rank's segment, or make one."""
        self.segments = RankSegments(self.node.directory, root_digest=1, rank=self.rank)
        layout = 0x1000 + world
        need: Any = SimpleNamespace(
            layout=layout, data_bytes=DATA_BYTES, manifest_bytes=MANIFEST_BYTES, slot_bytes=DATA_BYTES + MANIFEST_BYTES
        )
        segment = self.segments.own_existing(need)
        if segment is None:
            path = next(p for p in self.segments._paths(layout) if not p.exists())
            spec = SegmentSpec(
                job="job", root_digest=1, rank=self.rank, slots=self.job.setup.slots, manifest_capacity=MANIFEST_BYTES,
                data_capacity=DATA_BYTES, layout_hash=layout,
            )  # fmt: skip
            segment = make_segment(path, spec)
        reservation = self.segments._reservation
        reservation.segment = segment
        reservation.ready.set()
        return segment

    def begin_life(self, record: Generation, chain: str, data: str, restored: SnapshotId | None,
                   superseded: SnapshotId | None, locals_: int, left_out: tuple[int, int] = (0, 0)) -> None:  # fmt: skip
        """Start to train from a restored state, and from its position in the data, without the samples of some steps."""
        self.sampler = sampler_at(data, self.rank, record.world_size)
        done = 0 if record.parent is None else record.parent.step
        if data and left_out[1] > done:
            self.sampler.leave_out(done, *left_out)
        self.record, self.chain, self.superseded = record, chain, superseded
        first = self.local == 0
        control = self.node.control
        assert control is not None
        self.acks = SnapshotAcks(
            control=control, local_rank=self.local, rank=self.rank, world_size=record.world_size,
            local_world_size=locals_, generation=record.number, restored=restored, parent=record.parent,
            on_publish=self.node.wake_relay if record.world_size > locals_ else None,
        )  # fmt: skip
        self.wanted = Wanted(record.number)
        row = control.row(self.local)
        row.clear()
        row.rank, row.world_size, row.generation = self.rank, record.world_size, record.number
        if first and record.world_size > locals_:
            self.node.relay_process = self.process
            self.node.relay = AckRelay(
                control=control, store=Carrier(self.job, self.node.index), generation=record.number,
                firsts=self.job.firsts, first=self.rank, local_world_size=locals_,
                messages=MessageFiles(self.node.folder),  # type: ignore[arg-type]
            )  # fmt: skip
        self.acks.publish(self.segments.complete())

    # -- snapshots -------------------------------------------------------------------------------------------

    def take(self, step: int, *, is_persist: bool) -> None:
        """Begin the snapshot of a step, as `Session._take` and `_skip` do."""
        if is_persist:
            self.wanted.owe(step)
        id_ = SnapshotId(self.record.number, step)
        request = SnapshotRequest(
            id=id_, job="job", rank=self.rank, world_size=self.world, coordinates={}, parent=self.record.parent,
            persist=self.wanted.owed is not None, token=self.record.token,
        )  # fmt: skip
        writer = self.segments.begin(request, known=self.acks.known(), superseded=self.superseded)
        if writer is None:
            self.acks.publish(self.segments.complete(), low_watermark=id_)
            self.job.note("skips", 1)
            promises.skipped(self.job, id_)
            return
        if request.persist:
            self.wanted.begun(id_)
        self.writer, self.request = writer, request
        self.data = json.dumps(self.sampler.state_dict())
        self.job.rules.taken(State.of(id_, self.record.token), self.chain, self.world)
        whole = whole_of(self.chain, self.rank, self.world)
        writer.data[: len(whole) // 2] = whole[: len(whole) // 2]
        watches.memory_is_whole(self.job.rules, self.segments.segment)
        copy_s = self.job.setup.copy_s * self.node.slowness * (0.5 + self.job.random.random())
        self.job.later(copy_s, lambda: self._complete(writer, request, whole), self.process)

    def _complete(self, writer: Any, request: SnapshotRequest, whole: bytes) -> None:
        if self.writer is not writer:
            return
        self.writer = None
        if self.job.random.random() < self.job.setup.discards:
            writer.discard()
            self.wanted.discarded(request.id, RuntimeError("changed"), persist=request.persist)
            self.job.rules.discarded |= {request.id} if request.persist else set()
            self.acks.publish(self.segments.complete(), low_watermark=request.id)
            self.job.say(self.process.name, f"discards its snapshot of {request.id}")
            return
        writer.data[: len(whole)] = whole
        table, total = table_of(self.rank, self.world)
        digests = [
            chunk_digests(memoryview(whole)[start : start + nbytes])
            for start, nbytes in zip(table.byte_offset.tolist(), table.nbytes.tolist(), strict=True)
        ]
        state = State.of(request.id, request.token)
        values = {"step": request.id.step, "chain": self.job.rules.truth[state][0], f"rng@rank{self.rank}": b"r"}
        values["data"] = self.data
        figures, is_bad = TensorFigures.unknown(len(table)), self.job.rules.is_bad(state, self.rank)
        figures.suspect[0] = is_bad
        all_digests = np.concatenate(digests)
        manifest = Manifest.of(request, table=table, digests=all_digests, values=values, figures=figures)
        writer.commit(encode_manifest(manifest), data_bytes=total, suspect=2 * is_bad)
        self.acks.publish(self.segments.complete())
        wakes = (
            request.persist
            or self.job.setup.persist_s > 0
            or self.world > self.job.setup.per_node
            or not self.has_taken
        )
        self.has_taken = True
        with contextlib.suppress(FileNotFoundError):
            self.node.directory.notify(self.rank, wakes=wakes)


def make_segment(path: Any, spec: SegmentSpec) -> Segment:
    """Make a segment, as `Segment.create` does; what it reserves is beyond this simulation."""
    file = memory.FILES.make(path, spec.nbytes)
    block = Superblock(spec=spec, uid=os.getuid(), boot_id=bytes(16), created_ns=0)
    raw = encode_superblock(block)
    file.buffer[: len(raw)] = raw
    segment = Segment(path, memory.FILES.open(path), block, memory.SimBlock(file))
    segment.own()
    return segment


__all__ = ["Carrier", "Killed", "Node", "Rank", "make_segment"]
