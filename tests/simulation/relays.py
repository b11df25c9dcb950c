"""What relays of nodes write to each other, and which of their turns would find only what they found before.

The relay of a node asks again until it has nothing more to learn: at first within milliseconds, then once a second. Where neither this
node nor what it reads has changed since, such a turn says and learns nothing. With thousands of nodes nearly all are of that
kind, so that in a job with a calendar they are counted and not run; while messages get lost, all are run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashckpt.shm.ack_relay import AGAIN, RESTS
from flashckpt.shm.control import PAGE
from simulation import memory

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machines import Node


class Carrier:
    """In place of the process group's store: what relays write there."""

    def __init__(self, job: Job, node: int) -> None:
        self._job, self._node = job, node

    def _reach(self) -> None:
        if self._node in self._job.cut_off:
            raise RuntimeError("the store of the process group does not answer")

    def set(self, key: str, value: bytes, /) -> None:
        self._reach()
        if self._node in self._job.mute and self._job.random.random() < 0.5:
            return
        self._arrive(key, value)
        if self._job.random.random() < self._job.echoes:
            self._job.later(self._job.random.random() * 5, lambda: self._arrive(key, value))

    def _arrive(self, key: str, value: bytes) -> None:
        job = self._job
        if job.carried.get(key) == value:
            return
        job.carried[key] = value
        is_for_all = key.endswith("/job")
        job.news[is_for_all] += 1
        resting = sorted(job.resting)
        if job.calendar is not None:  # else all wake: a story stays the one that its seed once told
            first = job.ranks[0].node.index if job.ranks else -1
            resting = [one for one in resting if one != first] if is_for_all else [first] * (first in job.resting)
        for node in map(job.nodes.__getitem__, resting):
            if node.index != self._node and node.relay is not None:
                node.wake_relay(0.05 + job.random.random() * 4)

    @property
    def _heard(self) -> dict[str, bytes]:
        self._reach()
        return self._job.deaf.get(self._node, self._job.carried)

    def check(self, keys: list[str], /) -> bool:
        return all(map(self._heard.__contains__, keys))

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return list(map(self._heard.__getitem__, keys))


def seen_by(node: Node) -> Any:
    """Return all that a turn of a node's relay depends on; None: something else besides."""
    job, relay, control, process = node.job, node.relay, node.control, node.relay_process
    if job.calendar is None or relay is None or control is None or process is None or process.deadly_in is not None:
        return None
    if job.cut_off or job.mute or job.deaf or job.echoes:
        return None
    outgoing = memory.FILES.folders.get(str(node.folder), {}).get("outgoing")
    return relay, control._map[PAGE:], outgoing, job.news[not relay._nodes]


def turns_in_vain(node: Node) -> bool:
    """Take a turn that finds what the last one found, if it does, as one that is run: only its numbers change, and its stamp."""
    relay = node.relay
    if relay is None or node.relay_saw is None or (relay._turns + 1) % AGAIN == 0 or node.relay_saw != seen_by(node):
        return False
    is_quiet = node.relay_has_rested and not relay._nodes
    relay._rested = relay._rested + 1 if is_quiet else 0
    if not is_quiet or relay._rested % RESTS == 0:
        relay._turns += 1
    relay._deliver(relay._received)
    return True
