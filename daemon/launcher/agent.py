"""The agent of one node: every override of torch.distributed.elastic but its rendezvous (rounds.py).

What differs from torchrun's agent, and why:

* workers come from the zygote and are watched by pidfds: a failure is seen in milliseconds;
* survivors of a failure are killed at once: what they hold is in shared memory, not in them;
* every generation gets a fresh store: torchrun 2.13 hands stale gloo addresses to restarted ranks;
* the rendezvous decodes no pickle, and on one node there is none: everything listens on the loopback address;
* a stop is agreed with the ranks, so that none stops alone inside a collective;
* an agent that leaves does not close the rendezvous for the others.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from flashckpt.daemon.launcher import findings, hang, job_secret, node_check
from flashckpt.daemon.launcher.budget import HANG, REFILL_S, Budget, RestartDecision
from flashckpt.daemon.launcher.context import GroupStart, WorkerContext, make_context, script_commands
from flashckpt.daemon.launcher.elastic_compat import raise_signal, replaced
from flashckpt.daemon.launcher.failure import FailureReport, is_of_stop, is_wrong_command
from flashckpt.daemon.launcher.hang import Pace
from flashckpt.daemon.launcher.incidents import Incidents
from flashckpt.daemon.launcher.node_check import Check
from flashckpt.daemon.launcher.options import AgentOptions, LaunchOutcome, NodeCheckError, RefusedError
from flashckpt.daemon.launcher.rendezvous import OneNode
from flashckpt.daemon.launcher.reporting import FailureReporter, hang_states
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous
from flashckpt.daemon.launcher.stop import AgreedStop, Group, KeyValueStore, StopSignals
from flashckpt.daemon.launcher.stragglers import Stragglers
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.launcher.way_back import FIX, WayBack, has_older, way_back
from flashckpt.daemon.machine.process import become_subreaper
from flashckpt.daemon.zygote.client import ZygoteClient
from flashckpt.environment import env
from flashckpt.errors import FINAL_CODES, PASSING_CODES, FlashckptError, LayoutError
from flashckpt.shm import agent_folder
from flashckpt.shm.control import ControlRow

_log = logging.getLogger("flashckpt.dlrun")
_TICK_S = 0.2
_SIGNAL_S = 1.0  # within it the other processes of a job have the signal that one has
_LEAVE_S = 1.0  # for the stacks of ranks that are restarted with other nodes: all but stuck ones answer in milliseconds
_CAUSE_S = 8.0  # longer than a silent node counts as alive under the default settings
_BAD_STEPS = 2  # in which one node alone had bad numbers: it is named
_ON_LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class DlrunAgent(LocalElasticAgent):
    """The agent of one node."""

    def __init__(
        self,
        spec: WorkerSpec,
        *args: Any,
        zygote: ZygoteClient,
        options: AgentOptions,
        outcome: LaunchOutcome,
        **kwargs: Any,
    ) -> None:
        self._stores = FreshStoreRendezvous(spec.rdzv_handler, unit=options.node_unit)
        if isinstance(spec.rdzv_handler, OneNode):
            spec.master_addr = spec.master_port = None  # the store's own, on the loopback address
        spec.rdzv_handler = self._stores
        super().__init__(spec, *args, **kwargs)
        self._zygote, self._options, self._outcome = zygote, options, outcome
        limit = spec.max_restarts if options.restarts_chosen else None
        self._budget = Budget(limit, refill_steps=options.refill_steps)
        self._starts = 0
        self._way_back = WayBack()
        self._bad_steps: list[int] = []
        self._failures = 0
        self._rendezvous_s = 0.0
        self._checked = False
        self._ended = False
        self._pace = Pace()
        self._started_s = self._longest_s = 0.0
        self._stalls, self._slow_start = hang.StallWatch(options.hang_s), hang.SlowStart(0.0)
        self._has_trained = self._is_after_hang = False
        self._knows_cause = True

    # -- from start to end

    def run(self, role: str = "default") -> RunResult:
        """Supervise the worker group until it ends; owns the signals, the job watch and the zygote meanwhile."""
        become_subreaper()
        names = env.TORCHELASTIC_SIGNALS_TO_HANDLE
        self._signals = StopSignals(names, raise_signal)
        self._watch = JobWatch()
        if key := agent_folder.derived(job_secret.read_secret(), "ranks"):
            agent_folder.write_key(self._watch.agent_dir, key)
        self._stop = AgreedStop(self._watch, self._options.grace_s)
        self._reporter = FailureReporter(self._watch, self._options.ledger)
        self._incidents = Incidents(self._watch)
        self._signals.install()
        try:
            # torch returns None for a node that was never needed (more joined than --nnodes allows)
            result = super().run(role) or RunResult(state=WorkerState.SUCCEEDED)
            self._stores.may_close, self._stores.has_failed = not self._outcome.resume, result.is_failed()
            self._ended = not result.is_failed() and not self._outcome.resume
            if self._ended:
                self._watch.request("ended")
                self._outcome.unpersisted = self._watch.unpersisted()
                if self._outcome.unpersisted is not None:
                    self._incidents.ends_without_checkpoint(self._outcome.unpersisted.found)
            return result
        except (RendezvousConnectionError, DistError) as error:  # the latter where no rendezvous is under way
            others = self._others(self._worker_group)
            if others is not None or isinstance(error, RendezvousConnectionError):
                self._incidents.store_lost(self._options.endpoint, others)
            raise
        except SignalException:
            self._outcome.resume = self._watch.control() is not None  # a flashckpt job: its state is kept
            raise
        finally:
            if self._outcome.resume or sys.exc_info()[0] is not None:
                self._watch.request("persist-now")
            self._reporter.finish("ended")
            self._incidents.close()
            self._zygote.close()
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
                self._join(group)
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
                others_begin = self._stores.num_nodes_waiting() > 0 or self._stores.has_lost()
                if others_begin and not self._stop.is_under_way:
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
        self._leave_if_bad()
        self._incidents.tick(self._others(self._worker_group))
        if isinstance(context, WorkerContext):
            self._watch.reap({*context.pids().values(), *self._zygote.pids})
        rows = self._rows()
        if not isinstance(context, WorkerContext):
            return None
        if not self._stop.is_under_way and (stall := self._stall(rows)) is not None:
            return self._end_hang(context, rows, stall)
        self._see_slow_start(context, rows)
        if not rows:
            return None
        self._pace.see(time.monotonic(), max(row.step for row in rows))
        if self._options.standbys:
            if self._has_begun(rows) and not self._stop.is_under_way:
                context.keep_standbys(self._watch.agent_dir)
        elif any(row.first_step for row in rows):
            context.rehearse(self._options.warm)
        self._reporter.tick(rows)
        self._stragglers.tick(rows, self._others(self._worker_group))
        limit_s = hang.timeout_s(self._pace.step_s, self._options.hang_s)
        if self._stop.is_under_way or not hang.is_hanging(rows, time.monotonic_ns(), limit_s):
            return None
        return self._end_hang(context, rows, hang.Stall(what="", limit_s=limit_s))

    def _leave_if_bad(self) -> None:
        """Name this node once numbers became bad on it alone again and again, and leave the job where it can do without.

        Raises:
            NodeCheckError: the job can do without this node.
        """
        steps = agent_folder.bad_numbers(self._watch.agent_dir)
        if len(steps) < _BAD_STEPS:
            return
        what = f"numbers became NaN or infinite on {socket.gethostname()} alone, in steps {', '.join(map(str, steps))}"
        serves = self._stores.serves_job()
        if not serves and (self._stores.has_spare() or self._stores.may_shrink()):
            raise NodeCheckError(
                f"this node is left out: {what}", state="The job continues without it.", remedy="test its hardware"
            )
        if steps != self._bad_steps:
            why = "it stays: the job's rendezvous is on it" if serves else "it stays until another node waits"
            _log.error("%s: test its hardware; %s", what, why)
        self._bad_steps = steps

    def _stall(self, rows: Sequence[ControlRow]) -> hang.Stall | None:
        """Return what makes no progress, although no step is due. Where no state would be kept, only a young job is ended for it."""
        ran_s, workers = time.monotonic() - self._started_s, self._worker_group.workers
        is_starting = not self._has_begun(rows) and not any(row.paused for row in rows)
        if self._watch.control() is None and ran_s > REFILL_S:
            return None
        ranks = {worker.global_rank: int(worker.id) for worker in workers}
        waited = agent_folder.waited_at(self._watch.agent_dir)
        return self._stalls.look(time.monotonic(), ranks, is_starting=is_starting, waited=waited)

    def _see_slow_start(self, context: WorkerContext, rows: Sequence[ControlRow]) -> None:
        if self._stop.is_under_way or self._has_begun(rows) or any(row.paused for row in rows):
            return
        ran_s, counts_steps = time.monotonic() - self._started_s, self._watch.control() is not None
        if what := self._slow_start.look(ran_s, context.pids().values(), counts_steps=counts_steps):
            self._reporter.slow_start(context, self._beats(rows), what)

    def _beats(self, rows: Sequence[ControlRow]) -> list[hang.Beat]:
        ranks = {worker.global_rank: int(worker.id) for worker in self._worker_group.workers}
        return hang.beats_of(rows, ranks, self._started_s)

    def _has_begun(self, rows: Sequence[ControlRow]) -> bool:
        """Return whether all ranks of this node have trained a step of this generation; note it, and how long that took."""
        if not self._has_trained and any(row.first_step for row in rows):
            self._has_trained = True
            if self._stores.notes is not None:
                self._stores.notes.note_trained(self._watch.job.job if self._watch.job is not None else "")
        if not rows or len(rows) < len(self._worker_group.workers) or not all(row.first_step for row in rows):
            return False
        self._longest_s = max(self._longest_s, max(row.first_step for row in rows) / 1e9 - self._started_s)
        return True

    def _join(self, group: WorkerGroup) -> None:
        """Restart with the nodes that wait: new ones, or some of this round that saw a failure before the ranks here did."""
        _log.info("other nodes are waiting to join: restarting the workers with them")
        others = self._others(group)
        if isinstance(context := self._pcontext, WorkerContext):
            rows = self._rows()
            self._incidents.leaves(hang_states(self._watch, context.pids(), self._beats(rows), _LEAVE_S), rows)
            self._incidents.send(others, restarts=True, decision="")
        self._end_suspects()
        self._starts += 1
        self._way_back.follow(None, self._watch.job)
        self._restart_judged(group, others)
        if others is not None and (why := findings.why_left(others.store, self._stores.lost_since_the_round_before())):
            _log.error("%s", why)

    def _end_suspects(self) -> None:
        restored = max((row.restored_step for row in self._rows()), default=-1)
        agent_folder.end_suspects(self._watch.agent_dir, self._starts, restored)

    def _rows(self) -> list[ControlRow]:
        return self._watch.rows(set(self._pcontext.pids().values())) if self._pcontext else []

    # -- generations

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun = time.monotonic()
        self._expect_job()
        try:
            super()._rendezvous(worker_group)
        except RendezvousError as error:
            if (refused := self._refusal(error)) is None:
                raise
            raise refused from error
        self._rendezvous_s = time.monotonic() - begun
        self._expect_job()
        if self._stores.has_missed:
            agent_folder.note_missed(self._watch.agent_dir)
        if (others := self._others(worker_group)) is not None:
            ranks = [worker.global_rank for worker in worker_group.workers]
            findings.introduce(others.store, others.rank, host=socket.gethostname(), ranks=ranks)
        if self._options.node_check:
            self._check_nodes(worker_group)

    def _expect_job(self) -> None:
        """Prepare a node that is new to the job: its persister starts while the node waits, or beside the start of its ranks."""
        if self._watch.job is None and self._stores.notes is not None:
            self._watch.expect(self._stores.notes.job())

    def _refusal(self, error: RendezvousError) -> RefusedError | None:
        """Return the error that ends this node if the rendezvous failed because of a permanent error."""
        notes, held = self._stores.notes, self._stores.held
        if notes is not None and isinstance(error, RendezvousTimeoutError) and held:
            notes.end(LayoutError.exit_code)
            return RefusedError.size(held)
        answers = isinstance(error, (RendezvousClosedError, RendezvousTimeoutError))
        code = notes.ended() if notes is not None and answers else 0
        return (RefusedError.size(held) if held else RefusedError.elsewhere(code)) if code else None

    def _check_nodes(self, group: WorkerGroup) -> None:
        """Leave if this node is bad; rendezvous again without the other bad nodes."""
        others = self._others(group)
        if others is None or not node_check.is_due(others, checked=self._checked):
            return
        self._checked = True
        address = self._worker_group.spec.local_addr or socket.getfqdn()
        check = Check(others.store, node=others.rank, count=others.size, address=address)
        bad = check.run()
        if others.rank == min(set(range(others.size)) - set(bad), default=0):
            for node, why in bad.items():
                host = findings.host_of(others.store, node)
                name = {"id": f"{group.spec.rdzv_handler.get_run_id()}-check-{host}", "job": self._options.job}
                self._incidents.tell("node unhealthy", node=node, host=host, reason=f"node check: {why}", **name)
        if node_check.must_meet_again(bad, others, min_nodes=self._options.min_nodes):
            self._rendezvous(group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._watch.forget_refusal()
        with replaced(local_elastic_agent, "start_processes", self._start_context):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._started_s = time.monotonic()
        names = (f"rank {worker.global_rank} pid {pids[worker.local_rank]}" for worker in worker_group.workers)
        _log.info("started %s", ", ".join(names))
        if isinstance(self._pcontext, WorkerContext):
            self._reporter.started(rendezvous_s=self._rendezvous_s, fork_s=self._pcontext.fork_s)
        self._pace = Pace()
        after_hang, self._is_after_hang = self._is_after_hang, False
        # ranks here may wait for those of other nodes
        known_s = self._longest_s if after_hang or self._others(worker_group) is None else 0.0
        self._stalls = hang.StallWatch(self._options.hang_s, known_s, after_hang=after_hang)
        self._slow_start = hang.SlowStart(self._longest_s)
        self._stragglers = Stragglers(self._watch, self._incidents)
        return pids

    def _start_context(
        self, *, entrypoint: Callable[..., Any] | str, args: dict[int, tuple[Any, ...]], **rest: Any
    ) -> PContext:
        """Stand in for torch's start_processes: scripts are forked, commands spawned, functions are torch's."""
        if isinstance(self._stores.inner, OneNode):
            for environment in rest["envs"].values():
                environment.update({name: "lo" for name in _ON_LOOPBACK if not env.is_set(name)})
        scripts = script_commands(entrypoint, args)
        start = GroupStart(
            number=self._starts,
            failures=self._failures,
            job=self._options.job,
            watch=self._watch,
            back=self._way_back.back,
            leave_out=self._way_back.leave_out,
            restore_step=-1 if self._has_trained else self._options.restore_step,
        )
        if callable(entrypoint) and scripts is None:
            for local_rank, environment in rest["envs"].items():
                environment.update(start.environment(local_rank))
            return start_processes(entrypoint=entrypoint, args=args, **rest)
        context = make_context(
            start,
            entrypoint,
            args,
            scripts=scripts,
            survivors_s=self._options.survivors_s,
            standbys=self._options.standbys,
            zygote=self._zygote,
            **rest,
        )
        self._pcontext = context  # before the start, so that a signal in between still ends the workers
        context.start()
        if self._options.log_dir:
            self._watch.log_folder = getattr(rest["logs_specs"], "_run_log_dir", None) or self._options.log_dir
        return context

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 -- torch's signature
        """End the workers of this generation: at once, or within --shutdown-timeout."""
        wait_s = int(self._options.survivors_s)
        death = signal.SIGTERM if wait_s else signal.SIGKILL
        if self._pcontext is not None:
            self._pcontext.close(death, wait_s)
        self._shutdown(death)  # other contexts; their close() takes no timeout before torch 2.12

    # -- failures

    def _after_failure(self, group: WorkerGroup, result: RunResult) -> bool:
        """Report the failure and restart; returns False if the group is not restarted."""
        context, hung, others = self._pcontext, bool(self._outcome.hang), self._others(group)
        self._has_begun(self._rows())  # it may have been killed before anybody looked
        report = None
        if isinstance(context, WorkerContext) and result.is_failed() and not hung:
            report = self._reporter.failure(context, self._rows(), restart=self._starts + 1, others=others)
            self._knows_cause = not report.elsewhere
            if is_of_stop(report) and self._signals.await_first(_SIGNAL_S if report.first.is_signalled else 0.0):
                self._reporter.stopped_by(number := self._signals.received[0], report)
                self._watch.request("persist-now")
                raise_signal(number)
        self._end_suspects()
        decided = self._judge(report)
        action = decided.reason
        if report is not None:
            _log.error("%s", report.render(action))
        elif hung:
            _log.error("%s\n  -> %s", self._outcome.hang, action)
        self._watch.request("persist-now")
        if report is not None and isinstance(context, WorkerContext):
            self._incidents.failed(context, self._rows(), report)
        self._incidents.send(others, restarts=decided.restart, decision=action)
        if not decided.restart:
            self._outcome.repeats = action if decided.repeats and not hung else ""
            if decided.repeats:
                step = report.step if report is not None else self._pace.highest
                self._outcome.remedy = way_back(self._watch.job, step, "" if hung else FIX)
            self._stop_workers(group)
            self._conclude(others, restarts=False)
            if others is not None and not self._knows_cause:
                lost = findings.await_cause(others.store, self._stores.lost_in_this_round, timeout_s=_CAUSE_S)
                self._outcome.elsewhere = self._name_cause(others.store, lost)
                self._outcome.refused = self._stores.notes.ended() if self._stores.notes is not None else 0
            group.state = WorkerState.FAILED
            self._reporter.finish("ended")
            return False
        self._is_after_hang, self._outcome.hang = hung, ""
        self._remaining_restarts = self._budget.left
        self._failures += 1
        self._starts += 1
        self._way_back.follow(decided, self._watch.job)
        time.sleep(decided.pause_s)  # a stop signal ends it, as it ends a rendezvous
        self._restart_judged(group, others)
        if others is not None:
            self._name_cause(others.store, self._stores.lost_since_the_round_before())
        return True

    def _restart_judged(self, group: WorkerGroup, others: Group | None) -> None:
        """Restart, and have the incident judged: once it is known which nodes continue, or that none does."""
        if others is None:
            self._conclude(None, restarts=True)
            self._restart_workers(group)
            return
        try:
            self._restart_workers(group)
        except RendezvousConnectionError:
            raise  # there is no store to read accounts from; see run
        except (RendezvousError, FlashckptError):
            self._conclude(others, restarts=False)
            raise
        self._conclude(others, restarts=True)

    def _conclude(self, others: Group | None, *, restarts: bool) -> None:
        lost = (
            {}
            if others is None
            else self._stores.lost_since_the_round_before()
            if restarts
            else self._stores.lost_in_this_round()
        )
        self._incidents.conclude(
            others, lost, restarts=restarts, silent_s=lambda node: self._stores.silent_s(node, before=restarts)
        )
        self._incidents.starts = self._starts

    def _name_cause(self, store: KeyValueStore, lost: Mapping[int, str]) -> str:
        """Report what ended the generation if it was not on this node: a lost machine, or a rank elsewhere."""
        if self._knows_cause and not lost:
            return ""
        cause = findings.cause(store, lost)
        _log.error("%s", cause)
        self._reporter.named_elsewhere(cause)
        return cause

    def _refused(self, report: FailureReport | None) -> int:
        """Return the exit code of a rank whose error a restart cannot fix, 0 if there is none."""
        ran_s = time.monotonic() - self._started_s
        if report is not None and is_wrong_command(report, has_trained=self._has_trained, ran_s=ran_s):
            return report.first.code
        context = self._pcontext
        exits = context.exits() if isinstance(context, WorkerContext) else []
        return self._watch.refused() or next((item.code for item in exits if item.code in FINAL_CODES), 0)

    def _may_fit_again(self, refused: int) -> bool:
        """Return whether another number of nodes could fit the layout again: the job has trained with one."""
        notes, size = self._stores.notes, self._worker_group.group_world_size
        if refused != LayoutError.exit_code or notes is None or not notes.has_trained():
            return False
        if not self._stores.may_grow() and not self._stores.may_shrink():
            return False
        notes.refuse(int(size or 0))
        return True

    def _judge(self, report: FailureReport | None) -> RestartDecision:
        if self._stop.is_under_way:
            return RestartDecision(restart=False, reason="not restarting: the job was asked to stop")
        if self._remaining_restarts < self._budget.left:  # torch sets them to 0 when a process cannot be killed
            return RestartDecision(
                restart=False, reason="not restarting: a rank is stuck in the kernel and still holds its device"
            )
        if refused := self._refused(report):
            if self._may_fit_again(refused):
                return RestartDecision(
                    restart=True,
                    reason="restarting: nodes were lost or joined, and the layout does not fit those there are",
                )
            self._outcome.refused = refused
            if self._stores.notes is not None:
                self._stores.notes.end(refused)
            return RestartDecision(
                restart=False, reason=f"not restarting: the error of exit code {refused} is permanent"
            )
        ran_s = time.monotonic() - self._started_s
        if report is None:
            decided, step = self._budget.spend(fingerprint="", step=self._pace.highest, ran_s=ran_s), self._pace.highest
            return self._again(HANG if self._outcome.hang else "", step, decided)
        may_pass, step = report.first.may_pass, report.step
        self._outcome.passing = report.first.code if report.first.code in PASSING_CODES else 0
        decided = self._budget.spend(fingerprint=report.fingerprint, step=step, ran_s=ran_s, may_pass=may_pass)
        return self._again(report.crash, step, decided, error=report.fingerprint)

    def _again(self, kind: str, step: int, decided: RestartDecision, *, error: str = "") -> RestartDecision:
        """Return what is done about a failure: from the second time at a step on, of an error, or of a `kind` without one."""
        comes_again = self._budget.comes_again(kind, step)
        if decided.repeats:
            return self._further_back(error, step) or decided
        if not comes_again or not decided.restart:
            return decided
        return self._further_back(kind, step) or self._budget.stays(kind, step) or decided

    def _further_back(self, fingerprint: str, step: int) -> RestartDecision | None:
        """Return the decision to try an older state after the same failure; None where that may not be, or there is none."""
        if step < 0 or not self._options.escalate or not has_older(self._watch.job):
            return None
        return self._budget.go_back(fingerprint=fingerprint, step=step, limit=self._options.escalate)

    def _end_hang(self, context: WorkerContext, rows: Sequence[ControlRow], stall: hang.Stall) -> RunResult:
        """Record all stacks, then kill every rank; the rank that differs counts as the one that failed."""
        others = self._others(self._worker_group)
        suspect = self._reporter.hang(context, self._beats(rows), stall, restart=self._starts + 1, others=others)
        self._knows_cause = suspect.known
        self._outcome.hang = suspect.text
        self._incidents.hangs(suspect.states, rows, suspect.rank if suspect.known else -1, suspect.text)
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
        received, ranks, rows = self._signals.received, group.spec.local_world_size, self._rows()
        pace_s = self._pace.at_least_s(time.monotonic(), max((row.step for row in rows), default=-1))
        if not self._stop.tick(received, rows, ranks=ranks, step_s=pace_s, group=self._others(group)):
            raise_signal(received[0] if received else signal.SIGTERM)
