"""Too little host memory is an error with a remedy, never SIGBUS and never an OOM kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.memory import ended, fork, restorable, spec_of, take

from flashckpt.errors import SharedMemoryError
from flashckpt.shm import block
from flashckpt.shm.block import Capacity, capacities, cgroup_capacities, require_capacity
from flashckpt.shm.segment import Segment

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "cg").mkdir()
    write(tmp_path / "proc/self/cgroup", "0::/pod/job\n")
    write(tmp_path / "proc/self/mountinfo", f"31 23 0:28 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    return tmp_path / "proc"


def test_the_least_of_all_ancestor_cgroups_counts(proc: Any, tmp_path: Any) -> None:
    for folder, limit, used in (("pod/job", "max", 10), ("pod", 100 * MIB, 70 * MIB), ("", 900 * MIB, 0)):
        write(tmp_path / "cg" / folder / "memory.max", f"{limit}\n")
        write(tmp_path / "cg" / folder / "memory.current", f"{used}\n")
    write(tmp_path / "cg/pod/memory.stat", f"anon 1\ninactive_file {10 * MIB}\nactive_file {5 * MIB}\nshmem 7\n")
    found = cgroup_capacities(proc=proc)
    assert [r.nbytes for r in found] == [45 * MIB, 900 * MIB]
    assert str(tmp_path / "cg/pod") in found[0].limit


def test_version_1_hierarchies_are_read(tmp_path: Any) -> None:
    proc = tmp_path / "proc"
    write(proc / "self/cgroup", "9:name=systemd:/\n4:memory:/a/b\n0::/\n")
    write(proc / "self/mountinfo", f"35 31 0:32 / {tmp_path}/m rw shared:1 - cgroup cgroup rw,memory\n")
    write(tmp_path / "m/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "m/a/memory.limit_in_bytes", f"{50 * MIB}\n")
    write(tmp_path / "m/a/memory.usage_in_bytes", f"{30 * MIB}\n")
    write(tmp_path / "m/a/memory.stat", f"total_inactive_file {MIB}\n")
    assert [r.nbytes for r in cgroup_capacities(proc=proc)] == [21 * MIB]


@pytest.mark.parametrize("line", ["0::/../../kubepods/x\n", "0::/not/visible/in/here\n"])
def test_inside_a_container_the_mount_point_is_our_own_group(proc: Any, tmp_path: Any, line: Any) -> None:
    write(proc / "self/cgroup", line)
    write(tmp_path / "cg/memory.max", f"{64 * MIB}\n")
    write(tmp_path / "cg/memory.current", "0\n")
    assert [r.nbytes for r in cgroup_capacities(proc=proc)] == [64 * MIB]


def test_without_cgroups_nothing_is_limited_and_nothing_fails(tmp_path: Any) -> None:
    assert cgroup_capacities(proc=tmp_path) == []
    assert [r.limit for r in capacities(tmp_path, proc=tmp_path)] == [f"free space of the file system of {tmp_path}"]


def test_this_machine_has_a_least_room(shm_dir: Any) -> None:
    found = capacities(shm_dir)
    assert found[0].nbytes > 0
    assert found == sorted(found, key=lambda r: r.nbytes)


def test_the_error_names_need_room_limit_and_every_remedy(shm_dir: Any, monkeypatch: Any) -> None:
    limit = Capacity(nbytes=3 * MIB, limit="memory.max of cgroup /x")
    monkeypatch.setattr(block, "capacities", lambda *_a, **_k: [limit])
    with pytest.raises(SharedMemoryError) as error:
        require_capacity(shm_dir, 4 * MIB, what="job 'j', rank 0", slots=3)
    text = str(error.value)
    for part in ("job 'j', rank 0", "3145728 bytes", "4194304 bytes", "memory.max of cgroup /x", "flashckpt gc",
                 "slots=2", "remount", "--shm-size", "exit code 14"):  # fmt: skip
        assert part in text
    require_capacity(shm_dir, 3 * MIB, what="j")


def test_a_segment_that_does_not_fit_is_refused_before_anything_is_written(shm_dir: Any, monkeypatch: Any) -> None:
    need = spec_of().nbytes
    monkeypatch.setattr(block, "capacities", lambda *_a, **_k: [Capacity(nbytes=need - 1, limit="x")])
    with pytest.raises(SharedMemoryError):
        Segment.create(shm_dir / "a.seg", spec_of())
    assert list(shm_dir.iterdir()) == []
    monkeypatch.setattr(block, "capacities", lambda *_a, **_k: [Capacity(nbytes=need, limit="x")])
    Segment.create(shm_dir / "a.seg", spec_of()).close()


def test_room_that_vanishes_while_reserving_is_an_error_and_the_segment_is_removed(
    shm_dir: Any, monkeypatch: Any
) -> None:
    segment = Segment.create(shm_dir / "a.seg", spec_of())
    monkeypatch.setattr(block, "capacities", lambda *_a, **_k: [Capacity(nbytes=1000, limit="memory.max")])
    with pytest.raises(SharedMemoryError, match=r"memory\.max"):
        segment.reserve()
    assert list(shm_dir.iterdir()) == []
    segment.close()


def test_a_segment_with_a_snapshot_is_kept_when_reserving_fails(shm_dir: Any, monkeypatch: Any) -> None:
    segment = Segment.create(shm_dir / "a.seg", spec_of())
    take(segment, 0, 10)
    monkeypatch.setattr(block, "capacities", lambda *_a, **_k: [Capacity(nbytes=1000, limit="memory.max")])
    with pytest.raises(SharedMemoryError):
        segment.reserve()
    assert restorable(shm_dir / "a.seg") == [10]
    segment.close()


# -- the real thing, where root allows ------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.root
def test_a_small_tmpfs_refuses_by_error_never_by_bus_error(small_tmpfs: Any) -> None:
    def create() -> None:
        with pytest.raises(SharedMemoryError, match="free space of the file system"):
            Segment.create(small_tmpfs / "a.seg", spec_of(slots=3))

    assert ended(fork(create)) == 0
    assert list(small_tmpfs.iterdir()) == []


@pytest.mark.root
def test_a_tmpfs_that_fills_up_between_check_and_reserve_is_an_error(small_tmpfs: Any) -> None:
    def fill_and_reserve() -> None:
        segment = Segment.create(small_tmpfs / "a.seg", spec_of(slots=2))
        os.posix_fallocate(os.open(small_tmpfs / "other", os.O_RDWR | os.O_CREAT), 0, 5 * MIB)
        with pytest.raises(SharedMemoryError):
            segment.reserve()

    assert ended(fork(fill_and_reserve)) == 0
    assert [p.name for p in small_tmpfs.iterdir()] == ["other"]


@pytest.mark.root
def test_two_ranks_that_reserve_at_once_on_a_small_tmpfs_one_gets_an_error(small_tmpfs: Any) -> None:
    """Each alone fits: both pass the check, the reservation decides."""
    first = Segment.create(small_tmpfs / "a.seg", spec_of(rank=0))
    second = Segment.create(small_tmpfs / "b.seg", spec_of(rank=1))
    first.reserve()
    with pytest.raises(SharedMemoryError):
        second.reserve()
    take(first, 0, 10)
    assert restorable(small_tmpfs / "a.seg") == [10]
    first.close()
    second.close()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 32 MiB, version 1 or 2, whichever this machine has."""
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = base / f"flashckpt-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(32 * MIB))
            except OSError:
                folder.rmdir()
                continue
            yield folder
            folder.rmdir()
            return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.root
