"""Segments as blocks of `multiprocessing.shared_memory`: found by name, and taken away by nobody."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
from support.memory import bytes_of, ended, fork, killed_at, request_of, restorable, shards_of, spec_of, take
from support.paths import ROOT

from flashckpt.core.shard import place
from flashckpt.shm import block
from flashckpt.shm.block import SHM, SharedBlock, name_of, withdraw, withdraw_all
from flashckpt.shm.gc import dead_memory, leftovers, remove
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment


def pythons() -> list[str]:
    """Return this interpreter and the others of 3.10 to 3.13 that are installed, on PATH or by pyenv."""
    names = [f"python3.{minor}" for minor in (10, 11, 12, 13)]
    found = [sys.executable, *(path for name in names if (path := shutil.which(name)))]
    found += map(str, sorted((Path.home() / ".pyenv" / "versions").glob("3.1[0-3].*/bin/python3")))
    real = dict.fromkeys(str(Path(path).resolve()) for path in found)
    return [path for path in real if subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode == 0]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobDirectory]:
    """A job directory in the machine's real memory tier: only there are segments blocks with a name."""
    monkeypatch.delenv("FLASHCKPT_SHM_DIR")
    was_there = (SHM / f"flashckpt-{os.getuid()}").exists()
    directory = JobDirectory.open(f"test-{uuid.uuid4().hex[:12]}")
    yield directory
    directory.hold_live().close()
    withdraw_all(directory.path)
    shutil.rmtree(directory.path, ignore_errors=True)
    for left in SHM.glob(f"flashckpt-{os.getuid()}-{directory.job}-*"):
        left.unlink()
    if not was_there:
        with contextlib.suppress(OSError):  # another job has begun in it
            directory.path.parent.rmdir()


@pytest.fixture
def path(job: JobDirectory) -> Path:
    return job.segment_path(0, 5)


def own_name(path: Path) -> Path:
    name = name_of(path)
    assert name is not None
    return SHM / name


def stranger(python: str, name: str, *, kill: bool = False) -> str:
    """Attach by name with nothing but the standard library, as any tool might; print the magic and end."""
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)" if kill else "b.close()"
    code = f"from multiprocessing.shared_memory import SharedMemory; b = SharedMemory({name!r}); print(bytes(b.buf[:8])); {end}"
    done = subprocess.run([python, "-u", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


# -- the name -----------------------------------------------------------------------------------------------


def test_a_segment_is_a_block_that_the_standard_library_finds(path: Path) -> None:
    segment = Segment.create(path, spec_of())
    take(segment, 0, 10)
    name = name_of(path)
    assert name == f"flashckpt-{os.getuid()}-{path.parent.name}-r00000-0000000000000005"
    other = SharedBlock(name)
    assert bytes(other.buf[:8]) == path.read_bytes()[:8]
    assert other.inode == path.stat().st_ino
    other.close()
    segment.close()


def test_a_tensor_is_read_with_the_standard_library_and_the_byte_tables(path: Path) -> None:
    """The recipe of docs/format.md, section "Look at a snapshot": superblock, slot header, data."""
    segment = Segment.create(path, spec_of())
    take(segment, 1, 20)
    spec, at = segment.spec, place(shards_of(0)).offsets.tolist()
    segment.close()
    memory = shared_memory.SharedMemory(
        own_name(path).name, **({"track": False} if sys.version_info >= (3, 13) else {})
    )
    try:
        start = spec.data_at(1) + at[1]
        assert memory.buf is not None
        assert bytes(memory.buf[start : start + 70_000]) == bytes_of(0, 20)[1].tobytes()
    finally:
        memory.close()
    assert path.exists(), "the segment stays, whatever this process's tracker does at its end"


def test_the_recipe_of_the_docs_prints_the_slots(path: Path) -> None:
    page = ROOT / "docs" / "format.md"
    program = page.read_text().split("## 8. Look at a snapshot")[1].split("```python\n")[1].split("```")[0]
    segment = Segment.create(path, spec_of())
    take(segment, 0, 10)
    take(segment, 1, 20)
    header = segment.header(1)
    segment.close()
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, own_name(path).name], capture_output=True, text=True, check=True
    )
    assert [line.split(",")[0] for line in done.stdout.splitlines()[:2]] == ["slot 0: COMPLETE", "slot 1: COMPLETE"]
    last = f"step {header.step} of generation {header.generation}, {header.world_size} ranks"
    assert done.stdout.splitlines()[1].endswith(last)


def test_plain_files_elsewhere(shm_dir: Path) -> None:
    assert name_of(shm_dir / "r00000-0000000000000005.seg") is None
    assert name_of(SHM / f"flashckpt-{os.getuid()}" / "job" / "control") is None
    segment = Segment.create(shm_dir / "r00000-0000000000000005.seg", spec_of())
    take(segment, 0, 10)
    segment.close()
    assert restorable(shm_dir / "r00000-0000000000000005.seg") == [10]


