"""The agent's eyes on the job: its own directory, the job directory, the control page, the daemon.

For scripts that do not use flashckpt, everything here does nothing. Where the daemon dies with dlrun, as in a container
whose PID 1 this is, the end waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flashckpt.core.snapshot_id import BEFORE_ALL
from flashckpt.daemon.launcher.way_back import steps_on_root
from flashckpt.daemon.machine.process import reap, zombies
from flashckpt.environment import Environment, env
from flashckpt.errors import DamagedError, FlashckptError, PersistError
from flashckpt.faults import crash_point
from flashckpt.printable import printable
from flashckpt.shm import agent_folder
from flashckpt.shm.control import ControlRow, ControlView
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory, memory_root
from flashckpt.shm.lease import Lease
from flashckpt.shm.persisted import await_persister
from flashckpt.shm.persister_owner import LOOK_S, PersisterOwner
from flashckpt.shm.persister_process import LOG_NAME, in_one_line
from flashckpt.shm.private import private_directories, private_directory, remove_tree

LIMIT_S = 600.0
_ANSWER_S = 10.0
_log = logging.getLogger("flashckpt.dlrun")


class JobWatch:
    """Finds the job directory that local rank 0 names, keeps its daemon alive, reads its control page.

    Raises:
        ConfigError: The directory of this user's agents is a link, another user's, or open to others.
        SharedMemoryError: It cannot be created.
    """

    def __init__(self) -> None:
        self._base = memory_root().parent / f"flashckpt-agents-{os.getuid()}"
        _sweep(self._base)
        self.agent_dir, self._lock = _make_agent_dir(self._base)
        self.job: JobDirectory | None = None
        self.log_folder = ""  # of this launch's ranks, where the user wants their logs
        self._live: Lease | None = None
        self._control: ControlView | None = None
        self._is_cut_short = False
        self._is_expected = False  # no rank has named the job yet
        self._owner: PersisterOwner | None = None
        self._unseen: PersistError | None = None
        self._zombies: set[int] = set()
        self._looked_s = 0.0

    def stacks_file(self, local_rank: int) -> Path:
        """Return the file to which a rank writes the stacks of its threads on request."""
        return self.agent_dir / f"stacks-{local_rank}"

    def tick(self) -> None:
        """Look for the job directory; once it is there, hold its live lock and supervise its persister."""
        if self._find() is not None and self._owner is not None:
            self._owner.tick()

    def expect(self, name: str) -> None:
        """Make a place for a job that other nodes train, and start its persister: ranks that come find it running.

        Where nobody comes the persister removes the place. Memory of that job which is here already is left to the ranks.
        """
        with contextlib.suppress(OSError, FlashckptError):  # ranks that come say what is wrong
            name = Environment({"FLASHCKPT_JOB_ID": name}).FLASHCKPT_JOB_ID
            if not name or (memory_root() / name).exists():
                return
            job = JobDirectory.open(name)
            self._take(job, job.hold_live())
            self._is_expected = True
            crash_point("expect.before-persister")
            self.tick()

    def reap(self, known: set[int]) -> None:
        """Reap the orphans that this subreaper inherited, at most once a second; not `known`, whose end somebody waits for.

        One that ended since the last look is left: it may be a child of whoever runs dlrun inside another program.
        """
        if (now := time.monotonic()) - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        found = zombies() - known - (self._owner.pids if self._owner is not None else set())
        reap(found & self._zombies)
        self._zombies = found

    def _find(self) -> JobDirectory | None:
        """Return the job directory that local rank 0 has named: another one where a restart has another root.

        A script with a second Checkpointer names another one too, while its ranks still have the first.
        """
        path = None
        try:
            path = agent_folder.read_job(self.agent_dir) or agent_folder.read_job(self.agent_dir, "opening")
            if path is None or (self.job is not None and self.job.path == path):
                self._is_expected = self._is_expected and path is None
                return self.job
            if self._live is not None and self._live.held_by_other(0):
                return self.job
            job = JobDirectory.at(path)  # where the rank has it: its script may have chosen another FLASHCKPT_SHM_DIR
            live = job.hold_live()
        except (OSError, FlashckptError) as error:
            if path is not None and not self._unseen:
                self._unseen = _unseen(path, error)
                _log.error("%s", self._unseen)
            return self.job
        self._let_go()
        self._take(job, live)
        return job

    def _take(self, job: JobDirectory, live: Lease) -> None:
        job.note(self.log_folder, "log-folder")
        self.job, self._live, self._owner, self._unseen = job, live, PersisterOwner(job, _log), None

    def _let_go(self) -> None:
        """Leave the job that was there to its persister, which commits what it has yet to, and ends."""
        if self._owner is not None:
            self._owner.close()
        if self._live is not None:
            self._live.close()
        if self._is_expected and self.job is not None:
            self.job.request("ended")
            self.job, self._is_expected = None, False
        self._control = None

    def persister_problem(self) -> str:
        """Return in one line what is wrong with this node's persister now; "" for nothing."""
        return self._owner.problem if self._owner is not None else ""

    def control(self) -> ControlView | None:
        """Return the shared control page, None where no rank has made one. It is read, never mapped, so that truncation cannot kill dlrun."""
        job = self._find()
        if self._control is None and job is not None:
            view = ControlView(job.control_path)
            try:
                view.stop_after = -1  # left by an earlier launch that was killed while it stopped
            except (OSError, FlashckptError):
                return None
            self._control = view
        return self._control

    def rows(self, pids: set[int]) -> list[ControlRow]:
        """Return a copy of the control rows of these processes; [] while the file is damaged, which is logged once."""
        return [row for row in self._every_row() if row.pid in pids]

    def _every_row(self) -> list[ControlRow]:
        control = self.control()
        if control is None:
            return []
        try:
            rows = control.rows()
        except FileNotFoundError:
            return []
        except (OSError, DamagedError) as error:
            if not self._is_cut_short:
                _log.error("%s", error)
            self._is_cut_short = True
            return []
        self._is_cut_short = False
        return rows

    def refused(self) -> int:
        """Return the exit code of a rank whose error a restart cannot fix, 0 if there is none."""
        return agent_folder.read_permanent_error(self.agent_dir)

    def forget_refusal(self) -> None:
        """Forget the permanent error of a rank: the next generation may have another size."""
        agent_folder.forget_permanent_error(self.agent_dir)

    def request(self, name: str) -> None:
        """Leave a request (`persist-now`, `ended`) for the daemon."""
        job = self._find()
        if job is not None:
            with contextlib.suppress(OSError):
                job.request(name)

    def await_flush(self, timeout_s: float) -> bool:
        """Wait until the newest snapshot that all ranks of this node hold is committed, the daemon gives up, or the time is up."""
        job = self._find()
        if job is None or self.control() is None:
            return True
        rows = [row for row in self._every_row() if row.pid > 0]
        held = [set(row.complete) for row in rows]
        common = set.intersection(*held) if held else set()
        newest = max(common, default=None)

        def is_over(status: DaemonStatus | None) -> bool:
            if newest is None or (status is not None and (status.committed or BEFORE_ALL) >= newest):
                return True
            self.tick()
            return False

        with contextlib.suppress(FlashckptError):
            return await_persister(job, is_over, timeout_s=timeout_s)
        return False

    def unpersisted(self) -> PersistError | None:
        """Return the error of a job that ended well and has nothing on storage though it should; see `unpersisted`."""
        job = self._find()
        return (
            self._unseen
            if job is None
            else unpersisted(job, [row for row in self._every_row() if row.pid > 0], self.tick)
        )

    def close(self) -> None:
        """Release the locks and remove the agent's directory."""
        self._let_go()
        self._lock.close()
        if self.job is not None and is_last_process():
            wait_for_flush(self.job)
        with contextlib.suppress(OSError, FlashckptError):
            with private_directory(self._base) as base:
                remove_tree(self.agent_dir.name, base)
            self._base.rmdir()


