"""The owner of a node's persister: starts it, sees that it runs and says something, replaces it, reports it. Torch-free.

Under dlrun the agent owns the persister, else a thread of the node's first rank does. What only the persister's log knew
(it cannot start, storage fails) reaches the job's output here: once, and again every ten minutes while it lasts.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.errors import FlashckptError
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
from flashckpt.shm.persister_process import LOG_NAME, MODULE, in_one_line, last_words, state_of

LOOK_S = 1.0
"""Seconds between two looks."""
START_S = 60.0
"""Seconds within which a persister that was started has taken its lock."""
STOPPED_S = 10.0
"""Seconds of silence after which a persister that is stopped is killed, and another one started."""
SILENT_S = 300.0
"""The same of one that runs and hangs; doubled each time, because a long commit looks alike."""
STEADY_S = 60.0
"""Seconds after which a persister that was replaced counts as healthy."""
REPEAT_S = 600.0
"""Seconds between two lines about what is still wrong."""
_WAITS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LAST_START_S = 10.0
_LONGEST_GAP_S = 2.0
_IS_ROUTINE = re.compile(r"\S+ \S+ INFO \[")
_PREFIX = re.compile(r"^\S+ \S+ [A-Z]+ \[[^]]*\] ")


class PersisterOwner:
    """Supervises the persister of one job on this node; `tick` does what is due.

    Args:
        directory: Of the job; this process holds its live lock.
        log: Where the job's output is.
    """

    def __init__(self, directory: JobDirectory, log: Any) -> None:
        self._directory, self._log = directory, log
        self._child: PersisterProcess | None = None
        self._is_up = False  # a persister held the lock at the last look
        self._is_confirmed = False  # and has written a status since
        self._left_quietly = False  # the last one ended with 0 before that
        self._since_s = self._looked_s = float("-inf")
        self._failures = 0  # in a row
        self._is_missed = False  # it was logged that none runs, and not that one runs again
        self._again_s = float("-inf")
        self._asked_ns = 0  # newest request to retry before the last start
        self._killed = ""
        self._patience_s = SILENT_S
        self._silence = Silence()
        self._said: dict[str, tuple[list[str], float]] = {}
        self.problem = ""  # what is wrong now, in one line

    @property
    def pids(self) -> set[int]:
        """The persister, where it was started here: its end is looked at here."""
        return {self._child.pid} if self._child is not None else set()

    def tick(self) -> None:
        """Look at the persister, at most once a second."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        try:
            if self._directory.daemon_alive():
                self._see_running(now)
            elif self._directory.path.exists():  # else the persister has removed it, after a clean end
                self._see_none(now)
            self._see_notice(now)
        except (OSError, FlashckptError) as error:
            self._say("look", f"the persister cannot be looked at: {error}", now)

    def close(self, *, confirm: bool = False) -> None:
        """Let go of the persister, which keeps running.

        Args:
            confirm: First see whether it has started, where that is not known yet: a failure would be seen by nobody.
        """
        end = time.monotonic() + _LAST_START_S
        while confirm and self._child is not None and not self._is_confirmed and time.monotonic() < end:
            time.sleep(0.05)
            self._looked_s = float("-inf")
            self.tick()
            if self._failures:
                break
        if self._child is not None:
            self._child.close()
            self._child = None

    # -- one that runs -----------------------------------------------------------------------------------

    def _see_running(self, now: float) -> None:
        if not self._is_up:
            self._is_up, self._is_confirmed, self._since_s, self._silence = True, False, now, Silence()
        if self._child is not None and self._child.has_ended():  # it found the lock taken
            self._child = None
        status = self._status()
        silent_s = self._silence.see(status)
        pid = self._child.pid if self._child is not None else status.pid if status is not None else 0
        if not silent_s and status is not None and status.pid == pid > 0:
            self._confirmed(status, now)
        if silent_s > STOPPED_S:
            self._see_silent(pid, silent_s, now)

    def _confirmed(self, status: DaemonStatus, now: float) -> None:
        if not self._is_confirmed and self._is_missed:
            self._is_missed = False
            self._log.warning("the persister of job %s runs again, pid %d", self._directory.job, status.pid)
        self._is_confirmed = True
        if self._failures and now - self._since_s > STEADY_S:
            self._failures = 0
        self.problem = in_one_line(status.error)
        if status.error:
            cause = in_one_line(status.error)
            self._say(
                "storage",
                f"persisting fails (failures so far: {status.failures}): {cause}; it is retried, training continues, and {newest_in_words(status)}",
                now,
                cause=_found_in(status.error),
                warn=True,
            )
        elif self._said.pop("storage", None) is not None:
            self._log.warning("persisting works again: %s", newest_in_words(status))

    def _see_silent(self, pid: int, silent_s: float, now: float) -> None:
        state = state_of(pid)
        is_stopped = state in ("T", "t")
        if not is_stopped and silent_s <= self._patience_s:
            return
        what = f"process {pid} is stopped" if is_stopped else f"process {pid}, state {state or 'unknown'}"
        if kill_persister(pid, self._directory.path):
            self._killed = f"reported nothing for {silent_s:.0f} s ({what}) and was killed"
            self._patience_s *= 1 if is_stopped else 2
        else:
            text = f"the persister of job {self._directory.job} has reported nothing for {silent_s:.0f} s, and cannot be replaced from here ({what}): end it"
            self._say("silent", text, now)

    # -- none --------------------------------------------------------------------------------------------

    def _see_none(self, now: float) -> None:
        child, reason = self._child, ""
        if child is not None:
            if not child.has_ended():
                if now - child.started_s <= START_S:
                    return
                child.kill()
                reason = f"did not start within {START_S:.0f} s and was killed"
            elif child.code == 0 and (self._is_confirmed or not self._left_quietly):
                # asked to end, or it found the lock taken by one that is gone
                self._left_quietly = not self._is_confirmed
                self._again_s = now + LOOK_S
            else:
                reason = child.how_it_ended()
            child.close()
        elif self._is_up:
            reason = "has ended"
        self._child, self._is_up, self._is_confirmed = None, False, False
        was_killed, self._killed = self._killed, ""
        if was_killed or reason:
            self._failed(was_killed or reason, now)
        if now >= self._again_s or (self._directory.asked_ns("retry-now") or 0) > self._asked_ns:
            self._start(now)

    def _start(self, now: float) -> None:
        self._asked_ns = self._directory.asked_ns("retry-now") or 0
        self._again_s = now + LOOK_S
        log = self._directory.path / LOG_NAME
        size = log_size(log)
        try:
            pid = self._directory.ensure_daemon()
        except (OSError, FlashckptError) as error:
            self._failed(f"cannot be started: {in_one_line(str(error))}", now)
            return
        if pid:
            self._child = PersisterProcess(pid, log, size)

    def _failed(self, reason: str, now: float) -> None:
        wait_s = _WAITS_S[min(self._failures, len(_WAITS_S) - 1)]
        self._failures += 1
        self._again_s = now + wait_s
        self.problem = text = f"the persister of job {self._directory.job} {reason}"
        self._record(text)
        log = self._directory.path / LOG_NAME
        self._is_missed |= self._say(
            "start",
            f"{text}; until another one runs nothing reaches storage. It is started again; its log is {log}",
            now,
        )

    def _record(self, error: str) -> None:
        """Write the status in place of the persister that is not there; its lock keeps another one from writing."""
        lock = self._directory.hold_daemon()
        if lock is None:
            return
        try:
            status = self._status() or DaemonStatus()
            answered_ns = max(status.answered_ns, self._asked_ns)
            self._directory.write_status(
                replace(
                    status,
                    failures=status.failures + 1,
                    error=error,
                    answered_ns=answered_ns,
                    pid=0,
                    updated_ns=time.time_ns(),
                )
            )
        finally:
            lock.close()

    # -- reports -----------------------------------------------------------------------------------------

    def _see_notice(self, now: float) -> None:
        if notice := self._directory.read_notice():
            self._say("notice", f"job {self._directory.job}: {notice}", now, warn=True)
        else:
            self._said.pop("notice", None)

    def _say(self, kind: str, text: str, now: float, *, cause: str = "", warn: bool = False) -> bool:
        """Log what is wrong if it is new, has another cause than before, or was logged long ago; return whether it was."""
        # the next failure names other files, steps and seconds; how a process ended is not known where another reaped it
        core = re.sub(r"\S*[\d/]\S*| with exit code|was (?=ended)| by SIG\w+|[,;:]", "", cause or text).split()
        before, at_s = self._said.get(kind, ([], float("-inf")))
        if core == before and now - at_s < REPEAT_S:
            return False
        self._said[kind] = core, now
        (self._log.warning if warn else self._log.error)("%s", text)
        return True

    def _status(self) -> DaemonStatus | None:
        try:
            return self._directory.read_status()
        except FlashckptError:
            return None


