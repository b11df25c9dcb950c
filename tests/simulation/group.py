"""The process group of one start: what ranks say to all others arrives once all have said it, or never.

A collective is the same one on every rank, or the start hangs: that is looked at. Where a rank is dead, the others learn of it, as
gloo tells them, with an error that is none of the product's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashckpt import collectives
from flashckpt.restore import candidate_restore
from simulation.clock import CLOCK, Process
from simulation.threads import Event
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job
    from simulation.machines import Rank

LATENCY_S = 0.03
"""Most seconds between what one rank and what another one does of the same."""


class GroupLostError(RuntimeError):
    """Another rank is gone."""


@dataclass
class _Round:
    kind: str
    parts: dict[int, Any] = field(default_factory=dict)
    news: Event = field(default_factory=Event)


class Group:
    """All ranks of one start."""

    def __init__(self, job: Job, ranks: Sequence[Rank]) -> None:
        self.job, self.processes = job, [rank.process for rank in ranks]
        self._rounds: list[_Round] = []
        self._at = [0] * len(ranks)
        self._nodes = {rank.node.index for rank in ranks}
        for number, rank in enumerate(ranks):
            members[rank.process] = self, number
            rank.process.on_death.append(partial(self._left, rank.process))

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.processes)

    def exchange(self, kind: str, mine: Any) -> list[Any]:
        """Say something; return what all have said. `kind` is what is done with it."""
        me = members[self._process()][1]
        number, self._at[me] = self._at[me], self._at[me] + 1
        self._wait()
        if number == len(self._rounds):
            self._rounds.append(_Round(kind))
        this = self._rounds[number]
        if this.kind != kind:
            raise Violation("all ranks do the same together", f"rank {me}: {kind}; others: {this.kind}")
        this.parts[me] = mine
        this.news.set()
        while len(this.parts) < self.size:
            if not all(process.alive or rank in this.parts for rank, process in enumerate(self.processes)):
                raise GroupLostError("Connection closed by peer")
            this.news.clear()
            this.news.wait(1e9)
        self._wait()
        if not self.processes[0].alive:  # it passes on what the others have said
            raise GroupLostError("Connection closed by peer")
        return [this.parts[rank] for rank in range(self.size)]

    def _wait(self) -> None:
        self._process().passes_point()
        CLOCK.scheduler.sleep(LATENCY_S * self.job.random.random())
        while self._nodes & self.job.cut_off and self.size > 1:
            CLOCK.scheduler.sleep(1.0)

    def _left(self, process: Process) -> None:
        members.pop(process, None)
        for one in self._rounds:
            one.news.set()

    @staticmethod
    def _process() -> Process:
        process = CLOCK.scheduler.process
        assert process is not None
        return process


members: dict[Process | None, tuple[Group, int]] = {}
"""The group of each process that is in one, and its rank."""


def _mine() -> tuple[Group, int]:
    return members[CLOCK.scheduler.process]


def _is_alone() -> bool:
    found = members.get(CLOCK.scheduler.process)
    return found is None or found[0].size == 1


def _gathered(data: bytes) -> list[bytes]:
    return [data] if _is_alone() else _mine()[0].exchange("all gather", data)


def _from_rank_0(data: bytes) -> bytes:
    return data if _is_alone() else _mine()[0].exchange("from rank 0", data)[0]


def _maximum(data: Any) -> bytes:
    parts = [data] if _is_alone() else _mine()[0].exchange("maximum", data)
    return bytes(np.max(parts, axis=0))


def _total(value: int) -> int:
    return value if _is_alone() else sum(_mine()[0].exchange("total", value))


class SimHostGroup:
    """In place of `HostGroup`."""

    def __init__(self) -> None:
        (self._group, self._rank), self.ranks = _mine(), _mine()[0].size

    def total(self, value: int) -> int:
        return sum(self._group.exchange("total", value))

    def all_to_all(self, parts: Sequence[Sequence[Any]]) -> list[memoryview]:
        mine = [b"".join(map(bytes, part)) for part in parts]
        return [memoryview(one[self._rank]) for one in self._group.exchange("all to all", mine)]

    def close(self) -> None:
        """Nothing to leave: the default group carries host memory."""


def install() -> None:
    """Put it in place of torch.distributed, once per program."""
    collectives.__dict__.update(
        is_alone=_is_alone, rank=lambda: 0 if _is_alone() else _mine()[1], all_gather_bytes=_gathered,
        bytes_from_rank_0=_from_rank_0, maximum=_maximum, total=_total,
    )  # fmt: skip
    candidate_restore.__dict__["HostGroup"] = SimHostGroup


__all__ = ["Group", "GroupLostError", "install", "members"]
