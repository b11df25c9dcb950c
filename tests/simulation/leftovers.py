"""What is left when a simulation is over: pins, slots, segments, and what lies on the root once it was swept."""

from __future__ import annotations

import contextlib

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.intents import READY
from flashckpt.checkpoint.retention import KEEP, LEASES, Policy
from flashckpt.checkpoint.root_records import TOMBSTONE, parse_prefix, prefix_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.housekeeping import sweep_root
from flashckpt.errors import FlashckptError
from flashckpt.shm.segment import Segment
from simulation import memory, watches
from simulation.clock import CLOCK
from simulation.job import Job
from simulation.machines import Node
from simulation.watches import Violation

SEEN_S = 4.0
"""Seconds after a commit in which each persister has had a turn."""


def _forgotten_pins(node: Node) -> list[SnapshotId]:
    """Return what a persister holds pinned, and neither persists nor proposes."""
    daemon = node.daemon
    if node.persister is None or not node.persister.alive or daemon is None or daemon.persisting is None:
        return []
    machine = daemon.persisting.negotiation
    used = {machine.candidate, None if machine.persist is None else machine.persist.intent.identity}
    sought, there = daemon.persisting._seeker._held, node.directory.segments()
    is_there = any(h.identity == sought and h.is_complete for path in there for h in Segment.attach(path).headers())
    forgotten = [one for one in daemon.persisting._pins if one not in used]
    return sorted(forgotten if sought is None or is_there else [*forgotten, sought])


def check(job: Job) -> None:
    """Nothing is held for ever."""
    for folder, files in memory.FILES.folders.items():
        if not folder.endswith("/job"):
            continue
        for name, file in files.items():
            if name.endswith(".seg"):
                # beside what a rank writes: what is persisted or proposed, and what was found while the root was asked
                pinned = [byte for byte, holders in file.locks.items() if byte and not all(holders.values())]
                if len(pinned) > 2 + 2 * job.setup.replicate:
                    raise Violation("no pin is held for ever", f"{folder}/{name}: {len(pinned)} slots")
    if extra := [one for node in job.nodes for one in _forgotten_pins(node)]:
        raise Violation("no pin is held for ever", f"{extra}, which nobody persists")
    _segments_go(job)
    job.is_over = True
    for process in list(job.processes):
        process.on_death.clear()  # nobody starts anything any more
        CLOCK.scheduler.kill(process)
    process = job.process("sweeper", 0)
    problem, listed = list[str](), set[SnapshotId]()
    for hours in (2, 4, 6, 8):  # a folder that a late writer left something in takes three of them
        CLOCK.offset_s[0] = 3600.0 * hours
        CLOCK.scheduler.spawn(process, lambda: _sweep(job, problem, listed))
        CLOCK.scheduler.run(CLOCK.scheduler.now + 60)
    if problem:
        raise Violation("a sweep works", problem[0])
    _on_root(job, listed)


def _on_root(job: Job, listed: set[SnapshotId]) -> None:
    """What lies on the root once it was swept: what retention keeps, all of it listed, and nothing else."""
    newest = max(job.rules.committed)
    there = {KEEP + prefix_of(*one) for one in job.rules.committed}
    if claims := [key for key in there & job.bucket.objects.keys() if job.bucket.objects[key][0].startswith(TOMBSTONE)]:
        raise Violation("nothing leaks", f"{claims}: what is there is claimed for its deletion")
    left = [key for key in job.bucket.keys if key.startswith("intents/0") and watches.identity_of(key[8:]) < newest]
    if left:
        raise Violation("nothing leaks", f"{left[:4]} although {newest} is committed")
    names = {key.partition("/")[0] for key in job.bucket.keys if key.startswith("step-")}
    ids = {parse_prefix(name) for name in names}
    old = sorted(one for one in ids if one is not None and one < newest and one not in job.rules.committed)
    if old and not job.counts["operator"]:
        raise Violation("nothing leaks", f"folders of {old[:4]} although {newest} is committed")
    behind = [key for key in job.bucket.below(READY) if key[len(READY) : len(READY) + 6] < f"{newest.generation:06d}"]
    if left := behind + job.bucket.below(LEASES):
        raise Violation("nothing leaks", f"{left[:4]} although {newest} is committed")
    if job.counts["operator"]:
        return
    if surplus := job.rules.surplus():
        raise Violation("what retention does not keep goes", f"{surplus[:4]} are there, and {newest}")
    if wrong := listed ^ job.rules.committed.keys():
        raise Violation("what is committed is listed", f"{sorted(wrong)[:4]}, of {sorted(listed)[-4:]}")


def _segments_go(job: Job) -> None:
    """Memory of earlier generations is given back once all ranks hold something newer, or it is on storage."""
    for node in {rank.node.index: rank.node for rank in job.ranks}.values():
        daemon, number = node.daemon, job.ranks[0].record.number
        committed = None if daemon is None or daemon.persisting is None else daemon.persisting.committed
        if node.persister is None or not node.persister.alive or committed is None or committed.generation != number:
            continue
        if CLOCK.scheduler.now - job.committed_at.get(committed, 1e9) < SEEN_S:
            continue
        for path in node.directory.segments():
            with contextlib.closing(Segment.attach(path)) as segment:
                held = [header.identity for header in segment.headers() if header.sequence]
            is_free = not any(memory.FILES.find(path).locks.values())  # type: ignore[arg-type]
            if held and is_free and max(held) < committed and max(held).generation < number:
                raise Violation("memory is given back", f"{path} holds {max(held)}, and {committed} is committed")


def _sweep(job: Job, problem: list[str], listed: set[SnapshotId]) -> None:
    assert CLOCK.scheduler.process is not None
    try:
        policy = Policy(keep_last=job.setup.keep_last, keep_every=job.setup.keep_every)
        sweep_root(store := job.connect(CLOCK.scheduler.process), policy, max(job.rules.committed, default=None))
        listed.clear()
        listed.update(info.identity for info in list_checkpoints(store))
    except FlashckptError as error:
        problem.append(str(error))
