"""Pages made before they are needed; threads of a fill."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from flashckpt.restore.executor import thread_count
from flashckpt.shm import prefault

SIZE = 16 << 20


@pytest.fixture
def fresh() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        yield mapping


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def test_populate_maps_what_it_is_asked_for_and_no_more(fresh: mmap.mmap) -> None:
    start = address_of(fresh) + 5 * 4096
    if not prefault.populate(start + 100, 3 * 4096):
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    assert all(prefault.is_mapped(start + k * 4096) for k in range(4)), "the pages at both ends count whole"
    assert not prefault.is_mapped(start - 4096)
    assert not prefault.is_mapped(start + 4 * 4096)


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert thread_count(waits=False) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert thread_count(waits=False) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert thread_count(waits=False) == 1
    assert thread_count(waits=True) == 16, "storage is waited for: more threads than cores"
