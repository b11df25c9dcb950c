"""How dlrun reports a failure: the text for the user, the ledger's line, the stacks of a hang."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from flashckpt.daemon.launcher import failure as failures
from flashckpt.daemon.launcher import findings, hang
from flashckpt.daemon.launcher.context import WorkerContext
from flashckpt.daemon.launcher.findings import Finding
from flashckpt.daemon.launcher.ledger import Ledger, LedgerEntry, advance, seconds_of_start
from flashckpt.daemon.launcher.stop import Group
from flashckpt.daemon.launcher.watch import JobWatch


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The rank that is blamed for a hang, and the report.

    `known` is False if no rank of this node differs from the others: the rank is then arbitrary.
    """

    rank: int
    text: str
    known: bool
    states: Sequence[hang.RankState] = ()


_log = logging.getLogger("flashckpt.dlrun")
_STOPPED = "it was stopped (SIGSTOP or a debugger), and its peers timed out"
_LEFT = "it ended with exit code 0 while its peers still needed it"
_ELSEWHERE = "connection lost to a rank of another node"


@dataclass(frozen=True, kw_only=True)
class _Start:
    """The start of a generation: when it was forked, and the seconds until then."""

    forked_ns: int
    rendezvous_s: float
    fork_s: float

    def line(self, rows: Sequence[Any]) -> str:
        """Return where the time to the first step of all ranks of this node went; "" until then."""
        seconds = seconds_of_start(rows, self.forked_ns)
        if seconds is None:
            return ""
        seconds = {"rendezvous": self.rendezvous_s, "fork": self.fork_s, **seconds}
        seconds["init"] = max(0.0, seconds["init"] - self.fork_s)  # counted from before the fork
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in seconds.items())
        step = max(row.restored_step for row in rows)
        how = f"restored step {step}" if step >= 0 else "nothing restored"
        return f"first step of all ranks {sum(seconds.values()):.2f} s after the start ({how}): {parts} s"


