"""Every override of torch.distributed.elastic, in one file: the agent, its stores, its launch.

What differs from torchrun's agent, and why:

* workers come from the zygote and are watched by pidfds: a failure is seen in milliseconds;
* survivors of a failure are killed at once: what they hold is in shared memory, not in them;
* every generation gets a fresh store: torchrun 2.13 hands stale gloo addresses to restarted ranks;
* an unchanged membership of one node is not negotiated again;
* a stop is agreed with the ranks, so that none stops alone inside a collective;
* an agent that leaves does not close the rendezvous for the others.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _DistributedRendezvousOpExecutor,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher_api

from flashckpt.daemon import hang, node_check, stores
from flashckpt.daemon.budget import Budget, Verdict
from flashckpt.daemon.context import Life, WorkerContext, make_context, script_commands
from flashckpt.daemon.failure import FailureReport
from flashckpt.daemon.hang import Pace
from flashckpt.daemon.node_check import Check
from flashckpt.daemon.nursery import Nursery
from flashckpt.daemon.options import AgentOptions, Outcome, RendezvousLostError
from flashckpt.daemon.process import become_subreaper, reap_strays
from flashckpt.daemon.reporting import Reporter
from flashckpt.daemon.stop import AgreedStop, Group, StopSignals
from flashckpt.daemon.torch_parts import raise_signal, replaced
from flashckpt.daemon.watch import JobWatch
from flashckpt.memory.control import ControlRow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_log = logging.getLogger("flashckpt.dlrun")
_TICK_S = 0.2
_LINGER_S = 2.5


class InUnits(_DistributedRendezvousOpExecutor):
    """The steps of a c10d rendezvous, whose every round is cut to a multiple of `unit` nodes; the others wait.

    Nodes that trained in the round before stay before others do: their memory holds the snapshots.
    """

    def __init__(self, inner: DynamicRendezvousHandler, unit: int) -> None:
        super().__init__(inner._this_node, inner._state_holder, inner.settings)  # noqa: SLF001 -- torch offers no other way in
        self._unit = unit
        self.has_trained = False
        self.has_waited = False

    def waits(self) -> bool:
        """Return whether a round went on without this node since the last call."""
        waited, self.has_waited = self.has_waited, False
        return waited

    def _add_to_wait_list(self) -> None:
        self.has_waited = True
        super()._add_to_wait_list()

    def missing(self, size: int) -> bool:
        """Whether a node of the present round, of `size` nodes, has left it to begin another."""
        return len(self._state_holder.state.participants) < size

    def _add_to_participants(self) -> None:
        super()._add_to_participants()
        if not self._state.complete and self.has_trained:
            self._state.participants[self._node] = 1  # the place of its rank, which is given at the end

    def _mark_rendezvous_complete(self) -> None:
        nodes = self._state.participants
        surplus = len(nodes) % self._unit
        for node in sorted(nodes, key=lambda node: (-nodes[node], node))[len(nodes) - surplus :]:
            del nodes[node]  # its next look puts it on the wait list
        super()._mark_rendezvous_complete()


class FreshStores(stores.Forwarding):
    """A rendezvous whose every round hands the workers a store that nobody has written to.

    `may_close` stays False until the job has ended for good: the shutdown of a c10d rendezvous is
    final for all nodes.
    """

    def __init__(self, inner: RendezvousHandler, *, unit: int = 1) -> None:
        super().__init__(inner)
        self.rounds = 0
        self.may_close = False
        self._info: RendezvousInfo | None = None
        self._server: TCPStore | None = None
        self._unit = unit
        self._units: InUnits | None = None
        if unit > 1 and isinstance(inner, DynamicRendezvousHandler):
            self._units = inner._op_executor = InUnits(inner, unit)  # noqa: SLF001 -- torch offers no other way in

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; one node that is alone by definition does not ask anybody."""
        inner = self.inner
        if isinstance(inner, DynamicRendezvousHandler):
            if self._info is not None and inner.settings.max_nodes == 1:
                self._info, self._server = stores.of_one_node(self._info, self.rounds)
            else:
                self._info = self._join(inner)
        elif isinstance(inner, StaticTCPRendezvous) and self.rounds:
            self._info, self._server = stores.of_static(inner.next_rendezvous(), self.rounds)
        else:
            self._info = inner.next_rendezvous()
        self.rounds += 1
        return self._info

    def _join(self, inner: DynamicRendezvousHandler) -> RendezvousInfo:
        while True:
            inner._bootstrap_store_info = None  # noqa: SLF001 -- torch caches the first round's store here
            inner._shared_tcp_store_server = None  # noqa: SLF001 -- and its server here
            try:
                info = inner.next_rendezvous()
            except RendezvousTimeoutError:
                if self._units is None or not self._units.waits():
                    raise
                continue  # the others train: a node that is over waits for as long as they do
            except RendezvousClosedError:
                if self._units is None or not self._units.waits():
                    raise
                msg = "the job has ended without this node"
                raise RendezvousGracefulExitError(msg) from None
            if self._units is not None:
                self._units.has_trained = True
            return info

    def num_nodes_waiting(self) -> int:
        """Return how many nodes want to join and can: whole units, or any of them once a node has left the round."""
        waiting = int(self.inner.num_nodes_waiting())
        if self._units is None or self._info is None or self._units.missing(self._info.world_size):
            return waiting
        return waiting - waiting % self._unit

    def shutdown(self) -> bool:
        """Close the rendezvous, but only when the job is over for every node; nodes that wait to join are let hear of it."""
        if not self.may_close:
            return True
        closed = bool(self.inner.shutdown())
        if isinstance(self.inner, DynamicRendezvousHandler):
            state = self.inner._state_holder.state  # noqa: SLF001 -- a copy of what all nodes share
            if state.wait_list or state.redundancy_list:
                time.sleep(_LINGER_S)  # the store may end with this process; they look once a second
        return closed


