"""Real file systems that fill up and turn read-only under a running job (make test-mounts; root).

Small ones of their own: a tmpfs, and an ext4 in a file. The job is real: a training loop, its memory tier, its daemon.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import ended, fork
from support.ranks import wait_for

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.retention import keep, unkeep
from flashckpt.commands.status import describe
from flashckpt.commands.verify import verify_checkpoint
from flashckpt.errors import PersistError, SharedMemoryError
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.storage.factory import open_store

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]

MIB = 1 << 20
KEEP_LAST = 2


def run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command[:2])} is refused here: {done.stderr.decode().strip()}")


@dataclass(frozen=True)
class Disk:
    """A mounted file system that can be made full or read-only, and well again."""

    path: Path

    def fill(self) -> None:
        """Leave less than 64 KiB of room."""
        with (self.path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for block in (MIB, 1 << 16):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(os.urandom(block))
            os.fsync(file.fileno())

    def empty(self) -> None:
        (self.path / "filler").unlink()

    def read_only(self) -> None:
        """The kernel refuses while a file is open for writing: the daemon has none open between two commits."""
        wait_for(lambda: not self._remount("ro"), what="the file system to become read-only")

    def read_write(self) -> None:
        assert not self._remount("rw")

    def _remount(self, mode: str) -> int:
        return subprocess.run(
            ["mount", "-o", f"remount,{mode}", str(self.path)], check=False, capture_output=True
        ).returncode


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Disk]:
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "flashckpt-test", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def ext4(path: Path, size: str) -> Iterator[Disk]:
    path.mkdir()
    image = path.with_suffix(".image")
    run("truncate", "-s", size, str(image))
    run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    run("mount", "-o", "loop", str(image), str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
        image.unlink()


class Quota(Disk):
    """A subvolume of btrfs whose quota group has a limit: writes answer EDQUOT while the file system itself has room."""

    LIMIT, ENOUGH = "8m", "150m"

    def fill(self) -> None:
        self._limit(self.LIMIT)

    def empty(self) -> None:
        self._limit(self.ENOUGH)

    def _limit(self, size: str) -> None:
        run("btrfs", "qgroup", "limit", size, str(self.path))
        run("btrfs", "filesystem", "sync", str(self.path))


@contextlib.contextmanager
def btrfs(path: Path, size: str) -> Iterator[Quota]:
    """A file system of its own size: btrfs needs more than 100 MiB."""
    del size
    if not shutil.which("mkfs.btrfs"):
        pytest.skip("needs btrfs-progs")
    mounted, image = path.with_suffix(".mounted"), path.with_suffix(".image")
    mounted.mkdir()
    run("truncate", "-s", "400m", str(image))
    run("mkfs.btrfs", "-q", str(image))
    run("mount", "-o", "loop", str(image), str(mounted))
    try:
        run("btrfs", "quota", "enable", str(mounted))
        run("btrfs", "subvolume", "create", str(mounted / "limited"))
        yield Quota(mounted / "limited")
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
        image.unlink()


FAULTS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None], int]] = {
    "full": (Disk.fill, Disk.empty, errno.ENOSPC),
    "over quota": (Quota.fill, Quota.empty, errno.EDQUOT),
    "read-only": (Disk.read_only, Disk.read_write, errno.EROFS),
}


CASES = [*itertools.product((tmpfs, ext4), ("full", "read-only")), (btrfs, "over quota")]


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[f"{kind.__name__}-{fault}" for kind, fault in CASES])
def test_root_fails_training_and_memory_go_on_and_the_next_persist_succeeds_by_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., contextlib.AbstractContextManager[Disk]],
    fault: str,
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    spoil, repair, number = FAULTS[fault]
    with kind(tmp_path / "root", "48m") as disk:
        root = disk.path / "run"
        model = torch.nn.Linear(800, 800)
        optimizer = torch.optim.AdamW(model.parameters())  # 7.7 MB with its moments
        ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=2, keep_last=KEEP_LAST, job="mounted")
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()

        def train(*steps: int) -> None:
            for step in steps:
                model(torch.ones(2, 800)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(step)

        train(1, 2)
        ckpt.wait(60)
        spoil(disk)
        train(3, 4)
        with pytest.raises(PersistError, match=os.strerror(number)):
            ckpt.wait(60)
        train(5, 6, 7)
        ckpt.fence()
        job = JobDirectory.open("mounted", create=False)
        wait_for(lambda: describe(job)["snapshot"] == (1, 7), what="the memory tier to go on")
        told = describe(job)
        assert told["committed"] == (1, 2)
        assert os.strerror(number) in told["error"]
        assert told["lag"] >= 1
        assert (job.path / "daemon.log").read_text().count("persist failed") == 1, "said once"

        repair(disk)
        train(8)
        wait_for(lambda: _durable(ckpt), what="the daemon to persist by itself", deadline_s=60)
        assert not describe(job)["error"]
        _holds(root, model, optimizer, step=8)
        assert not list(root.rglob("*.tmp*")), "a failed write leaves nothing"
        ckpt.close()
        wait_for(lambda: not any(memory_root().iterdir()), what="the memory to be given back")


@pytest.mark.parametrize("kind", [tmpfs, ext4], ids=lambda kind: kind.__name__)
def test_a_full_root_makes_room_of_what_retention_does_not_keep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., contextlib.AbstractContextManager[Disk]],
) -> None:
    """A checkpoint loses its keep mark; before the next commit, after which it would be deleted, the disk is full."""
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    with kind(tmp_path / "root", "64m") as disk:
        root = disk.path / "run"
        model = torch.nn.Linear(800, 800)
        optimizer = torch.optim.AdamW(model.parameters())
        ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=2, keep_last=KEEP_LAST, job="mounted")
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()
        store = open_store(str(root))

        def train(*steps: int) -> None:
            for step in steps:
                model(torch.ones(2, 800)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(step)
            ckpt.wait(60)

        def steps_of() -> list[int]:
            return sorted(info.step for info in list_checkpoints(store))

        train(1, 2)
        (first,) = list_checkpoints(store)
        keep(store, first.prefix)
        train(3, 4)
        train(5, 6)
        train(7, 8)
        wait_for(lambda: steps_of() == [2, 6, 8], what="retention")
        unkeep(store, first.prefix)
        disk.fill()
        os.truncate(disk.path / "filler", (disk.path / "filler").stat().st_size - MIB)  # room for names, not for 7.7 MB
        train(9, 10)
        job = JobDirectory.open("mounted", create=False)
        log = (job.path / "daemon.log").read_text()
        assert f"the root is full: deleted {first.prefix} (" in log
        assert "persist failed" not in log
        assert not describe(job)["error"]
        wait_for(lambda: steps_of() == [8, 10], what="retention after the commit")
        _holds(root, model, optimizer, step=10)
        ckpt.close()
        wait_for(lambda: not any(memory_root().iterdir()), what="the memory to be given back")


def _durable(ckpt: Checkpointer) -> bool:
    with contextlib.suppress(PersistError):
        ckpt.wait(60)
        return True
    return False


def _holds(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Every checkpoint is whole, and the newest is the live state bit for bit."""
    store = open_store(root)
    wait_for(lambda: len(list_checkpoints(store)) <= KEEP_LAST, what="retention, which no commit waits for")
    infos = list_checkpoints(store, damaged=True, whole=True)
    assert infos[0].step == step
    for info in infos:
        assert not verify_checkpoint(store, info, lambda _: None)["damaged"]
    other = torch.nn.Linear(800, 800)
    again = torch.optim.AdamW(other.parameters())
    reader = Checkpointer.readonly(str(root))
    reader.track(model=other, optimizer=again)
    reader.restore()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["exp_avg"], again.state[two]["exp_avg"])


