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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from types import ModuleType
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher_api

from flashckpt.daemon import failure as failures
from flashckpt.daemon.context import ScriptCommand, WorkerContext
from flashckpt.daemon.ledger import Failure, Ledger, advance
from flashckpt.daemon.nursery import Nursery
from flashckpt.daemon.process import become_subreaper, reap_strays
from flashckpt.daemon.stop import StopSignals, stop_step
from flashckpt.daemon.watch import JobWatch

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
    """

    job: str = ""
    survivors_s: float = 0.0
    grace_s: float = 60.0
    ledger: str = ""


@dataclass(kw_only=True)
class Outcome:
    """How the launch ended, for the exit code."""

    resume: bool = False
    stopped_by: int = 0


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
        self._lives = 0
        self._failures = 0
        self._pending: Failure | None = None
        self._rendezvous_s = 0.0
        self._stopping_until: float | None = None
        self._pace = (0.0, -1, 0.0)  # (time, highest step then, seconds per step)

    # -- life of the agent

    def run(self, role: str = "default") -> RunResult:
        """Run the worker group to its end, with signals, the job watch and the zygote around it."""
        become_subreaper()
        names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        self._signals = StopSignals(names, _raise_signal)
        self._watch = JobWatch()
        self._ledger = Ledger(self._options.ledger)
        self._signals.install()
        try:
            result: RunResult = super().run(role)
            self._stores.may_close = not self._outcome.resume
            if not result.is_failed() and not self._outcome.resume:
                self._watch.request("ended")
            return result
        finally:
            if self._outcome.resume or sys.exc_info()[0] is not None:
                self._watch.request("persist-now")
            self._finish_ledger("ended")
            self._nursery.close()
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
                self._mark_stopped()
                self._exit_barrier()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return result
            if result.state is WorkerState.HEALTHY:
                _log.info("other nodes wait to join: the workers start again with them")
                self._lives += 1
                self._restart_workers(group)
            elif not self._after_failure(group, result):
                return result

    def _supervise(self, group: WorkerGroup) -> RunResult:
        """Return when the workers have ended or failed, or (HEALTHY) when other nodes want to join."""
        context = self._pcontext
        assert context is not None
        self._signals.supervising = True
        try:
            while True:
                if self._signals.received:
                    self._stop_together(group)
                result: RunResult = self._monitor_workers(group)
                group.state = result.state
                if result.state is not WorkerState.HEALTHY:
                    return result
                if self._stores.num_nodes_waiting() > 0 and self._stopping_until is None:
                    return result
                self._tick()
                self._wait(context)
        finally:
            self._signals.supervising = False

    def _wait(self, context: PContext) -> None:
        if isinstance(context, WorkerContext):
            context.wait_event(_TICK_S, [self._signals.fd])
            self._signals.drain()
        else:
            time.sleep(self._worker_group.spec.monitor_interval)

    def _tick(self) -> None:
        """Do what is due several times a second: find the job, keep its daemon, follow its steps."""
        self._watch.tick()
        rows = self._rows()
        if not rows:
            return
        highest, now = max(row.step for row in rows), time.monotonic()
        before_s, before, _ = self._pace
        if highest > before:
            self._pace = (now, highest, (now - before_s) / (highest - before) if before >= 0 else 0.0)
        pending = self._pending
        if pending is not None and advance(pending, rows, time.monotonic_ns()):
            self._finish_ledger("restarted")

    def _rows(self) -> list[Any]:
        return self._watch.rows(set(self._pcontext.pids().values())) if self._pcontext else []

    # -- generations

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun = time.monotonic()
        super()._rendezvous(worker_group)
        self._rendezvous_s = time.monotonic() - begun

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _replaced(local_elastic_agent, "start_processes", self._start_context):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if self._pending is not None and isinstance(self._pcontext, WorkerContext):
            self._pending.seconds |= {"rendezvous": self._rendezvous_s, "fork": self._pcontext.fork_s}
            self._pending.forked_ns = time.monotonic_ns() - int(self._pcontext.fork_s * 1e9)
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
            cpus=_bindings(numa_options, len(args)),
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
        report = self._report(result)
        restart = self._remaining_restarts > 0 and self._stopping_until is None
        left = f"{self._remaining_restarts - 1} of {group.spec.max_restarts} restarts are left"
        action = f"restarting all workers ({left})" if restart else "no restart is left: the job ends"
        if self._stopping_until is not None:
            action = "the job was asked to stop: it ends"
        if report is not None:
            _log.error("%s", report.render(action))
        self._watch.request("persist-now")
        if not restart:
            self._stop_workers(group)
            group.state = WorkerState.FAILED
            self._finish_ledger("ended")
            return False
        self._remaining_restarts -= 1
        self._failures += 1
        self._lives += 1
        self._restart_workers(group)
        return True

    def _report(self, result: RunResult) -> failures.FailureReport | None:
        context = self._pcontext
        if not isinstance(context, WorkerContext) or not result.is_failed():
            return None
        exits = [item for item in context.exits() if item.failed]
        first = failures.first_failure(exits)
        step = max((row.step for row in self._rows() if row.pid == first.pid), default=-1)
        log_path = context.stderrs[first.local_rank] or context.stdouts[first.local_rank]
        files = {item.rank: context.error_files[item.local_rank] for item in exits if item.traceback}
        report = failures.FailureReport(
            first=first,
            host=socket.gethostname(),
            cause=failures.describe_exit(first.code, oom_kills=failures.oom_kills()),
            others=[item for item in exits if item is not first],
            step=step,
            log_lines=failures.tail(log_path) if log_path else (),
            log_path=log_path,
            error_files=files,
        )
        self._open_ledger(report, context)
        return report

    def _open_ledger(self, report: failures.FailureReport, context: WorkerContext) -> None:
        self._finish_ledger("failed again")
        detect_s = (time.time_ns() - report.first.at_ns) / 1e9 - (time.monotonic() - context.detected_s)
        self._pending = Failure(
            time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            host=report.host,
            restart=self._lives + 1,
            rank=report.first.rank,
            cause=report.cause,
            step=report.step,
            detected_ns=int(context.detected_s * 1e9),
            seconds={"detect": max(0.0, detect_s), "stop": context.stopped_s - context.detected_s},
        )

    def _finish_ledger(self, outcome: str) -> None:
        if self._pending is None:
            return
        if self._watch.job is not None:
            own = self._watch.job.path / "ledger.jsonl"
            self._ledger.paths = [own, *(path for path in self._ledger.paths if path != own)]
        self._ledger.append(replace(self._pending, outcome=outcome))
        self._pending = None

    # -- stopping

    def _stop_together(self, group: WorkerGroup) -> None:
        """Agree with the ranks on the step to stop after; without flashckpt in them, stop as torchrun does."""
        number = self._signals.received[0]
        if self._stopping_until is not None:
            if time.monotonic() > self._stopping_until:
                _log.error("the workers did not stop in %.0f s: they are killed", self._options.grace_s)
                self._outcome.resume = True
                _raise_signal(number)
            return
        control = self._watch.control()
        steps = [row.step for row in self._rows() if row.step >= 0]
        if control is None or len(steps) < group.spec.local_world_size:
            _raise_signal(number)
        assert control is not None
        control.stop_after = stop_step(steps, step_s=self._pace[2])
        self._stopping_until = time.monotonic() + self._options.grace_s
        name = signal.Signals(number).name
        _log.warning("%s: all ranks stop after step %d, their state is kept", name, control.stop_after)

    def _mark_stopped(self) -> None:
        """After a clean end: note whether the workers ended because they were asked to."""
        control = self._watch.control()
        if self._stopping_until is None or control is None:
            return
        highest = max((row.step for row in self._rows()), default=-1)
        self._outcome.resume = highest >= control.stop_after
        control.stop_after = -1
        self._outcome.stopped_by = self._signals.received[0]


def script_commands(
    entrypoint: Callable[..., Any] | str, args: dict[int, tuple[Any, ...]]
) -> dict[int, ScriptCommand] | None:
    """Return what a forked worker can run in place of this command, None if it must be spawned."""
    if entrypoint is torchrun.run_script_path:
        return {rank: ScriptCommand(argv=tuple(map(str, item)), module=False) for rank, item in args.items()}
    if entrypoint != sys.executable:
        return None
    commands = {}
    for rank, item in args.items():
        words = [str(word) for word in item]
        if words[:1] != ["-u"]:
            return None
        module = words[1:2] == ["-m"]
        rest = words[2:] if module else words[1:]
        if not rest or rest[0].startswith("-"):
            return None
        commands[rank] = ScriptCommand(argv=tuple(rest), module=module)
    return commands


def _bindings(numa_options: Any, count: int) -> dict[int, list[int]]:
    """Return the processors of each local rank under --numa-binding, {} without it."""
    if numa_options is None:
        return {}
    from torch.numa.binding import _get_logical_cpus_to_bind_to

    return {
        rank: sorted(_get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=numa_options)) for rank in range(count)
    }


def _raise_signal(number: int) -> None:
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
    reap_strays(set())
    return outcome
