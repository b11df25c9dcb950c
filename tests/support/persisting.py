"""Nodes that agree on, write, commit and retain checkpoints on one root that counts requests.

Negotiation, and what is asked of the root for each of its actions, are the product's own; training and time are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import commit, write_together
from flashckpt.core.intent import Intent
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.coordinator import PersistCoordinator
from flashckpt.daemon.persister.messaging import IDLE_LOOK_S, ROOT_LOOK_S
from flashckpt.daemon.persister.protocol import Action, Event
from flashckpt.shm.job_directory import JobConfig
from flashckpt.storage.store import Store
from support.negotiations import Node, Root
from support.requests import RequestStore
from support.slots import FakePin, make_pin, shard


@dataclass
class CountedNode(Node):
    """A node whose persister asks a counting store; `requests` are its own, by the action they were sent for."""

    counted: RequestStore = field(default_factory=RequestStore)
    requests: Counter[str] = field(default_factory=Counter)
    executor: PersistCoordinator | None = None

    def _execute(self, action: Action) -> Event | None:
        before = self.counted.total
        answer = super()._execute(action)
        self.requests[type(action).__name__] += self.counted.total - before
        return answer

    def _look(self, action: Action) -> Event | None:
        store = cast("Store", self.counted)
        self._asked()._view = self.inventory()
        return self._asked()._look(action, store) or self._asked()._lease(action, store)

    def _write(self, action: Action) -> Event:
        store = cast("Store", self.counted)
        match action:
            case p.StartWrite(intent, ranks):
                prefix = prefix_of(*intent.identity)
                pins = [self._pin_of(intent, rank) for rank in ranks]
                put_indexes(store, prefix, write_together(cast("Any", pins), store, prefix))
                self.result = p.WriteFinished(0.0)
                return p.Done()
            case p.Commit(intent):
                commit(store, prefix_of(*intent.identity), intent.writers)
                self.root.committed.add(intent.identity)
                return p.Committed()
            case p.ApplyRetention():
                prune(store, Policy(keep_last=1))
                return p.Done()
            case p.Sweep():
                return p.Done()
        return self._asked()._write(action, store)

    def _pin_of(self, intent: Intent, rank: int) -> FakePin:
        part = shard("weight", (self.world_size, 8), offsets=(rank, 0), lengths=(1, 8))
        values = {"step": intent.step, f"rng@rank{rank}": b"state of the generators"}
        return make_pin([part], rank=rank, world_size=self.world_size, step=intent.step, values=values)

    def _asked(self) -> PersistCoordinator:
        if self.executor is None:
            self.executor = PersistCoordinator(JobConfig(job="scale", root="counted://root", node_count=self.nodes))
            self.executor._record = self.generation
        return self.executor


def job(nodes: int, ranks: int = 8, *, carries: bool = False) -> list[CountedNode]:
    """Return the nodes of a job, each with a persister; `carries`: their ranks live, and carry what these say."""
    root, counted = Root(), RequestStore()
    found = [
        CountedNode(
            root=root, name=f"n{at}", ranks=tuple(range(at * ranks, (at + 1) * ranks)), world_size=nodes * ranks,
            nodes=nodes, counted=counted, carries=carries,
        )
        for at in range(nodes)
    ]  # fmt: skip
    for node in found:
        node.start()
    return found


def persist_step(nodes: list[CountedNode], step: int, now_s: float) -> dict[str, int]:
    """Take a snapshot that is to be persisted, and turn until all nodes know that it is committed and propose nothing.

    Returns:
        Requests of all nodes together, by what they were sent for.
    """
    for node in nodes:
        node.requests.clear()
        node.take(step, persist=True)
    looks = 0
    machines = [node.machine for node in nodes if node.machine is not None]
    while any(machine.committed is None or machine.committed.step < step for machine in machines):
        looks += 1
        assert looks < 20, "not committed"
        turn(nodes, now_s + looks * ROOT_LOOK_S)
    for _ in range(2):  # propose nothing any more, and hear that of the others
        looks += 1
        turn(nodes, now_s + looks * (ROOT_LOOK_S if nodes[0].carries else IDLE_LOOK_S))
    return sum((node.requests for node in nodes), Counter())


def turn(nodes: list[CountedNode], now_s: float) -> None:
    """Give each node a turn."""
    for node in nodes:
        node.tick(now_s)
        node.run()