def _unseen(path: Path, error: Exception) -> PersistError:
    return PersistError(
        "dlrun cannot reach the job's memory, in which its ranks keep their snapshots",
        found=str(error).partition("\n")[0],
        expected=f"{path}, as the ranks see it: the same tmpfs, also where they run in a container",
        state="Training continues, but nothing is persisted, and neither a hang nor a stop is agreed upon.",
        remedy="let dlrun run where its ranks do, e.g. inside the container, or give both the same /dev/shm",
    )


def _make_agent_dir(base: Path) -> tuple[Path, Lease]:
    """Return a locked directory; another agent's sweep may remove one in the instant before it is locked."""
    while True:
        folder = base / f"{os.getpid()}-{secrets.token_hex(4)}"
        with (
            contextlib.suppress(FileNotFoundError),
            private_directory(base, create=True) as above,
            private_directory(folder, create=True, within=above) as inside,
        ):
            lease = Lease(agent_folder.LOCK, create=True, dir_fd=inside)
            if lease.exclusive(0) and (folder / agent_folder.LOCK).exists():
                return folder, lease
            lease.close()


def _sweep(base: Path) -> None:
    """Remove the directories of agents that were killed: nobody holds their lock any more."""
    for folder in private_directories(base)[0]:
        try:
            with private_directory(base) as above, private_directory(folder, within=above) as inside:
                lease = Lease(agent_folder.LOCK, dir_fd=inside)
                if lease.exclusive(0):
                    remove_tree(folder.name, above)
                lease.close()
        except (OSError, FlashckptError):
            continue  # being created or removed just now


