"""Daemons for tests: turned by hand in this process, or forked (0.05 s instead of a start of Python)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from flashckpt import faults
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.daemon.persister.service import Daemon
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage import posix  # noqa: F401 -- before forks: an import that another thread has begun never ends in a child
from flashckpt.storage.factory import open_store
from support.memory_tier import FakeJob, FakeRank
from support.ranks import wait_for

QUICK = DaemonTimeouts(linger_s=0.0, patience_s=0.0)


@contextlib.contextmanager
def daemon_of(job: FakeJob, times: DaemonTimeouts = QUICK) -> Iterator[Daemon]:
    """A daemon in this process, turned by hand."""
    lock = job.directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(job.directory, lock, times)
    try:
        yield daemon
    finally:
        daemon.close()


def turn_until(daemon: Daemon, condition: Callable[[], object], what: str) -> None:
    """Turn until the condition holds."""

    def once() -> object:
        daemon.turn()
        return condition()

    wait_for(once, what=what)


class ForkedDaemon:
    """A daemon in a process of its own.

    Args:
        job: Its job.
        crash_at: Crash point to die at.
        prepare: Called in the child first.
        times: When it ends.
    """

    def __init__(
        self,
        job: FakeJob,
        *,
        crash_at: str | None = None,
        prepare: Callable[[], None] | None = None,
        times: DaemonTimeouts = QUICK,
    ) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 0
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time-out belongs to the parent
                os.setsid()
                faults.arm(crash_at)
                if prepare is not None:
                    prepare()
                lock = job.directory.hold_daemon()
                if lock is not None:
                    daemon = Daemon(job.directory, lock, times)
                    signal.signal(signal.SIGTERM, daemon.stop)
                    daemon.run()
                    code = daemon.exit_code
            except BaseException:  # noqa: BLE001 -- nothing may unwind into the test runner
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Return the wait status once it ended."""
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if done else None
        return self.status

    def wait_killed(self) -> None:
        """Wait until it died by SIGKILL."""
        status = wait_for(lambda: (self.poll(),) if self.poll() is not None else None, what="the daemon to die")[0]
        assert os.WIFSIGNALED(status), f"the daemon ended by itself: {status}"
        assert os.WTERMSIG(status) == signal.SIGKILL

    def wait_stopped(self) -> None:
        """Wait until it is stopped by SIGSTOP."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return
            time.sleep(0.005)
        raise AssertionError("the daemon was not stopped")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end if it is SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                wait_for(lambda: self.poll() is not None, what="the daemon to end")


@contextlib.contextmanager
def forked(job: FakeJob, **options: object) -> Iterator[ForkedDaemon]:
    """A forked daemon that is killed at the end."""
    daemon = ForkedDaemon(job, **options)  # type: ignore[arg-type]  # the names of its arguments
    try:
        yield daemon
    finally:
        daemon.kill()


def identities(job: FakeJob) -> list[tuple[int, int]]:
    """Return the committed checkpoints of the job's root, ascending."""
    return sorted(info.identity for info in list_checkpoints(open_store(job.root)))


def steps(job: FakeJob) -> list[int]:
    """Return their steps."""
    return [step for _, step in identities(job)]


def assert_bitwise(jobs: FakeJob | list[FakeJob], identity: tuple[int, int]) -> None:
    """The checkpoint holds exactly what the ranks held, verified through the restore path."""
    jobs = jobs if isinstance(jobs, list) else [jobs]
    store = open_store(jobs[0].root, **jobs[0].config.storage_options)
    (info,) = [i for i in list_checkpoints(store) if i.identity == identity]
    source = StorageSource(store, read_manifest(store, info), info.prefix)
    for rank in [rank for job in jobs for rank in job.ranks]:
        assert source.manifest.values[f"rng@rank{rank.rank}"] == rank.generator(*identity)
        for shard in rank.shards:
            buffer = bytearray(shard.nbytes)
            execute_reads([Target(shard=shard, buffer=memoryview(buffer))], [source])
            assert bytes(buffer) == FakeRank.bytes_of(shard, *identity)


def assert_all_bitwise(job: FakeJob) -> None:
    """Whatever is visible is whole."""
    for identity in identities(job):
        assert_bitwise(job, identity)


@contextlib.contextmanager
def two_checkpoints(root: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """A root with steps 10 and 20, committed by a daemon that has gone; the job that took them still runs."""
    job = FakeJob(str(root), shapes=shapes)
    store = open_store(job.root)
    with daemon_of(job) as daemon:
        for step in (10, 20):
            job.step(step, persist=True)
            turn_until(daemon, lambda: any(info.step == step for info in list_checkpoints(store)), "a commit")  # noqa: B023
    yield job.root
    job.die()
