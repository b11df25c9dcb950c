"""One simulation from its seed to its end, its story, and the shortest story that ends alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from simulation import agents, endings, leftovers, remembered, replicas, seams, setbacks, voting, watches
from simulation.calm import Calendar
from simulation.clock import CLOCK, Process, Spins
from simulation.job import Job, Setup
from simulation.plan import KINDS, Fault, draw
from simulation.states import State
from simulation.storage import SimStore, Trouble
from simulation.watches import Violation

_current: list[Job] = []
_draw = Random(0)
LIVELY_S = 900.0
"""Virtual seconds without a fault after which something that was taken in them is committed."""
EMPTIED_S = 120.0
"""The same where nothing else went wrong than that somebody emptied the root."""
READ_S = 120.0
"""And after which a person reads in the status that the run is fenced, and starts it again: the root is that of others."""


@dataclass
class Outcome:
    """How one simulation ended.

    Attributes:
        seed: Its seed.
        rule, problem: What was broken; "" if nothing was.
        story: What happened.
        faults: What went wrong on purpose.
        counts: Numbers.
        virtual_s: How much virtual time it took.
    """

    seed: int
    setup: Setup
    faults: list[Fault]
    rule: str = ""
    problem: str = ""
    story: list[tuple[float, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0

    def tell(self, last: int = 60) -> str:
        """Return the story in lines."""
        lines = [f"seed {self.seed}: {self.setup}", *(f"  {fault}" for fault in self.faults), ""]
        lines += [f"{at / 60:7.2f} min  {who:14} {what}" for at, who, what in self.story[-last:]]
        return "\n".join([*lines, "", f"BROKEN: {self.problem}" if self.rule else "nothing was broken"])


def prepare() -> None:
    """Put the simulation in the place of the machine; once per program."""
    if getattr(prepare, "done", False):
        return
    prepare.done = True  # type: ignore[attr-defined]

    def connect(process: Process) -> SimStore:
        return _current[0].connect(process)

    seams.install(
        connect,
        lambda: f"n{CLOCK.scheduler.process.node}" if CLOCK.scheduler.process is not None else "world",
        _draw,
    )
    replicas.install()
    watches.install()
    endings.install(lambda: _current[0])
    setbacks.install(lambda: _current[0])
    agents.install(lambda *_, **__: {one.step for one in _current[0].rules.committed})
    voting.install()
    remembered.install()
    kind: Any = Segment
    for name in ("_put_header", "_put_both_headers", "remove_names"):
        setattr(kind, name, _watched(getattr(kind, name)))
    write_status = JobDirectory.write_status

    def write(self: JobDirectory, status: Any) -> None:
        job, process = _current[0], CLOCK.scheduler.process
        job.rules.said(status.committed, str(self.path))
        job.rules.replicated(status.replicated)
        if process is not None and job.errors.get(process.name, "") != (found := status.error.partition("\n")[0]):
            job.errors[process.name] = found
            job.say(process.name, found or "works again")
        write_status(self, status)

    kind = JobDirectory
    kind.write_status = write


def _watched(method: Any) -> Any:
    def call(self: Segment, *arguments: Any) -> Any:
        answer = method(self, *arguments)
        path: Any = self.path
        headers = [State(h.identity, h.mark) for h in self.headers() if h.is_complete] if path.exists() else []
        if "/replicas/" in str(path):
            watches.replica_is_whole(_current[0].rules, self)
        _current[0].rules.segment_changed(path, headers)
        return answer

    return call


def simulate(
    seed: int, setup: Setup | None = None, faults: Sequence[Fault] | None = None, *, jumps: bool | None = None
) -> Outcome:
    """Run one simulation.

    Args:
        seed: Of everything that is random.
        setup: The job; None: as the seed draws it.
        faults: What goes wrong; None: as the seed draws it.
        jumps: What is like what was before is counted, and not run (`calm`); False: only looked at; None: neither.
    """
    prepare()
    drawn = draw(seed)
    setup, faults = setup or drawn[0], list(drawn[1] if faults is None else faults)
    _draw.seed(f"{seed} product")
    job = Job(setup, seed)
    job.on_empty = partial(setbacks.told_of_it, job)
    _current[:] = [job]
    outcome = Outcome(seed, setup, faults)
    try:
        _run(job, faults, jumps=jumps)
    except Violation as error:
        outcome.rule, outcome.problem = error.rule, str(error)
    except Spins as error:
        outcome.rule, outcome.problem = "time passes", str(error)
    finally:
        outcome.story, outcome.counts, outcome.virtual_s = job.story, dict(job.counts), CLOCK.scheduler.now
        try:
            CLOCK.scheduler.close(job.processes)
        except (Violation, Spins):
            pass
    return outcome


def _run(job: Job, faults: Sequence[Fault], *, jumps: bool | None) -> None:
    scheduler, setup = CLOCK.scheduler, job.setup
    job.begin()
    if jumps is not None:
        job.calendar = Calendar(job, jumps=jumps)
        job.calendar.run(faults, setup.faults_s, partial(_break, job))
    else:
        for fault in faults:
            scheduler.after(fault.at_s, partial(_break, job, fault))
        scheduler.run(setup.faults_s)
    _calm(job)
    while not _is_lively(job):
        lively_s = _lively_s(job)
        if scheduler.now >= job.calm_s + lively_s:
            raise Violation("liveness", f"nothing new was committed in {lively_s:.0f} s without a fault")
        if scheduler.now >= job.calm_s + READ_S and not job.counts["fenced"] and _is_fenced(job):
            job.note("fenced")
            KINDS["restart all nodes"](job, 0, 0.0)
        scheduler.run(scheduler.now + 10)
    scheduler.run(scheduler.now + setup.quiet_s)
    leftovers.check(job)


def _lively_s(job: Job) -> float:
    """Return the seconds within which something new is committed."""
    cycles_s = 3 * job.setup.persist_every * job.setup.step_s
    if job.met == {"root is emptied"} and not job.counts["failed starts"]:
        return EMPTIED_S + cycles_s
    # a step that a rank discards is no miss: the next one is persisted
    return LIVELY_S + (cycles_s if job.setup.discards else 0.0)


def _break(job: Job, fault: Fault) -> None:
    job.say("FAULT", f"{fault.kind} {fault.target} {fault.value:.2f}")
    job.met.add(fault.kind)
    KINDS[fault.kind](job, fault.target, fault.value)


def _calm(job: Job) -> None:
    """From here on nothing goes wrong any more."""
    job.say("world", "no more faults")
    job.calm_s, job.calm_step, job.calm_steps = CLOCK.scheduler.now, job.step, job.counts["steps"]
    for name, value in vars(Trouble()).items():
        setattr(job.bucket.trouble, name, value)
    job.cut_off.clear()
    job.mute.clear()
    job.deaf.clear()
    job.echoes = 0.0
    job.failing = None
    job.full.clear()
    for process in job.processes:
        CLOCK.scheduler.pause(process, 0.0)
        process.deadly_in = None
    if job.counts["stranger"]:
        KINDS["restart all nodes"](job, 0, 0.0)  # a person ends the run that is fenced, and starts it again


def _is_fenced(job: Job) -> bool:
    """Whether others have the number of the run, or a higher one: machines that it left had something to save, too."""
    return bool(job.ranks) and not job.rules.may_write(job.ranks[0].record)


def _is_lively(job: Job) -> bool:
    """Whether the ranks that run now took something after the last fault that is committed."""
    at_s = job.rules.taken_at
    running = job.ranks[0].record.number if job.ranks else -1
    return any(
        one.generation == running and at_s[one] > job.calm_s and one in job.rules.committed for one in job.committed_at
    )


def shrink(outcome: Outcome, limit: int = 60) -> Outcome:
    """Return the shortest story that breaks the same rule: fewer faults, then a smaller job."""
    best, tries = outcome, 0
    size = max(1, len(best.faults) // 2)
    while size and tries < limit:
        for start in range(0, len(best.faults), size):
            faults = best.faults[:start] + best.faults[start + size :]
            tries += 1
            found = simulate(best.seed, best.setup, faults)
            if found.rule == outcome.rule:
                best = found
                break
        else:
            size //= 2
    for change in ({"nodes": 1}, {"nodes": 2}, {"per_node": 1}, {"discards": 0.0}):
        smaller = replace(best.setup, **change)
        if smaller != best.setup and (found := simulate(best.seed, smaller, best.faults)).rule == outcome.rule:
            best = found
    return best
