"""Hang detection: no step for too long, then the stacks of all ranks, grouped, and the rank that differs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from flashckpt.daemon.machine.process import session_cpu_s
from flashckpt.daemon.zygote.worker import STACKS_SIGNAL
from flashckpt.shm.persister_owner import log_size
from flashckpt.shm.persister_process import state_of

MINIMUM_S = 60.0
LEARNT_STEPS = 20
"""A learnt timeout is this many median steps, and never under MINIMUM_S."""

LONG_START_S = 300.0
"""A restart in which no rank does anything has at least this long, and ten times the longest start of the job."""
AT_WORK = 3.0
"""Behind a hang, ranks that use the processor may restore or compile: they have so many times the limit, and it once more."""
_LOOK_S = 0.5
_IDLE = 0.001  # of a core for each rank: the threads of its libraries that look around now and then
_BUSY_S = 0.05  # of all ranks together: ranks that only wait for one another use less in minutes

_TRACED = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


class Beat(Protocol):
    """The fields of a control row that hang detection reads."""

    rank: int
    pid: int
    step: int
    heartbeat_ns: int
    first_step: int
    paused: int


@dataclass(kw_only=True)
class NoRow:
    """A rank that has not come to its checkpointer yet; see Beat."""

    rank: int
    pid: int
    heartbeat_ns: int
    step: int = -1
    first_step: int = 0
    paused: int = 0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Ranks that make no progress, although no step is due; `ranks` are the suspects, empty where the stacks have to tell."""

    what: str
    ranks: Sequence[int] = ()
    limit_s: float


class StallWatch:
    """Sees what `is_hanging` cannot: a rank that is stopped in any phase, and a restart in which no rank does anything.

    Args:
        explicit_s: See `timeout_s`.
        known_s: How long the longest start of this job took, in seconds; 0: a restart has no limit yet.
        after_hang: The start before ended in a hang: a rank that uses the processor may be in the same again, and is
            believed to be at work for AT_WORK times the limit.
    """

    def __init__(self, explicit_s: float | None, known_s: float = 0.0, *, after_hang: bool = False) -> None:
        self._stop_s = MINIMUM_S if explicit_s is None else explicit_s or float("inf")
        least_s = max(LONG_START_S, 10 * known_s) if explicit_s is None else max(self._stop_s, 3 * known_s)
        self._quiet_limit_s = least_s if known_s > 0 else float("inf")
        self._known_s, self._after_hang = known_s, after_hang
        self._stopped_s: dict[int, float | None] = {}
        self._last_s: float | None = None
        self._quiet_s, self._mark, self._ran_s = 0.0, (0.0, 0.0), 0.0

    def look(self, now_s: float, ranks: Mapping[int, int], *, is_starting: bool, waited: float) -> Stall | None:
        """Return what has made no progress for too long. To be called several times a second.

        Args:
            now_s: Monotonic clock; what is counted is the time in which this process looked, not that of a suspended machine.
            ranks: Rank -> pid.
            is_starting: Some rank has not trained a step of this generation.
            waited: When a rank last recorded that it waits for storage.
        """
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, 1.0)
        if self._last_s is not None and passed_s < _LOOK_S:
            return None
        self._last_s = now_s
        for rank, pid in ranks.items():
            stopped = state_of(pid) == "T"  # "t" is a debugger: somebody looks at it
            before = self._stopped_s.get(rank)  # None: it ran when it was last looked at
            self._stopped_s[rank] = (0.0 if before is None else before + passed_s) if stopped else None
        if still := [
            rank for rank, seconds in self._stopped_s.items() if seconds is not None and seconds > self._stop_s
        ]:
            names = ", ".join(f"{rank} (pid {ranks[rank]})" for rank in still)
            what = f"rank{'s' if len(still) > 1 else ''} {names} stopped (SIGSTOP) for {self._stop_s:.1f} s"
            return Stall(what=what, ranks=still, limit_s=self._stop_s)
        if not is_starting or self._quiet_limit_s == float("inf"):
            return None
        self._ran_s += passed_s
        self._quiet_s = 0.0 if self._is_busy(ranks, waited) else self._quiet_s + passed_s
        if self._quiet_s <= self._quiet_limit_s:
            return None
        done = "trained a step" if self._after_hang else "done anything"
        what = f"no rank has {done} for {self._quiet_s:.1f} s of a restart (a start took {self._known_s:.1f} s before)"
        return Stall(what=what, limit_s=self._quiet_limit_s)

    def _is_busy(self, ranks: Mapping[int, int], waited: float) -> bool:
        """Return whether the ranks have used the processor since they last had, or wait for storage."""
        counts = not self._after_hang or self._ran_s < AT_WORK * self._quiet_limit_s
        cpu_s = session_cpu_s(set(ranks.values())) if counts else 0.0
        if cpu_s - self._mark[0] < _BUSY_S and waited == self._mark[1]:
            return False
        self._mark = (cpu_s, waited)
        return True


