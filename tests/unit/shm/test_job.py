"""The job directory, its records and locks, and the id under which a job finds it again."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.memory import ended, fork
from support.ranks import wait_for

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, DamagedError, FormatVersionError, JobInUseError, SharedMemoryError
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory, memory_root
from flashckpt.shm.lease import Lease
from flashckpt.storage.factory import job_id, job_id_of_root, root_digest, root_url

# -- identity -------------------------------------------------------------------------------------------


def test_the_id_is_the_first_that_is_given(monkeypatch: Any) -> None:
    for name in ("SLURM_JOB_ID", "JOBSET_UID", "JOB_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JOBSET_UID", "abc")
    of_root = job_id_of_root("/r").removeprefix("root-")
    assert job_id("/r") == f"jobset-abc-{of_root}"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert job_id("/r") == f"slurm-17-{of_root}"
    monkeypatch.setenv("FLASHCKPT_JOB_ID", "named")
    assert job_id("/r") == "named"
    assert job_id("/r", "explicit") == "explicit"


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "JOBSET_UID", "JOB_UID"])
def test_roots_in_one_allocation_are_jobs_that_a_requeue_finds_again(variable: str, monkeypatch: Any) -> None:
    for name in ("SLURM_JOB_ID", "JOBSET_UID", "JOB_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "4711")
    roots = ("/r", "/r2", "s3://bucket/run", "s3://bucket/run2")
    assert len({job_id(root) for root in roots}) == len(roots)
    for root in roots:
        first = job_id(root)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert job_id(root) == job_id(f"{root}/") == first
    monkeypatch.setenv(variable, "4712")
    assert job_id("/r") != first


def test_without_a_name_the_root_and_the_user_are_the_job(monkeypatch: Any, tmp_path: Any) -> None:
    for name in ("SLURM_JOB_ID", "JOBSET_UID", "JOB_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "random-per-launch")
    monkeypatch.chdir(tmp_path)
    assert job_id("out") == job_id(str(tmp_path / "out")) == job_id(f"file://{tmp_path}/out/")
    assert job_id("out") != job_id("out2")
    assert job_id("s3://bucket/run") == job_id("s3://bucket/run/")
    assert root_url("s3://bucket/run/") == "s3://bucket/run"
    assert root_digest("out") == root_digest(str(tmp_path / "out"))
    before = job_id("out")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert job_id("out") != before


@pytest.mark.parametrize("bad", ["../up", "a/b", ".hidden", "sp ace", "x" * 129, "-flag"])
def test_an_id_that_cannot_name_a_directory_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="job="):
        job_id("/r", bad)


# -- directory and records ------------------------------------------------------------------------------


def test_a_directory_is_private_and_found_again() -> None:
    directory = JobDirectory.open("j1")
    assert directory.path == memory_root() / "j1"
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert JobDirectory.open("j1", create=False).path == directory.path
    with pytest.raises(FileNotFoundError):
        JobDirectory.open("absent", create=False)
    assert not (memory_root() / "absent").exists()


def test_a_directory_that_others_can_open_is_refused() -> None:
    directory = JobDirectory.open("j1")
    directory.path.chmod(0o755)
    with pytest.raises(ConfigError, match="FLASHCKPT_SHM_DIR"):
        JobDirectory.open("j1")


def test_records_come_back_and_absent_ones_are_none() -> None:
    directory = JobDirectory.open("j1")
    assert directory.read_config() is None
    assert directory.read_generation() is None
    assert directory.read_status() is None
    config = JobConfig(job="j1", root="s3://b/r", storage_options={"key": "v", "n": 1}, keep_every=100, world_size=8)
    record = Generation(number=3, token="t", parent=SnapshotId(2, 40), world_size=8, claimed=True)
    status = DaemonStatus(committed=SnapshotId(3, 60), failures=2, error="disk full", lag=1)
    directory.write_config(config)
    directory.write_generation(record)
    directory.write_status(status)
    assert directory.read_config() == config
    assert directory.read_generation() == record
    assert directory.read_status() == status
    assert not list(directory.path.glob(".*"))


def test_records_hold_no_secret_for_others() -> None:
    directory = JobDirectory.open("j1")
    directory.write_config(JobConfig(job="j1", root="/r", storage_options={"secret": "x"}))
    assert (directory.path / "job.msgpack").stat().st_mode & 0o077 == 0


def test_damaged_or_newer_records_are_refused() -> None:
    directory = JobDirectory.open("j1")
    directory.write_generation(Generation(number=3))
    path = directory.path / "generation.msgpack"
    good = path.read_bytes()
    for bad, error in (
        (b"", DamagedError),
        (good[:-1], DamagedError),
        (good[:-1] + b"\x00", DamagedError),
        (good[:8] + b"\x02" + good[9:], FormatVersionError),
    ):
        path.write_bytes(bad)
        with pytest.raises(error):
            directory.read_generation()


def test_writer_of_a_record_killed_at_any_instant_leaves_the_old_or_the_new_one() -> None:
    directory = JobDirectory.open("j1")
    directory.write_generation(Generation(number=0, token="t" * 5000))
    for _ in range(10):

        def write_on() -> None:
            for n in range(1, 10**6):
                directory.write_generation(Generation(number=n, token="t" * 5000))

        child = fork(write_on)
        seen: set[int] = set()

        def advanced(seen: set[int] = seen) -> bool:
            record = directory.read_generation()
            assert record is not None
            seen.add(record.number)
            return len(seen) > 5

        wait_for(advanced, what="records")
        os.kill(child, signal.SIGKILL)
        ended(child)
        assert directory.read_generation() is not None


def test_segments_are_found_by_scanning_and_nothing_else_is_taken_for_one() -> None:
    directory = JobDirectory.open("j1")
    wanted = [directory.segment_path(rank, h) for rank, h in ((0, 5), (0, 2**64 - 1), (12, 7))]
    for path in (*wanted, directory.path / ".r00000-0000000000000005.seg.1.tmp", directory.path / "r0.seg"):
        path.touch()
    assert directory.segments() == sorted(wanted)


# -- locks ----------------------------------------------------------------------------------------------


def test_a_rank_that_starts_while_the_last_run_is_being_removed_gets_a_directory_of_its_own() -> None:
    """`open` holds the job alive before it reads anything: a remover either sees it, or is waited for."""
    old = JobDirectory.open("j1")
    with pytest.raises(BlockingIOError):
        _remove(old)
    old.hold_live().close()
    removing, go = os.pipe(), os.pipe()

    def remover() -> None:
        lease = Lease(old.live_path)
        assert lease.exclusive(0)
        os.write(removing[1], b"x")
        os.read(go[0], 1)
        old.path.rename(old.path.with_name(".j1.ended-1"))

    child = fork(remover)
    os.read(removing[0], 1)
    starter = fork(lambda: JobDirectory.open("j1").write_generation(Generation(number=5)))
    os.write(go[1], b"x")
    assert (ended(child), ended(starter)) == (0, 0)
    assert JobDirectory.open("j1").read_generation() == Generation(number=5)
    for fd in (*removing, *go):
        os.close(fd)


def _remove(directory: JobDirectory) -> None:
    lease = Lease(directory.live_path)
    try:
        if not lease.exclusive(0):
            raise BlockingIOError
    finally:
        lease.close()


def test_a_removal_that_never_ends_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setattr("flashckpt.shm.job_directory._REMOVAL_S", 0.05)
    directory = JobDirectory.open("j1")
    directory.hold_live().close()
    lease = Lease(directory.live_path)
    assert lease.exclusive(0)
    with pytest.raises(JobInUseError, match="being removed"):
        JobDirectory.open("j1")
    lease.close()


def test_life_is_known_by_lock_and_ends_with_the_process() -> None:
    directory = JobDirectory.open("j1")
    assert directory.anyone_alive()
    directory.hold_live().close()
    assert not directory.anyone_alive()

    def rank() -> None:
        lease = directory.hold_live()
        signal.pause()
        lease.close()

    ranks = fork(rank), fork(rank)
    try:
        wait_for(directory.anyone_alive, what="a live rank")
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            ended(pid)
    assert not directory.anyone_alive()


def test_only_one_daemon_holds_the_lock() -> None:
    directory = JobDirectory.open("j1")
    lease = directory.hold_daemon()
    assert lease is not None
    assert directory.daemon_alive()
    assert directory.hold_daemon() is None
    lease.close()
    assert not directory.daemon_alive()


DAEMON = """
import os, sys, time
from pathlib import Path
from flashckpt.shm.job_directory import JobDirectory
directory = JobDirectory(Path(sys.argv[-1]))
lease = directory.hold_daemon()
print("torch" in sys.modules, lease is None, flush=True)
if lease is not None:
    (directory.path / f"pid-{os.getpid()}").touch()
    end = time.monotonic() + 60  # one that started late finds the directory removed
    while (directory.path / "requests").exists() and not (directory.path / "stop").exists() and time.monotonic() < end:
        time.sleep(0.01)
