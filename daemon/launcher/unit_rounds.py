"""The steps of one node through a rendezvous: rounds of a size that fits the job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
)

from flashckpt.daemon.launcher.job_state import JobState
from flashckpt.daemon.launcher.shared_state import SharedState

_log = logging.getLogger("flashckpt.dlrun")
_WAIT_S = 0.25
_STEPS = {
    _Action.ADD_TO_PARTICIPANTS: "_add_to_participants",
    _Action.ADD_TO_WAIT_LIST: "_add_to_wait_list",
    _Action.ADD_TO_REDUNDANCY_LIST: "_add_to_redundancy_list",
    _Action.REMOVE_FROM_PARTICIPANTS: "_remove_from_participants",
    _Action.REMOVE_FROM_WAIT_LIST: "_remove_from_wait_list",
    _Action.REMOVE_FROM_REDUNDANCY_LIST: "_remove_from_redundancy_list",
    _Action.MARK_RENDEZVOUS_COMPLETE: "_mark_rendezvous_complete",
    _Action.MARK_RENDEZVOUS_CLOSED: "_mark_rendezvous_closed",
}
"""Methods that change the state for a node, by the action that torch's operations ask for."""


class UnitRounds(_DistributedRendezvousOpExecutor):
    """The steps of a c10d rendezvous, whose every round is cut to the most nodes that fit the job; the others wait as spares.

    What fits is a multiple of `unit`, and no number that the job's layout has refused. Nodes that trained in the previous
    round have precedence: their memory holds the snapshots. If no number fits, the round stays open until a node joins
    or leaves.
    """

    def __init__(self, inner: DynamicRendezvousHandler, unit: int, is_refused: Callable[[int], bool]) -> None:
        super().__init__(inner._this_node, inner._state_holder, inner.settings)  # noqa: SLF001 -- torch offers no other way in
        self._unit, self._is_refused = unit, is_refused
        self.has_trained = False
        self.has_waited = False
        self.is_spare = False
        self.held = 0
        self._members: set[_NodeDesc] = set()

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """Do what an operation asks for until it is finished.

        As torch does, but keep-alive messages do not write the state, and waiting ends as soon as the state changes.
        """
        holder = self._state_holder
        if not isinstance(holder, SharedState):
            super().run(state_handler, deadline, update_deadline)
            return
        left = -1
        while True:
            holder.sync()
            self._state = holder.state
            if self._has_left(left):
                return
            action = state_handler(_RendezvousContext(self._node, self._state, self._settings), deadline)
            match action:
                case _Action.FINISH:
                    self._note_members(state_handler)
                    return
                case _Action.ERROR_CLOSED:
                    raise RendezvousClosedError
                case _Action.ERROR_TIMEOUT:
                    raise RendezvousTimeoutError
                case _Action.SYNC:
                    holder.wait(_WAIT_S)
                case _Action.KEEP_ALIVE:
                    holder.beat()
                    self._keep_alive_in(holder)
                case _:
                    left = self._change(action, leaves=isinstance(state_handler, _RendezvousExitOp))
                    holder.mark_dirty()
            if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and update_deadline is not None:
                deadline = update_deadline(self._settings.timeout.join)

    def _note_members(self, operation: object) -> None:
        if isinstance(operation, _RendezvousJoinOp):
            self._members = set(self._state.participants)

    def _change(self, action: _Action, *, leaves: bool) -> int:
        """Change the state; return the number of the round that this node leaves to begin the next one, -1 for none."""
        begins_again = leaves and self._state.complete and not self._state.closed
        number = self._state.round if begins_again else -1
        getattr(self, _STEPS[action])()
        if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and self._state.complete:
            self._add_to_wait_list()  # what torch asks for next, in the same write
        if begins_again:
            self._begin_again()
        return number

    def _has_left(self, number: int) -> bool:
        """Return whether this node has left that round, and waits for the next or is in it; False for -1."""
        return number >= 0 and (self._state.round > number or self._node in self._state.wait_list)

    def _begin_again(self) -> None:
        """Wait for the next round in the write that leaves this one; who leaves last begins it, with those that wait.

        Those that were in this one come first, others as far as there is room: of many nodes each writes once then, not three
        times, and a spare not at all. One that dies while it waits is lost from the new round instead.
        """
        state = self._state
        if state.complete:  # others are in it still
            self._add_to_wait_list()
            return
        for node in self._members & state.wait_list:
            state.wait_list.discard(node)
            state.participants[node] = 1
        self._add_to_participants()
        others_come = bool(state.complete or state.wait_list or state.redundancy_list)
        if not state.complete and state.wait_list:
            self._let_in()
        if not others_come and len(state.participants) >= self._settings.min_nodes:
            self._mark_rendezvous_complete()  # those of the last round are here, or known to be lost

    def _let_in(self) -> None:
        state, most = self._state, self._settings.max_nodes
        for node in sorted(state.wait_list)[: most - len(state.participants)]:
            state.wait_list.discard(node)
            state.participants[node] = 0
        if len(state.participants) == most:
            self._mark_rendezvous_complete()

    def _keep_alive_in(self, holder: SharedState) -> None:
        before = self._state.deadline
        self._keep_alive()
        if self._state.deadline != before:
            holder.mark_dirty()

    def waits(self) -> bool:
        """Return whether a round has completed without this node since the last call."""
        waited, self.has_waited = self.has_waited, False
        return waited

    def fitting(self, count: int) -> int:
        """Return the most of `count` nodes that the job can run on, 0 if it can on none."""
        least, most = self._settings.min_nodes, min(count, self._settings.max_nodes)
        sizes = range(most // self._unit * self._unit, least - 1, -self._unit)
        return next((size for size in sizes if not self._is_refused(size)), 0)

    def joinable(self, running: int, waiting: int) -> int:
        """Return how many waiting nodes would train if a new round began beside `running` ones."""
        whole = waiting - waiting % self._unit
        if not whole or not self._is_refused(running + whole):
            return whole
        return max(0, self.fitting(running + whole) - running)

    def _add_to_wait_list(self) -> None:
        self.has_waited = True
        super()._add_to_wait_list()
        running = len(self._state.participants)
        self.is_spare = self.fitting(running + len(self._state.wait_list)) <= running

    def missing(self, size: int) -> bool:
        """Whether a node of the current round, of `size` nodes, has left it to begin another."""
        return len(self._state_holder.state.participants) < size

    def _add_to_participants(self) -> None:
        super()._add_to_participants()
        if not self._state.complete and self.has_trained:
            self._state.participants[self._node] = 1  # a placeholder for its rank, assigned when the round completes

    def _keep_alive(self) -> None:
        super()._keep_alive()
        state = self._state
        enough = self._settings.min_nodes <= len(state.participants)
        if self._node not in state.participants or state.complete or state.deadline is not None or not enough:
            return
        if not self._holds():  # a held round has another size now
            state.deadline = datetime.now(timezone.utc) + self._settings.timeout.last_call

    def _holds(self) -> bool:
        """Return whether the round must stay open; logs the reason once per size."""
        size = len(self._state.participants) // self._unit * self._unit
        if not self._is_refused(size) or self.fitting(size):
            return False
        if self.held != size:
            _log.warning(
                "%d nodes do not fit the job's layout: waiting for more, up to %d, at most %.0f s"
                " (--rdzv-conf join_timeout)",
                size,
                self._settings.max_nodes,
                self._settings.timeout.join.total_seconds(),
            )
        self.held = size
        return True

    def _mark_rendezvous_complete(self) -> None:
        nodes = self._state.participants
        if self._holds():
            self._state.deadline = None
            return
        self.held = 0
        whole = len(nodes) // self._unit * self._unit
        surplus = len(nodes) - (fitting := self.fitting(whole) or whole)
        if fitting < whole:
            _log.warning("the job's layout fits %d of %d nodes: the others wait as spares", fitting, len(nodes))
        for node in sorted(nodes, key=lambda node: (-nodes[node], node))[len(nodes) - surplus :]:
            del nodes[node]  # it joins the wait list when it next reads the state
        if isinstance(self._state, JobState):
            self._state.draw()
        super()._mark_rendezvous_complete()
        if len(nodes) >= self._settings.max_nodes:  # who waits for a seat in vain makes nobody begin again
            self._state.redundancy_list |= self._state.wait_list
            self._state.wait_list.clear()