class SlowStart:
    """Says now and then that a start lasts, which is not ended: what a start is to take is not known, or its ranks wait for other nodes'.

    Args:
        known_s: How long the longest start of this job took, in seconds; 0: this is the first.
    """

    def __init__(self, known_s: float) -> None:
        self._known_s, self._due_s = known_s, max(LONG_START_S, 10 * known_s)
        self._cpu_s: float | None = None

    def look(self, ran_s: float, pids: Collection[int], *, counts_steps: bool) -> str:
        """Return what there is to say; "" in between: the times double, so that a start of hours makes a few lines.

        Args:
            ran_s: Seconds since the ranks were started; not all have trained a step.
            pids: The ranks' processes.
            counts_steps: Whether they have come to a Checkpointer. Of another program it is only said that it does nothing.
        """
        if ran_s < self._due_s:
            return ""
        self._due_s = 2 * ran_s
        before_s, self._cpu_s = self._cpu_s, session_cpu_s(pids)
        used_s, window_s = self._cpu_s - (before_s or 0.0), ran_s if before_s is None else ran_s / 2
        is_quiet = used_s < max(_BUSY_S, _IDLE * len(pids) * window_s)
        if (before_s is None and not self._known_s) or not (is_quiet or counts_steps):
            return ""
        known = f" (a start took {self._known_s:.0f} s before)" if self._known_s else ""
        return (
            f"{ran_s:.0f} s after the start not all ranks have trained a step{known}; in the last {window_s:.0f} s they "
            f"used {used_s:.1f} s of processor time. dlrun waits on; the ranks of this node are here:"
        )


class Pace:
    """Learns how long a step takes from (time, highest step) as the agent sees them."""

    def __init__(self, keep: int = 64) -> None:
        self._samples: list[float] = []
        self._keep = keep
        self._last: tuple[float, int] | None = None

    def see(self, now_s: float, step: int) -> None:
        """Record the highest step at this time; a lower one (a restart) resets the estimate."""
        if self._last is None or step < self._last[1]:
            self._last = (now_s, step)
        elif step > self._last[1]:
            self._samples.append((now_s - self._last[0]) / (step - self._last[1]))
            del self._samples[: -self._keep]
            self._last = (now_s, step)

    @property
    def highest(self) -> int:
        """Highest step seen; -1 before the first."""
        return self._last[1] if self._last is not None else -1

    def at_least_s(self, now_s: float, step: int) -> float:
        """Return seconds per step, or how long the current one has taken if none has ended yet; `step`: the highest one now.

        It was seen for the last time up to a tick ago, and of short steps many have ended since.
        """
        if step >= 0:
            self.see(now_s, step)
        return self.step_s or (now_s - self._last[0] if self._last is not None else 0.0)

    @property
    def step_s(self) -> float:
        """Median seconds per step; 0 before two steps were seen."""
        return median(self._samples) if self._samples else 0.0


def beats_of(rows: Sequence[Beat], ranks: Mapping[int, int], started_s: float) -> list[Beat]:
    """Return the rows, and for each rank (-> pid) that has none yet one of the time when it was started."""
    missing = ranks.keys() - {row.rank for row in rows}
    none: list[Beat] = [
        NoRow(rank=rank, pid=ranks[rank], heartbeat_ns=int(started_s * 1e9)) for rank in sorted(missing)
    ]
    return [*rows, *none]


def timeout_s(step_s: float, explicit_s: float | None) -> float:
    """Return the seconds without a step that count as a hang; infinite while nothing is learnt yet, or if it is off (0)."""
    if explicit_s is not None:
        return explicit_s if explicit_s > 0 else float("inf")
    return max(MINIMUM_S, LEARNT_STEPS * step_s) if step_s > 0 else float("inf")


def is_hanging(rows: Sequence[Beat], now_ns: int, limit_s: float) -> bool:
    """Return whether some rank has been silent for longer than `limit_s`.

    Never before every rank's first step (compilation, data), nor while any rank is paused: the others
    then wait for it.
    """
    if not rows or any(row.paused or not row.first_step for row in rows):
        return False
    return max(now_ns - row.heartbeat_ns for row in rows) > limit_s * 1e9


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank in a hang: its Python stack (innermost frame first), or its kernel state if it gives none."""

    rank: int
    pid: int
    step: int
    stack: tuple[str, ...] = ()
    kernel: str = ""


def parse_stack(text: str) -> tuple[str, ...]:
    """Return the main thread's frames of a faulthandler dump, innermost first: "function (file:line)"."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            blocks.append([])
        elif blocks and (match := _FRAME.match(line)):
            blocks[-1].append(f"{match['name']} ({match['file']}:{match['line']})")
    return tuple(blocks[-1]) if blocks else ()  # newest thread first, the main thread last


def frames_of(trace: str) -> tuple[str, ...]:
    """Return the frames of a Python traceback as those of a dump: the innermost first."""
    found = [match for line in trace.splitlines() if (match := _TRACED.match(line))]
    return tuple(f"{one['name']} ({one['file']}:{one['line']})" for one in reversed(found))


