"""What happens to a job: a setup and a list of faults, drawn from a seed, or written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from flashckpt.checkpoint.retention import keep
from flashckpt.checkpoint.root_records import parse_prefix, prefix_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from simulation import watches
from simulation.clock import CLOCK
from simulation.endings import ENDINGS
from simulation.hazards import HAZARDS, kill_node, other_job
from simulation.job import Job, Setup
from simulation.machines import Node
from simulation.setbacks import SETBACKS
from simulation.start_hazards import START_HAZARDS


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When.
        kind: Which, of `KINDS`.
        target: Which node, rank or object: a number that is taken modulo how many there are.
        value: How long or how much.
    """

    at_s: float
    kind: str
    target: int = 0
    value: float = 0.0

    def __str__(self) -> str:
        """Return it as it is written down: rounded, it would be another story."""
        return f"Fault({self.at_s!r}, {self.kind!r}, {self.target}, {self.value!r})"


def _node(job: Job, target: int) -> Node:
    return job.nodes[target % len(job.nodes)]


def kill_rank(job: Job, target: int, value: float) -> None:
    if job.ranks:
        job.kill(job.ranks[target % len(job.ranks)].process)


def kill_rank_later(job: Job, target: int, value: float) -> None:
    if job.ranks:
        process = job.ranks[target % len(job.ranks)].process
        process.deadly_in, process.at_point = int(value * 12), None


def poison(job: Job, target: int, value: float) -> None:
    """The next step makes numbers NaN, in what some or all ranks hold; the job fails of it some steps later."""
    job.poison = 1 + target
    job.later(value * value * 60, partial(kill_rank, job, target, value))


def kill_persister(job: Job, target: int, value: float) -> None:
    job.kill(_node(job, target).persister)


def kill_persister_later(job: Job, target: int, value: float) -> None:
    if (process := _node(job, target).persister) is not None:
        process.deadly_in, process.at_point = int(value * 40), None


def stop_persister(job: Job, target: int, value: float) -> None:
    """SIGTERM."""
    node = _node(job, target)
    if node.persister is not None and node.persister.alive and node.daemon is not None:
        CLOCK.scheduler.call_as(node.persister, partial(node.daemon.stop, 15, None))


def kill_agent(job: Job, target: int, value: float) -> None:
    job.kill(_node(job, target).agent)


def lose_node(job: Job, target: int, value: float) -> None:
    kill_node(job, _node(job, target), loses=True, back_s=5 + value * 100)


def restart_node(job: Job, target: int, value: float) -> None:
    kill_node(job, _node(job, target), loses=False, back_s=5 + value * 100)


def lose_for_good(job: Job, target: int, value: float) -> None:
    """A machine never comes back, where there is another one in its place."""
    if sum(node.is_up for node in job.nodes) > job.wanted == job.setup.nodes:
        kill_node(job, _node(job, target), loses=True, back_s=1e9)


def lose_all(job: Job, target: int, value: float) -> None:
    for node in job.nodes:
        kill_node(job, node, loses=True, back_s=5 + value * 50)


def restart_all(job: Job, target: int, value: float) -> None:
    for node in job.nodes:
        kill_node(job, node, loses=False, back_s=5 + value * 50)


def pause_persister(job: Job, target: int, value: float) -> None:
    if (process := _node(job, target).persister) is not None:
        CLOCK.scheduler.pause(process, value * value * 700)


def pause_rank(job: Job, target: int, value: float) -> None:
    if job.ranks:
        CLOCK.scheduler.pause(job.ranks[target % len(job.ranks)].process, value * value * 100)


def pause_node(job: Job, target: int, value: float) -> None:
    node = _node(job, target)
    for process in job.processes:
        if process.node == node.index:
            CLOCK.scheduler.pause(process, value * value * 300)


def set_clock(job: Job, target: int, value: float) -> None:
    CLOCK.offset_s[_node(job, target).index] = (value - 0.5) * 10 ** (1 + target % 7)


def _trouble(name: str, level: Callable[[float], object]) -> Callable[[Job, int, float], None]:
    def start(job: Job, target: int, value: float) -> None:
        trouble = job.bucket.trouble
        calm = getattr(type(trouble)(), name)
        setattr(trouble, name, level(value))
        job.later(5 + value * 120, lambda: setattr(trouble, name, calm))

    return start


def lose_root(job: Job, target: int, value: float) -> None:
    """Nothing answers there."""
    since_s, trouble = CLOCK.scheduler.now, job.bucket.trouble
    trouble.is_gone = True

    def back() -> None:
        if trouble.is_gone and CLOCK.scheduler.now < job.setup.faults_s:
            watches.memory_goes_on(job, since_s)
        trouble.is_gone = False

    job.later(5 + value * 120, back)


def cut_root(job: Job, target: int, value: float) -> None:
    index = _node(job, target).index
    job.bucket.trouble.cut.add(index)
    job.later(2 + value * 120, lambda: job.bucket.trouble.cut.discard(index))


