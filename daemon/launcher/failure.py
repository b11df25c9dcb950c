"""Who failed first, and what its exit code means: turns the exits of a worker group into one report."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashckpt.errors import PASSING_CODES

_ECHO = re.compile(
    r"connection closed|connection reset|connection refused|connectfullmesh|broken pipe|socket closed"
    r"|closed by peer|remote process exited|timed out waiting|heartbeat monitor|no route to host",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"\bgaierror\b|name resolution|name or service not known|\bDistNetworkError\b|\bDistStoreError\b"
    r"|network is unreachable|stale file handle|transport endpoint is not connected",
    re.IGNORECASE,
)
_DEVICE = re.compile(
    r"^AcceleratorError\b(?!.*error: (?:device-side assert triggered|out of memory|invalid |no kernel image|misaligned"
    r"|an illegal (?:memory access|instruction)|operation not (?:supported|permitted)))"
)
"""Errors of a device of any kind; an assertion, a wrong argument or address is the program's own error, and stays one."""
_SIGNALLED = re.compile(
    r"killed by signal: (terminated|interrupt|hangup|quit|user defined)|DataLoader worker .*exited unexpectedly|^KeyboardInterrupt\b",
    re.IGNORECASE,
)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
CRASHES = tuple(-number for number in (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV))
"""Exit codes of faults of the program, or of what it calls."""
_CAUSED = "The above exception was the direct cause of the following exception:"
_MEANING = {
    1: "an exception or an exit(1) in the script",
    2: "wrong command line, or an exit(2) in the script",
    40: "storage did not take the checkpoint",
    41: "storage could not be reached",
    126: "the command was found but may not be executed",
    127: "the command was not found",
    128: "the shell or a device runtime failed (128)",
}
_SIGNALS = {
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "asked to stop from outside",
    signal.SIGSEGV: "native crash: invalid memory access",
    signal.SIGABRT: "native crash: abort, often a failed assertion in C++ or CUDA",
    signal.SIGBUS: "native crash: a mapped file or shared memory was truncated",
    signal.SIGFPE: "native crash: arithmetic",
    signal.SIGILL: "native crash: the binary does not fit this processor",
    signal.SIGINT: "interrupted",
}


def _of_worker(trace: str) -> bool:
    """Whether a connection was lost to a loader worker, which has died, and to no rank."""
    return "/torch/utils/data/" in trace and "/multiprocessing/" in trace and "/torch/distributed/" not in trace


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """One worker's end. `code` is negative for a signal; `at_ns` is wall-clock time, of the error file if any."""

    local_rank: int
    rank: int
    pid: int
    code: int
    at_ns: int
    summary: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        """Whether the worker ended badly."""
        return self.code != 0

    @property
    def lost_connection(self) -> str:
        """How it noticed the end of another rank ("connection closed by peer"); "" if that is not what ended it.

        Pipeline stages raise an error of theirs from it ("failed to run forward"), so causes count too.
        """
        return "" if _of_worker(self.traceback) else self._says(_ECHO)

    def _says(self, pattern: re.Pattern[str]) -> str:
        """Return the first text of the error and its causes in which a pattern is found, "" if there is none."""
        causes = [part.rstrip().rpartition("\n")[2] for part in self.traceback.split(_CAUSED)[:-1]]
        return next((text for text in (self.summary, *causes) if pattern.search(text)), "")

    @property
    def is_signalled(self) -> bool:
        """Whether a stop signal ended it, or something it had forked (a loader worker)."""
        code = -self.code if self.code < 0 else self.code - 128
        return code in _STOP_SIGNALS or bool(self._says(_SIGNALLED))

    @property
    def may_pass(self) -> bool:
        """Whether it ended because something it needs (storage, a name, the network) could not be reached."""
        return self.code in PASSING_CODES or bool(self._says(_PASSING))

    @property
    def is_of_device(self) -> bool:
        """Whether a device, its driver or a kernel failed (a context that was lost): nothing in the script has to be wrong."""
        return bool(self._says(_DEVICE))

    @property
    def is_echo(self) -> bool:
        """Whether it only noticed the end of another rank."""
        return bool(self.lost_connection)


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The first failing rank of one generation and what is known of it; `step` is -1 if the script reports no steps.

    `elsewhere`: every rank of this node only lost its connection to a rank on another node.
    """

    first: WorkerExit
    host: str
    cause: str
    others: Sequence[WorkerExit] = ()
    step: int = -1
    log_lines: Sequence[str] = ()
    log_path: str = ""
    error_files: dict[int, str] = field(default_factory=dict)
    elsewhere: bool = False

    @property
    def fingerprint(self) -> str:
        """The text by which this failure is the same as another; "" where it is not the script's own error."""
        first = self.first
        is_own = bool(first.traceback) and not (first.is_echo or first.may_pass or first.is_of_device)
        return fingerprint(self.first) if is_own else ""

    @property
    def crash(self) -> str:
        """The signal of a fault of the program that ended the rank, in words; "" for any other end."""
        return f"a rank ends by {signal.Signals(-self.first.code).name}" if self.first.code in CRASHES else ""

    def render(self, action: str) -> str:
        """Return the report as the lines a user reads; `action` says what is done about it."""
        if self.elsewhere:
            return "\n".join([*self._lost_connections(), f"  -> {action}"])
        step = f" at step {self.step}" if self.step >= 0 else ""
        lines = [f"rank {self.first.rank} (local {self.first.local_rank}, pid {self.first.pid}) on {self.host}"]
        lines[0] += f" failed first{step}: {self.cause}"
        if self.first.traceback:
            lines += ["  | " + line for line in self.first.traceback.rstrip().splitlines()]
        if self.log_lines:
            lines.append(f"  last {len(self.log_lines)} lines of {self.log_path}:")
            lines += ["  > " + line for line in self.log_lines]
        if self.others:
            lines.append(self._others())
        lines.append(f"  -> {action}")
        return "\n".join(lines)

    def _lost_connections(self) -> list[str]:
        ranks = ", ".join(str(rank) for rank in sorted(item.rank for item in (self.first, *self.others)))
        step = f" at step {self.step}" if self.step >= 0 else ""
        who = f"rank{'s' if self.others else ''} {ranks} lost the connection to another node"
        return [
            f"the failure did not begin on {self.host}{step}: {who}",
            f"  | rank {self.first.rank}: {(self.first.lost_connection or self.first.summary).splitlines()[0]}",
        ]

    def _others(self) -> str:
        ranks = ",".join(str(item.rank) for item in self.others)
        files = [self.error_files[item.rank] for item in self.others if item.rank in self.error_files]
        where = f" (tracebacks: {files[0]}{', ...' if len(files) > 1 else ''})" if files else ""
        return f"  after it: rank{'s' if len(self.others) > 1 else ''} {ranks}{where}"