def collect(
    workers: Mapping[int, int], files: Mapping[int, Path], *, wait_s: float = 3.0
) -> dict[int, tuple[str, ...]]:
    """Ask forked workers for their stacks; ranks that do not answer (stopped, in the kernel) are left out.

    By local rank, `workers` are pids, and `files` where the faulthandler of each writes.
    """
    asked = {}
    for local_rank, pid in workers.items():
        if state_of(pid) not in ("T", "t") and _handles(pid, STACKS_SIGNAL):  # a stopped one would not answer
            asked[local_rank] = log_size(files[local_rank])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
    end, before = time.monotonic() + wait_s, dict[int, int]()
    while time.monotonic() < end and asked:
        now = {rank: log_size(files[rank]) for rank in asked}
        if now == before and all(
            _whole(files[rank], start) or _is_gone(workers[rank]) for rank, start in asked.items()
        ):
            break  # nothing was added meanwhile: the main thread comes last
        before = now
        time.sleep(0.005)
    return {rank: stack for rank, start in asked.items() if (stack := parse_stack(_read(files[rank], start)))}


def _is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def _handles(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal: without one it would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (signum - 1) & 1)


def _read(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""


def _whole(path: Path, start: int) -> bool:
    return bool(parse_stack(_read(path, start)))


def kernel_state(pid: int) -> str:
    """Return what the kernel knows of a process: state, wait channel and (as root) the innermost kernel functions.

    E.g. "state T (stopped), waits in do_signal_stop; in the kernel: do_signal_stop < get_signal < exit_to_user_mode_loop".
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return "gone"
    match = re.search(r"^State:\s*(.+)$", status, re.MULTILINE)
    channel = ""
    with contextlib.suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("\0\n ")
    waits = f", waits in {channel}" if channel not in ("", "0") else ""
    return f"state {match[1] if match else '?'}{waits}{_kernel_stack(pid)}"


def _kernel_stack(pid: int, frames: int = 6) -> str:
    try:
        lines = Path(f"/proc/{pid}/stack").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    names = [line.split()[-1].partition("+")[0] for line in lines[:frames] if line.strip()]
    return f"; in the kernel: {' < '.join(names)}" if names else ""


def odd_ranks(states: Sequence[RankState]) -> list[int]:
    """Return the ranks to suspect: those without a stack, else those outside the largest group, else the lowest step."""
    silent = [state.rank for state in states if not state.stack]
    if silent:
        return silent
    groups = _groups(states)
    if len(groups) > 1:
        return sorted(state.rank for group in groups[1:] for state in group)
    lowest = min(state.step for state in states)
    behind = [state.rank for state in states if state.step == lowest]
    return behind if len(behind) < len(states) else []


def _groups(states: Sequence[RankState]) -> list[list[RankState]]:
    """Ranks with equal stacks together, the largest group first."""
    by_stack: dict[tuple[str, ...], list[RankState]] = defaultdict(list)
    for state in states:
        by_stack[state.stack].append(state)
    return sorted(by_stack.values(), key=lambda group: (-len(group), group[0].rank))


def render(
    states: Sequence[RankState], *, silent_s: float, limit_s: float, stall: Stall | None = None, frames: int = 12
) -> str:
    """Return the report of a hang: groups of equal stacks, and the ranks to look at."""
    odd = (stall.ranks if stall is not None else None) or odd_ranks(states)
    what = (stall.what if stall is not None else "") or f"no step for {silent_s:.1f} s"
    who = f"; look at rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}" if odd else ""
    lines = [f"{what} (hang timeout {limit_s:.1f} s){who}"]
    return "\n".join([*lines, *_where(states, frames)])


def render_start(states: Sequence[RankState], what: str, frames: int = 12) -> str:
    """Return what SlowStart says, and where the ranks are."""
    return "\n".join([what, *_where(states, frames)])


def _where(states: Sequence[RankState], frames: int) -> list[str]:
    lines = []
    for group in _groups(states):
        ranks = ", ".join(f"{state.rank} (step {state.step})" for state in group)
        if group[0].stack:
            lines.append(f"  rank {ranks}:")
            lines += [f"    {frame}" for frame in group[0].stack[:frames]]
        else:
            lines += [f"  rank {state.rank} (step {state.step}) gave no stack: {state.kernel}" for state in group]
    return lines


def states_of(
    rows: Sequence[Beat], stacks: Mapping[int, tuple[str, ...]], workers: Mapping[int, int]
) -> list[RankState]:
    """Join control rows with collected stacks; ranks without a stack get their kernel state."""
    local = {pid: local_rank for local_rank, pid in workers.items()}
    states = []
    for row in sorted(rows, key=lambda row: row.rank):
        stack = stacks.get(local.get(row.pid, -1), ())
        kernel = "" if stack and state_of(row.pid) != "D" else kernel_state(row.pid)
        states.append(RankState(rank=row.rank, pid=row.pid, step=row.step, stack=stack, kernel=kernel))
    return states