def cut_nodes(job: Job, target: int, value: float) -> None:
    """A node cannot reach the store of the process group: it neither says nor hears anything."""
    index = _node(job, target).index
    job.cut_off.add(index)
    job.later(2 + value * 60, lambda: job.cut_off.discard(index))


def resize(job: Job, target: int, value: float) -> None:
    job.wanted = 1 + target % len(job.nodes)
    job.later(0.0, job._recover)


def roll_back(job: Job, target: int, value: float) -> None:
    """A user has an earlier checkpoint restored."""
    known = sorted(one for one in job.rules.committed if job.rules.is_on_line(one))
    if known:
        job.ask_step = known[target % len(known)].step
        job.later(0.0, job._recover)


def _checkpoints(job: Job) -> list[str]:
    return sorted({key.partition("/")[0] for key in job.bucket.keys if key.startswith("step-")})


def delete_checkpoint(job: Job, target: int, value: float) -> None:
    """An operator deletes a folder by hand, or half of it."""
    if names := _checkpoints(job):
        prefix = names[target % len(names)]
        job.note("operator")
        _by_hand(job, lambda: job.bucket.drop_all(prefix + "/"), prefix)


def damage_checkpoint(job: Job, target: int, value: float) -> None:
    """Bytes of a committed checkpoint are cut off."""
    keys = [key for key in job.bucket.keys if key.endswith(".fck") and parse_prefix(key.partition("/")[0])]
    if keys:
        key = keys[target % len(keys)]
        job.note("operator")
        half = job.bucket.objects[key][0][: int(len(job.bucket.objects[key][0]) * value)]
        _by_hand(job, lambda: job.bucket.set(key, half), key.partition("/")[0])


def _by_hand(job: Job, work: Callable[[], object], prefix: str) -> None:
    job.is_operator = True
    identity = parse_prefix(prefix)
    assert identity is not None
    job.rules.removed_by_operator(identity)
    work()
    job.is_operator = False


def preempt(job: Job, target: int, value: float) -> None:
    job.preempt()


def slow_node(job: Job, target: int, value: float) -> None:
    node = _node(job, target)
    node.slowness = 2 + 10 * value
    job.later(5 + value * 120, lambda: setattr(node, "slowness", 1.0))


def cut_one_way(job: Job, target: int, value: float) -> None:
    """What a node says to the others gets lost, as often as not; it hears them."""
    index = _node(job, target).index
    job.mute.add(index)
    job.later(2 + value * 60, lambda: job.mute.discard(index))


def cut_deaf(job: Job, target: int, value: float) -> None:
    """A node hears nothing new of the others; they hear it."""
    index = _node(job, target).index
    job.deaf[index] = dict(job.carried)
    job.later(2 + value * 60, lambda: job.deaf.pop(index, None))


def double_messages(job: Job, target: int, value: float) -> None:
    """What nodes say arrives again later, behind what they have said since."""
    job.echoes = 0.1 + 0.5 * value
    job.later(5 + value * 60, lambda: setattr(job, "echoes", 0.0))


def take_over(job: Job, target: int, value: float) -> None:
    """The job starts again from memory, without the root; then its nodes go, others continue, and one of these goes, too."""
    nodes = list({rank.node.index: rank.node for rank in job.ranks}.values())
    for node in nodes:
        job.bucket.trouble.cut.add(node.index)
        job.later(30.0, partial(job.bucket.trouble.cut.discard, node.index))
    kill_rank(job, target, value)
    for node in nodes:
        job.later(10 + 8 * value, partial(kill_node, job, node, loses=False, back_s=14 + 10 * value))

    def next_one() -> None:
        if job.ranks and CLOCK.scheduler.now < job.setup.faults_s:
            restart_node(job, job.ranks[target % len(job.ranks)].node.index, 0.9)

    job.later(35 + 10 * value, next_one)


def truncate_record(job: Job, target: int, value: float) -> None:
    """An operator's copy of a checkpoint's MANIFEST, or of an index, ends too early."""
    keys = [key for key in job.bucket.keys if key.startswith("step-") and not key.endswith(".fck")]
    if keys:
        key = keys[target % len(keys)]
        job.note("operator")
        half = job.bucket.objects[key][0][: int(len(job.bucket.objects[key][0]) * value)]
        _by_hand(job, lambda: job.bucket.set(key, half), key.partition("/")[0])
        if key.endswith("/MANIFEST") and (identity := parse_prefix(key.partition("/")[0])):
            job.rules.cut_short.setdefault(identity, CLOCK.scheduler.now)


def copy_checkpoint(job: Job, target: int, value: float) -> None:
    """An operator copies a checkpoint to another name on the same root: nobody may take it for that one."""
    if names := _checkpoints(job):
        name = names[target % len(names)]
        identity = parse_prefix(name)
        assert identity is not None
        other = prefix_of(identity.generation, identity.step + 1000)
        job.is_operator = True
        job.note("operator")
        for key in job.bucket.below(f"{name}/"):
            job.bucket.set(f"{other}/{key.partition('/')[2]}", job.bucket.objects[key][0])
        job.is_operator = False


