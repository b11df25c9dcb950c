"""What the agents of all nodes decide: who is in the next round, and whether there is one. The decisions are the product's."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from flashckpt.daemon.launcher import way_back
from flashckpt.daemon.launcher.agent import DlrunAgent
from flashckpt.daemon.launcher.budget import ESCALATE, Budget, RestartDecision
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous
from flashckpt.daemon.launcher.unit_rounds import UnitRounds
from flashckpt.daemon.launcher.way_back import WayBack
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
        node.way_back, node.went_back = WayBack(), Counter()
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
    def judge(nodes: list[Node], *, step: int, ran_s: float, may_pass: bool, error: str) -> RestartDecision:
        """Return what the agents of a round decide after a failure: each counts for itself, and one that ends ends all.

        Args:
            nodes: Of the round.
            step: The last that was trained.
            ran_s: How long.
            may_pass: Storage cannot be reached.
            error: That of the script; "" where a rank was killed.
        """
        verdicts = [_verdict(node, step=step, ran_s=ran_s, may_pass=may_pass, error=error) for node in nodes]
        for node, verdict in zip(nodes, verdicts, strict=True):
            if error:
                _goes_back(node, verdict, error, step)
                if verdict.back or verdict.repeats:
                    continue
            has_come_on = node.highest >= 0 and step >= node.highest + REFILL_STEPS
            node.failures = 1 if has_come_on else node.failures + 1
            node.highest = max(node.highest, step)
            if verdict.restart and node.failures > node.budget.limit:
                raise Violation("a crash loop ends", f"{node.name} goes on after {node.failures} failures")
            if not verdict.restart and node.failures <= node.budget.limit:
                raise Violation("a job that may restart does", f"{node.name} gave up after {node.failures} failures")
        return min(verdicts, key=lambda verdict: (verdict.restart, -verdict.pause_s))


def _verdict(node: Node, *, step: int, ran_s: float, may_pass: bool, error: str) -> RestartDecision:
    """Return what the agent of one node decides, as `DlrunAgent._judge` does of a report."""
    this: Any = SimpleNamespace(
        _budget=node.budget, _options=SimpleNamespace(escalate=ESCALATE), _watch=SimpleNamespace(job=node.directory)
    )
    this._further_back = partial(DlrunAgent._further_back, this)
    decided: RestartDecision = this._budget.spend(fingerprint=error, step=step, ran_s=ran_s, may_pass=may_pass)
    decided = DlrunAgent._again(this, "", step, decided, error=error)
    node.way_back.follow(decided, node.directory)
    return decided


def _goes_back(node: Node, verdict: RestartDecision, error: str, step: int) -> None:
    """The same failure goes back to an older state, each time further, and some day it ends the job."""
    tried = node.went_back[error, step]
    if verdict.back:
        node.went_back[error, step] += 1
        node.job.note("failures that went further back")
    if verdict.back not in (0, tried + 1) or verdict.back > ESCALATE or (verdict.repeats and verdict.restart):
        raise Violation("the same failure goes further back", f"{node.name}: {verdict}, after {tried}")


def _steps() -> Any:
    steps: Any = UnitRounds.__new__(UnitRounds)
    steps._unit, steps._is_refused = 1, lambda _: False
    steps.has_trained, steps.held = False, 0
    steps._record = lambda **_: None
    return steps


def install(steps_on_root: Any) -> None:
    """Let agents know which steps are on the root without the thread that waits for the answer, once per program."""
    way_back.__dict__["steps_on_root"] = steps_on_root