def test_a_cgroup_limit_is_an_error_not_an_oom_kill(cgroup: Any, shm_dir: Any) -> None:
    def inside() -> None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        with pytest.raises(SharedMemoryError, match="cgroup"):
            Segment.create(shm_dir / "big.seg", spec_of(sizes=(20 * MIB,)))
        segment = Segment.create(shm_dir / "a.seg", spec_of(sizes=(9 * MIB,)))
        with pytest.raises(SharedMemoryError, match="cgroup"):
            _reserve_twice(segment, shm_dir)

    assert ended(fork(inside)) == 0


def _reserve_twice(segment: Segment, folder: Path) -> None:
    second = Segment.create(folder / "b.seg", spec_of(rank=1, sizes=(9 * MIB,)))
    segment.reserve()
    second.reserve()


def test_the_refusal_says_how_many_slots_fit_and_what_they_cost() -> None:
    gib = 1 << 30

    def refused(slots: int, room: int) -> str:
        with pytest.raises(SharedMemoryError) as caught:
            block.slots_for(10 * gib, room, slots)
        return str(caught.value)

    assert "slots=2), 20.00 GiB, snapshots pause until the bytes of a checkpoint are on storage" in refused(3, 20 * gib)
    assert "slots=3), 30.00 GiB; " in refused(4, 35 * gib)
    assert "2 slots of 10.00 GiB are the least" in refused(3, 19 * gib)
    assert "2 slots of 10.00 GiB are the least" in refused(2, 19 * gib)


def test_huge_pages_are_said_of_the_innermost_mount(tmp_path: Path) -> None:
    write(
        tmp_path / "proc/self/mountinfo",
        "20 1 0:20 / / rw - ext4 /dev/vda rw,huge=always\n"
        "27 20 0:25 / /dev/shm rw shared:3 - tmpfs tmpfs rw,size=9k\n"
        "28 27 0:39 / /dev/shm/large rw - tmpfs tmpfs rw,size=9k,huge=within_size,inode64\n",
    )
    asked = {
        place: block.huge_pages(Path(place), proc=tmp_path / "proc")
        for place in ("/dev/shm/job", "/dev/shm/large/job", "/dev/shm/larger", "/home")
    }
    assert list(asked.values()) == ["never", "within_size", "never", "never"]