def is_last_process() -> bool:
    """Whether the daemon dies with this process: as PID 1, or if FLASHCKPT_WAIT_FLUSH=1 says so."""
    return os.getpid() == 1 or env.FLASHCKPT_WAIT_FLUSH


def wait_for_flush(job: JobDirectory, limit_s: float = LIMIT_S) -> bool:
    """Return True once the daemon has answered every request; False if it died or `limit_s` seconds have passed."""
    said = False

    def is_over(_: DaemonStatus | None) -> bool:
        nonlocal said
        if not _is_asked(job) or not job.daemon_alive():
            return True
        if not said:
            _log.info("waiting for the daemon to persist the newest snapshot (at most %.0f s)", limit_s)
            said = True
        return False

    with contextlib.suppress(FlashckptError):  # a persister of another release: nobody knows what it has done
        await_persister(job, is_over, timeout_s=limit_s)
    if _is_asked(job):
        _log.error("the snapshots in memory were not persisted in time: see %s", job.path / "daemon.log")
        return False
    return True


def unpersisted(job: JobDirectory, rows: Sequence[ControlRow], tick: Callable[[], None]) -> PersistError | None:
    """Return the error of a job that ended well, if it came to a persist step and nothing is on storage, nor can come there.

    A persister that works is not waited for: what it has not committed after some seconds it commits when dlrun has ended.
    `ended` is asked for; `tick` lets a persister that is not there be started.
    """
    with contextlib.suppress(FlashckptError, OSError):
        config, status = job.read_config(), job.read_status()
        if config is None or (status is not None and status.committed) or not _reached_persist(job, config, rows):
            return None
        if (why := _why_not(job, tick)) and not steps_on_root(config, _ANSWER_S):
            return PersistError(
                "the job ended, and nothing of it is on storage",
                found=in_one_line(why),
                expected=f"a checkpoint in {printable(config.root)}: a persist step was reached",
                state=f"The newest snapshot stays in this node's memory, job {job.job!r}.",
                remedy=f"look at {job.path / LOG_NAME}, fix the cause, and start the job again on this node: it restores from "
                "memory and persists",
            )
    return None


def _reached_persist(job: JobDirectory, config: JobConfig, rows: Sequence[ControlRow]) -> bool:
    """Whether a step was reached that is to be on storage, by the numbers of the steps or by a snapshot that is marked so."""
    every = config.persist_every
    if every and any(row.step // every > max(row.restored_step, 0) // every for row in rows):
        return True
    record = job.read_generation()
    return bool(scan(job, [record] if record else []).flagged())


def _why_not(job: JobDirectory, tick: Callable[[], None]) -> str:
    """Return why nothing is committed, "" where something is, or may still be."""
    asked_ns, why = job.ask("retry-now"), ""

    def is_over(status: DaemonStatus | None) -> bool:
        nonlocal why
        if not job.path.exists() or (status is not None and status.committed):
            return True
        why = status.error if status is not None and status.answered_ns >= asked_ns else ""
        tick()
        return bool(why)

    is_answered = await_persister(job, is_over, timeout_s=_ANSWER_S)
    if is_answered or job.daemon_alive():
        return why
    return "no persister is running on this node"


def _is_asked(job: JobDirectory) -> bool:
    return any(job.request_path(name).exists() for name in ("persist-now", "ended"))
