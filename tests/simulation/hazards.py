"""Faults of a second kind: of a machine that wakes up among others, of memory, of people at the very moment that counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from flashckpt.checkpoint.retention import Policy, keep, prune, reading, tombstone
from flashckpt.checkpoint.root_records import GENERATIONS, MANIFEST, encode_claim, parse_prefix, prefix_of
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.shm.segment import Segment
from simulation import memory
from simulation.clock import CLOCK
from simulation.job import Job
from simulation.machines import Node
from simulation.watches import Violation

SWEEPER = 900
"""In place of the index of a node: a machine of somebody else, whose clock is days ahead."""


def kill_node(job: Job, node: Node, *, loses: bool, back_s: float) -> None:
    """A machine is gone, perhaps with its memory; later it, or another one in its place, is there."""
    if not node.is_up:
        return
    node.is_up = False
    for process in list(job.processes):
        if process.node == node.index:
            job.kill(process)
    if loses:
        folder = str(node.folder.parent)
        node.lose_memory()
        job.rules.memory_lost(folder + "/")

    def back() -> None:
        node.is_up = True
        node.persister = node.agent = None
        job.start_agent(node)
        job.start_if_idle()

    job.later(back_s, back)


def hang_node(job: Job, target: int, value: float) -> None:
    """All of a machine stands still; the others go on without it, and it wakes up among them."""
    if job.ranks:
        index = job.ranks[target % len(job.ranks)].node.index
        for process in job.processes:
            if process.node == index:
                CLOCK.scheduler.pause(process, 15 + value * 200)
        job.later(3 + value * 7, job._recover)


def hang_at_point(job: Job, target: int, value: float) -> None:
    """The same in the middle of what its persister does: between a look and what follows from it."""
    if job.ranks:
        rank = job.ranks[target % len(job.ranks)]
        if (process := rank.node.persister) is not None and process.alive:
            process.deadly_in, process.at_point = int(value * 40), lambda: hang_node(job, rank.rank, value * 7 % 1)


def shrink(job: Job, target: int, value: float) -> None:
    """A machine no longer reaches the root, then it is gone for good, and the job goes on with one less."""
    if not job.ranks:
        return
    node = job.ranks[target % len(job.ranks)].node
    job.bucket.trouble.cut.add(node.index)

    def end() -> None:
        job.bucket.trouble.cut.discard(node.index)
        if job.wanted > 1 and CLOCK.scheduler.now < job.setup.faults_s:
            job.wanted -= 1
            kill_node(job, node, loses=True, back_s=1e9)

    job.later(2 + 6 * value, end)


def hang_agent(job: Job, target: int, value: float) -> None:
    """The agent of a machine comes too late for the next rounds, though its memory and its persister are there."""
    if job.ranks:
        rank = job.ranks[target % len(job.ranks)]
        if rank.node.agent is not None:
            CLOCK.scheduler.pause(rank.node.agent, 8 + value * 60)
        job.kill(rank.process)


def step_back(job: Job, target: int, value: float) -> None:
    """A user has the newest checkpoint, or the one before it, restored, and soon after that start a rank dies."""
    known = sorted(one for one in job.rules.committed if job.rules.is_on_line(one))
    if known:
        job.ask_step = known[-1 - target % min(2, len(known))].step
        job.later(0.0, job._recover)

        def strike() -> None:
            if job.ranks and CLOCK.scheduler.now < job.setup.faults_s:
                job.kill(job.ranks[target % len(job.ranks)].process)

        job.later(4 + value * 10, strike)


def _unfinished(job: Job) -> str:
    """Return the newest folder without MANIFEST; "" where there is none."""
    names = {key.partition("/")[0] for key in job.bucket.keys if key.startswith("step-")}
    return max((one for one in names if f"{one}/{MANIFEST}" not in job.bucket.objects), default="")


def lose_part(job: Job, target: int, value: float) -> None:
    """The storage loses an object of what is being written, or the end of it."""
    if keys := job.bucket.below((_unfinished(job) or "-") + "/"):
        key = keys[target % len(keys)]
        identity = parse_prefix(key.partition("/")[0])
        assert identity is not None
        job.rules.spoilt(identity)
        raw = job.bucket.objects[key][0]
        if value < 0.3:
            job.bucket.drop(key)
        else:
            job.bucket.set(key, raw[: int(len(raw) * (value - 0.3))])


def cut_manifest(job: Job, target: int, value: float) -> None:
    """The end of the newest MANIFEST, or of the one before it, is lost."""
    if committed := sorted(job.rules.committed):
        identity = committed[-1 - target % min(2, len(committed))]
        key = f"{prefix_of(*identity)}/{MANIFEST}"
        raw = job.bucket.objects[key][0]
        job.note("operator")
        job.rules.removed_by_operator(identity)
        job.rules.cut_short.setdefault(identity, CLOCK.scheduler.now)
        job.is_operator = True
        job.bucket.set(key, raw[: int(len(raw) * value)])
        job.is_operator = False


def bury(job: Job, target: int, value: float) -> None:
    """Somebody's sweep that does not see its intent takes what is being written for left over."""
    if name := _unfinished(job):
        job.bucket.set(f"{name}/{MANIFEST}", tombstone("swept", CLOCK.time()))


