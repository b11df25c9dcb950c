"""Directories in shared memory that are not ours: another user's, links, open to others. Nothing in them is touched."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.memory import ended, fork, spec_of

from flashckpt.bench import scratch
from flashckpt.cli import main as cli
from flashckpt.core.lineage import Generation
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.zygote import worker
from flashckpt.errors import ConfigError, SharedMemoryError
from flashckpt.shm.gc import look
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.shm.private import create_file, private_directories, private_directory
from flashckpt.shm.segment import Segment

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="acts as another user")


def bench_memory() -> None:
    with scratch.memory(1, what="test"):
        pass


MAKERS: dict[str, tuple[Callable[[], object], str]] = {
    "job": (lambda: JobDirectory.open("j1"), f"flashckpt-{os.getuid()}"),
    "agent": (JobWatch, f"flashckpt-agents-{os.getuid()}"),
    "bench": (bench_memory, f"flashckpt-{os.getuid()}"),
}
makers = pytest.mark.parametrize(("make", "name"), list(MAKERS.values()), ids=list(MAKERS))


def as_nobody(shm_dir: Path, work: Callable[[], object]) -> None:
    """Run `work` as another user, in a directory that is open to all as /dev/shm is."""
    shm_dir.chmod(0o1777)

    def changed() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()

    assert ended(fork(changed)) == 0


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@makers
def test_a_link_in_place_of_our_directory_is_refused(
    make: Callable[[], object], name: str, shm_dir: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)  # of this user and private, so that nothing but the link is wrong
    (shm_dir / name).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symbolic link"):
        make()
    assert everything(tmp_path) == []


@makers
@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_directory_that_others_may_enter_is_refused(
    make: Callable[[], object], name: str, shm_dir: Path, mode: int
) -> None:
    (shm_dir / name).mkdir()
    (shm_dir / name).chmod(mode)
    with pytest.raises(ConfigError, match="FLASHCKPT_SHM_DIR"):
        make()
    assert everything(shm_dir / name) == []


@makers
@as_root
@pytest.mark.root
@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_a_directory_of_another_user_is_refused(
    make: Callable[[], object], name: str, shm_dir: Path, mode: int
) -> None:
    def squat() -> None:
        (shm_dir / name).mkdir()
        (shm_dir / name).chmod(mode)

    as_nobody(shm_dir, squat)
    with pytest.raises(ConfigError, match=f"uid {NOBODY}"):
        make()
    assert everything(shm_dir / name) == []


@as_root
@pytest.mark.root
def test_another_user_cannot_have_a_file_overwritten_through_the_agents_directory(
    shm_dir: Path, tmp_path: Path
) -> None:
    """The directory is theirs, so that they could rename what we make in it and put links in its place."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    base = shm_dir / f"flashckpt-agents-{os.getuid()}"

    def attack() -> None:
        base.mkdir()
        base.chmod(0o777)
        (base / "1-x").mkdir()
        (base / "1-x").chmod(0o777)
        (base / "1-x" / "stacks-0").symlink_to(victim)

    as_nobody(shm_dir, attack)
    with pytest.raises(ConfigError):
        JobWatch()
    with pytest.raises(ConfigError):
        worker.register_stacks(str(base / "1-x" / "stacks-0"))
    assert victim.read_text() == "precious"
    assert (base / "1-x").is_dir(), "what is another's is not swept either"


def test_stacks_go_to_a_new_private_file_and_never_through_a_link(tmp_path: Path) -> None:
    watch = JobWatch()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = watch.stacks_file(0)
    path.symlink_to(victim)

    def rank() -> None:
        os.umask(0)
        worker.register_stacks(str(path))

    for _ in range(2):  # the second one is the rank of the next generation
        assert ended(fork(rank)) == 0
        assert victim.read_text() == "precious"
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.lstat().st_mode & 0o777 == 0o600
    watch.close()


