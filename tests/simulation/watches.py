"""What is looked at on the way: what memory calls whole, what a pin holds, why a snapshot is given up."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashckpt.checkpoint.retention import TOMBSTONE_AGE_S
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.shm.segment import Segment
from simulation import memory
from simulation.clock import CLOCK
from simulation.states import State, bytes_of, whole_of

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machines import Node
    from simulation.rules import Rules

PATIENCE_S = 60.0
"""Seconds that slow writers have at least."""
LEASE_S = 5.0
"""Seconds that the holder of a commit's lease may be silent."""
FAILED_S = 25.0
"""Seconds until a persister knows that the root fails: two requests, each as long as a time-out."""
NEWS_S = 5.0
"""Seconds until all nodes know of a commit."""
_REASONS = (b"ranks [", b"its lineage was rolled back")
_EXCUSES = {
    "memory rots", "storage loses a part", "buried while written", "listings lag", "operator deletes", "operator damages",
    "operator truncates", "MANIFEST is cut short", "operator copies", "operator sweeps",
}  # fmt: skip
"""Faults by which an attempt may fail for another reason than the storage."""
_LATE = {"slow node", "kill persister", "pause persister", "writers are late"}
"""Faults of which a persist takes longer, and its committer hears nothing."""


class Violation(BaseException):  # not an Exception: the product's loops must not swallow it
    """Something is true that must never be."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def memory_is_whole(rules: Rules, segment: Segment | None) -> None:
    """Compare what a segment calls COMPLETE with what was trained, while another slot of it is being written."""
    assert segment is not None
    path: Any = segment.path
    raw = memory.FILES.find(path).buffer
    for slot, header in enumerate(segment.headers()):
        state = State(header.identity, header.mark)
        if header.is_complete and state in rules.truth and header.identity not in rules.rotten:
            chain, world = rules.truth[state]
            wanted, at = whole_of(chain, header.rank, world), segment.spec.data_at(slot)
            if raw[at : at + len(wanted)] != wanted:
                raise Violation("what memory calls whole is whole", f"{header.identity} in slot {slot} of {path}")


def replica_is_whole(rules: Rules, segment: Segment) -> None:
    """Look for the rows of a rank in a replica that has just become COMPLETE."""
    path: Any = segment.path
    known = rules.held_in(str(path))
    for slot, header in enumerate(segment.headers() if path.exists() else ()):
        state, at = State(header.identity, header.mark), segment.spec.data_at(slot)
        if header.is_complete and state not in known and state in rules.truth:
            row, _ = bytes_of(rules.truth[state][0], header.rank)
            if row not in memory.FILES.find(path).buffer[at : at + header.data_bytes]:
                raise Violation("what memory calls whole is whole", f"the replica of {header.identity} in {path}")


def given_up(job: Job, name: str, reason: bytes, after_s: float) -> None:
    """An intent is abandoned: not before slow writers had time, and for damage only where there is some."""
    if reason == b"other writers did not finish":
        if after_s < PATIENCE_S:
            raise Violation("a slow node is waited for", f"{name} after {after_s:.0f} s")
    elif (
        not reason.startswith(_REASONS)
        and not job.met & _EXCUSES
        and job.ranks
        and job.ranks[0].record.number == identity_of(name).generation
    ):
        raise Violation("nothing is given up without a reason", f"{name}: {reason.decode()[:80]}")


def generation_of(node: Node) -> Generation | None:
    """Return what a machine knows of the generation that runs; None where it cannot be read."""
    with contextlib.suppress(FlashckptError):
        return node.directory.read_generation()
    return None


def identity_of(name: str) -> SnapshotId:
    """Return the snapshot of an intent, or of the mark that it was abandoned."""
    generation, _, step = name.removesuffix(".abandoned").partition("-")
    return SnapshotId(int(generation), int(step))


def intent_closed(job: Job, name: str, newest: SnapshotId) -> None:
    """An intent is removed: it is decided by then."""
    identity = identity_of(name)
    if identity > newest and f"{prefix_of(*identity)}/MANIFEST" not in job.bucket.objects:
        raise Violation("an open intent stays", f"{identity} was removed, and {newest} is the newest that is decided")


def nothing_is_passed_over(job: Job, identity: SnapshotId) -> None:
    """Something was committed: where nothing went wrong yet, a persist step that a rank discarded has cost one interval at most.

    With two slots ranks skip steps besides, and where requests are slow the nodes hear of each other too late.
    """
    every, taken, before = job.setup.persist_every, job.rules.taken_at, max(job.committed_at, default=None)
    if job.met or before is None or job.setup.slots < 3 or job.rules.look_s() > 0.2 or every * job.setup.step_s < 10:
        return
    free_s = job.committed_at[before] + NEWS_S  # all nodes know by then that it is committed
    for lost in job.rules.discarded:
        following = SnapshotId(lost.generation, lost.step - lost.step % every + every)
        is_later = before < lost < following < identity and following not in job.rules.discarded
        if is_later and min(taken[lost], taken.get(following, 0.0)) > free_s:
            raise Violation(
                "a discarded step costs one interval", f"{lost} was, and {identity} came behind {following}"
            )


def memory_goes_on(job: Job, since_s: float) -> None:
    """The root was gone for a while, and nothing else was wrong: with how few slots ever, all ranks have held newer snapshots."""
    rules, now, slow_s = job.rules, CLOCK.scheduler.now, FAILED_S + 8 * (job.setup.step_s + job.setup.copy_s)
    ran = job.ranks and min(rules.taken_at.values(), default=now) < since_s
    if now - since_s < slow_s or job.met != {"storage is gone"} or not ran:
        return
    best = rules.best()
    if best is None or rules.taken_at[best.identity] < now - slow_s:
        raise Violation(
            "memory goes on without the root", f"{best and best.identity} is the newest after {now - since_s:.0f} s"
        )


def lease_taken(job: Job, key: str) -> None:
    """Somebody takes over a commit: not from a holder that was heard of a moment ago.

    Where requests take a good part of the lease's time, or listings lag, its holder is not seen in time, and both commit:
    one MANIFEST wins.
    """
    job.holders[key] = CLOCK.scheduler.process
    if job.rules.look_s() > LEASE_S / 2 or "listings lag" in job.met:
        return
    stem, _, number = key.rpartition(".")
    earlier = f"{stem}.{int(number) - 1:06d}"
    silences = [CLOCK.scheduler.now - at_s for at_s in job.rules.renewed_s[earlier]]
    seen = [silent_s for silent_s in silences if silent_s > job.rules.look_s()] or silences  # a later one was not seen
    if seen and (silent_s := seen[-1]) < LEASE_S - job.rules.look_s():
        raise Violation("a commit is left to who has its lease", f"{key} after {silent_s:.1f} s")
    _holder_lives(job, key, earlier)


def buried(job: Job, identity: SnapshotId, before: bytes | None) -> SnapshotId:
    """A tombstone is written: not over what all nodes are about to persist, whatever its folder looks like; return the snapshot."""
    process, now, name = CLOCK.scheduler.process, CLOCK.scheduler.now, f"{identity.generation:06d}-{identity.step:09d}"
    begun = job.bucket.objects.get(f"intents/{name}")
    if begun is None or process is None or before is not None or "listings lag" in job.met:
        return identity
    is_decided = f"intents/{name}.abandoned" in job.bucket.objects or not job.rules.is_on_line(identity)
    if not is_decided and now - begun[1] > 4 * job.rules.look_s():
        raise Violation(
            "what is being persisted is not swept", f"{identity} by {process.name}, {now - begun[1]:.1f} s open"
        )
    return identity


def tombstone_goes(identity: SnapshotId, age_s: float) -> None:
    """A tombstone is removed: by whoever does it, it is older than a committer sleeps between its checks and its commit."""
    process = CLOCK.scheduler.process
    seems_s = age_s + (0.0 if process is None else CLOCK.offset_s.get(process.node, 0.0))
    if seems_s < TOMBSTONE_AGE_S - 1.0:
        raise Violation("a tombstone stays for an hour", f"{identity} after {seems_s:.0f} s")


def went_back(rules: Rules, identity: SnapshotId, back: int) -> None:
    """A start restores something older than the last one did, since that fails: the second time a checkpoint, where there are some."""
    began = next((one for _, one in sorted(rules.parents.items(), reverse=True) if one is not None), None)
    older = [one for one in rules.committed if began is not None and one < began and rules.is_on_line(one)]
    if began is not None and older and identity >= began:
        raise Violation("the same failure goes further back", f"{identity} again, and the last began with {began}")
    if back > 1 and older and identity not in rules.committed and not rules.was_touched(max(older)):
        raise Violation("the same failure goes further back", f"{identity} is no checkpoint, and {older[:4]} are")


def _holder_lives(job: Job, key: str, earlier: str) -> None:
    """Where nothing is wrong but that other writers are late, a holder that lives is not taken for dead."""
    holder, begun = job.holders.get(earlier), job.rules.renewed_s[earlier]
    if holder is None or not begun or job.met - _LATE:
        return
    if holder.alive and holder is not CLOCK.scheduler.process and holder.paused_until < begun[0]:
        raise Violation("who commits and lives is left to it", f"{key}, and {holder.name} lives")


def _checked(pin_all: Callable[..., Any]) -> Callable[..., Any]:
    def call(view: Any, identity: Any, ranks: Any) -> Any:
        pins = pin_all(view, identity, ranks)
        if others := [str(pin.header.identity) for pin in (pins or {}).values() if pin.header.identity != identity]:
            raise Violation("what is pinned is what was asked for", f"{others} for {identity}")
        return pins

    return call


def _unforeseen(*arguments: object, **_: object) -> None:
    """In place of `Logger.exception`, with which the product's loops report what they did not foresee."""
    raise Violation("nothing unforeseen happens", f"{arguments[1]}: {sys.exc_info()[1]!r}")


def install() -> None:
    """Look at every pin that a persister takes, and at each error that nobody foresaw, once per program."""
    logging.Logger.exception = _unforeseen  # type: ignore[method-assign]
    for name in ("coordinator", "seeker"):
        module: Any = importlib.import_module(f"flashckpt.daemon.persister.{name}")
        module.pin_all = _checked(module.pin_all)