class FailureReporter:
    """Keeps the open record of the last failure until the new generation has trained its lost steps again."""

    def __init__(self, watch: JobWatch, ledger_path: str) -> None:
        self._watch = watch
        self._ledger = Ledger(ledger_path)
        self._pending: LedgerEntry | None = None
        self._oom_kills = failures.oom_kills()
        self._start: _Start | None = None

    def failure(
        self, context: WorkerContext, rows: Sequence[Any], *, restart: int, others: Group | None = None
    ) -> failures.FailureReport:
        """Report the first failing rank of a generation, also to the other nodes, and open its ledger record."""
        exits = [item for item in context.exits() if item.failed]
        first = failures.first_failure(exits)
        if first.is_echo and (causes := context.standing or failures.left_before(first, context.exits())):
            first = causes[0]  # its peers failed first, but this rank is the cause
        before, self._oom_kills = self._oom_kills, failures.oom_kills()
        kills = self._oom_kills - before
        log_path = context.stderrs[first.local_rank] or context.stdouts[first.local_rank]
        report = failures.FailureReport(
            first=first,
            host=socket.gethostname(),
            cause=_cause(first, context, kills),
            others=[item for item in exits if item is not first],
            step=max((row.step for row in rows if row.pid == first.pid), default=-1),
            log_lines=failures.tail(log_path) if log_path and not first.traceback else (),
            log_path=log_path,
            error_files={item.rank: context.error_files[item.local_rank] for item in exits if item.traceback},
            elsewhere=first.is_echo and others is not None,
        )
        if others is not None and not report.elsewhere:
            self._publish(others, first.rank, report.cause, report.step)
        detect_s = (time.time_ns() - first.at_ns) / 1e9 - (time.monotonic() - context.detected_s)
        cause, rank = (_ELSEWHERE, -1) if report.elsewhere else (report.cause, first.rank)
        self._open(cause, rank, report.step, restart=restart, detect_s=detect_s, context=context)
        return report

    @staticmethod
    def _publish(others: Group, rank: int, cause: str, step: int) -> None:
        findings.publish(others.store, Finding(rank=rank, host=socket.gethostname(), cause=cause, step=step))

    def named_elsewhere(self, cause: str) -> None:
        """Add what became known later to the open record."""
        if self._pending is not None:
            self._pending.cause = cause

    def hang(
        self,
        context: WorkerContext,
        rows: Sequence[Any],
        stall: hang.Stall,
        *,
        restart: int,
        others: Group | None = None,
    ) -> Suspect:
        """Collect the stacks of this node's ranks, kill them all, and open the ledger record of a hang."""
        silent_s = (time.monotonic_ns() - min(row.heartbeat_ns for row in rows)) / 1e9
        states = hang_states(self._watch, context.pids(), rows)
        odd = list(stall.ranks) or hang.odd_ranks(states)
        text = hang.render(states, silent_s=silent_s, limit_s=stall.limit_s, stall=stall)
        context.abort()
        step = max(state.step for state in states)
        rank = odd[0] if odd else -1
        if odd and others is not None:
            silent = next(state for state in states if state.rank == rank)
            self._publish(others, rank, f"hangs: {silent.kernel or silent.stack[0]}", silent.step)
        self._open(f"hang: {text.splitlines()[0]}", rank, step, restart=restart, detect_s=silent_s, context=context)
        known = bool(odd) or others is None
        return Suspect(rank=odd[0] if odd else states[0].rank, text=text, known=known, states=states)

    def slow_start(self, context: WorkerContext, rows: Sequence[Any], what: str) -> None:
        """Say that a start lasts, and where the ranks of this node are."""
        _log.warning("%s", hang.render_start(hang_states(self._watch, context.pids(), rows), what))

    def stopped_by(self, number: int, report: failures.FailureReport) -> None:
        """Report that a stop signal also reached ranks, or what they had forked, which did not wait for the agreed step."""
        text = "%s reached rank %d too, which ended before all ranks could stop together (%s): the newest common snapshot is kept"
        _log.warning(text, signal.Signals(number).name, report.first.rank, report.cause)
        self.finish("ended")

    def _open(self, cause: str, rank: int, step: int, *, restart: int, detect_s: float, context: WorkerContext) -> None:
        self.finish("failed again")
        self._pending = LedgerEntry(
            time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            host=socket.gethostname(),
            restart=restart,
            rank=rank,
            cause=cause,
            step=step,
            begun_ns=int((context.detected_s - max(0.0, detect_s)) * 1e9),
            seconds={"detect": max(0.0, detect_s), "stop": context.stopped_s - context.detected_s},
        )

    def started(self, *, rendezvous_s: float, fork_s: float) -> None:
        """Record how long the new generation took to rendezvous and to fork, in seconds."""
        forked_ns = time.monotonic_ns() - int(fork_s * 1e9)
        self._start = _Start(forked_ns=forked_ns, rendezvous_s=rendezvous_s, fork_s=fork_s)
        if self._pending is not None:
            self._pending.seconds |= {"rendezvous": rendezvous_s, "fork": fork_s}
            self._pending.forked_ns = forked_ns

    def tick(self, rows: Sequence[Any]) -> None:
        """Follow the new generation: log where its start went, and write the ledger's line once its lost steps are trained again."""
        if self._start is not None and (line := self._start.line(rows)):
            _log.info("%s", line)
            self._start = None
        if self._pending is not None and advance(self._pending, rows, time.monotonic_ns()):
            self.finish("restarted")

    def finish(self, outcome: str) -> None:
        """Write the open record, if any."""
        if self._pending is None:
            return
        if self._watch.job is not None:
            own = self._watch.job.path / "ledger.jsonl"
            self._ledger.paths = [own, *(path for path in self._ledger.paths if path != own)]
        self._ledger.append(replace(self._pending, outcome=outcome))
        self._pending = None


def _cause(first: failures.WorkerExit, context: WorkerContext, oom_kills: int) -> str:
    if first in context.standing:
        return _STOPPED
    if first.is_of_device:
        return f"exit code {first.code}: an error of the device, its driver or a kernel"
    return failures.describe_exit(first.code, oom_kills=oom_kills) if first.failed else _LEFT


def hang_states(
    watch: JobWatch, workers: Mapping[int, int], rows: Sequence[Any], wait_s: float = 3.0
) -> list[hang.RankState]:
    """Collect the stacks of this node's ranks, for at most `wait_s` seconds."""
    files = {local_rank: watch.stacks_file(local_rank) for local_rank in workers}
    return hang.states_of(rows, hang.collect(workers, files, wait_s=wait_s), workers)