"""


def test_the_daemon_is_started_once_detached_and_in_its_own_session(monkeypatch: Any, tmp_path: Any) -> None:
    """A stand-in for the service module, started the way the real one is."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/daemon.py "$@"\n')
    program.chmod(0o755)
    (tmp_path / "daemon.py").write_text(DAEMON)
    monkeypatch.setattr(sys, "executable", str(program))
    directory = JobDirectory.open("j1")

    def starter() -> None:
        directory.ensure_daemon()
        wait_for(directory.daemon_alive, what="the daemon")

    starters = [fork(starter) for _ in range(3)]
    assert [ended(pid) for pid in starters] == [0, 0, 0]
    wait_for(lambda: list(directory.path.glob("pid-*")), what="the daemon's file")
    directory.ensure_daemon()
    (found,) = directory.path.glob("pid-*")
    pid = int(found.name.removeprefix("pid-"))
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
    (directory.path / "stop").touch()
    wait_for(lambda: not directory.daemon_alive(), what="its end")
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), what="its exit")


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_events_and_requests_are_files() -> None:
    directory = JobDirectory.open("j1")
    directory.notify(3)
    before = directory.event_path(3).stat().st_mtime_ns
    os.utime(directory.event_path(3), ns=(0, 0))
    directory.notify(3)
    assert directory.event_path(3).stat().st_mtime_ns >= before
    directory.request("persist-now")
    directory.request("persist-now")
    assert directory.request_path("persist-now").exists()