class OwnerThread:
    """Ticks an owner once a second, in a rank."""

    def __init__(self, owner: PersisterOwner) -> None:
        self._owner, self._closing = owner, threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashckpt-persister", daemon=True)
        self._thread.start()

    def close(self, *, confirm: bool) -> None:
        """End the thread; `confirm` as PersisterOwner.close."""
        self._closing.set()
        self._thread.join()
        self._owner.close(confirm=confirm)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            with contextlib.suppress(Exception):  # a logger of the user's: it must not end the supervision
                self._owner.tick()


def newest_in_words(status: DaemonStatus) -> str:
    """Return what is on storage, as a clause."""
    if status.committed is None:
        return "nothing is on storage"
    return f"the newest checkpoint on storage is of step {status.committed[1]}"


def _found_in(error: str) -> str:
    """Return what an error has found, which stays the same over attempts; the error where it does not say."""
    lines = [line.strip() for line in error.splitlines()]
    return next((line for line in lines if line.startswith("found:")), error)


class PersisterProcess:
    """A persister that was started here, by its pidfd.

    Where this process is its parent or a subreaper above it, `has_ended` reaps it and learns its exit code.
    """

    def __init__(self, pid: int, log: Path, log_start: int) -> None:
        self.pid, self.started_s = pid, time.monotonic()
        self.code: int | None = None
        self._log, self._from = log, log_start
        self._fd = _pidfd(pid)

    def has_ended(self) -> bool:
        """Whether it has ended; reaps it where that is up to this process."""
        if self._fd < 0:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(0):
            return False
        with contextlib.suppress(ChildProcessError):  # a child of init, or reaped by somebody else
            found = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
            if found is not None:
                self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.close()
        return True

    def how_it_ended(self) -> str:
        """Return what is known of its end: "ended with exit code 10: the last words of its log"."""
        if self.code is not None and self.code < 0:
            how = f"was ended by {_signal_name(-self.code)}"
        else:
            how = "ended" if self.code is None else f"ended with exit code {self.code}"
        said = last_words(self._log, self._from)
        if not said:
            return f"{how}, and its log says nothing"
        return how if _IS_ROUTINE.match(said) else f"{how}: {_PREFIX.sub('', said)}"

    def kill(self) -> None:
        """SIGKILL."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it; it keeps running."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def kill_persister(pid: int, job: Path) -> bool:
    """SIGKILL the persister of a job directory; False, and nothing is done, where `pid` is another process by now."""
    fd = _pidfd(pid) if pid > 0 else -1
    if fd < 0:
        return False
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if MODULE.encode() not in words or os.fsencode(job) not in words:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Silence:
    """How long the persister has written no status, counted over looks: a clock that was set does not count.

    Neither does time in which the one who looks was stopped as well.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mark: object = self
        self._looked_s = time.monotonic()

    def see(self, status: DaemonStatus | None) -> float:
        """Look at the present status; returns the seconds."""
        mark = None if status is None else (status.pid, status.updated_ns)
        now = time.monotonic()
        gap_s, self._looked_s = min(now - self._looked_s, _LONGEST_GAP_S), now
        self.seconds = self.seconds + gap_s if mark == self._mark else 0.0
        self._mark = mark
        return self.seconds


def log_size(path: Path) -> int:
    """Return the bytes of a log, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