def test_what_is_done_by_the_descriptor_stays_in_the_directory_that_was_checked(shm_dir: Path, tmp_path: Path) -> None:
    ours = shm_dir / "ours"
    with private_directory(ours, create=True) as fd:
        ours.rename(shm_dir / "moved")
        ours.symlink_to(tmp_path)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd))
    assert everything(tmp_path) == []
    assert (shm_dir / "moved" / "file").exists()
    with pytest.raises(ConfigError, match="symbolic link"):
        create_file(ours / "file")
    assert everything(tmp_path) == []


def test_a_job_that_is_a_link_is_refused_by_ranks_and_daemon(tmp_path: Path) -> None:
    JobDirectory.open("real")
    tmp_path.chmod(0o700)
    (memory_root() / "j1").symlink_to(tmp_path)
    for create in (True, False):
        with pytest.raises(ConfigError, match="symbolic link"):
            JobDirectory.open("j1", create=create)
    command = [sys.executable, "-m", "flashckpt.daemon.persister.service", str(memory_root() / "j1")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == ConfigError.exit_code
    assert everything(tmp_path) == []


@pytest.mark.parametrize("umask", [0, 0o077])
def test_all_that_is_made_is_private_whatever_the_umask(umask: int) -> None:
    def work() -> None:
        os.umask(umask)
        directory = JobDirectory.open("j1")
        directory.write_generation(Generation(number=1))
        directory.notify(0)
        directory.request("persist-now")
        Segment.create(directory.segment_path(0, 5), spec_of(job="j1")).close()
        watch = JobWatch()
        watch.stacks_file(0)
        with scratch.memory(1, what="test") as path:
            found = [*memory_root().parent.rglob("*")]
            assert path in found
            assert len(found) > 10
            assert [one for one in found if one.lstat().st_mode & 0o077] == []

    assert ended(fork(work)) == 0


@makers
@pytest.mark.parametrize("place", ["/proc/flashckpt-none", "/dev/null/below", "/dev/shm/" + "x" * 300])
def test_memory_that_cannot_be_made_is_one_clear_error(
    make: Callable[[], object], name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", place)
    with pytest.raises(SharedMemoryError, match="cannot be made") as caught:
        make()
    assert name in caught.value.problem
    assert caught.value.found
    assert "FLASHCKPT_SHM_DIR" in caught.value.remedy


def test_a_relative_memory_folder_is_the_same_one_from_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", "memory")
    assert memory_root() == tmp_path / "memory" / f"flashckpt-{os.getuid()}"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([*arguments, "--json"])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), json.loads(out), err


def victim_home(tmp_path: Path) -> Path:
    """A directory that would be a job, were it looked at: it must stay as it is."""
    home = tmp_path / "home"
    (home / "events").mkdir(parents=True)
    home.chmod(0o700)
    (home / "r00000-0000000000000005.seg").write_bytes(b"x" * 100_000)
    return home


def test_gc_and_status_name_links_once_and_leave_them_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "0")
    home = victim_home(tmp_path)
    before = everything(home)
    JobDirectory.open("dead").hold_live().close()
    (memory_root() / "linked").symlink_to(home)
    (memory_root() / ".linked.ended-1").symlink_to(home)
    code, document, err = run("status", capsys=capsys)
    assert [job["job"] for job in document["jobs"]] == ["dead"]
    assert (code, len(document["left_alone"]), err.count("left alone")) == (0, 2, 2)
    code, document, err = run("gc", "--apply", capsys=capsys)
    assert (code, [one["job"] for one in document["memory"]], len(document["left_alone"])) == (0, ["dead"], 2)
    assert err.count("left alone") == 2
    assert document["memory"][0]["nbytes"] < 100_000
    assert everything(home) == before
    code, document, _ = run("gc", "--job", "linked", "--apply", capsys=capsys)
    assert code == 30
    assert "symbolic link" in document["error"]["found"]
    assert everything(home) == before
    assert not (memory_root() / "dead").exists()


