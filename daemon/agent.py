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

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher_api

from flashckpt.daemon import hang
from flashckpt.daemon.budget import REFILL_STEPS, Budget, Verdict
from flashckpt.daemon.context import WorkerContext, bindings, script_commands
from flashckpt.daemon.failure import FailureReport, fingerprint
from flashckpt.daemon.hang import Pace
from flashckpt.daemon.node_check import Check
from flashckpt.daemon.nursery import Nursery
from flashckpt.daemon.process import become_subreaper, reap_strays
from flashckpt.daemon.reporting import Reporter, hang_states
from flashckpt.daemon.stop import AgreedStop, Group, StopSignals
from flashckpt.daemon.watch import JobWatch
from flashckpt.errors import FlashckptError, HangError, RestartBudgetError
from flashckpt.memory.control import ControlRow

_log = logging.getLogger("flashckpt.dlrun")
_TICK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What dlrun adds to torchrun's settings.

    Attributes:
        job: The job's name, where the user gave one by --rdzv-id.
        survivors_s: Seconds that survivors of a failure get between SIGTERM and SIGKILL; 0 kills at once.
        grace_s: Seconds an agreed stop may take before the workers are killed.
        ledger: A file that gets one JSON line per failure, besides the job directory's own.
        hang_s: Seconds without a step that count as a hang; 0 switches it off, None learns it from the steps.
        refill_steps: New steps between two failures that give the restart budget back; 0 never.
        wait_flush: Do not end before the daemon has persisted the newest snapshot (or grace_s is over).
        node_check: Look for bad and slow nodes before the first generation, and leave them out.
        min_nodes: Fewest nodes the job runs on.
    """

    job: str = ""
    survivors_s: float = 0.0
    grace_s: float = 60.0
    ledger: str = ""
    hang_s: float | None = None
    refill_steps: int = REFILL_STEPS
    wait_flush: bool = False
    node_check: bool = False
    min_nodes: int = 1


@dataclass(kw_only=True)
class Outcome:
    """How the launch ended, for the exit code: stopped on request, hanging, or by an error that repeats itself."""

    resume: bool = False
    hang: str = ""
    repeats: str = ""
    refused: int = 0


class RefusedError(FlashckptError):
    """A rank found the job impossible as it is; it has told why, and the exit code is its own."""

    def __init__(self, problem: str, *, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(problem)


class RendezvousLostError(FlashckptError):
    """The rendezvous store cannot be reached, so that nodes cannot find each other any more."""

    exit_code = 1


class NodeCheckError(FlashckptError):
    """The node check found this node bad, or too few good ones."""

    exit_code = 38


class FreshStores(RendezvousHandler):
    """A rendezvous whose every round hands the workers a store that nobody has written to.

    `may_close` stays False until the job has ended for good: the shutdown of a c10d rendezvous is
    final for all nodes.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self.inner = inner
        self.rounds = 0
        self.may_close = False
        self._info: RendezvousInfo | None = None
        self._server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; one node that is alone by definition does not ask anybody."""
        inner = self.inner
        if isinstance(inner, DynamicRendezvousHandler):
            if self._info is not None and inner.settings.max_nodes == 1:
                self._info = self._alone(self._info)
            else:
                inner._bootstrap_store_info = None  # noqa: SLF001 -- torch caches the first round's store here
                inner._shared_tcp_store_server = None  # noqa: SLF001 -- and its server here
                self._info = inner.next_rendezvous()
        elif isinstance(inner, StaticTCPRendezvous) and self.rounds:
            self._info = self._next_static(inner.next_rendezvous())
        else:
            self._info = inner.next_rendezvous()
        self.rounds += 1
        return self._info

    def _alone(self, info: RendezvousInfo) -> RendezvousInfo:
        address = _address(info)
        self._server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        store = PrefixStore(f"flashckpt/round{self.rounds}", self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address, self._server.port))

    def _next_static(self, info: RendezvousInfo) -> RendezvousInfo:
        """Open a new port for the new generation and tell the other nodes through the first store."""
        address = _address(info)
        key = f"flashckpt/port{self.rounds}"
        if info.rank == 0:
            self._server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            info.store.set(key, str(self._server.port))
        port = int(info.store.get(key))
        store = PrefixStore(f"flashckpt/round{self.rounds}", info.store)
        return RendezvousInfo(store, info.rank, info.world_size, RendezvousStoreInfo(address, port))

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the workers' store."""
        return bool(self.inner.use_agent_store)

    def get_backend(self) -> str:
        """Return the inner backend's name."""
        return str(self.inner.get_backend())

    def is_closed(self) -> bool:
        """Return whether the rendezvous was closed for good."""
        return bool(self.inner.is_closed())

    def set_closed(self) -> None:
        """Close the rendezvous for good."""
        self.inner.set_closed()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def num_nodes_waiting(self) -> int:
        """Return how many nodes want to join."""
        return int(self.inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the run id."""
        return str(self.inner.get_run_id())

    def shutdown(self) -> bool:
        """Close the rendezvous, but only when the job is over for every node."""
        return bool(self.inner.shutdown()) if self.may_close else True


def _address(info: RendezvousInfo) -> str:
    assert info.bootstrap_store_info is not None  # both rendezvous that come here fill it in
    return str(info.bootstrap_store_info.master_addr)


class DlrunAgent(LocalElasticAgent):
    """The agent of one node."""

    def __init__(
        self, spec: WorkerSpec, *args: Any, nursery: Nursery, options: AgentOptions, outcome: Outcome, **kwargs: Any
    ) -> None:
        self._stores = FreshStores(spec.rdzv_handler)
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
        self._signals = StopSignals(names, _raise_signal)
        self._watch = JobWatch()
        self._stop = AgreedStop(self._watch, self._options.grace_s)
        self._reporter = Reporter(self._watch, self._options.ledger)
        self._signals.install()
        try:
            result: RunResult = super().run(role)
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
        if self._options.node_check and not self._checked:
            self._checked = True
            self._check_nodes(worker_group)

    def _check_nodes(self, group: WorkerGroup) -> None:
        """Leave if this node is bad; rendezvous again without the others that are."""
        others = self._others(group)
        if others is None:
            return
        address = self._worker_group.spec.local_addr or socket.getfqdn()
        bad = Check(others.store, node=others.rank, count=others.size, address=address).run()
        if not bad:
            _log.info("node check: %d nodes are well", others.size)
            return
        text = "; ".join(f"node {node}: {why}" for node, why in sorted(bad.items()))
        if others.size - len(bad) < self._options.min_nodes:
            raise NodeCheckError(
                f"too few nodes are well: {text}", expected=f"at least {self._options.min_nodes} nodes"
            )
        if others.rank in bad:
            raise NodeCheckError(f"this node is left out: {bad[others.rank]}", state="The other nodes go on.")
        _log.warning("node check: left out: %s", text)
        super()._rendezvous(group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _replaced(local_elastic_agent, "start_processes", self._start_context):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if isinstance(self._pcontext, WorkerContext):
            self._reporter.started(rendezvous_s=self._rendezvous_s, fork_s=self._pcontext.fork_s)
        self._pace = Pace()
        return pids

    def _start_context(
        self,
        *,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        numa_options: Any,
        **rest: Any,
    ) -> PContext:
        """Stand in for torch's start_processes: scripts are forked, commands spawned, functions are torch's."""
        scripts = script_commands(entrypoint, args)
        if callable(entrypoint) and scripts is None:
            whole: dict[str, Any] = {**rest, "start_method": start_method, "numa_options": numa_options}
            return start_processes(entrypoint=entrypoint, args=args, envs=envs, **whole)
        for local_rank, environment in envs.items():
            environment.update(self._worker_environment(local_rank))
        context = self._make_context(
            nursery=self._nursery,
            scripts=scripts,
            survivors_s=self._options.survivors_s,
            cpus=bindings(numa_options, len(args)),
            entrypoint=entrypoint if isinstance(entrypoint, str) else sys.executable,
            args=args if isinstance(entrypoint, str) else {rank: ("-u", *item) for rank, item in args.items()},
            envs=envs,
            **rest,
        )
        self._pcontext = context  # before the start: a signal in between must still end its workers
        context.start()
        return context

    def _make_context(self, *, envs: dict[int, dict[str, str]], **rest: Any) -> WorkerContext:
        """Build the context with a log directory of this life's own (torch names it by the restart count)."""
        counts = {rank: env["TORCHELASTIC_RESTART_COUNT"] for rank, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._lives)
        context = WorkerContext(envs=envs, **rest)
        for rank, env in envs.items():
            env["TORCHELASTIC_RESTART_COUNT"] = counts[rank]
        return context

    def _worker_environment(self, local_rank: int) -> dict[str, str]:
        extra = {
            "TORCHELASTIC_RESTART_COUNT": str(self._failures),
            "FLASHCKPT_AGENT_DIR": str(self._watch.agent_dir),
            "FLASHCKPT_RESTART": str(self._lives),
            "FLASHCKPT_STACKS_FILE": str(self._watch.stacks_file(local_rank)),
        }
        return {**extra, "FLASHCKPT_JOB_ID": self._options.job} if self._options.job else extra

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch's signature
        """End the workers of this generation: at once, or with the time the user gave by --shutdown-timeout."""
        wait_s = int(self._options.survivors_s)
        self._shutdown(signal.SIGTERM if wait_s else signal.SIGKILL, wait_s)

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
        own_error = bool(report.first.traceback) and not report.first.is_echo
        return self._budget.spend(fingerprint=fingerprint(report.first) if own_error else "", step=report.step)

    def _end_hang(self, context: WorkerContext, rows: Sequence[ControlRow], limit_s: float) -> RunResult:
        """Write down all stacks, then kill every rank; the odd one counts as the one that failed."""
        silent_s = (time.monotonic_ns() - min(row.heartbeat_ns for row in rows)) / 1e9
        states = hang_states(self._watch, context.pids(), rows)
        self._outcome.hang = hang.render(states, silent_s=silent_s, limit_s=limit_s)
        context.abort()
        self._reporter.hang(context, states, self._outcome.hang, restart=self._lives + 1)
        suspect = (hang.odd_ranks(states) or [states[0].rank])[0]
        worker = next(worker for worker in self._worker_group.workers if worker.global_rank == suspect)
        failed = ProcessFailure(
            local_rank=worker.local_rank, pid=int(worker.id), exitcode=-signal.SIGKILL, error_file=""
        )
        failed.message = self._outcome.hang
        return RunResult(state=WorkerState.FAILED, failures={suspect: failed})

    # -- stopping

    def _others(self, group: WorkerGroup) -> Group | None:
        rank: Any = group.group_rank  # torch declares these None and fills them at the rendezvous
        size: Any = group.group_world_size
        store: Any = self._store
        return None if store is None or size in {None, 1} else Group(store=store, rank=rank, size=size)

    def _stop_together(self, group: WorkerGroup) -> None:
        """Agree with all ranks on the step to stop after; without flashckpt in them, stop as torchrun does."""
        others = self._others(group)
        store = others.store if others is not None else None
        signals = self._signals.received
        if signals and not self._stop.is_under_way:
            if self._watch.control() is None:
                _raise_signal(signals[0])
            self._stop.ask(store)
        elif store is not None:
            self._stop.hear(store)
        if not self._stop.is_under_way:
            return
        if self._stop.is_late:
            _log.error(
                "the workers did not stop in %.0f s: they are killed, what is in memory is kept", self._options.grace_s
            )
            _raise_signal(signals[0] if signals else signal.SIGTERM)
        pace_s = self._pace.at_least_s(time.monotonic())
        step = self._stop.advance(self._rows(), ranks=group.spec.local_world_size, step_s=pace_s, group=others)
        if step is not None:
            why = signal.Signals(signals[0]).name if signals else "another node was asked to stop"
            _log.warning("%s: all ranks stop after step %d, their state is kept", why, step)


def _raise_signal(number: int) -> NoReturn:
    name = signal.Signals(number)
    msg = f"Process {os.getpid()} got signal: {name}"
    raise SignalException(msg, sigval=name)


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


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

    with _replaced(launcher_api, "LocalElasticAgent", build):
        try:
            launcher_api.launch_agent(config, entrypoint, args)
        except SignalException:
            if not outcome.resume:
                raise
        except (RendezvousError, DistError) as error:
            if "rendezvous" not in type(error).__name__.lower() and config.max_nodes == 1:
                raise
            raise RendezvousLostError(
                f"the agent at {config.rdzv_endpoint} hosted the rendezvous store and cannot be reached, or it closed",
                found=f"{type(error).__name__}: {error}",
                state="The workers of this node were ended; complete snapshots are persisted by the daemon.",
                remedy="start the job again; docs/launching.md says how to keep the store on a node that does not train",
            ) from error
        except ChildFailedError as error:
            if outcome.refused:
                why = "the job cannot run as it is: a rank has told why, above"
                raise RefusedError(why, exit_code=outcome.refused) from error
            if outcome.repeats:
                raise RestartBudgetError(outcome.repeats, remedy="mend the script; its traceback is above") from error
            if outcome.hang:
                raise HangError(outcome.hang, state="All ranks were killed.") from error
            raise
    reap_strays(set())
    return outcome
