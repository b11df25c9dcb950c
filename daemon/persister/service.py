"""The persisting daemon of one job on one node: `python -m flashckpt.daemon.persister.service <job directory>`.

A separate process, in its own session, without torch. It wakes on events and once a second, reads the
slot headers, and does what `PersistCoordinator` decides. It never stops training and never unlinks a segment
that a restart could use. A second daemon for the same directory ends at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from flashckpt.core.intent import NodeMessage
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.machine.logs import LogCopy, configure, log_context, turn_over
from flashckpt.daemon.persister import metrics
from flashckpt.daemon.persister.attempts import Attempts
from flashckpt.daemon.persister.coordinator import PersistCoordinator
from flashckpt.daemon.persister.extensions import Extensions
from flashckpt.daemon.persister.history import SessionHistory
from flashckpt.daemon.persister.retire import retire
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.daemon.persister.wakeup import Wakeup
from flashckpt.environment import env
from flashckpt.errors import (
    DamagedError,
    FlashckptError,
    FormatVersionError,
    PersistError,
    SharedMemoryError,
)
from flashckpt.native.guarding import kept_maps
from flashckpt.shm.acks import whole_job
from flashckpt.shm.gc import take_away
from flashckpt.shm.inventory import Identity, NodeInventory, scan
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory
from flashckpt.shm.lease import Lease
from flashckpt.shm.messages import MessageFiles
from flashckpt.shm.persister_process import LOG_NAME
from flashckpt.shm.private import private_directory, remove_file, remove_tree
from flashckpt.storage.factory import open_store

SCAN_S = 1.0
"""Seconds between two scans without an event."""
LEAST_S = 0.03
"""Least seconds between two turns, each of which costs 2.5 ms of CPU with 8 ranks: below 8 % of a core at worst."""
BUSY_S = 0.05
"""Seconds between two looks while other nodes are waited for; the end of this node's own writes wakes the daemon."""
_log = logging.getLogger("flashckpt.daemon")
__all__ = ["Daemon", "DaemonTimeouts", "main"]


