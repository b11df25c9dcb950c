"""The snapshots that one rank still owes: skipped ones, persist steps, and waiting until these are committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from flashckpt.core.settings import Settings
from flashckpt.core.snapshot_id import BEFORE_ALL, SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError, PersistError
from flashckpt.report import RestoreReport, guarded
from flashckpt.shm.acks import AckedSnapshots
from flashckpt.shm.job_directory import NO_STATUS, DaemonStatus, JobDirectory
from flashckpt.shm.persisted import await_persister
from flashckpt.shm.persister_owner import REPEAT_S, SILENT_S, Silence, newest_in_words
from flashckpt.shm.persister_process import LOG_NAME, in_one_line, state_of

_log = guarded(logging.getLogger("flashckpt"))
Identity = SnapshotId
POLL_S = 0.01
"""Seconds between two looks at the daemon's status, 0.3 ms each: a watch on the file would save half of it, and cost threads in every rank."""
_LOOK_S = 1.0
"""Seconds between two looks at what the other ranks hold."""
_WITHOUT_DAEMON_S = 15.0


class Skips:
    """The skipped snapshots of one rank in one session.

    Until the session has its first snapshot, a skipped one is retried 1, 2, 4, 8, ... steps later and not only at
    the next regular step: memory that is being prepared is ready soon. The steps are the same on all ranks, so
    that their snapshots are common; a rank that skipped nothing joins if it sees that another rank did.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._due: int | None = None  # the last regular step at which a snapshot was due
        self._missed = False  # by this rank, at the last attempt
        self._tried = 0
        self._is_common = False
        self._row = 0  # skipped in a row

    def is_retry(self, step: int, *, unrecoverable: Callable[[], Collection[Identity]]) -> bool:
        """Return whether a skipped snapshot is retried at `step`.

        Args:
            step: The step just done.
            unrecoverable: Returns the unrecoverable ids; called rarely.
        """
        if self._due is None or self._is_common:
            return False
        offset = step - self._due
        if offset & (offset - 1):
            return False
        return self._missed or (self._generation, self._tried) in unrecoverable()

    def tried(self, step: int, *, is_due: bool) -> None:
        """Record that a snapshot of `step` is attempted now."""
        self._tried, self._missed = step, False
        if is_due:
            self._due = step

    def saw(self, common: Collection[Identity]) -> None:
        """Record the ids that all ranks hold: once one is of this session, retries end."""
        self._is_common = self._is_common or any(generation == self._generation for generation, _ in common)

    def reopened(self) -> None:
        """Record that the state moved to another segment, whose memory is not ready yet."""
        self._is_common = False

    def skipped(self, step: int, why: str) -> None:
        """Count a skipped snapshot; log the first of several in a row."""
        self._missed = True
        self._row += 1
        if self._row == 1:
            _log.warning("no snapshot of step %d: %s; skipped ones are counted in ckpt.stats", step, why)

    def taken(self, step: int) -> None:
        """End a row of skipped snapshots."""
        if self._row:
            _log.info("snapshots are taken again from step %d on, %d were skipped", step, self._row)
        self._row = 0


@dataclass(eq=False)
class Wanted:
    """The steps that one rank needs to have on storage.

    Attributes:
        owed: Persist step whose snapshot was skipped or discarded: the next snapshot is persisted in its place.
        taken: Newest snapshot that was taken to be persisted.
        why: Which one was discarded last, and why; "" if none was.
        restored: Snapshot that the session began with, if it was in memory and so may not be on storage.
        due: The newest persist step up to it; 0 where there is none.
    """

    generation: int
    owed: int | None = None
    taken: Identity | None = None
    discards: int = 0
    why: str = ""
    restored: Identity | None = None
    due: int = 0

    def began_with(self, report: RestoreReport | None, *, settings: Settings, marked: bool) -> None:
        """Record what the session began with; `marked`: it is a snapshot to be persisted, whatever its number is."""
        if report is not None and not report.tier_bytes.get("storage"):
            self.restored = Identity(report.generation, report.step)
            self.due = report.step if marked else settings.newest_persist(report.step)

    def count_restored(self, committed: Identity | None) -> None:
        """Want what the session began with, if its persist steps are not on storage and nothing newer is wanted."""
        if self.due and self.owed is None and self.taken is None and (committed or BEFORE_ALL)[1] < self.due:
            self.taken = self.restored

    def owe(self, step: int) -> None:
        """Record that the snapshot of `step`, or the next one that can be taken, must be persisted."""
        self.owed = step

    def begun(self, identity: Identity) -> None:
        """Record that a snapshot to be persisted is being taken."""
        self.owed, self.taken = None, identity

    def discarded(self, identity: Identity, error: Exception, *, persist: bool) -> None:
        """Record a discarded snapshot (called in the copy thread)."""
        self.discards += 1
        self.why = f"the snapshot of step {identity[1]} was discarded: {str(error).splitlines()[0]}"
        if persist:
            self.owed = identity[1]


def persisting_fails(status: DaemonStatus, directory: JobDirectory) -> PersistError:
    """Return the error that tells a callback of failures that training does not meet."""
    return PersistError(
        "persisting fails",
        found=in_one_line(status.error),
        state=f"Training continues in memory alone; {newest_in_words(status)}. Failures so far: {status.failures}.",
        remedy=f"look at the storage and at {directory.path / LOG_NAME}; it is tried again until it succeeds",
    )


class CommitWatch:
    """Sees, after each snapshot, what the daemon has committed, and that it fails.

    Args:
        directory: The job's directory on this node.
        on_commit: Called with generation and step of each checkpoint that is seen to be committed.
        on_failure: Called with the error at once, and again while it lasts.
    """

    def __init__(
        self, directory: JobDirectory, on_commit: Callable[[int, int], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._directory, self._on_commit, self._on_failure = directory, on_commit, on_failure
        self._committed: Identity | None = None
        self._mark: tuple[int, int, int] | None = None
        self._failing_s = float("-inf")  # when failures were reported last

    def look(self) -> None:
        """Compare the daemon's status with the one that was seen before."""
        mark = self._directory.status_mark()  # before it is read: what is written meanwhile is seen the next time
        if mark is not None and mark in (self._mark, NO_STATUS):
            return
        try:
            status = self._directory.read_status()
        except (DamagedError, FormatVersionError):
            status = None
        self._mark = mark if status is not None else None
        if status is None:
            return
        now = time.monotonic()
        if not status.error:
            self._failing_s = float("-inf")
        elif now - self._failing_s > REPEAT_S:
            self._failing_s = now
            self._on_failure(persisting_fails(status, self._directory))
        if status.committed not in (None, self._committed):
            assert status.committed is not None
            self._committed = status.committed
            self._on_commit(*status.committed)