def test_a_request_with_an_answer_has_one_time_from_its_first_moment(monkeypatch: Any) -> None:
    """Of two times, that of its making and the one that is set, the daemon would make two attempts."""
    directory = JobDirectory.open("j")
    seen, utime = [], os.utime

    def looking(*args: Any, **kwargs: Any) -> None:
        seen.append(directory.asked_ns("retry-now"))
        utime(*args, **kwargs)
        seen.append(directory.asked_ns("retry-now"))

    monkeypatch.setattr(os, "utime", looking)
    first = directory.ask("retry-now")
    second = directory.ask("retry-now", after=first + 10**12)
    assert seen
    assert {*seen} <= {None, first}, "the second one is not there before its time is"
    assert second > first + 10**12
    assert directory.asked_ns("retry-now") == second
    assert [path.name for path in directory.request_path("retry-now").parent.iterdir()] == ["retry-now"]


def test_a_full_tmpfs_is_a_clear_error_and_the_daemons_status_is_written_all_the_same(monkeypatch: Any) -> None:
    directory = JobDirectory.open("full")
    directory.write_status(DaemonStatus(committed=SnapshotId(1, 5), error="x" * 100))
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(".tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SharedMemoryError, match="too little host memory"):
        directory.write_generation(Generation(number=1))
    assert directory.read_generation() is None
    directory.write_status(DaemonStatus(committed=SnapshotId(1, 9)))
    assert directory.read_status() == DaemonStatus(committed=SnapshotId(1, 9))
    (directory.path / "daemon.msgpack").unlink()
    with pytest.raises(SharedMemoryError):
        directory.write_status(DaemonStatus(committed=SnapshotId(1, 9)))
