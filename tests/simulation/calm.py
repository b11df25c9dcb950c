"""Jumps over calm: where nothing goes wrong, one cycle of a job is like the one before, and need not be run to be counted.

A cycle goes from one persist step to the next: steps, snapshots, one persist, its commit, retention. Before each persist step the
world is looked at; where it was `ALIKE` times the same one, but for the numbers of steps and the time, the *calendar* moves on by
whole cycles, to the last one before the next fault; once a job was calm for so long, `ALIKE_AGAIN` looks are enough. The world itself stands still: no clock and no step of the product moves. So a
jump leaves nothing inconsistent, and all that the product does about a fault, before and after it, is run, and watched by all rules.

**Why that is the same.** The product's decisions rest on what `Look` compares: snapshots and pins of each slot, leases, files and
descriptors, fibers and processes, what each persister negotiates and how much it remembers, what relays carry, every kind of object on
the root, and what happened in the cycle. Only what differs from cycle to cycle by chance is left out: fractions of seconds,
the position in the data (which `rules` checks in each step that is run), and what is younger than a cycle, as a request that is
under way; what leaks becomes older. Nothing is compared while a fault lasts, a machine is away or a process is paused.

**What is counted.** The length and the requests of a skipped cycle are the mean of those that were run in this job and found alike,
each without the chance by which its steps were shorter or longer than a step is on average.

**What grows older** than a cycle: sweeps come every half an hour, and keep their phase; what the last cycles did not write is older on
the root after a jump, so that a sweep takes what a fault has left. The budget of restarts is told the steps and seconds of the calendar.

**What a jump cannot show**: what takes more than a few cycles to go wrong, each of them alike (a counter that overflows, a listing
that grows to its next page, the tombstones of an hour, of which there are fewer here). Generations, claims and checkpoints that
are deleted do grow: all of them are made around faults. Seeds without jumps (`make simulate`) run hours in full; with `keep_every`
checkpoints become more in each cycle, and nothing is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flashckpt.checkpoint.root_records import TOMBSTONE, parse_prefix
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import housekeeping
from flashckpt.daemon.persister.negotiation import SWEEP_EVERY_S
from simulation import memory
from simulation.clock import CLOCK, Fiber
from simulation.storage import Trouble

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machines import Node
    from simulation.plan import Fault

ALIKE, ALIKE_AGAIN = 3, 2
"""Looks in a row that find the same, before the first jump of a job, and before a later one."""
_SIZED = (list, dict, set, frozenset, tuple)


@dataclass(frozen=True)
class Cycle:
    """One cycle that was run, and was like the one before.

    Attributes:
        seconds: How long it was, with steps of average length.
        requests: Of all nodes to the root, without those of sweeps.
        commit_s: From the snapshot to the commit.
    """

    seconds: float
    requests: int
    commit_s: float


@dataclass
class Skipped:
    """All that a job has skipped."""

    seconds: float = 0.0
    steps: int = 0
    cycles: int = 0
    requests: float = 0.0
    sweeps: int = 0
    jumps: int = 0
    commit_s: float = 0.0  # the sum of all


@dataclass
class Sweeps:
    """How many were run, and what they asked of the root."""

    count: int = 0
    requests: int = 0
    _work: Callable[..., None] = field(default=housekeeping.sweep_root)

    def __call__(self, store: Any, *rest: Any) -> None:
        """Sweep, and count."""
        before = store.asked
        self._work(store, *rest)
        self.count, self.requests = self.count + 1, self.requests + store.asked - before


class Look:
    """One look at the world.

    Attributes:
        state: What has to be equal; None: something is wrong, or not over.
    """

    def __init__(self, job: Job, before: Look | None, swept: int) -> None:
        self.job, self.now_s = job, CLOCK.scheduler.now
        self.newest = max(job.committed_at, default=None)
        self.counts = Counter(job.counts)
        self.late_s = job.late_s
        self.asked = sum(job.bucket.requests.values()) - swept
        self.descriptor = memory.FILES._descriptor
        self._near = (1 + (job.setup.keep_last or 3)) * job.setup.persist_every
        self.state: tuple[Any, ...] | None = None
        if before is not None and _is_calm(job):
            self.state = (self._happened(before), self._root(before), self._shared(before), *map(self._node, job.nodes))

    def is_like(self, before: Look | None) -> bool:
        """Whether the world is the same as it was at the look before."""
        return before is not None and self.state is not None and self.state == before.state

    def _step(self, identity: SnapshotId | None) -> Any:
        """Return a snapshot as seen from the present step; what is old, or of an earlier generation, is there for good."""
        if identity is None or identity.generation != self.job.ranks[0].record.number:
            return identity
        ago = self.job.step - identity.step
        return ago if ago < self._near else identity

    def _happened(self, before: Look) -> Any:
        counts = {what: number - before.counts[what] for what, number in self.counts.items()}
        return sorted((what, number) for what, number in counts.items() if number and " a " not in what)

    def _root(self, before: Look) -> Any:
        """Return how many objects there are of each kind; of tombstones, which stay for an hour, those of this cycle."""
        kinds = Counter[Any]()
        for key, (data, at_s) in self.job.bucket.objects.items():
            folder, _, name = key.rpartition("/")
            if data.startswith(TOMBSTONE) or name.endswith("_deleted"):
                kinds["deleted"] += at_s > before.now_s
            elif (identity := parse_prefix(folder)) is not None:
                kinds[self._step(identity), name.partition(".")[2] or name] += 1
            else:
                kinds[folder] += 1
        return sorted(map(repr, kinds.items()))

    def _shared(self, before: Look) -> Any:
        job, files = self.job, memory.FILES
        fibers = [one for process in job.processes if process.alive for one in process.fibers]
        return (
            len(job.carried),
            sorted(process.name for process in job.processes if process.alive),
            sum(number <= before.descriptor for number in files.descriptors),
            sum(len(folder) for folder in files.folders.values()),
            sum(_is_old(one, before.now_s) for one in fibers),
            {len(rank.chain) for rank in job.ranks},
        )

    def _node(self, node: Node) -> Any:
        """Return what one node holds, and what its persister is about."""
        rules, folder = self.job.rules, str(node.folder)
        slots = [
            (sorted(repr(self._step(state.identity)) for state in rules.held_in(f"{folder}/{name}")), _pins(file))
            for name, file in memory.FILES.folders[folder].items()
            if name.endswith(".seg")
        ]
        daemon, relay = node.daemon, node.relay
        if daemon is None or (persisting := daemon.persisting) is None:
            return slots
        machine, attempts = persisting.negotiation, daemon.attempts
        held = daemon, persisting, machine, machine._messaging, persisting._leases, persisting._proposals, relay
        common = self._step(max(relay._job.common, default=None)) if relay is not None else None
        return (
            slots,
            machine.persist is None,
            [self._step(one) for one in (machine.candidate, machine.floor, machine.committed, machine._owed)],
            self._step(machine._search.target) if machine._search.target > machine.floor else None,
            (attempts.is_failing, machine.given_up, daemon._goal, persisting.flush is None),
            max(2, common) if isinstance(common, int) else common,
            [_sizes(one) for one in held],
        )


def _is_calm(job: Job) -> bool:
    """Whether no fault lasts, nothing waits for one, and all are there."""
    if job.bucket.trouble != Trouble() or job.cut_off or job.mute or job.deaf or job.echoes or job.poison:
        return False
    if job.on_claim or job.on_start or job.on_commit or not job.ranks or job.failed_s is not None:
        return False
    now = CLOCK.scheduler.now
    if any(one.alive and (one.paused_until > now or one.deadly_in is not None) for one in job.processes):
        return False
    return all(
        node.is_up
        and node.slowness == 1.0
        and node.agent
        and node.agent.alive
        and node.persister
        and node.persister.alive
        for node in job.nodes
    )


def _is_old(fiber: Fiber, since_s: float) -> bool:
    return fiber.begun_s < since_s and not fiber.done


def _pins(file: memory.SimFile) -> list[int]:
    return sorted(len(holders) for byte, holders in file.locks.items() if byte and holders)


def _sizes(thing: Any) -> list[tuple[str, int]]:
    """Return how much a part of the product remembers."""
    known = vars(thing) if hasattr(thing, "__dict__") else {}
    return [(name, len(value)) for name, value in known.items() if isinstance(value, _SIZED) and not _is_tuple(value)]


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


class Calendar:
    """The time of a job: that of its world, and what was skipped.

    Args:
        job: The job.
        jumps: Skip; else everything is only looked at.

    Attributes:
        cycles: Those that were found alike.
        skipped: What was jumped over.
        sweeps: Of the root.
    """

    def __init__(self, job: Job, *, jumps: bool) -> None:
        self.job, self.skipped, self.sweeps = job, Skipped(), Sweeps()
        self._jumps = jumps
        self.cycles: list[Cycle] = []
        self._before: Look | None = None
        self._alike = 0
        self._due_s = 0.0
        job.on_cycle = self._look
        housekeeping.__dict__["sweep_root"] = self.sweeps

    @property
    def now_s(self) -> float:
        """Seconds of the calendar."""
        return CLOCK.scheduler.now + self.skipped.seconds

    @property
    def requests_of_sweeps(self) -> float:
        """Requests of the sweeps that were skipped."""
        return self.skipped.sweeps * self.sweeps.requests / max(1, self.sweeps.count)

    def run(self, faults: Sequence[Fault], until_s: float, strike: Callable[[Fault], object]) -> None:
        """Run the job through its faults, which come at times of the calendar."""
        try:
            for fault in sorted(faults, key=lambda fault: fault.at_s):
                self._run_to(fault.at_s)
                strike(fault)
            self._run_to(until_s)
        finally:
            housekeeping.__dict__["sweep_root"] = self.sweeps._work
            self.job.on_cycle = lambda: None

    def _run_to(self, at_s: float) -> None:
        self._due_s = at_s
        while self.now_s < at_s - 1e-6:
            CLOCK.scheduler.run(at_s - self.skipped.seconds)  # a jump ends it early

    def _look(self) -> None:
        """A persist step is about to begin."""
        before, now = self._before, Look(self.job, self._before, self.sweeps.requests)
        self._before = now
        self._alike = self._alike + 1 if now.is_like(before) else 0
        if before is None or self._alike == 0:
            return
        commit_s = (
            0.0 if now.newest is None else self.job.committed_at[now.newest] - self.job.rules.taken_at[now.newest]
        )
        seconds = (now.now_s - now.late_s) - (before.now_s - before.late_s)
        self.cycles.append(Cycle(seconds, now.asked - before.asked, commit_s))
        if self._jumps and self._alike >= (ALIKE_AGAIN if self.skipped.jumps else ALIKE) - 1:
            self._jump()

    def _jump(self) -> None:
        """Let whole cycles go by."""
        cycle_s = fmean(one.seconds for one in self.cycles)
        count = int((self._due_s - self.now_s) / cycle_s)
        if count < 1:
            return
        skipped, seconds = self.skipped, count * cycle_s
        self._grow_older(seconds)
        skipped.jumps += 1
        skipped.cycles += count
        skipped.seconds += seconds
        skipped.steps += count * self.job.setup.persist_every
        skipped.requests += count * fmean(one.requests for one in self.cycles)
        skipped.commit_s += count * fmean(one.commit_s for one in self.cycles)
        self.job.skipped = skipped.steps, skipped.seconds
        CLOCK.scheduler.stop()

    def _grow_older(self, seconds: float) -> None:
        """What no cycle touches is older behind a jump: what lies on the root, and when it was swept last."""
        since_s = CLOCK.scheduler.now - ALIKE * fmean(one.seconds for one in self.cycles)
        objects = self.job.bucket.objects
        for key, (data, at_s) in objects.items():
            if at_s < since_s:
                objects[key] = data, at_s - seconds
        for node in self.job.nodes:
            if node.daemon is not None and node.daemon.persisting is not None:
                node.daemon.persisting.negotiation._swept_s -= seconds % SWEEP_EVERY_S
                self.skipped.sweeps += int(seconds / SWEEP_EVERY_S)