def keep_mark(job: Job, target: int, value: float) -> None:
    """An operator marks a checkpoint, with `flashckpt keep`, and believes what it says."""
    if not (committed := sorted(job.rules.committed)):
        return
    identity, operator = committed[target % len(committed)], job.process("operator", 0)

    def mark() -> None:
        with contextlib.suppress(FlashckptError):
            keep(job.connect(operator), prefix_of(*identity))
            job.rules.marked(identity)
            job.say("operator", f"was told that {identity} is kept")

    CLOCK.scheduler.spawn(operator, mark)


KINDS: dict[str, Callable[[Job, int, float], None]] = {
    "kill rank": kill_rank,
    "kill rank at a point": kill_rank_later,
    "poison": poison,
    "kill persister": kill_persister,
    "kill persister at a point": kill_persister_later,
    "stop persister": stop_persister,
    "kill agent": kill_agent,
    "lose node": lose_node,
    "lose node for good": lose_for_good,
    "restart node": restart_node,
    "lose all nodes": lose_all,
    "restart all nodes": restart_all,
    "pause persister": pause_persister,
    "pause rank": pause_rank,
    "pause node": pause_node,
    "set clock": set_clock,
    "storage refuses": _trouble("refuses", lambda v: 0.05 + 0.6 * v),
    "storage forgets": _trouble("forgets", lambda v: 0.05 + 0.6 * v),
    "storage lies": _trouble("lies", lambda v: 0.1 + 0.8 * v),
    "storage is slow": _trouble("slowness", lambda v: 2 + 60 * v),
    "storage is gone": lose_root,
    "storage denies": _trouble("is_denied", lambda _: True),
    "storage is full": _trouble("is_full", lambda _: True),
    "listings lag": _trouble("lag_s", lambda v: 0.1 + 10 * v),
    "cut from root": cut_root,
    "cut between nodes": cut_nodes,
    "resize": resize,
    "roll back": roll_back,
    "operator deletes": delete_checkpoint,
    "operator damages": damage_checkpoint,
    "other job": other_job,
    "keep mark": keep_mark,
    "preemption": preempt,
    "slow node": slow_node,
    "cut one way": cut_one_way,
    "operator copies": copy_checkpoint,
    "operator truncates": truncate_record,
    "cut deaf": cut_deaf,
    "messages come twice": double_messages,
    "others take over": take_over,
    **HAZARDS,
    **ENDINGS,
    **START_HAZARDS,
    **SETBACKS,
}


def draw(seed: int, kinds: Sequence[str] = (), **fixed: object) -> tuple[Setup, list[Fault]]:
    """Return the setup and the faults of a seed: few kinds in each, so that rare ones meet often; with `kinds` these."""
    random = Random(f"{seed} plan")
    nodes = random.choice((1, 1, 2, 2, 3, 4))
    values: dict[str, object] = {
        "nodes": nodes,
        "per_node": random.choice((1, 1, 2)) if nodes < 4 else 1,
        "slots": random.choice((2, 3, 3)),
        "step_s": random.choice((1.0, 3.0, 10.0)),
        "persist_every": random.choice((2, 5, 12)),
        "copy_s": random.choice((0.1, 0.8)),
        "discards": random.choice((0.0, 0.0, 0.03)),
        "keep_last": random.choice((1, 2, 3)),
        "keep_every": random.choice((None, None, 20)),
        "latency_s": random.choice((0.005, 0.02, 0.15)),
    }
    if Random(f"{seed} time").random() < 0.25:  # every snapshot may be persisted, and the clock says when
        values |= {"persist_every": 1, "persist_s": 20}
    if Random(f"{seed} spares").random() < 0.25:
        values["spares"] = nodes
    if Random(f"{seed} young").random() < 0.15:  # much happens before the first commit
        values["persist_every"] = 40
    if Random(f"{seed} far").random() < 0.1:
        values["latency_s"] = 0.6
    values["votes"] = Random(f"{seed} votes").random() < 0.75
    values["spread"] = Random(f"{seed} spread").random() < 0.25
    values |= fixed
    if nodes > 1 and Random(f"{seed} replicas").random() < 0.25:
        values |= {"replicate": 1 + seed // 2 % 2, "slots": 3 + seed % 2}
    setup = Setup(**values)  # type: ignore[arg-type]
    kinds = list(kinds) or random.sample(sorted(KINDS), random.choice((1, 2, 3, 5, 8)))
    count = random.choice((1, 3, 8, 20))
    faults = [
        Fault(random.uniform(0, setup.faults_s), random.choice(kinds), random.randrange(1000), random.random())
        for _ in range(count)
    ]
    return setup, sorted(faults, key=lambda fault: fault.at_s)


__all__ = ["KINDS", "Fault", "SnapshotId", "draw"]