def test_names_of_long_jobs_fit_and_differ() -> None:
    base = SHM / f"flashckpt-{os.getuid()}"
    names = {name_of(base / ("j" * 200 + end) / "r00000-0000000000000005.seg") for end in ("a", "b")}
    assert len(names) == 2
    assert all(name is not None and len(name) < 200 for name in names)


def test_another_users_file_of_that_name_costs_only_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(target)

    monkeypatch.setattr(Path, "replace", refused)
    segment = Segment.create(path, spec_of())
    take(segment, 0, 10)
    segment.close()
    assert not own_name(path).exists()
    again = Segment.attach(path, writable=True)
    assert restorable(path) == [10]
    again.close()


# -- nobody takes it away -----------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_a_stranger_who_attaches_and_ends_takes_no_snapshot_along(path: Path, python: str, kill: bool) -> None:
    segment = Segment.create(path, spec_of())
    take(segment, 0, 10)
    assert stranger(python, own_name(path).name, kill=kill) == str(path.read_bytes()[:8])
    take(segment, 1, 20)
    segment.close()
    assert restorable(path) == [10, 20]
    again = Segment.attach(path, writable=True)  # the next writer names it again
    assert own_name(path).stat().st_ino == path.stat().st_ino
    again.close()


def test_a_killed_owner_leaves_the_block_and_starts_no_tracker(path: Path) -> None:
    def live() -> None:
        segment = Segment.create(path, spec_of())
        take(segment, 0, 10)
        tracker = subprocess.run(
            ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
        )
        assert "resource_tracker" not in tracker.stdout
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(live)) == -signal.SIGKILL
    assert restorable(path) == [10]
    assert own_name(path).stat().st_ino == path.stat().st_ino


@pytest.mark.parametrize("point", ["segment.before-reserve", "segment.before-rename", "segment.after-rename"])
def test_a_maker_killed_at_any_point_leaves_nothing_that_stays(path: Path, point: str) -> None:
    killed_at(point, lambda: Segment.create(path, spec_of()))
    assert path.exists() == (point == "segment.after-rename")
    if not path.exists():
        assert len(leftovers_of(path)) == 1
        Segment.create(path, spec_of()).close()
    else:
        Segment.attach(path, writable=True).close()
    assert leftovers_of(path) == []
    assert own_name(path).stat().st_ino == path.stat().st_ino


def leftovers_of(path: Path) -> list[Path]:
    return [left for left in leftovers() if path.parent.name in left.name]


# -- removal ------------------------------------------------------------------------------------------------


def test_both_names_go_with_the_segment(path: Path) -> None:
    segment = Segment.create(path, spec_of())
    segment.unlink()
    segment.close()
    assert not path.exists()
    assert not own_name(path).exists()


def test_a_name_that_belongs_to_a_newer_segment_stays(path: Path, tmp_path: Path) -> None:
    Segment.create(path, spec_of()).close()
    old = path.with_name("r00000-0000000000000006.seg")
    path.rename(old)
    Segment.create(path, spec_of()).close()
    withdraw(old)
    assert own_name(path).stat().st_ino == path.stat().st_ino


def test_a_directory_removed_by_hand_leaves_blocks_that_are_found(path: Path) -> None:
    Segment.create(path, spec_of()).close()
    shutil.rmtree(path.parent)
    assert leftovers_of(path) == [own_name(path)]
    (found,) = [dead for dead in dead_memory() if dead.path == own_name(path)]
    assert found.is_expired
    assert found.nbytes > 0
    assert remove(found) == 0
    assert leftovers_of(path) == []


def test_a_living_makers_block_is_no_leftover(path: Path) -> None:
    temporary, memory = block.new(path, 4096)
    assert leftovers_of(path) == []
    assert memory is not None
    memory.close()
    temporary.unlink()


# -- buffers ------------------------------------------------------------------------------------------------


def test_buffers_in_use_outlive_the_block(path: Path) -> None:
    segment = Segment.create(path, spec_of())
    writer = segment.begin(0, request_of(1, 1))
    view = np.frombuffer(writer.data, np.uint8)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    segment.close()
    view[:10] = 1  # would be a segmentation fault
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors
    del writer, view


def test_the_standard_librarys_tracker_is_itself_again(path: Path) -> None:
    segment = Segment.create(path, spec_of())
    segment.close()
    mine = shared_memory.SharedMemory(create=True, size=struct.calcsize("q"))
    mine.close()
    mine.unlink()
    assert not (SHM / mine.name).exists()
