"""The rounds of a rendezvous: a new store for each, in units of nodes, never of a size that the job cannot run on."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _NodeDesc
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _delay as _torch_delay

from flashckpt.daemon.launcher import job_secret, rendezvous_store
from flashckpt.daemon.launcher.elastic_compat import replaced
from flashckpt.daemon.launcher.job_state import JobState
from flashckpt.daemon.launcher.sealed_store import SealedStore
from flashckpt.daemon.launcher.unit_rounds import UnitRounds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_log = logging.getLogger("flashckpt.dlrun")
_LINGER_S = 2.5
_LEAVE_S = 5.0
_POLL_S = 0.05


class JobNotes:
    """Which numbers of nodes the job has trained on, which it has refused, and the exit code that ends it everywhere.

    They are in the rendezvous store, which lasts as long as the job. Anybody who can reach it can write to it, so notes
    are signed (sealed_store): a stranger's counts as absent.

    Args:
        secret: The job's secret; without one (b"") notes are not signed.

    Attributes:
        code: The exit code that ends the job on all nodes, as far as this node knows; 0 for none.
    """

    def __init__(self, store: Store, run_id: str, secret: bytes = b"") -> None:
        self._store, self._prefix = SealedStore(store, secret, f"job {run_id}"), f"flashckpt.job.{run_id}"
        self.code = 0

    def note_trained(self, job: str = "") -> None:
        """Record that some generation of the job has trained a step, and the name by which nodes have its memory."""
        self._note("trained", job)

    def has_trained(self) -> bool:
        """Return whether any generation of the job has trained a step."""
        return self._noted("trained") is not None

    def job(self) -> str:
        """Return that name, "" where no node has noted one or the store is gone."""
        with contextlib.suppress(DistError):
            return self._noted("trained") or ""
        return ""

    def refuse(self, size: int) -> None:
        """Record that the job's layout does not fit `size` nodes."""
        self._note(f"refused.{size}", "1")

    def is_refused(self, size: int) -> bool:
        """Return whether the layout was recorded not to fit `size` nodes."""
        return self._noted(f"refused.{size}") is not None

    def end(self, code: int) -> None:
        """Record the exit code of a permanent error, so that all nodes end with it."""
        self.code = code
        with contextlib.suppress(DistError):  # the store is gone, but this node still knows the code
            self._note("end", str(code))

    def ended(self) -> int:
        """Return that exit code, 0 where none was noted or the store is gone."""
        try:
            self.code = int(self._noted("end") or self.code)
        except (DistError, ValueError):
            pass
        return self.code

    def leave(self, nodes: int, timeout_s: float) -> None:
        """Return once `nodes` nodes have called this, at the latest after `timeout_s` seconds.

        The store may end with the calling process: a node that has not read by then why the job ends never will.
        """
        until = time.monotonic() + timeout_s
        try:
            left = self._store.add(f"{self._prefix}.left", 1)
            while left < nodes and time.monotonic() < until:
                time.sleep(_POLL_S)
                left = self._store.add(f"{self._prefix}.left", 0)
        except DistError:
            return  # its host has left, so all nodes had arrived

    def _note(self, name: str, value: str) -> None:
        self._store.set(f"{self._prefix}.{name}", value)

    def _noted(self, name: str) -> str | None:
        """Return a note, None if there is none or a stranger wrote it."""
        key = f"{self._prefix}.{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class FreshStoreRendezvous(rendezvous_store.Forwarding):
    """A rendezvous that gives the workers a new, empty store in every round.

    `may_close` stays False until the job has ended for good: the shutdown of a c10d rendezvous is
    final for all nodes.

    Attributes:
        has_failed: Whether the job ended by a failure: the other nodes read here what it was before the store goes.
        has_missed: Whether the job had rounds without this node since the one before, in which it took part.
        notes: The nodes' notes about the job; None if the number of nodes is fixed.
    """

    def __init__(self, inner: RendezvousHandler, *, unit: int = 1) -> None:
        super().__init__(inner)
        self.rounds = 0
        self.has_missed, self._number = False, -1
        self.may_close = self.has_failed = False
        self.notes: JobNotes | None = None
        self._info: RendezvousInfo | None = None
        self._server: TCPStore | None = None
        self._unit = unit
        self._steps: UnitRounds | None = None
        self._nodes: dict[_NodeDesc, int] = {}
        self._before: dict[_NodeDesc, int] = {}
        self._heard: dict[_NodeDesc, float] = {}
        self._secret = job_secret.read_secret()
        if isinstance(inner, DynamicRendezvousHandler):
            self.notes = JobNotes(inner._store, inner.get_run_id(), self._secret)  # noqa: SLF001 -- torch offers no other way in
            inner._get_store = self._store_of_round  # type: ignore[assignment,method-assign]  # noqa: SLF001 -- the same
            self._steps = inner._op_executor = UnitRounds(inner, unit, self.notes.is_refused)  # noqa: SLF001 -- the same

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round."""
        inner = self.inner
        if isinstance(inner, DynamicRendezvousHandler):
            self._info = self._join(inner)
            state = inner._state_holder.state  # noqa: SLF001 -- a copy of what all nodes share
            self.note_round(state.round)
            self._before, self._nodes = self._nodes, dict(state.participants)
            self._hear(inner)
        elif isinstance(inner, StaticTCPRendezvous):
            with replaced(static_tcp_rendezvous, "TCPStore", rendezvous_store.tcp_store):
                info = inner.next_rendezvous()
            seal = functools.partial(SealedStore, secret=self._secret)
            self._info, self._server = rendezvous_store.of_static(info, inner.get_run_id(), self.rounds, seal)
        else:
            self._info = inner.next_rendezvous()
        self.rounds += 1
        return self._info

    def note_round(self, number: int) -> None:
        """Note the number of the round that this node takes part in: they are counted for the whole job."""
        self.has_missed, self._number = self._number >= 0 and number != self._number + 1, number

    def _store_of_round(self) -> SealedStore:
        """Return the store of the current round, in place of torch's, which believes whatever it holds."""
        inner = self.inner
        assert isinstance(inner, DynamicRendezvousHandler)
        state = inner._state_holder.state  # noqa: SLF001 -- a copy of what all nodes share
        purpose = f"round {inner.get_run_id()} {state.token if isinstance(state, JobState) else ''}"
        return SealedStore(DynamicRendezvousHandler._get_store(inner), self._secret, purpose)  # noqa: SLF001 -- the same

    def _join(self, inner: DynamicRendezvousHandler) -> RendezvousInfo:
        assert self._steps is not None
        while True:
            inner._bootstrap_store_info = None  # noqa: SLF001 -- torch caches the first round's store here
            inner._shared_tcp_store_server = None  # noqa: SLF001 -- and its server here
            try:
                with replaced(dynamic_rendezvous, "_delay", functools.partial(_delay, is_again=self.rounds > 0)):
                    info = inner.next_rendezvous()
            except RendezvousTimeoutError:
                if not self._is_left_over():
                    raise
                continue  # the others train: a surplus node waits for as long as they do
            except RendezvousClosedError:
                if not self._is_left_over():
                    raise
                raise RendezvousGracefulExitError("the job ended before this node could join") from None
            self._steps.has_trained, self._steps.held, self._steps.is_spare = True, 0, False
            return info

    def _is_left_over(self) -> bool:
        """Return whether a round has completed without this node because it did not fit."""
        assert self._steps is not None
        return self._steps.waits() and (self._unit > 1 or self._steps.is_spare)

    @property
    def held(self) -> int:
        """The number of nodes that did not change while this node waited for it; 0 if it did not wait."""
        return self._steps.held if self._steps is not None else 0

    def may_grow(self) -> bool:
        """Return whether more nodes than in the current round may join."""
        inner = self.inner
        if self._info is None or not isinstance(inner, DynamicRendezvousHandler):
            return False
        return int(self._info.world_size) < int(inner.settings.max_nodes)

    def may_shrink(self) -> bool:
        """Return whether the job could run on fewer nodes than in the current round, as far as is known."""
        return self._steps is not None and self._info is not None and self._steps.fitting(self._info.world_size - 1) > 0

    def serves_job(self) -> bool:
        """Return whether the store in which the nodes meet is in this process, and would end with it."""
        return bool(getattr(self.inner, "serves_job", False))

    def has_spare(self) -> bool:
        """Return whether another node waits to take the place of one that leaves."""
        if not isinstance(inner := self.inner, DynamicRendezvousHandler):
            return False
        state = inner._state_holder.state  # noqa: SLF001 -- a copy of what all nodes share
        return bool(state.wait_list or state.redundancy_list)

    def lost_in_this_round(self) -> dict[int, str]:
        """Return the nodes that the current round is known to have lost, group rank -> address."""
        inner = self.inner
        if not isinstance(inner, DynamicRendezvousHandler):
            return {}
        try:
            inner.is_closed()  # reads the state again
        except RendezvousError:
            return {}  # the host of the store is gone; the next rendezvous reports it
        return _gone(self._nodes, inner._state_holder.state.participants)  # noqa: SLF001 -- a copy of what all nodes share

    def has_lost(self) -> bool:
        """Return whether a node of this round has ended, alone or with its machine, and the job can do without it.

        Where it cannot, nothing is gained by a restart: the link may come back, and the ranks continue.
        """
        if self._steps is None or not isinstance(inner := self.inner, DynamicRendezvousHandler):
            return False
        state = inner._state_holder.state  # noqa: SLF001 -- a copy of what all nodes share
        gone = self._nodes.keys() - state.participants.keys()
        has_ended = isinstance(state, JobState) and any(state.lost.get(node, (0, 0, 0))[2] for node in gone)
        return has_ended and self._steps.fitting(len(state.participants)) > 0

    def lost_since_the_round_before(self) -> dict[int, str]:
        """Return the nodes of the previous round that are not in this one, group rank -> address."""
        return _gone(self._before, self._nodes)

    def silent_s(self, rank: int, *, before: bool) -> float:
        """Return the seconds since the last sign of a node of this round, or of the one `before`; 0 unknown."""
        nodes = self._before if before else self._nodes
        node = next((node for node, number in nodes.items() if number == rank), None)
        heard_s = self._heard.get(node, 0.0) if node is not None else 0.0
        return time.monotonic() - heard_s if heard_s else 0.0

    def _hear(self, inner: DynamicRendezvousHandler) -> None:
        state, now_s = inner._state_holder.state, time.monotonic()  # noqa: SLF001 -- a copy of what all nodes share
        lost = state.lost if isinstance(state, JobState) else {}
        self._heard = {node: self._heard.get(node, now_s - silent_ms / 1e3) for node, (_, silent_ms, _) in lost.items()}

    def num_nodes_waiting(self) -> int:
        """Return how many waiting nodes can join: as many as fit, or any of them once a node has left the round."""
        waiting = int(self.inner.num_nodes_waiting())
        if isinstance(self.inner, DynamicRendezvousHandler):
            self._hear(self.inner)
        if not waiting or self._steps is None or self._info is None or self._steps.missing(self._info.world_size):
            return waiting
        return self._steps.joinable(int(self._info.world_size), waiting)

    def shutdown(self) -> bool:
        """Close the rendezvous, but only when the job has ended on every node; gives waiting nodes the time to notice."""
        ended = self.notes is not None and self.notes.code  # not asked for: the host of the store may be lost
        if not self.may_close and not ended:
            return True
        staying = len(self._nodes) - len(self.lost_in_this_round()) if self.has_failed else len(self._nodes)
        closed = bool(self.inner.shutdown())
        if (ended or self.has_failed) and self.notes is not None:
            self.notes.leave(self.held or staying, _LEAVE_S)
            if ended:
                return closed
        if self.has_spare():
            time.sleep(_LINGER_S)  # the store may end with this process; waiting nodes poll it once a second
        return closed


def _delay(seconds: Any, *, is_again: bool) -> None:
    """Wait as torch does, but not before a round that begins again: up to 0.3 s, which spread the start of a job, also behind its first round."""
    if not (is_again and isinstance(seconds, tuple)):
        _torch_delay(seconds)


def _gone(before: dict[_NodeDesc, int], now: dict[_NodeDesc, int]) -> dict[int, str]:
    return {rank: node.addr for node, rank in before.items() if node not in now}