def _tries(root: Path, width: int) -> str:
    """Start a job whose state needs 12 x width^2 bytes per slot; return what it is told, "" if it fits."""
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(str(root), snapshot_every=1, job="small", slots=2)
    ckpt.track(model=model, optimizer=optimizer)
    try:
        ckpt.restore()
        for step in (1, 2, 3):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            ckpt.step(step)
        ckpt.fence()
    except SharedMemoryError as error:
        return str(error)
    ckpt.close()
    return ""


def test_memory_of_64_mb_is_too_little_the_job_is_told_need_room_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Docker gives a container. Never SIGBUS: the job runs in a process of its own, which ends by itself."""
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    with tmpfs(tmp_path / "shm", "64m") as shm:
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(shm.path))
        said = tmp_path / "said"
        assert ended(fork(lambda: said.write_text(_tries(tmp_path / "root", 2200)))) == 0  # 58 MB per slot
        text = said.read_text()
        assert "too little host memory for the snapshots of 2 slots per rank" in text
        assert f"room for {64 * MIB} bytes" in text
        (needed,) = re.findall(r"expected: (\d+) bytes", text)
        assert int(needed) > 2 * 12 * 2200**2
        assert "flashckpt gc" in text
        assert "--shm-size" in text
        assert ended(fork(lambda: said.write_text(_tries(tmp_path / "root2", 1000)))) == 0  # 24 MB in two slots fit
        assert said.read_text() == ""


def test_memory_that_others_filled_is_told_and_fits_once_they_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    with tmpfs(tmp_path / "shm", "64m") as shm:
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(shm.path))
        said = tmp_path / "said"
        shm.fill()
        assert ended(fork(lambda: said.write_text(_tries(tmp_path / "root", 1000)))) == 0
        assert said.read_text()
        shm.empty()
        assert ended(fork(lambda: said.write_text(_tries(tmp_path / "root", 1000)))) == 0
        assert said.read_text() == ""