def rot(job: Job, target: int, value: float) -> None:
    """A bit of a snapshot in memory turns over."""
    found: list[tuple[SnapshotId, memory.SimPath, int]] = []
    for folder, files in memory.FILES.folders.items():
        for name in files if folder.endswith("/job") else ():
            if name.endswith(".seg"):
                path = memory.SimPath(f"{folder}/{name}")
                with contextlib.closing(Segment.attach(path)) as segment:  # type: ignore[arg-type]
                    found += [
                        (header.identity, path, segment.spec.data_at(slot))
                        for slot, header in enumerate(segment.headers())
                        if header.is_complete
                    ]
    if found:
        identity, path, at = sorted(found, key=lambda one: (one[0], str(one[1])))[-1 - target % min(2, len(found))]
        memory.FILES.find(path).buffer[at + int(value * 64)] ^= 1 << target % 8
        job.rules.rotten.add(identity)


def other_job(job: Job, target: int, value: float) -> None:
    """Another run is started on the same root: it claims the next generation, and dies."""
    newest = max((int(key.rpartition("/")[2]) for key in job.bucket.below(GENERATIONS)), default=0)
    claim = Generation(number=newest + 1, token="stranger", parent=None)
    job.bucket.set(f"{GENERATIONS}{newest + 1:06d}", encode_claim(claim))
    job.rules.begins(claim, is_on_root=True)
    job.note("stranger")


def keep_oldest(job: Job, target: int, value: float) -> None:
    """An operator marks a checkpoint while retention deletes it: the oldest after a commit, or one that is being claimed."""
    operator = job.process("operator", 0)

    def mark(identity: SnapshotId) -> None:
        with contextlib.suppress(FlashckptError):
            keep(job.connect(operator), prefix_of(*identity))
            job.rules.marked(identity)
            job.say("operator", f"was told that {identity} is kept")

    def oldest() -> None:
        if job.rules.committed:
            CLOCK.scheduler.spawn(operator, partial(mark, min(job.rules.committed)))

    if value < 0.5:
        job.on_commit.append(lambda: job.later(value * 48 * job.setup.latency_s, oldest))
    else:
        job.on_claim.append(lambda identity: CLOCK.scheduler.spawn(operator, partial(mark, identity)))


def read_slowly(job: Job, target: int, value: float) -> None:
    """Somebody copies a checkpoint, slowly: under the lease of a reader it stays where it is."""
    if not (committed := sorted(job.rules.committed)):
        return
    identity, reader = committed[target % len(committed)], job.process("reader", 0)
    prefix = prefix_of(*identity)

    def read() -> None:
        with contextlib.suppress(FlashckptError), reading(job.connect(reader), prefix) as manifest:
            CLOCK.scheduler.sleep(value * 60)
            lost = [one for one in manifest.objects if f"{prefix}/{one}" not in job.bucket.objects]
            if lost and not CLOCK.offset_s and not job.rules.was_touched(identity):
                raise Violation("what is read stays while it is read", f"{prefix}: {lost}")

    CLOCK.scheduler.spawn(reader, read)


def delay_writers(job: Job, target: int, value: float) -> None:
    """Persisters of nodes other than the first stand still, one after the other, so that its commit waits for them."""

    def pause(turn: int) -> None:
        nodes = list({rank.node.index: rank.node for rank in job.ranks}.values())[1:]
        if (
            nodes
            and CLOCK.scheduler.now < job.setup.faults_s
            and (process := nodes[(target + turn) % len(nodes)].persister) is not None
        ):
            CLOCK.scheduler.pause(process, 16.0)

    for turn in range(5):
        job.later(turn * (20 + 10 * value), partial(pause, turn))


def sweep_now(job: Job, target: int, value: float) -> None:
    """An operator sweeps and prunes the root, from a machine whose clock is days ahead: all that lies there seems old."""
    CLOCK.offset_s[SWEEPER] = 3 * 86400.0
    process = job.process("sweeper", SWEEPER)
    policy = Policy(keep_last=job.setup.keep_last, keep_every=job.setup.keep_every)

    def tidy() -> None:
        with contextlib.suppress(FlashckptError):
            sweep(store := job.connect(process))
            prune(store, policy)

    CLOCK.scheduler.spawn(process, tidy)


HAZARDS: dict[str, Callable[[Job, int, float], None]] = {
    "hang node": hang_node,
    "hang node at a point": hang_at_point,
    "hang agent": hang_agent,
    "node is not replaced": shrink,
    "step back": step_back,
    "storage loses a part": lose_part,
    "buried while written": bury,
    "MANIFEST is cut short": cut_manifest,
    "memory rots": rot,
    "keep oldest": keep_oldest,
    "slow reader": read_slowly,
    "operator sweeps": sweep_now,
    "writers are late": delay_writers,
}