def is_of_stop(report: FailureReport) -> bool:
    """Return whether a failure can be the work of a signal that asked the whole job to stop, and is no error of the script."""
    return report.first.is_signalled or report.first.is_echo


_SEEN_NS = 1_000_000_000
_WRONG_COMMAND = (2, 126, 127)
_COMMAND_S = 600.0  # as long as running is no progress where no steps are counted


def is_wrong_command(report: FailureReport, *, has_trained: bool, ran_s: float) -> bool:
    """Return whether a generation ended as a wrong command line does: with its exit code, before any step of the job."""
    is_early = report.step < 0 and not has_trained and ran_s < _COMMAND_S
    return report.first.code in _WRONG_COMMAND and not report.first.traceback and is_early


def first_failure(exits: Sequence[WorkerExit]) -> WorkerExit:
    """Return the exit that caused the others: the earliest one that is not an echo, else the earliest echo.

    A rank that is killed leaves no error file, and its peers' "connection closed" may be dated before
    its own end is seen: so exits by signal and true errors rank before echoes whatever their time.
    """
    return min((item for item in exits if item.failed), key=lambda item: (item.is_echo, item.at_ns, item.rank))


def left_before(echo: WorkerExit, exits: Sequence[WorkerExit]) -> list[WorkerExit]:
    """Return the ranks that had ended with 0 when their peers failed by a lost connection: they are the ones that were lost.

    The end of a process is seen a moment after its peers' error, which is dated by its file: both orders count.
    """
    return sorted(
        (item for item in exits if not item.failed and item.at_ns < echo.at_ns + _SEEN_NS), key=lambda item: item.at_ns
    )


def describe_exit(code: int, *, oom_kills: int = 0) -> str:
    """Return an exit code in words: "signal 9 (SIGKILL, exit code 137): killed from outside".

    Args:
        code: Negative for a signal, as Python's subprocess counts, or 128 + n as shells do.
        oom_kills: How many processes of this control group the kernel killed for memory meanwhile.
    """
    signum = -code if code < 0 else code - 128
    if (code < 0 or code > 128) and signum in set(signal.Signals):
        name = signal.Signals(signum)
        meaning = _SIGNALS.get(name, "ended by a signal")
        if name is signal.SIGKILL:
            meaning = "out of memory: the kernel's OOM killer of this control group" if oom_kills else meaning
            meaning += "" if oom_kills else " (no OOM kill was counted in this control group)"
        return f"signal {signum} ({name.name}, exit code {128 + signum}): {meaning}"
    return f"exit code {code}: {_MEANING.get(code, 'the script ended with this code')}"


def read_error(path: str) -> tuple[str, str, int]:
    """Return (summary, traceback, time in ns) of an error file; empty and 0 where there is none or half of one."""
    try:
        file = Path(path)
        message = json.loads(file.read_text(encoding="utf-8"))["message"]
        at_ns = file.stat().st_mtime_ns
        if isinstance(message, str):
            return message, message, at_ns
        return str(message["message"]), str(message["extraInfo"]["py_callstack"]), at_ns
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", 0


def tail(path: str, *, lines: int = 20, max_bytes: int = 65536) -> list[str]:
    """Return the last lines of a log file, [] where it cannot be read; reads at most `max_bytes`."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def oom_kills() -> int:
    """Return how many OOM kills this process's control group has counted (0 where it cannot be read)."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            return _counter(Path("/sys/fs/cgroup"), path, "memory.events")
        if "memory" in controllers.split(","):
            return _counter(Path("/sys/fs/cgroup/memory"), path, "memory.oom_control")
    return 0


def _counter(mount: Path, group: str, name: str) -> int:
    path = mount / group.lstrip("/") / name
    if not path.exists():
        path = mount / name  # a container sees its own group at the mount, whatever the group's name is outside
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        return 0
    return 0


def fingerprint(item: WorkerExit) -> str:
    """Return what makes two failures the same: the traceback without addresses, or the exit code."""
    text = item.traceback or item.summary or f"exit {item.code}"
    return re.sub(r"0x[0-9a-f]+|\b\d{4,}\b", "#", text)
