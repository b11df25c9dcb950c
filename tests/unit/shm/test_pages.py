"""Pages made before they are needed; threads of a fill."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashckpt.restore.executor import thread_count
from flashckpt.shm import segment_file

SIZE = 16 << 20


@pytest.fixture
def fresh() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        yield mapping


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def test_populate_maps_what_it_is_asked_for_and_no_more(fresh: mmap.mmap) -> None:
    start = address_of(fresh) + 5 * 4096
    if not segment_file.populate(start + 100, 3 * 4096):
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    assert all(segment_file.is_mapped(start + k * 4096) for k in range(4)), "the pages at both ends count whole"
    assert not segment_file.is_mapped(start - 4096)
    assert not segment_file.is_mapped(start + 4 * 4096)


def fresh_of(mapping: mmap.mmap) -> segment_file.FreshMemory:
    return segment_file.FreshMemory(np.array([address_of(mapping), 0]), np.array([SIZE, SIZE]))


def test_fresh_memory_is_made_where_it_is_asked_for_with_huge_pages_inside_it_alone(fresh: mmap.mmap) -> None:
    start = address_of(fresh)
    memory = fresh_of(fresh)
    aligned = (start + SIZE) // segment_file.HUGE * segment_file.HUGE - -(
        -start // segment_file.HUGE
    ) * segment_file.HUGE
    assert memory.huge_bytes in (0, aligned), "0: the kernel has none"
    memory.make(start, 3 << 20)
    assert all(segment_file.is_mapped(start + at) for at in range(0, 3 << 20, 4096))
    assert bytes(fresh[: 3 << 20]) == bytes(3 << 20)
    assert not segment_file.is_mapped(start + SIZE - 4096)


def test_memory_that_was_written_keeps_its_bytes_and_asks_for_no_huge_pages(fresh: mmap.mmap) -> None:
    fresh[:] = os.urandom(4096) * (SIZE // 4096)
    before = bytes(fresh)
    memory = fresh_of(fresh)
    assert memory.huge_bytes == 0
    memory.make(address_of(fresh), SIZE)
    assert bytes(fresh) == before


def test_small_memory_asks_for_no_huge_pages(fresh: mmap.mmap) -> None:
    nbytes = segment_file.HUGE_FROM - 1
    assert segment_file.FreshMemory(np.array([address_of(fresh)]), np.array([nbytes])).huge_bytes == 0


def test_huge_pages_that_turn_out_slow_are_given_up(fresh: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fresh_of(fresh)
    if not memory.huge_bytes:
        pytest.skip("the kernel has no huge pages")
    clock = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    memory.make(address_of(fresh), SIZE)
    assert memory.huge_bytes == 0


@pytest.mark.parametrize("shift", [0, 5, 70_000])
def test_what_a_file_holds_is_mapped_and_stays_as_it_is(shm_dir: Path, shift: int) -> None:
    data = os.urandom(4096) * 1024
    (shm_dir / "held").write_bytes(data)
    with (shm_dir / "held").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        segment_file.map_held(address_of(mapping) + shift, len(data) - shift)
        segment_file.map_held(address_of(mapping) + shift, 1)
        assert mapped_bytes(address_of(mapping)) >= (len(data) - shift) // 65536 * 4096
        assert bytes(mapping) == data


def mapped_bytes(address: int) -> int:
    """Return how much of the mapping that begins at an address is in this process's page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert thread_count(waits=False) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert thread_count(waits=False) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert thread_count(waits=False) == 1
    assert thread_count(waits=True) == 16, "storage is waited for: more threads than cores"
