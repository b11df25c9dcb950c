"""Faults where something ends: a job, the room on the root, a record that can no longer be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from flashckpt.daemon.persister import flush, service
from flashckpt.errors import FlashckptError
from flashckpt.shm.job_directory import JobDirectory
from simulation import memory
from simulation.clock import CLOCK
from simulation.hazards import kill_node
from simulation.job import Job
from simulation.machines import Node
from simulation.watches import Violation


def end_job(job: Job, target: int, value: float) -> None:
    """The job ends: ranks and agents leave, persisters commit what is newest and give memory back; later it is started again."""
    nodes = [node for node in job.nodes if node.is_up and node.agent is not None and node.agent.alive]
    if not job.ranks:
        return
    job.end_group()
    for node in nodes:
        assert node.agent is not None
        CLOCK.scheduler.call_as(node.agent, partial(node.directory.request, "ended"))
        node.agent.on_death.pop()  # nobody starts it again at once
        job.kill(node.agent)
        job.later(5 + 100 * value, partial(_again, job, node))


def _again(job: Job, node: Node) -> None:
    job.start_agent(node)
    job.start_if_idle()


def fill(job: Job, target: int, value: float) -> None:
    """The root has room for little more than what is there: what may be deleted makes room."""
    trouble = job.bucket.trouble
    trouble.room = job.bucket.nbytes + int(value * 2000)
    job.later(5 + value * 120, lambda: setattr(trouble, "room", 0))


def damage_generation(job: Job, target: int, value: float) -> None:
    """The record of a machine's generation is damaged; who cannot go on without it is given another machine."""
    node = job.nodes[target % len(job.nodes)]
    path = node.folder / "generation.msgpack"
    if not node.is_up or not path.exists():
        return
    raw = memory.FILES.find(path).buffer
    raw[int(value * len(raw))] ^= 1 << target % 8

    def replace() -> None:
        try:
            node.directory.read_generation()
        except FlashckptError:
            if not job.is_over:
                kill_node(job, node, loses=True, back_s=5.0)

    job.later(40.0, replace)


ENDINGS: dict[str, Callable[[Job, int, float], None]] = {
    "job ends": end_job,
    "storage fills": fill,
    "generation is damaged": damage_generation,
}


def given_back(job: Job, path: Any) -> None:
    """A persister removes the memory of a job that ended: what all held, or something newer, is on the root by then."""
    rules, before = job.rules, job.rules.best()
    memory.FILES.lose(str(path))
    node = next(node for node in job.nodes if str(node.folder) == str(path))
    node.control = None
    job.note("jobs that ended")
    rules.memory_lost(f"{path}/")
    after = rules.best()
    is_less = before is not None and (after is None or after.identity < before.identity)
    if before is not None and is_less and not rules.is_excused(before.identity):
        raise Violation(
            "what a job ends with is on the root", f"{before.identity}, and {after and after.identity} is left"
        )


def install(job_of: Callable[[], Job]) -> None:
    """Let a persister give memory back, and count what it deletes to make room; once per program."""

    def take_away(path: Any, base: int, *, locks: object, only_unused: bool = False) -> Any:
        CLOCK.scheduler.check()
        if JobDirectory(path).anyone_alive():
            return None
        given_back(job_of(), path)
        return path

    def room(*arguments: Any, **more: Any) -> Any:
        found = made(*arguments, **more)
        job_of().note("made room", bool(found.nbytes))
        return found

    made: Any = flush.__dict__["make_room"]
    flush.__dict__["make_room"] = room
    here = {"private_directory": lambda _: contextlib.nullcontext(0), "take_away": take_away}
    service.__dict__.update(here, remove_tree=lambda *_: None)
