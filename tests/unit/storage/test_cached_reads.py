"""Large reads of a local file: out of the page cache as far as it has them, past it for the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashckpt.bench.host import resident_share
from flashckpt.errors import DamagedError
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore

NBYTES = (9 << 20) + 1234


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, bytes]:
    """A file with all its pages in the page cache, as a copy or a download leaves it."""
    data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()
    path = tmp_path / "a"
    path.write_bytes(data)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if resident_share(file.fileno()) < 1:
            pytest.skip("this file system keeps nothing in the page cache")
    return path, data


@pytest.fixture
def direct_opens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts files opened with O_DIRECT."""
    opened, real = [], os.open

    def opening(path: str, flags: int, *args: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            opened.append(flags)
        return real(path, flags, *args, **more)

    monkeypatch.setattr("flashckpt.storage.direct_io.os.open", opening)
    return opened


def test_what_the_page_cache_has_is_not_read_from_the_disk(
    written: tuple[Path, bytes], direct_opens: list[int]
) -> None:
    path, data = written
    out = bytearray(NBYTES - 5)
    open_store(path.parent).get_range("a", 5, memoryview(out))
    assert out == data[5:]
    assert not direct_opens


def test_verification_reads_the_disk(written: tuple[Path, bytes], direct_opens: list[int]) -> None:
    path, data = written
    out = bytearray(NBYTES)
    store = PosixStore(path.parent)
    store.past_cache = True
    store.get_range("a", 0, memoryview(out))
    assert out == data
    assert direct_opens


@pytest.mark.parametrize("kept", [(0, 4096), (0, 3 << 20), (1 << 20, 2 << 20), (8 << 20, NBYTES), (0, NBYTES - 9)])
@pytest.mark.parametrize("start", [0, 4096, 777])
def test_ranges_that_are_cached_in_part_are_read_whole(
    written: tuple[Path, bytes], kept: tuple[int, int], start: int
) -> None:
    path, data = written
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(file.fileno(), kept[1] - kept[0], kept[0])
    out = bytearray(NBYTES - start)
    open_store(path.parent).get_range("a", start, memoryview(out))
    assert out == data[start:]
    with pytest.raises(DamagedError, match="truncated"):
        open_store(path.parent).get_range("a", start, memoryview(bytearray(NBYTES - start + 1)))


@pytest.mark.parametrize("answer", [11, 95])  # EAGAIN: not in the cache; EOPNOTSUPP: this file system does not say
def test_file_systems_that_do_not_say_what_is_cached_are_read(
    written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, direct_opens: list[int], answer: int
) -> None:
    path, data = written
    real = os.preadv

    def reading(fd: int, views: list[memoryview], start: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise OSError(answer, os.strerror(answer))
        return real(fd, views, start)

    monkeypatch.setattr("flashckpt.storage.direct_io.os.preadv", reading)
    out = bytearray(NBYTES)
    open_store(path.parent).get_range("a", 0, memoryview(out))
    assert out == data
    assert direct_opens
