"""The job directory: everything of one job on one node, in files on tmpfs. Torch-free."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from flashckpt.core.lineage import Generation
from flashckpt.core.settings import checked
from flashckpt.environment import env
from flashckpt.errors import DamagedError, JobInUseError, SharedMemoryError
from flashckpt.shm import private
from flashckpt.shm.block import SEGMENT_NAME
from flashckpt.shm.lease import Lease, is_at
from flashckpt.shm.persister_process import LOG_NAME, MODULE
from flashckpt.shm.private import (
    DaemonStatus,
    JobConfig,
    Skipped,
    mark_file,
    open_file,
    private_directories,
    private_directory,
    read_file,
    remove_file,
    replace,
)

_REMOVAL_S = 10.0
_PAGE = 4096
_NOTICE_BYTES = 1000
LEFT_OUT = "left-out"
"""Name of the note of samples that were left out last."""
_SETTLED_NS = 100_000_000
"""Clocks of file systems have ticks of a few milliseconds."""
NO_STATUS = (0, 0, 0)

__all__ = ["DaemonStatus", "Generation", "JobConfig", "JobDirectory", "jobs_in_memory", "memory_root"]


def memory_root() -> Path:
    """Return the folder of this user's jobs: $FLASHCKPT_SHM_DIR or /dev/shm, then `flashckpt-<uid>`."""
    base = Path(env.FLASHCKPT_SHM_DIR)
    return base.absolute() / f"flashckpt-{os.getuid()}"  # absolute: the daemon runs in another directory


def jobs_in_memory() -> tuple[list[JobDirectory], list[Skipped]]:
    """Return this user's jobs on this node by name, and foreign files among them, which are left untouched."""
    paths, skipped = private_directories(memory_root())
    return [JobDirectory(path) for path in paths if not path.name.startswith(".")], skipped


