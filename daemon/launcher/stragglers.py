"""Names ranks and nodes that slow down all others, while the job trains: each agent measures its ranks, the first one compares.

Nothing of it runs in a rank: times of phases are in the rows that ranks write anyway, and the kernel knows how long a thread
ran. Agents send a record every LOOK_S through the round's store; the first one reads a few of them in each of its turns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flashckpt.core.incident import CONTINUE, Incident
from flashckpt.core.rank_table import PROCESSOR, RankTimes, times_of
from flashckpt.core.records import pack
from flashckpt.daemon.launcher import account as said
from flashckpt.daemon.launcher.incidents import Incidents, new_name
from flashckpt.daemon.launcher.slowness import Naming, PaceChange, marked, slow_places
from flashckpt.daemon.launcher.stop import Group, KeyValueStore
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.shm.control import PHASES, ControlRow
from flashckpt.shm.rank_table import write_table

LOOK_S = 10.0
"""Seconds between two looks: each compares the steps since the one before."""
MOST_REPORTS = 20
"""Reports of one round: what comes and goes without end does not push out other incidents."""
_PER_TURN = 50
"""Turns in which the first agent reads the records of all nodes once: it must see failures meanwhile."""
_MOST_BYTES, _MOST_RANKS = 60_000, 64
_KEY = "flashckpt/times"
_CLASSES = {"data": "data", PROCESSOR: "machine"}
_GONE = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError)  # no store, or no such record
_log = logging.getLogger("flashckpt.dlrun")


class _Sample(NamedTuple):
    pid: int
    step: int
    at_ns: int
    phases_ns: tuple[int, ...]
    processor_ns: int


class PhaseMeter:
    """Measures the ranks of this node between two looks."""

    def __init__(self) -> None:
        self._before: dict[int, _Sample] = {}

    def look(self, rows: Sequence[ControlRow]) -> list[RankTimes]:
        """Return the times of each rank that has trained a step since the last look."""
        found = []
        for row in rows:
            now = _Sample(row.pid, row.step, row.heartbeat_ns, row.phases(), processor_ns(row.pid))
            before = self._before.get(row.rank)
            if before is None or before.pid != now.pid or not row.first_step or row.paused:
                self._before[row.rank] = now
            elif (steps := now.step - before.step) > 0:
                self._before[row.rank] = now
                spent = (*(b - a for a, b in zip(before.phases_ns, now.phases_ns, strict=True)),
                         now.processor_ns - before.processor_ns)  # fmt: skip
                seconds = {
                    name: round(one / 1e9 / steps, 6)
                    for name, one in zip((*PHASES, PROCESSOR), spent, strict=True)
                    if one > 0
                }
                found.append(RankTimes(rank=row.rank, pid=row.pid, step=row.step, stage=max(0, row.stage), host=socket.gethostname(),
                                       step_s=round(max(0, now.at_ns - before.at_ns) / 1e9 / steps, 6), seconds=seconds))  # fmt: skip
        return found


def processor_ns(pid: int) -> int:
    """Return the nanoseconds that the first thread of a process ran, or waited for a core; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        return int(ran) + int(waited)
    return 0


class Stragglers:
    """The slow ranks and nodes of one generation of workers."""

    def __init__(self, watch: JobWatch, incidents: Incidents) -> None:
        self._watch, self._incidents = watch, incidents
        self._meter, self._naming = PhaseMeter(), Naming()
        self._nodes: dict[int, list[RankTimes]] = {}
        self._looked_s, self._next, self._reports = time.monotonic(), 0, 0

    def tick(self, rows: Sequence[ControlRow], others: Group | None) -> None:
        """Measure and compare, where that is due."""
        try:
            self._tick(rows, others)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the job is worth more
            _log.warning("slow ranks cannot be looked for: %s: %s", type(error).__name__, error)

    def _tick(self, rows: Sequence[ControlRow], others: Group | None) -> None:
        is_first, now = others is None or others.rank == 0, time.monotonic()
        if is_first and others is not None:
            self._read_some(others)
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        found = self._meter.look(rows)
        if not is_first:
            assert others is not None
            _send(others, found)
            return
        self._nodes[0] = found or self._nodes.get(0, [])
        ranks = [one for node in sorted(self._nodes) for one in self._nodes[node]]
        for change in self._naming.look(now, slow_places(ranks)):
            self._report(change, [one.rank for one in ranks if one.node == change.place[0]])
        if self._watch.job is not None and ranks:
            table = [replace(one, slow=phase) for one, phase in marked(ranks, self._naming.named)]
            write_table(self._watch.job.path, table)

    def _read_some(self, others: Group) -> None:
        """Read the records of the next few nodes."""
        for _ in range(-(-others.size // _PER_TURN)):
            self._next = self._next % (others.size - 1) + 1
            if found := _read(others.store, self._next):
                self._nodes[self._next] = found

    def _report(self, change: PaceChange, here: Sequence[int]) -> None:
        (node, rank), slow = change.place, change.slow
        self._reports += 1
        if self._reports > MOST_REPORTS:
            return
        whole, who = rank < 0, "its ranks" if rank < 0 else "it"
        name, at = new_name()
        if change.recovered:
            what, reason = f"is as fast as the others again, after {change.since_s:.0f} s", f"{slow.phase} was slow"
        else:
            what = (f"slow in {slow.phase} for {change.since_s:.0f} s: {slow.seconds:.3g} s of each step, the median of the ranks is "
                    f"{slow.median:.3g} s")  # fmt: skip
            reason = f"all other ranks wait for {who} in each step"
        alone = whole or len(here) == 1
        self._incidents.report(Incident(
            id=name, time=at, job=self._watch.job.job if self._watch.job is not None else "", restart=self._incidents.starts,
            kind="straggler", category=_CLASSES.get(slow.phase, "unknown") if alone or slow.phase == "data" else "unknown",
            node=node, host=slow.host, rank=rank, pid=slow.pid, step=slow.step, what=what, action=CONTINUE, reason=reason,
        ))  # fmt: skip


def _send(others: Group, ranks: Sequence[RankTimes]) -> None:
    if ranks:
        with contextlib.suppress(*_GONE):
            others.store.set(f"{_KEY}/{others.rank}", json.dumps([pack(one) for one in ranks]))


def _read(store: KeyValueStore, node: int) -> list[RankTimes]:
    """Return what a node has sent last; the store may hold what somebody else wrote."""
    try:
        raw = store.get(f"{_KEY}/{node}") if store.check([f"{_KEY}/{node}"]) else b"[]"
        found = json.loads(raw) if len(raw) <= _MOST_BYTES else []
        return [
            replace(times, node=node, host=said.clean(times.host, 100), slow="")
            for times in (times_of(one) for one in found[:_MOST_RANKS])
            if times.seconds.keys() <= {*PHASES, PROCESSOR}
        ]
    except _GONE:
        return []
