"""One job from its first start on: its agents start ranks, which restore, train, and die with their machines."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from flashckpt.core.lineage import BEGINNING
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.job_directory import JobConfig
from simulation import memory, promises, replicas, samples, seams, voting, watches
from simulation.agents import Agents
from simulation.clock import CLOCK, Killed, Process, Scheduler
from simulation.machines import Node, Rank
from simulation.restoring import Restore, RestoreFailed
from simulation.rules import Rules
from simulation.storage import Bucket, SimStore
from simulation.threads import wakers
from simulation.voting import Start

RESTORE_S = 1.3
"""Seconds from the start of ranks to their first step, about."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The kind of job that a seed draws.

    Attributes:
        nodes, per_node, spares: Of the job, and machines beyond it.
        slots: Per rank.
        replicate: Nodes that keep replicas of each.
        step_s: Seconds of a step; each is a snapshot step.
        persist_every: Steps.
        persist_s: Least seconds between two persists.
        copy_s: Seconds that a snapshot takes.
        discards: Share of snapshots that a rank discards.
        keep_last, keep_every: Retention.
        latency_s: Half of what a request takes.
        votes: Its ranks restore as the product does, each for itself; else the simulation decides for all of them at once.
        spread: Indexes count as large from the first byte on: MANIFEST names them.
        faults_s, quiet_s: How long faults happen, and how long none do once something was committed after them.
        restart_s: Seconds of a restart, about; 0: as they come.
    """

    nodes: int = 1
    per_node: int = 1
    spares: int = 1
    slots: int = 3
    replicate: int = 0
    step_s: float = 5.0
    persist_every: int = 6
    persist_s: int = 0
    copy_s: float = 1.0
    discards: float = 0.0
    keep_last: int | None = 3
    keep_every: int | None = None
    latency_s: float = 0.02
    votes: bool = False
    spread: bool = False
    faults_s: float = 300.0
    quiet_s: float = 5.0
    restart_s: float = 0.0


class Job:
    """The job and its world; also what is told of it.

    Attributes:
        nodes: The machines that it may run on; those beyond `wanted` are spare.
        wanted: Nodes that it runs on.
        poison: Above 0: the next step makes numbers bad.
        ranks: Of the present worker group; empty where none runs.
        story: What happened.
        counts: Numbers of things that happened.
    """

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.clock = setup, CLOCK
        CLOCK.scheduler, CLOCK.offset_s = Scheduler(), {}
        memory.reset()
        seams.forget(seed, spread=setup.spread)
        replicas.forget(self)
        voting.forget()
        wakers.clear()
        self.random = Random(f"{seed} job")
        self.bucket = Bucket(Random(f"{seed} storage"), setup.latency_s)
        self.rules = Rules(self)
        self.bucket.on_change = self.rules.root_changed
        self.is_operator = self.is_over = False
        self.processes: list[Process] = []
        self.story: list[tuple[float, str, str]] = []
        self.counts: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        self.carried: dict[str, bytes] = {}
        self.news = [0, 0]  # changes of what nodes say, and of what is said to all of them
        self.cut_off: set[int] = set()
        self.mute: set[int] = set()
        self.deaf: dict[int, dict[str, bytes]] = {}
        self.echoes = 0.0  # share of messages that come twice
        self.failing: Any = None  # the step that fails
        self.error = ""  # of the script, that ended the worker group
        self.skip: tuple[int, list[int]] | None = None  # what the present generation leaves out, and at which step
        self.full: set[int] = set()  # nodes whose memory is full
        self.on_empty: Callable[[], None] = lambda: None  # called where a start finds an empty root
        self.resting = set(range(setup.nodes + setup.spares))  # nodes whose relays learn nothing at present
        self.nodes = [Node(self, index) for index in range(setup.nodes + setup.spares)]
        self.wanted = setup.nodes
        self.ranks: list[Rank] = []
        self.firsts: list[int] = []
        self.step = self.poison = 0
        self.ask_step: int | None = None
        self._number = 0  # of the present attempt to run
        self._starting = False
        self._began_s, self._may_pass = 0.0, False
        self.agents = Agents()
        self.asked: tuple[Counter[int], int] = Counter(), 0  # requests by node and commits, until the last minute began
        self.committed_at: dict[SnapshotId, float] = {}
        self.on_claim: list[Callable[[SnapshotId], object]] = []  # what waits for the next claim of a deletion
        self.on_start: list[Callable[[list[Rank]], object]] = []  # and for the next start
        self.on_commit: list[Callable[[], None]] = []  # what waits for the next one
        self.holders: dict[str, Process | None] = {}  # who took each lease on a commit
        self.met: set[str] = set()  # kinds of faults until now
        self.failed_s: float | None = None  # since when no rank trains
        self.calm_s = 0.0  # when the faults ended, and which step it was, and how many were taken
        self.calm_step = self.calm_steps = 0
        self.on_cycle: Callable[[], None] = lambda: None  # called before each persist step
        self.late_s = 0.0  # that steps took longer than `step_s`, by chance
        self.calendar: Any = None  # where calm is jumped over
        self.skipped = 0, 0.0  # steps and seconds that were not run, since nothing happened in them
        self.outages: list[tuple[str, float]] = []  # what each ended with, and how long it was
        self.trains_since_s = 0.0

    # -- small things ----------------------------------------------------------------------------------------

    def process(self, name: str, node: int) -> Process:
        """Start a process."""
        made = Process(name, node)
        made.on_death.append(lambda: memory.let_go(made))
        made.on_death.append(lambda: _forget(made))
        self.processes.append(made)
        if len(self.processes) > max(200, 4 * len(self.nodes) * (self.setup.per_node + 2)):
            self.processes = [one for one in self.processes if one.alive or one.fibers]
        return made

    def later(self, delay_s: float, work: Callable[[], Any], process: Process | None = None) -> None:
        """Do something later."""
        CLOCK.scheduler.after(delay_s, work, process)

    def say(self, who: str, what: str) -> None:
        """Tell what happens."""
        self.story.append((CLOCK.scheduler.now, who, what))

    def note(self, what: str, count: int = 1) -> None:
        """Count what happens."""
        self.counts[what] += count

    def connect(self, process: Process) -> SimStore:
        """Open the root."""
        return SimStore(self.bucket, process, lambda _: True)

    def committed(self, identity: SnapshotId) -> None:
        """Something was committed."""
        promises.committed(self, identity)
        watches.nothing_is_passed_over(self, identity)
        self.committed_at[identity] = CLOCK.scheduler.now
        self.note("commits")
        told, self.on_commit = self.on_commit, []
        for work in told:
            work()
        self.say("root", f"{identity} is committed")

    # -- starts and ends of the worker group -----------------------------------------------------------------

    def begin(self) -> None:
        """Start it for the first time."""
        for node in self.nodes:
            self.start_agent(node)
        self.start_soon()
        self.later(promises.MINUTE_S, partial(promises.count_requests, self))

    def start_agent(self, node: Node) -> None:
        """An agent starts on a machine."""
        if self.is_over or not node.is_up or (node.agent is not None and node.agent.alive):
            return
        agent = node.agent = self.process(f"agent {node.name}", node.index)
        node.restart, node.agents = 0, node.agents + 1
        self.agents.begin(node)
        memory.FILES.folders[str(node.agent_folder)] = {}
        node.make(self.setup.per_node)
        agent.on_death.append(lambda: self._agent_died(node))
        CLOCK.scheduler.call_as(agent, node.directory.hold_live)
        node.ensure_persister()

    def _agent_died(self, node: Node) -> None:
        for rank in self.ranks:
            if rank.node is node:
                self.kill(rank.process)
        self.later(2 + self.random.random() * 5, lambda: self.start_agent(node))
        self.start_if_idle()

    def start_if_idle(self) -> None:
        """Start ranks unless they run: an agent that comes is a spare then."""
        if not self.ranks:
            self.start_soon()

    def start_soon(self) -> None:
        """Start ranks as soon as there are enough machines."""
        if not self._starting:
            self._starting = True
            soon_s, wanted_s = 1 + self.random.random() * 4, self.setup.restart_s
            self.later(max(0.0, wanted_s - RESTORE_S) if wanted_s else soon_s, self._start)

    def _start(self) -> None:
        self._starting = False
        now = CLOCK.scheduler.now
        able = [n for n in self.nodes if n.is_up and n.agent and n.agent.alive and n.agent.paused_until <= now]
        if len(able) < self.wanted:
            self.start_soon()
            return
        self.end_group()
        self._number += 1
        late = [node for node in able if self.random.random() < 0.05]
        in_time = [node for node in able if node not in late]
        used = self.agents.meet(in_time if len(in_time) >= self.wanted else able, self.wanted)
        number, self._began_s = self._number, CLOCK.scheduler.now + self.skipped[1]
        per = self.setup.per_node
        self.firsts = [at * per for at in range(len(used))]
        self.ranks = []
        for at, node in enumerate(used):
            node.make(per)
            node.relay, node.relay_process = None, None
            for local in range(per):
                rank = at * per + local
                process = self.process(f"rank {rank}", node.index)
                process.on_death.append(lambda: self._rank_died(number))
                self.ranks.append(Rank(self, node, rank, local, process))
        self.say("agents", f"start {len(self.ranks)} ranks on {', '.join(node.name for node in used)}")
        self.note("starts")
        first, ranks = self.ranks[0].process, self.ranks
        CLOCK.scheduler.spawn(first, lambda: self._restore(first, ranks, number), delay_s=0.5 + self.random.random())

    def end_group(self) -> None:
        """Kill all ranks that are left."""
        ranks, self.ranks = self.ranks, []
        self._number += 1
        for rank in ranks:
            self.kill(rank.process)
            rank.node.restart += 1

    def _rank_died(self, number: int) -> None:
        if number != self._number:
            return
        self.failed_s = CLOCK.scheduler.now if self.failed_s is None else self.failed_s
        self._number += 1  # the others are echoes
        self.later((0.1 + self.random.random() * 2) * (not self.setup.restart_s), self._recover)

    def _recover(self) -> None:
        if not (nodes := list({id(rank.node): rank.node for rank in self.ranks}.values())):
            self.start_soon()
            return
        ran_s, may_pass = CLOCK.scheduler.now + self.skipped[1] - self._began_s, self._may_pass
        step = self.step + self.skipped[0]
        error, self.error = self.error, ""
        decided = self.agents.judge(nodes, step=step, ran_s=ran_s, may_pass=may_pass, error=error)
        self._may_pass = False
        self.say("agents", f"end the other ranks: {decided.reason}")
        self.end_group()
        for node in nodes:
            if node.is_up and node.agent and node.agent.alive and node.agent.paused_until <= CLOCK.scheduler.now:
                CLOCK.scheduler.call_as(node.agent, partial(node.directory.ask, "persist-now"))
        if decided.restart:
            self.later(decided.pause_s, self.start_soon)
        else:
            self.note("given up")
            self.end_agents(nodes)

    def end_agents(self, nodes: list[Node]) -> None:
        """The agents of some nodes end; somebody starts the job again later, with new ones."""
        for node in nodes:
            self.kill(node.agent)

    def preempt(self) -> None:
        """Everybody is asked to stop: the ranks end after one step, the agents behind them, and the job is started again."""
        nodes = [node for node in self.nodes if node.is_up and node.agent is not None and node.agent.alive]
        self.end_group()
        for node in nodes:
            if node.agent is not None:
                CLOCK.scheduler.call_as(node.agent, partial(node.directory.ask, "persist-now"))
        self.end_agents(nodes)

    def kill(self, process: Process | None) -> None:
        """SIGKILL."""
        if process is not None and process.alive:
            CLOCK.scheduler.kill(process)

    def _restore(self, first: Process, ranks: list[Rank], number: int) -> None:
        wanted, self.ask_step = self.ask_step, None
        start = Start(self, ranks, wanted) if self.setup.votes else Restore(self, ranks, wanted)
        try:
            found = start.run()
        except RestoreFailed as error:
            self.start_failed(first, error)
            return
        if number != self._number:
            raise Killed
        record = found.record
        self.step = found.identity.step if found.identity is not None else 0
        self.say("ranks", f"generation {record.number} begins with {found.identity or 'nothing'}, {found.source}")
        self.trains_since_s = self.trains_since_s or CLOCK.scheduler.now
        if self.failed_s is not None:
            self.outages.append((found.source, CLOCK.scheduler.now - self.failed_s))
            self.failed_s = None
        restored = found.identity if found.source == "memory" else None
        superseded = found.identity if found.source == "storage" else None
        self.skip = samples.left_out(self.step, found.data, found.left_out)
        self.note("samples left out", len(self.skip[1]) if self.skip else 0)
        for rank in ranks if not found.has_begun else ():
            begin = partial(rank.begin_life, record, found.chain, found.data, restored, superseded)
            CLOCK.scheduler.call_as(rank.process, partial(begin, self.setup.per_node, found.left_out))
        if self.setup.replicate and len(self.firsts) > 1:
            replicas.write_session(self, ranks, record, restored, superseded)
        self.later(self.setup.step_s, lambda: self._train(ranks, number))

    def start_failed(self, process: Process, error: RestoreFailed) -> None:
        """A rank ends in its restore."""
        self.say("ranks", f"could not begin: {error}")
        self._may_pass = error.may_pass
        self.note("failed starts")
        if error.is_empty:
            self.on_empty()
        CLOCK.scheduler.kill(process)

    def write_config(self, ranks: list[Rank]) -> None:
        """Tell the persister of each node about the job."""
        for rank in ranks:
            if rank.local == 0:
                config = JobConfig(
                    job="job", root="sim://root", keep_last=self.setup.keep_last, keep_every=self.setup.keep_every,
                    persist_every=self.setup.persist_every, persist_s=self.setup.persist_s, world_size=len(ranks), node_count=len(self.firsts),
                    node=rank.node.index, replicate=self.setup.replicate, replica_address=rank.node.name,
                )  # fmt: skip
                directory = rank.node.directory
                memory.FILES.remove(directory.request_path("ended"))  # type: ignore[arg-type]
                CLOCK.scheduler.call_as(rank.process, partial(directory.write_config, config))

    # -- training --------------------------------------------------------------------------------------------

    def _train(self, ranks: list[Rank], number: int) -> None:
        """All ranks take a step together; whoever is paused or still copies keeps all of them waiting."""
        if number != self._number:
            return
        now = CLOCK.scheduler.now
        late = max((rank.process.paused_until for rank in ranks), default=0.0)
        if late > now or any(rank.writer is not None for rank in ranks):
            self.later(max(late - now, 0.2), lambda: self._train(ranks, number))
            return
        if self.failing is not None and self.failing.step == self.step + 1 and self.failing.left:
            self.failing.left -= 1
            self.error = "the same error"
            self.kill(ranks[0].process)
            return
        if (self.step + 1) % self.setup.persist_every == 0:
            self.on_cycle()
        self.step += 1
        self.note("steps")
        step, is_persist = self.step, self.step % self.setup.persist_every == 0
        generation = ranks[0].record.number
        before, drawn = ranks[0].chain, [sample for rank in ranks for sample in rank.sampler.next_ids().tolist()]
        chain = hashlib.blake2b(f"{ranks[0].chain} {generation} {step}".encode(), digest_size=12).hexdigest()
        self.rules.trained_on(before, chain, drawn, step=step, poison=self.poison, skip=self.skip)
        self.poison, self.skip = 0, None
        for rank in ranks:
            rank.chain = chain
            rank.sampler.commit()

            def take(rank: Rank = rank) -> None:
                if number == self._number or rank.process.alive:
                    rank.take(step, is_persist=is_persist)

            rank.writer = rank  # its snapshot has yet to begin
            self.later(self.random.random() * 0.2, partial(self._take, rank, take), rank.process)
        chance = 0.9 + 0.2 * self.random.random()
        self.late_s += self.setup.step_s * (chance - 1)
        self.later(self.setup.step_s * chance, lambda: self._train(ranks, number))

    @staticmethod
    def _take(rank: Rank, take: Callable[[], None]) -> None:
        rank.writer = None
        take()


def _forget(process: Process) -> None:
    wakers.pop(process, None)


__all__ = ["BEGINNING", "Job", "Setup"]
