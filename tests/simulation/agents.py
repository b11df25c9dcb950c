"""What the agents of all nodes decide: who is in the next round, and whether there is one. The decisions are the product's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from flashckpt.daemon.launcher.budget import Budget, RestartDecision
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous
from flashckpt.daemon.launcher.unit_rounds import UnitRounds
from flashckpt.shm import agent_folder
from simulation.clock import CLOCK, Process
from simulation.machines import Node
from simulation.watches import Violation

REFILL_STEPS = 20
"""New steps between two failures after which the job is said to come on."""


class Agents:
    """The rounds of one job, and the restarts that it has left."""

    def __init__(self) -> None:
        self._state = _RendezvousState()

    def begin(self, node: Node) -> None:
        """An agent starts on a node."""
        node.budget, node.steps, node.failures, node.highest = Budget(None), _steps(), 0, -1
        stores: Any = FreshStoreRendezvous.__new__(FreshStoreRendezvous)
        stores._number, node.stores = -1, stores

    def meet(self, nodes: list[Node], wanted: int) -> list[Node]:
        """Return the nodes of the next round in the order of their ranks; each learns whether it missed some.

        Args:
            nodes: Those whose agents came in time.
            wanted: Of a round.
        """
        state, names = self._state, {_NodeDesc(node.name, node.agents, node.life): node for node in nodes}
        state.participants, state.complete = {}, False
        for name, node in names.items():
            steps, more = node.steps, len(nodes) + 1
            steps._node, steps._state = name, state
            steps._settings = SimpleNamespace(min_nodes=more, max_nodes=more, run_id="job")
            steps._add_to_participants()
        steps._settings = SimpleNamespace(min_nodes=wanted, max_nodes=wanted, run_id="job")
        steps._mark_rendezvous_complete()
        used = [names[name] for name in sorted(state.participants, key=lambda name: state.participants[name])]
        left = [node.name for node in nodes if node.steps.has_trained and node not in used]
        if left and not all(node.steps.has_trained for node in used):
            raise Violation("who holds memory is not left out", f"{left}")
        for node in used:
            node.steps.has_trained = True
            node.stores.note_round(state.round)
            if node.stores.has_missed:
                agent, folder = cast("Process", node.agent), cast("Path", node.agent_folder)
                CLOCK.scheduler.call_as(agent, partial(agent_folder.note_missed, folder))
        state.round += 1
        return used

    @staticmethod
    def judge(nodes: list[Node], *, step: int, ran_s: float, may_pass: bool) -> RestartDecision:
        """Return what the agents of a round decide after a failure: each counts for itself, and one that ends ends all."""
        verdicts: list[RestartDecision] = [
            node.budget.spend(fingerprint="", step=step, ran_s=ran_s, may_pass=may_pass) for node in nodes
        ]
        for node, verdict in zip(nodes, verdicts, strict=True):
            has_come_on = node.highest >= 0 and step >= node.highest + REFILL_STEPS
            node.failures = 1 if has_come_on else node.failures + 1
            node.highest = max(node.highest, step)
            if verdict.restart and node.failures > node.budget.limit:
                raise Violation("a crash loop ends", f"{node.name} goes on after {node.failures} failures")
            if not verdict.restart and node.failures <= node.budget.limit:
                raise Violation("a job that may restart does", f"{node.name} gave up after {node.failures} failures")
        return min(verdicts, key=lambda verdict: (verdict.restart, -verdict.pause_s))


def _steps() -> Any:
    steps: Any = UnitRounds.__new__(UnitRounds)
    steps._unit, steps._is_refused = 1, lambda _: False
    steps.has_trained, steps.held = False, 0
    steps._record = lambda **_: None
    return steps