class JobDirectory:
    """Paths and records of one job on one node."""

    def __init__(self, path: Path) -> None:
        """Wrap a path; use `open`."""
        self.path = path
        self._live: Lease | None = None

    @classmethod
    def open(cls, job_id: str, create: bool = True) -> JobDirectory:
        """Return the directory of `job_id`; with `create` it is created if missing, and held alive (`hold_live`).

        Raises:
            FileNotFoundError: It does not exist and `create` is False.
            ConfigError: It, or the folder above, is a link, belongs to another user or is open to others.
            SharedMemoryError: The system refuses to create it: read-only, full, or the name is too long.
            JobInUseError: It is being removed, for longer than 10 s.
        """
        directory = cls(memory_root() / job_id)
        if create:
            directory._live = directory._create_live()
            return directory
        return cls.at(directory.path)

    @classmethod
    def at(cls, path: Path) -> JobDirectory:
        """Return the existing job directory of that path. Raises as `open` with `create=False`."""
        with private_directory(path.parent) as base, private_directory(path, within=base):
            return cls(path)

    def _create_live(self) -> Lease:
        """Create the directory and take its live lock before anything in it is read.

        The daemon of a run that ended removes the directory under an exclusive lock: a process that starts at
        that moment waits for it and creates a new one.
        """
        end = time.monotonic() + _REMOVAL_S
        while True:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile: the next iteration creates it
                lease = self._make()
                if lease.shared(0) and is_at(self.live_path, lease.fd) and self.path.is_dir():
                    return lease
                lease.close()
            if time.monotonic() > end:
                raise JobInUseError(
                    f"the memory of job {self.job!r} is being removed",
                    found=f"{self.live_path} is held exclusively for {_REMOVAL_S} s",
                    state="Nothing was changed.",
                    remedy="wait until `flashckpt gc` or the daemon of the last run has ended, then start again",
                )
            time.sleep(0.01)

    def _make(self) -> Lease:
        """Create and check the directory and its folders; return an unlocked lease on its live lock."""
        with (
            private_directory(self.path.parent, create=True) as base,
            private_directory(self.path, create=True, within=base) as inside,
        ):
            for name in ("events", "requests", "replicas"):
                with private_directory(self.path / name, create=True, within=inside):
                    pass
            return Lease(self.live_path.name, create=True, dir_fd=inside)

    @property
    def job(self) -> str:
        """Job id."""
        return self.path.name

    @property
    def control_path(self) -> Path:
        """File of `flashckpt.shm.control`."""
        return self.path / "control"

    @property
    def live_path(self) -> Path:
        """File whose byte 0 every running rank and agent of the job holds shared."""
        return self.path / "live.lock"

    @property
    def daemon_lock_path(self) -> Path:
        """File whose byte 0 the daemon holds exclusively."""
        return self.path / "daemon.lock"

    def segment_path(self, rank: int, layout_hash: int) -> Path:
        """Return the path of the segment of one rank and layout."""
        return self.path / f"r{rank:05d}-{layout_hash:016x}.seg"

    @property
    def replicas_path(self) -> Path:
        """Folder of what this node keeps of the ranks of other nodes, and of the records of that."""
        return self.path / "replicas"

    def replica_path(self, rank: int, layout_hash: int) -> Path:
        """Return the path of the replica segment of one rank of another node."""
        return self.replicas_path / f"r{rank:05d}-{layout_hash:016x}.seg"

    def replica_segments(self) -> list[Path]:
        """Return the replica segments of all ranks and layouts, by rank."""
        return _segments_in(self.replicas_path)

    def event_path(self, rank: int) -> Path:
        """Return the file that `rank` touches after each COMPLETE."""
        return self.path / "events" / f"r{rank:05d}"

    def request_path(self, name: str) -> Path:
        """Return the file of a request: `persist-now`, `retry-now` or `ended`."""
        return self.path / "requests" / name

    def segments(self, *, rank: int | None = None) -> list[Path]:
        """Return the segments of all layouts, by rank, oldest file name first; with `rank` only those of one."""
        found = _segments_in(self.path)
        return found if rank is None else [path for path in found if path.name.startswith(f"r{rank:05d}-")]

    def notify(self, rank: int, *, wakes: bool = True) -> None:
        """Wake the daemon: a snapshot of `rank` is COMPLETE. Without `wakes` only see that the directory is still there."""
        path = f"{self.path}/events/r{rank:05d}"  # a Path costs more than the call
        try:
            os.utime(path, follow_symlinks=False) if wakes else os.lstat(path)
        except FileNotFoundError:
            mark_file(self.event_path(rank))

    def request(self, name: str) -> None:
        """Leave a request for the daemon; idempotent. Does nothing if the directory was removed."""
        with contextlib.suppress(FileNotFoundError):  # a caller that waits for an answer sees that no daemon is running
            mark_file(self.request_path(name))

    def ask(self, name: str, *, after: int = 0) -> int:
        """Leave a request, and return its time as the daemon reads it: nanoseconds since the epoch, above `after`.

        It is also later than any earlier request, even if the machine's clock was set back since.
        """
        path = self.request_path(name)
        temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
        now = max(time.time_ns(), after + 1, (self.asked_ns(name) or 0) + 1)
        with contextlib.suppress(FileNotFoundError):  # as `request`
            temporary.touch(mode=0o600)
            os.utime(temporary, ns=(now, now))
            replace(temporary, path)  # one call: with two different times the daemon would see two requests
        return self.asked_ns(name) or now

    def asked_ns(self, name: str) -> int | None:
        """Return when a request was last left, in nanoseconds since the epoch; None if there is none."""
        try:
            return self.request_path(name).lstat().st_mtime_ns
        except FileNotFoundError:
            return None

    def write_config(self, config: JobConfig) -> None:
        """Write `job.msgpack`.

        Raises:
            ConfigError: A setting in it is invalid: the daemon could never persist with it.
        """
        for name in ("storage_options", "keep_last", "keep_every", "compression"):
            checked(name, getattr(config, name))
        private.write_record(self.path / "job.msgpack", config)

    def read_config(self) -> JobConfig | None:
        """Return the config, None if there is none. Raises DamagedError if it is damaged."""
        return private.read_record(self.path / "job.msgpack", JobConfig)

    def write_generation(self, record: Generation) -> None:
        """Write `generation.msgpack`."""
        private.write_record(self.path / "generation.msgpack", record)

    def read_generation(self) -> Generation | None:
        """Return the current generation, None if none was claimed here. Raises DamagedError."""
        return private.read_record(self.path / "generation.msgpack", Generation)

    def write_status(self, status: DaemonStatus) -> None:
        """Write `daemon.msgpack`; in place if the tmpfs is full, because `wait()` must see what was committed.

        A reader that catches it halfway finds a wrong digest and reads again.
        """
        path = self.path / "daemon.msgpack"
        try:
            private.write_record(path, status)
        except SharedMemoryError:
            raw = private.framed(status)
            if not path.exists() or len(raw) > _PAGE:
                raise
            with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:  # its page exists already
                file.write(raw)
                file.truncate()

    def read_status(self) -> DaemonStatus | None:
        """Return the daemon's last status, None if there is none. Raises DamagedError."""
        return private.read_record(self.path / "daemon.msgpack", DaemonStatus)

    def status_mark(self) -> tuple[int, int, int] | None:
        """Return what distinguishes one status of the daemon from another without reading it; None where it cannot yet.

        NO_STATUS stands for none.
        A file that was written a moment ago may be written in place again without getting another time.
        """
        try:
            found = os.lstat(f"{self.path}/daemon.msgpack")  # at each snapshot: a path costs more than the call
        except FileNotFoundError:
            return NO_STATUS
        is_settled = abs(time.time_ns() - found.st_mtime_ns) > _SETTLED_NS
        return (found.st_ino, found.st_mtime_ns, found.st_size) if is_settled else None

    def note(self, text: str, name: str = "notice") -> None:
        """Leave a sentence about what the daemon works without, for the job's output and `flashckpt status`; "" takes it away.

        As "log-folder" it is the folder into which the agent wants the daemon's log copied.
        """
        with contextlib.suppress(OSError, DamagedError):  # tmpfs full, or something else in its place: a comfort
            if text:
                with os.fdopen(open_file(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                    file.write(os.fsencode(text)[:_NOTICE_BYTES])
            else:
                remove_file(self.path / name)

    def read_notice(self, name: str = "notice") -> str:
        """Return that sentence, "" where there is none."""
        try:
            return os.fsdecode(read_file(self.path / name, most=_NOTICE_BYTES))
        except (FileNotFoundError, DamagedError):
            return ""

    def forget_status(self) -> None:
        """Remove `daemon.msgpack`, the record of what is committed. The caller holds the daemon's lock."""
        remove_file(self.path / "daemon.msgpack")

    def hold_live(self) -> Lease:
        """Return a lease that marks the job as running until it is closed or the process dies.

        The first call after `open(create=True)` hands out the lease that was taken there.
        """
        lease, self._live = self._live, None
        if lease is not None:
            return lease
        lease = Lease(self.live_path, create=True)
        lease.shared(0)
        return lease

    def let_go(self) -> None:
        """Close the lease of `open(create=True)` unless it was handed out."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def anyone_alive(self) -> bool:
        """Return whether a rank or agent of the job is running (a caller that holds the lease counts)."""
        return _is_held(self.live_path)

    def hold_daemon(self) -> Lease | None:
        """Return the daemon's lease, or None if another daemon is running."""
        lease = Lease(self.daemon_lock_path, create=True)
        if lease.exclusive(0):
            return lease
        lease.close()
        return None

    def daemon_alive(self) -> bool:
        """Return whether a daemon of this job is running on this node."""
        return _is_held(self.daemon_lock_path)

    def ensure_daemon(self) -> int:
        """Start the daemon, detached in its own process session, unless one is running; return its pid, else 0.

        Two callers may both start one: the second daemon finds the lock taken and exits. `PersisterOwner` sees that it runs.

        Raises:
            OSError: No process can be started.
        """
        if self.daemon_alive():
            return 0
        with private_directory(self.path) as inside:
            log = open_file(LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=inside)
        try:
            # the shell in between exits at once, so that no rank has to reap the daemon
            started = subprocess.run(
                ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", sys.executable, "-m", MODULE, str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                check=False,
                cwd="/",
                env=_daemon_environment(),
            )
        finally:
            os.close(log)
        if started.returncode or not started.stdout.strip():  # it could not fork: a limit on processes
            raise OSError(f"/bin/sh ended with exit code {started.returncode} before it had started one")
        return int(started.stdout)


def _daemon_environment() -> dict[str, str]:
    """The caller's environment, extended so that the daemon imports the same flashckpt from any directory."""
    home = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
    paths = [home, *filter(None, env.PYTHONPATH.split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    environment.pop("FLASHCKPT_JOB_SECRET", None)  # who signs what is a matter of agents and ranks
    return environment


def _segments_in(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(filter(SEGMENT_NAME.fullmatch, os.listdir(folder)))]  # noqa: PTH208 -- names alone, at each snapshot
    except FileNotFoundError:
        return []


def _is_held(path: Path) -> bool:
    try:
        lease = Lease(path)
    except FileNotFoundError:
        return False
    try:
        return lease.held_by_other(0)
    finally:
        lease.close()