class Daemon:
    """The loop. `turn` is one pass over everything; `run` repeats it until the work is done.

    Attributes:
        exit_code: What the process ends with: 0, or that of the failure for which it leaves work undone.
    """

    def __init__(self, directory: JobDirectory, lock: Lease, times: DaemonTimeouts) -> None:
        self.directory = directory
        self.persisting: PersistCoordinator | None = None
        self.attempts = Attempts()
        self.exit_code = 0
        self._lock, self._times = lock, times
        self._alive_s = time.monotonic()
        self._stopped_s: float | None = None  # when a signal asked to end
        self._ended_generation: int | None = None
        self._surprise = self._damage = ""
        self._read: tuple[JobConfig | None, Generation | None] = (None, None)
        self._goal: tuple[Identity, int] | None = None  # what persist-now asks for, and when it was asked
        self._status = DaemonStatus()
        self._known: Identity | None = None  # what earlier persisters of this job here knew to be committed
        self._numbers: dict[str, float] = {}
        self._scrapes = metrics.Scrapes(self, directory.note)
        self.log_copy = LogCopy(directory.path / LOG_NAME)
        self._wakeup = Wakeup([directory.path / "events", directory.path / "requests"])
        self._messages = MessageFiles(directory.path)
        self.extensions = Extensions(directory, self._wakeup.wake)
        self.history = SessionHistory(directory, lambda config: open_store(config.root, **config.storage_options))

    def run(self) -> None:
        """Turn until the work is done and no rank is running, or a signal came and nothing is pending."""
        try:
            self._introduce()
            while not self._safe_turn():
                turn_over(self.directory.path / LOG_NAME)
                turned_s, flush = time.monotonic(), None if self.persisting is None else self.persisting.flush
                waits = flush is not None and not flush.is_writing and not self.error
                self._wakeup.wait(BUSY_S if waits else SCAN_S)
                if flush is None or not flush.is_begun or flush.is_writing:
                    time.sleep(max(0.0, turned_s + LEAST_S - time.monotonic()))  # eight ranks make eight events
        except BaseException:
            self.close()
            raise
        if not self.exit_code:  # else writers may hang in the storage that fails: they end with the process
            self.close()
        self.log_copy.close()

    def _introduce(self) -> None:
        """Confirm the start to the owner before anything is asked of storage; what an earlier persister counted is kept."""
        with contextlib.suppress(DamagedError, FormatVersionError):
            before = self.directory.read_status() or DaemonStatus()
            self.attempts.failures, self._known = before.failures, before.once_committed or before.committed
            error = before.error if before.pid else ""  # without a pid it is the owner's: that none is running
            self._say(replace(before, error=error, pid=os.getpid()))

    def _safe_turn(self) -> bool:
        """One turn; an unforeseen error is logged with its traceback, and the turn retried: snapshots wait to be persisted."""
        try:
            return self.turn()
        except Exception as error:  # noqa: BLE001 -- the daemon must not give up
            if str(error) != self._surprise:
                _log.exception("a turn failed")
                self.attempts.failures += 1
            self._surprise = str(error)
            self._say(
                replace(
                    self._status,
                    failures=self.attempts.failures,
                    error=f"the persister fails: {type(error).__name__}: {error}",
                    answered_ns=self.directory.asked_ns("retry-now") or 0,
                    pid=os.getpid(),
                )
            )
            if self._stopping:
                self.exit_code = FlashckptError.exit_code
            return self._stopping or not self.directory.path.exists()

    def turn(self) -> bool:
        """Look at everything once and act; True when the daemon should end."""
        self.log_copy.follow(self.directory.read_notice("log-folder"))
        config, record = self._records()
        alive = self.directory.anyone_alive()
        if alive:
            self._alive_s = time.monotonic()
        silent_s = time.monotonic() - self._alive_s
        if config is None or record is None:
            is_left = silent_s > self._times.linger_s or (not alive and self.directory.request_path("ended").exists())
            if is_left and self.directory.path.exists():
                self._remove(only_unused=True)  # no rank has begun the job here
            return self._stopping or is_left or not self.directory.path.exists()
        if self.persisting is None or self.persisting.config != config:
            if self.persisting is not None:
                self.persisting.close()
            self.persisting = PersistCoordinator(
                config, self._report_commit, self._messages.send, self._see, self._wakeup.wake
            )
        self._scrapes.turn(job=config.job, node=config.node)
        view = self._see()
        urgent = self._urgent(self.persisting, view, alive=alive)
        with log_context(generation=record.number, step=max(view.complete(), default=(0, 0))[1]):
            self._persist(self.persisting, view, record, urgent=urgent)
            retire(view, record, self.persisting.committed)
            kept_maps.let_go()
        self._answer(self.persisting, view)
        committed = None if self.persisting is None else self.persisting.committed
        self.extensions.turn(config, view, record, committed)
        self._report(self.persisting, view, alive=alive)
        is_last = self.directory.request_path("ended").exists()
        self.history.turn(config, record, self._status, alive=alive, committed=committed, is_last=is_last)
        return self._finished(self.persisting, view, record, alive=alive, urgent=urgent, silent_s=silent_s)

    @property
    def endpoint(self) -> metrics.Endpoint | None:
        """Where the metrics are, if they are asked for."""
        return self._scrapes.endpoint

    @property
    def error(self) -> str:
        """Text of the last failure; "" once a persist succeeded again."""
        return self.attempts.error

    def numbers(self) -> Mapping[str, float]:
        """Return what `metrics` shows, as of the last turn."""
        return self._numbers

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end as soon as nothing is pending, or the grace time is over."""
        del number, frame
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
        self._wakeup.wake()

    @property
    def _stopping(self) -> bool:
        return self._stopped_s is not None

    def close(self) -> None:
        """Release everything."""
        self._scrapes.close()
        self.extensions.close()
        self.history.close()
        if self.persisting is not None:
            self.persisting.close()
        self._wakeup.close()
        self._lock.close()

    # -- parts of a turn --------------------------------------------------------------------------------

    def _see(self) -> NodeInventory:
        record = self._read[1]
        return scan(self.directory, () if record is None else (record,))

    def _records(self) -> tuple[JobConfig | None, Generation | None]:
        """Return the job's records; where one is damaged, as they were when they could last be read.

        A record of an older generation does no harm: what a newer one has claimed fences it.
        """
        try:
            self._read = self.directory.read_config(), self.directory.read_generation()
            if self._damage and self.attempts.error == self._damage:
                self.attempts.error, self.attempts.error_code = "", 0
            self._damage = ""
        except (DamagedError, FormatVersionError) as error:
            unknown = None in self._read
            if str(error) != self._damage:
                used = "nothing can be persisted" if unknown else "its previous content is used"
                _log.error("a record of the job cannot be read, %s: %s", used, error)
            self._damage = str(error)
            if unknown:  # report it to those who wait for a commit
                self.attempts.error, self.attempts.error_code = self._damage, error.exit_code
                self._say(DaemonStatus(failures=self.attempts.failures, error=self.error, pid=os.getpid()))
        return self._read

    def _urgent(self, persisting: PersistCoordinator, view: NodeInventory, *, alive: bool) -> bool:
        """Whether the newest common snapshot is wanted now: on request, at the end, or when no rank is running any more."""
        if self.directory.request_path("ended").exists() or (not alive and view.slots):
            return True
        asked_ns = self.directory.asked_ns("persist-now")
        if asked_ns is not None and self._goal is None:  # what is newest now: training may continue meanwhile
            self._goal = max(view.complete(), default=SnapshotId(0, 0)), asked_ns
        return self._goal is not None and persisting.floor < self._goal[0]

    def _persist(
        self, persisting: PersistCoordinator, view: NodeInventory, record: Generation, *, urgent: bool
    ) -> None:
        asked_ns = self.directory.asked_ns("retry-now") or 0
        if not self.attempts.is_due(asked_ns):
            persisting.pause(view, urgent=urgent, failing=self.attempts.is_failing)
            return
        if persisting.flush is None or not persisting.flush.is_begun:
            self.attempts.begin(asked_ns)
        try:
            received = self._received(record)
            control = self.directory.control_path
            job = None if received is None else whole_job(control, record.number)  # else it may be out of date
            persisting.turn(view, record, urgent=urgent, received=received, job=job)
        except (FlashckptError, OSError) as error:
            if self.attempts.failed(error, record.number):
                persisting.disconnect()
            return
        self.attempts.went_well(is_over=persisting.flush is None or not persisting.flush.is_begun)

    def _received(self, record: Generation) -> tuple[NodeMessage, ...] | None:
        """Return what the ranks carry from other nodes; nothing after their end, however late that was noticed."""
        return None if self.directory.request_path("ended").exists() else self._messages.received(record.number)

    def _answer(self, persisting: PersistCoordinator, view: NodeInventory) -> None:
        """Take a request away once what was newest when it came, or something newer, is committed or gone."""
        if self._goal is None or (persisting.floor < self._goal[0] and persisting.undone(view, urgent=True)):
            return
        if self.directory.asked_ns("persist-now") == self._goal[1]:  # not asked again meanwhile
            remove_file(self.directory.request_path("persist-now"))
        self._goal = None

    def _report_commit(self, view: NodeInventory) -> None:
        """Write the status at once, without the failure before: who waits for the commit does not wait for what follows it."""
        if self.persisting is not None:
            self.attempts.went_well(is_over=True)
            self._report(self.persisting, view, alive=bool(self._numbers.get("ranks_alive")))

    def _report(self, persisting: PersistCoordinator, view: NodeInventory, *, alive: bool) -> None:
        lag = sum(identity > persisting.floor for identity in view.flagged()) if persisting.is_due else 0
        said, numbers = self.extensions.report()
        status = DaemonStatus(
            committed=persisting.committed,
            once_committed=persisting.committed or self._known,
            failures=self.attempts.failures,
            error=self.error,
            lag=lag,
            floor=persisting.floor,
            given_up=persisting.given_up,
            answered_ns=self.attempts.answered_ns,
            pid=os.getpid(),
            updated_ns=self._status.updated_ns,
            **said,
        )
        self._numbers = metrics.numbers_of(
            persisting, view, is_alive=alive, lag=lag, failures=self.attempts.failures, error=self.error
        )
        self._numbers |= numbers | self.history.numbers()
        self.extensions.observe(partial(metrics.families, self, persisting.config.job, persisting.config.node))
        self._say(status)

    def _say(self, status: DaemonStatus) -> None:
        """Write the status where it has changed, and once a second."""
        now = time.time_ns()
        if status.updated_ns != self._status.updated_ns:
            status = replace(status, updated_ns=self._status.updated_ns)
        if status != self._status or now - self._status.updated_ns > 10**9:
            self._status = replace(status, updated_ns=now)
            with contextlib.suppress(OSError, SharedMemoryError):  # tmpfs full: the next turn tries again
                self.directory.write_status(self._status)

    def _finished(
        self,
        persisting: PersistCoordinator,
        view: NodeInventory,
        record: Generation,
        *,
        alive: bool,
        urgent: bool,
        silent_s: float,
    ) -> bool:
        idle = not persisting.undone(view, urgent=urgent)
        if self.directory.request_path("ended").exists():
            if self._ended_generation not in (None, record.number):  # the job was started again meanwhile
                remove_file(self.directory.request_path("ended"))
                self._ended_generation = None
                return False
            self._ended_generation = record.number
            if idle and not alive:
                return self._remove()
        if self._stopping and (persisting.flush is None or self._grace_is_over()):
            return self._leave(persisting, view, urgent=urgent)
        if alive or silent_s <= (self._times.linger_s if idle else max(self._times.linger_s, self._times.patience_s)):
            return False
        return self._leave(persisting, view, urgent=urgent)

    def _grace_is_over(self) -> bool:
        """Whether a pending flush has had its time since the signal: less where storage fails, bounded where it hangs."""
        assert self._stopped_s is not None
        limit_s = self._times.grace_s if self.error else max(self._times.grace_s, self._times.patience_s)
        return time.monotonic() - self._stopped_s > limit_s

    def _leave(self, persisting: PersistCoordinator, view: NodeInventory, *, urgent: bool) -> bool:
        """Say what is left undone, if anything is; True."""
        if (undone := persisting.undone(view, urgent=urgent)) and (self.error or persisting.flush is not None):
            self.exit_code = self.attempts.error_code or PersistError.exit_code
            steps = ", ".join(f"step {step} of generation {generation}" for generation, step in undone)
            _log.error(
                "persister stopped before %s was committed (%s); the snapshot stays in this node's memory, and the next "
                "persister of the job resumes it; exit code %d",
                steps,
                self.error.partition("\n")[0] or "the storage did not answer in time",
                self.exit_code,
            )
        return True

    def _remove(self, *, only_unused: bool = False) -> bool:
        """Remove the directory of a job that ended cleanly; False if somebody started at the last moment, or it holds something."""
        with private_directory(self.directory.path.parent) as base:
            gone = take_away(
                self.directory.path, base, locks=["live.lock"], only_unused=only_unused
            )  # the daemon's lock is ours
            if gone is None:
                return False
            remove_tree(gone.name, base)
        _log.info("job %s finished; shared memory released", self.directory.job)
        return True


def main(arguments: list[str]) -> int:
    """Run the daemon of the job directory in `arguments`; 0 also where another one is already running.

    Where it ends with work undone, the exit code is that of the failure: 13 root, 41 storage, 40 no answer in time.
    """
    configure()
    faulthandler.enable(file=2)  # a crash inside a library is then said in daemon.log, with the threads' stacks
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m flashckpt.daemon.persister.service JOB_DIRECTORY\n")
        return 2
    with contextlib.suppress(PermissionError):  # already the leader of a session
        os.setsid()
    try:
        env.check("persister")
        directory = JobDirectory.at(Path(arguments[0]))
        lock = directory.hold_daemon()
        if lock is None:
            return 0
        daemon = Daemon(directory, lock, DaemonTimeouts())
    except FileNotFoundError:
        return 0  # the job ended and its directory was removed before we started
    except FlashckptError as error:
        _log.error("%s", error)
        return error.exit_code
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, daemon.stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _log.info("daemon of job %s, pid %d", directory.job, os.getpid())
    daemon.run()
    if daemon.exit_code:
        logging.shutdown()
        os._exit(daemon.exit_code)  # does not wait for a writer that hangs in the storage; it has published nothing
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