class DlrunAgent(LocalElasticAgent):
    """The agent of one node."""

    def __init__(
        self, spec: WorkerSpec, *args: Any, nursery: Nursery, options: AgentOptions, outcome: Outcome, **kwargs: Any
    ) -> None:
        self._stores = FreshStores(spec.rdzv_handler, unit=options.node_unit)
        spec.rdzv_handler = self._stores
        super().__init__(spec, *args, **kwargs)
        self._nursery, self._options, self._outcome = nursery, options, outcome
        self._budget = Budget(spec.max_restarts, refill_steps=options.refill_steps)
        self._lives = 0
        self._failures = 0
        self._rendezvous_s = 0.0
        self._checked = False
        self._ended = False
        self._pace = Pace()

    # -- life of the agent

    def run(self, role: str = "default") -> RunResult:
        """Run the worker group to its end, with signals, the job watch and the zygote around it."""
        become_subreaper()
        names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        self._signals = StopSignals(names, raise_signal)
        self._watch = JobWatch()
        self._stop = AgreedStop(self._watch, self._options.grace_s)
        self._reporter = Reporter(self._watch, self._options.ledger)
        self._signals.install()
        try:
            # torch gives None for a node that the job never needed (more came than --nnodes allows)
            result = super().run(role) or RunResult(state=WorkerState.SUCCEEDED)
            self._stores.may_close = not self._outcome.resume
            self._ended = not result.is_failed() and not self._outcome.resume
            if self._ended:
                self._watch.request("ended")
            return result
        except SignalException:
            self._outcome.resume = self._watch.control() is not None  # a flashckpt job: its state is kept
            raise
        finally:
            if self._outcome.resume or sys.exc_info()[0] is not None:
                self._watch.request("persist-now")
            self._reporter.finish("ended")
            self._nursery.close()
            if self._options.wait_flush and not self._ended:
                _log.info("waiting for the daemon to persist the newest snapshot")
                self._watch.await_flush(self._options.grace_s)
            self._watch.close()
            self._signals.restore()

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        role = group.spec.role
        self._initialize_workers(group)
        while True:
            result: RunResult = self._supervise(group)
            put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
            if result.state is WorkerState.SUCCEEDED:
                self._outcome.resume = self._stop.has_stopped(self._rows())
                self._exit_barrier()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return result
            if result.state is WorkerState.HEALTHY:
                _log.info("other nodes wait to join: the workers start again with them")
                self._lives += 1
                self._restart_workers(group)
            elif not self._after_failure(group, result):
                return result

    def _supervise(self, group: WorkerGroup) -> RunResult:
        """Return when the workers have ended, failed or hang, or (HEALTHY) when other nodes want to join."""
        context = self._pcontext
        assert context is not None
        self._signals.supervising = True
        try:
            while True:
                self._stop_together(group)
                result: RunResult = self._monitor_workers(group)
                group.state = result.state
                if result.state is not WorkerState.HEALTHY:
                    return result
                if self._stores.num_nodes_waiting() > 0 and not self._stop.is_under_way:
                    return result
                if (hanging := self._tick(context)) is not None:
                    return hanging
                self._wait(context)
        finally:
            self._signals.supervising = False

    def _wait(self, context: PContext) -> None:
        if isinstance(context, WorkerContext):
            context.wait_event(_TICK_S, [self._signals.fd])
            self._signals.drain()
        else:
            time.sleep(self._worker_group.spec.monitor_interval)

    def _tick(self, context: PContext) -> RunResult | None:
        """Do what is due several times a second; returns a result if the ranks hang."""
        self._watch.tick()
        rows = self._rows()
        if not rows or not isinstance(context, WorkerContext):
            return None
        self._pace.see(time.monotonic(), max(row.step for row in rows))
        self._reporter.tick(rows)
        limit_s = hang.timeout_s(self._pace.step_s, self._options.hang_s)
        if self._stop.is_under_way or not hang.is_hanging(rows, time.monotonic_ns(), limit_s):
            return None
        return self._end_hang(context, rows, limit_s)

    def _rows(self) -> list[ControlRow]:
        return self._watch.rows(set(self._pcontext.pids().values())) if self._pcontext else []

    # -- generations

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun = time.monotonic()
        super()._rendezvous(worker_group)
        self._rendezvous_s = time.monotonic() - begun
        if self._options.node_check:
            self._check_nodes(worker_group)

    def _check_nodes(self, group: WorkerGroup) -> None:
        """Leave if this node is bad; rendezvous again without the others that are."""
        others = self._others(group)
        if others is None or not node_check.is_due(others, checked=self._checked):
            return
        self._checked = True
        address = self._worker_group.spec.local_addr or socket.getfqdn()
        check = Check(others.store, node=others.rank, count=others.size, address=address)
        if node_check.leave_or_go_on(check.run(), others, min_nodes=self._options.min_nodes):
            self._rendezvous(group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with replaced(local_elastic_agent, "start_processes", self._start_context):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if isinstance(self._pcontext, WorkerContext):
            self._reporter.started(rendezvous_s=self._rendezvous_s, fork_s=self._pcontext.fork_s)
        self._pace = Pace()
        return pids

    def _start_context(
        self, *, entrypoint: Callable[..., Any] | str, args: dict[int, tuple[Any, ...]], **rest: Any
    ) -> PContext:
        """Stand in for torch's start_processes: scripts are forked, commands spawned, functions are torch's."""
        scripts = script_commands(entrypoint, args)
        if callable(entrypoint) and scripts is None:
            return start_processes(entrypoint=entrypoint, args=args, **rest)
        life = Life(number=self._lives, failures=self._failures, job=self._options.job, watch=self._watch)
        context = make_context(
            life,
            entrypoint,
            args,
            scripts=scripts,
            survivors_s=self._options.survivors_s,
            nursery=self._nursery,
            **rest,
        )
        self._pcontext = context  # before the start: a signal in between must still end its workers
        context.start()
        return context

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch's signature
        """End the workers of this generation: at once, or with the time the user gave by --shutdown-timeout."""
        wait_s = int(self._options.survivors_s)
        death = signal.SIGTERM if wait_s else signal.SIGKILL
        if self._pcontext is not None:
            self._pcontext.close(death, wait_s)
        self._shutdown(death)  # the rest; it takes no time-out before torch 2.12

    # -- failures

    def _after_failure(self, group: WorkerGroup, result: RunResult) -> bool:
        """Report the failure and restart; False if the group is not restarted."""
        context, hung = self._pcontext, bool(self._outcome.hang)
        report = None
        if isinstance(context, WorkerContext) and result.is_failed() and not hung:
            report = self._reporter.failure(context, self._rows(), restart=self._lives + 1)
        verdict = self._judge(report)
        action = verdict.reason
        if report is not None:
            _log.error("%s", report.render(action))
        elif hung:
            _log.error("%s\n  -> %s", self._outcome.hang, action)
        self._watch.request("persist-now")
        if not verdict.restart:
            self._outcome.repeats = action if verdict.repeats else ""
            self._stop_workers(group)
            group.state = WorkerState.FAILED
            self._reporter.finish("ended")
            return False
        self._outcome.hang = ""
        self._remaining_restarts = self._budget.left
        self._failures += 1
        self._lives += 1
        self._restart_workers(group)
        return True

    def _judge(self, report: FailureReport | None) -> Verdict:
        if self._stop.is_under_way:
            return Verdict(restart=False, reason="the job was asked to stop: it ends")
        if self._remaining_restarts < self._budget.left:  # torch took them away: a rank is stuck in the kernel
            return Verdict(restart=False, reason="a rank is stuck in the kernel: a new one would meet the same device")
        if refused := self._watch.refused():
            self._outcome.refused = refused
            return Verdict(restart=False, reason="every start would end the same: the job ends")
        if report is None:
            return self._budget.spend(fingerprint="", step=self._pace.highest)
        return self._budget.spend(fingerprint=report.fingerprint, step=report.step)

    def _end_hang(self, context: WorkerContext, rows: Sequence[ControlRow], limit_s: float) -> RunResult:
        """Write down all stacks, then kill every rank; the odd one counts as the one that failed."""
        suspect = self._reporter.hang(context, rows, limit_s, restart=self._lives + 1)
        self._outcome.hang = suspect.text
        worker = next(worker for worker in self._worker_group.workers if worker.global_rank == suspect.rank)
        failed = ProcessFailure(
            local_rank=worker.local_rank, pid=int(worker.id), exitcode=-signal.SIGKILL, error_file=""
        )
        failed.message = suspect.text
        return RunResult(state=WorkerState.FAILED, failures={suspect.rank: failed})

    # -- stopping

    def _others(self, group: WorkerGroup) -> Group | None:
        rank: Any = group.group_rank  # torch declares these None and fills them at the rendezvous
        size: Any = group.group_world_size
        store: Any = self._store
        return None if store is None or size in {None, 1} else Group(store=store, rank=rank, size=size)

    def _stop_together(self, group: WorkerGroup) -> None:
        """Agree with all ranks on the step to stop after; without flashckpt in them, stop as torchrun does."""
        pace_s, ranks = self._pace.at_least_s(time.monotonic()), group.spec.local_world_size
        received = self._signals.received
        if not self._stop.tick(received, self._rows(), ranks=ranks, step_s=pace_s, group=self._others(group)):
            raise_signal(received[0] if received else signal.SIGTERM)


def launch(
    config: Any, entrypoint: Callable[..., Any] | str, args: list[str], *, nursery: Nursery, options: AgentOptions
) -> Outcome:
    """Run the job as torch's launch_agent does, with our agent in place of LocalElasticAgent.

    Raises:
        ChildFailedError: workers failed and no restart was left.
        RestartBudgetError: the same error came at the same step twice.
        HangError: the ranks hang, and no restart was left.
        SignalException: dlrun was asked to stop and the workers could not agree on a step.
    """
    outcome = Outcome()

    def build(*rest: Any, **kwargs: Any) -> DlrunAgent:
        return DlrunAgent(*rest, nursery=nursery, options=options, outcome=outcome, **kwargs)

    theirs = vars(launcher_api)["LocalElasticAgent"]
    ours = build if theirs is LocalElasticAgent else theirs  # another one that somebody has put there is kept
    with replaced(launcher_api, "LocalElasticAgent", ours):
        try:
            launcher_api.launch_agent(config, entrypoint, args)
        except SignalException:
            if not outcome.resume:
                raise
        except (RendezvousError, DistError) as error:
            if "rendezvous" not in type(error).__name__.lower() and config.max_nodes == 1:
                raise
            raise RendezvousLostError.at(config.rdzv_endpoint, error) from error
        except ChildFailedError as error:
            if (clearer := outcome.error()) is not None:
                raise clearer from error
            raise
    reap_strays(set())
    return outcome
