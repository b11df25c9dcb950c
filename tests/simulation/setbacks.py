"""Faults after which the same comes back: a root that somebody empties, a step that fails again and again, partners that take nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashckpt.checkpoint.root_records import parse_prefix
from flashckpt.errors import FlashckptError, SharedMemoryError
from flashckpt.replicate import slots
from flashckpt.shm.segment import Segment
from simulation.clock import CLOCK
from simulation.hazards import kill_node
from simulation.job import Job
from simulation.machines import Node


def empty_root(job: Job, target: int, value: float) -> None:
    """Somebody, or a script, removes all that is on the root while the job runs, or is started again; or the checkpoints alone."""
    rules = job.rules
    job.note("emptied roots", bool(rules.committed))
    job.note("operator")
    job.is_operator = True
    for identity in filter(None, {parse_prefix(key.partition("/")[0]) for key in job.bucket.keys}):
        rules.removed_by_operator(identity)
    rules.is_emptied = True
    job.bucket.drop_all("" if target % 3 else "step-")
    if target % 3:
        rules.root_emptied()
    else:
        job.bucket.drop_all("catalog/")
    job.is_operator = False
    for node in job.nodes if value > 0.6 else ():
        kill_node(job, node, loses=False, back_s=2 + 20 * value)


def told_of_it(job: Job) -> None:
    """A start has ended with the error that the root is empty: a person reads it, and says that memory is to go on."""
    job.note("emptied roots that a person was told of")
    nodes = [node for node in job.nodes if node.is_up]
    for node in nodes:
        job.kill(node.persister)
        node.persister = None
        forget = partial(_forget, node)
        CLOCK.scheduler.spawn(job.process("operator", node.index), forget)
    job.end_agents(nodes)


def _forget(node: Node) -> None:
    """What `flashckpt forget --keep-memory --apply` does."""
    if (lock := node.directory.hold_daemon()) is not None:
        node.directory.forget_status()
        node.job.rules.told.pop(str(node.folder), None)
        lock.close()


@dataclass
class Failing:
    """A step that fails.

    Attributes:
        step: Which.
        left: How often it still does.
    """

    step: int
    left: int


def fail_at_step(job: Job, target: int, value: float) -> None:
    """The script fails at one step, with the same error each time: the agents go further and further back, or give up."""
    job.failing = Failing(job.step + 1 + target % 5, 2 + int(value * 5))


def hold_replicas(job: Job, target: int, value: float) -> None:
    """Somebody reads the replicas that a node keeps, or its memory is full: for a while it takes none."""
    node = job.nodes[target % len(job.nodes)]
    if target % 2:
        job.full.add(node.index)
        job.later(5 + 60 * value, lambda: job.full.discard(node.index))
        return
    reader, pins = job.process("reader", node.index), list[Any]()

    def pin() -> None:
        for path in node.directory.replica_segments():
            with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
                pins.extend(segment.pin(slot) for slot, one in enumerate(segment.headers()) if one.is_complete)
        job.note("replica slots that are read", sum(one is not None for one in pins))

    if node.is_up:
        CLOCK.scheduler.call_as(reader, pin)
    job.later(5 + 60 * value, partial(job.kill, reader))


SETBACKS: dict[str, Callable[[Job, int, float], None]] = {
    "root is emptied": empty_root,
    "a step fails": fail_at_step,
    "replica slots are held": hold_replicas,
}


def install(job_of: Callable[[], Job]) -> None:
    """Count what partners do not take, and let memory be full, once per program."""
    kind: Any = slots.ReplicaSlots
    begin, attach = kind.begin, kind._attach

    def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return begin(self, *arguments, **more)
        except slots.NoSlotError:
            job_of().note("replicas that found no slot")
            raise

    def attached(self: Any, path: Any, *arguments: Any) -> Any:
        process = CLOCK.scheduler.process
        if process is not None and process.node in job_of().full and not path.exists():
            job_of().note("replicas that found no memory")
            raise SharedMemoryError("there is too little shared memory")
        return attach(self, path, *arguments)

    kind.begin, kind._attach = counted, attached


__all__ = ["SETBACKS", "Failing", "install", "told_of_it"]