@as_root
@pytest.mark.root
def test_gc_and_status_touch_nothing_in_another_users_directory(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "0")
    home, base = victim_home(tmp_path), memory_root()
    before = everything(home)

    def squat() -> None:
        base.mkdir(mode=0o755)
        (base / "run").symlink_to(home)
        (base / "run2").mkdir()
        (base / ".run3.ended-1").symlink_to(home)

    as_nobody(shm_dir, squat)
    planted = everything(base)
    for command in (["status"], ["gc"], ["gc", "--apply"], ["gc", "--apply", "--job", "run"]):
        code, document, err = run(*command, capsys=capsys)
        if "--job" in command:
            assert (code, document["error"]["type"]) == (30, "NoCheckpointError")
            assert f"uid {NOBODY}" in document["error"]["found"]
            continue
        assert code == 0
        assert (document.get("jobs", []), document.get("memory", [])) == ([], [])
        assert [one["path"] for one in document["left_alone"]] == [str(base)]
        assert err.count(f"uid {NOBODY}") == 1
    assert (everything(home), everything(base)) == (before, planted)


def test_gc_reports_only_what_it_removed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "0")
    for job in ("a", "b"):
        directory = JobDirectory.open(job)
        Segment.create(directory.segment_path(0, 5), spec_of(job=job)).close()
        directory.hold_live().close()
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        "flashckpt.shm.private.shutil.rmtree", lambda path, **kw: None if ".a." in str(path) else rmtree(path, **kw)
    )
    monkeypatch.setattr("flashckpt.shm.private.shutil.rmtree.avoids_symlink_attacks", True, raising=False)
    code, document, _ = run("gc", "--apply", capsys=capsys)
    assert code == SharedMemoryError.exit_code
    gone = {one["job"]: one["nbytes"] for one in document["memory"]}
    assert gone["b"] > 0
    assert gone.get("a", 0) == 0
    assert [(one["job"], one["nbytes"] > 0) for one in document["kept"]] == [("a", True)]


def test_gc_goes_on_where_a_job_comes_to_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "0")
    for job in ("a", "b"):
        JobDirectory.open(job).hold_live().close()
    living = []

    def then_a_starts(job: str | None) -> Any:
        found = look(job)
        living.append(JobDirectory.open("a"))
        return found

    monkeypatch.setattr("flashckpt.commands.gc.look", then_a_starts)
    code, document, _ = run("gc", "--apply", capsys=capsys)
    assert (code, [one["job"] for one in document["memory"]]) == (0, ["b"])
    assert [(one["job"], one["nbytes"]) for one in document["kept"]] == [("a", 0)]
    assert (memory_root() / "a").is_dir()


@pytest.mark.parametrize("value", ["a day", "-1", "nan", "inf"])
def test_a_wrong_time_to_keep_dead_memory_is_refused(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", value)
    code, document, _ = run("gc", capsys=capsys)
    assert (code, document["error"]["problem"]) == (10, "invalid FLASHCKPT_KEEP_DEAD")


def test_listing_goes_on_where_a_directory_vanishes(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (shm_dir / name).mkdir(mode=0o700)
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: [*names(fd), "b2"])
    assert [path.name for path in private_directories(shm_dir)[0]] == ["a", "b", "c"]


@pytest.mark.matrix
def test_dlrun_with_closed_standard_streams_or_without_memory_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('x')\nopen({str(tmp_path / 'done')!r}, 'w').close()")
    launch = [
        "sh",
        "-c",
        '"$0" -m flashckpt.daemon.run --nproc-per-node 1 "$1" >&- 2>&- <&-',
        sys.executable,
        str(script),
    ]
    done = subprocess.run(launch, check=False, capture_output=True)
    assert (done.returncode, (tmp_path / "done").exists()) == (0, True)
    launch = [sys.executable, "-m", "flashckpt.daemon.run", "--nproc-per-node", "1", str(script)]
    environment = {**os.environ, "FLASHCKPT_SHM_DIR": "/proc/none"}
    done = subprocess.run(launch, check=False, capture_output=True, env=environment)
    assert (done.returncode, b"Traceback" in done.stderr) == (SharedMemoryError.exit_code, False)