@dataclass(kw_only=True)
class Waiting:
    """One call of `Checkpointer.wait`.

    Attributes:
        wanted: The steps that are waited for.
        directory: The job's directory on this node.
        timeout_s: Seconds, or None.
        present: Id of the current state, of the last step done.
        take: Begin a snapshot of the current state, to be persisted, if a slot is free; returns why it can never
            be taken, or "".
        known: The snapshots that all ranks hold, and those that are unrecoverable.
        holds: Whether this rank holds a snapshot COMPLETE.
        alive: Called repeatedly as a heartbeat: slow storage is not a hang.
        by_time: Whether the persister waits for its time unless it is asked.
    """

    wanted: Wanted
    directory: JobDirectory
    timeout_s: float | None
    present: Identity
    take: Callable[[], str]
    known: Callable[[], AckedSnapshots]
    holds: Callable[[Identity], bool]
    alive: Callable[[], None]
    by_time: bool = False
    _asked_ns: int = 0
    _newest_asked: bool = False
    _looked_s: float = float("-inf")
    _silent_s: float | None = None
    _silence: Silence = field(default_factory=Silence)
    _failure: str = ""
    _discards: int = field(init=False)

    def __post_init__(self) -> None:
        self._discards = self.wanted.discards

    def run(self) -> None:
        """Return when everything wanted is committed.

        Raises:
            PersistError: An attempt that began after this call failed, a snapshot cannot be taken, no daemon is
                running, or the time is up.
        """
        if not await_persister(self.directory, self._look, timeout_s=self.timeout_s, poll_s=POLL_S):
            raise self._error(self._failure or f"not committed after {self.timeout_s} s")

    def _look(self, status: DaemonStatus | None) -> bool:
        """Whether everything wanted is committed; does what can be done for it where it is not."""
        self.alive()
        self._failure = status.error.partition("\n")[0] if status is not None else ""
        self.wanted.count_restored(None if status is None else status.committed)
        if self._is_done(status):
            return True
        self._refuse_discards()
        self._make_up(status)
        if status is not None and status.error:
            self._retry(status)
        self._ask_for_newest_if_gone()
        if (
            self.wanted.owed is None
            and (self.by_time or self.wanted.taken == self.wanted.restored)
            and status is not None
        ):
            self._ask_for_newest()  # it need not be of a persist step
        self._look_for_daemon(status)
        return False

    def _is_done(self, status: DaemonStatus | None) -> bool:
        wanted = self.wanted
        if wanted.owed is not None:
            return False
        committed = None if status is None else status.committed
        return wanted.taken is None or (committed is not None and committed >= wanted.taken)

    def _refuse_discards(self) -> None:
        """Fail if a snapshot was discarded during this call: the next one would be discarded as well."""
        if self.wanted.discards > self._discards:
            raise self._error(self.wanted.why)

    def _make_up(self, status: DaemonStatus | None) -> None:
        """Take a snapshot now if the one to be persisted was skipped, discarded, or lost on another rank."""
        if self.wanted.owed is not None:
            if why := self.take():
                self._ask_for_newest()
                raise self._error(why)
            return
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        taken, known = self.wanted.taken, self.known()
        assert taken is not None
        floor = (0, -1) if status is None else status.floor
        if floor < taken and taken not in known.unrecoverable:
            return
        if any(identity > max(taken, floor) for identity in known.common):
            self._ask_for_newest()
        elif status is not None and self.present <= floor:
            raise self._error(status.given_up or "its persist was given up")
        elif self.present > taken and (why := self.take()):
            raise self._error(why)

    def _retry(self, status: DaemonStatus) -> None:
        """Make the daemon retry at once; an error counts only if an attempt that began after that fails."""
        standing_ns = self.directory.asked_ns("retry-now") or 0
        if not self._asked_ns or standing_ns < self._asked_ns:  # another rank, whose clock is behind, asked after us
            self._asked_ns = self.directory.ask("retry-now", after=status.answered_ns)
        elif status.answered_ns >= self._asked_ns:
            raise self._error(status.error)

    def _ask_for_newest_if_gone(self) -> None:
        """Ask for the newest one if the snapshot was overwritten before the daemon saw it: it would never be committed."""
        wanted = self.wanted
        if wanted.owed is None and wanted.taken is not None and not self.holds(wanted.taken):
            self._ask_for_newest()

    def _ask_for_newest(self) -> None:
        # again where it was answered before all ranks of the node held what is waited for
        if not self._newest_asked or (self.by_time and self.directory.asked_ns("persist-now") is None):
            self.directory.request("persist-now")
            self._newest_asked = True

    def _look_for_daemon(self, status: DaemonStatus | None) -> None:
        """Fail where nobody persists; who owns the daemon has replaced one that is gone or stopped by then."""
        now = time.monotonic()
        if self._silence.see(status) > SILENT_S:
            pid = status.pid if status is not None else 0
            raise self._error(
                f"the daemon (process {pid}, state {state_of(pid) or 'unknown'}) has reported nothing for {SILENT_S:.0f} s"
            )
        if self.directory.daemon_alive():
            self._silent_s = None
        elif self._silent_s is None:
            self._silent_s = now
        elif now - self._silent_s > _WITHOUT_DAEMON_S:
            raise self._error("no daemon of this job is running on this node")

    def _error(self, found: str) -> PersistError:
        wanted = self.wanted
        generation, step = wanted.taken or (wanted.generation, wanted.owed)
        if wanted.owed is not None:
            generation, step = wanted.generation, wanted.owed
        if wanted.why and wanted.why not in found:
            found = f"{found}; {wanted.why}"
        held = "Its snapshot is in host memory; training may continue."
        missing = "There is no snapshot of it; what is in host memory is intact, and training may continue."
        return PersistError(
            f"step {step} of generation {generation} is not on storage",
            found=found,
            state=held if wanted.owed is None else missing,
            remedy=f"look at the storage and at {self.directory.path}/daemon.log, then call wait() again",
        )
