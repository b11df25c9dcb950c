"""The copy with digests where memory is not what the rows say: an error before a byte is touched, never a crash."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from support.native_rows import PAGE, RANDOM, at, every_level, pages, protect, rows, xxh3

from flashckpt.native import UnusableMemoryError, copy_and_digest

__all__ = ["pages"]  # a fixture


@every_level
def test_unmapped_memory_is_an_error(level: str) -> None:
    with mmap.mmap(-1, PAGE) as gone:
        hole = at(np.frombuffer(gone, np.uint8))
    here = np.zeros(8, np.uint8)
    with pytest.raises(UnusableMemoryError, match="a source is not mapped"):
        copy_and_digest(rows((hole, at(here), 8)), level=level)
    with pytest.raises(UnusableMemoryError, match="a target is not mapped"):
        copy_and_digest(rows((at(RANDOM), hole, 8)), level=level)
    with pytest.raises(UnusableMemoryError, match="a source is not mapped"):
        copy_and_digest(rows((8, 0, 8)), level=level)
    with pytest.raises(UnusableMemoryError, match="a source is not mapped"):
        copy_and_digest(rows((2**62, 0, 8)), level=level)


@every_level
@pytest.mark.parametrize("page", [0, 1, 2])
def test_rights_of_each_page_count(level: str, page: int, pages: mmap.mmap) -> None:
    memory = np.frombuffer(pages, np.uint8)
    other = np.zeros(3 * PAGE, np.uint8)
    into, out_of = rows((at(other), at(memory), 3 * PAGE)), rows((at(memory), at(other), 3 * PAGE))
    copy_and_digest(into, level=level)
    protect(at(memory) + page * PAGE, PAGE, mmap.PROT_READ)
    with pytest.raises(UnusableMemoryError, match="a target is read-only"):
        copy_and_digest(into, level=level)
    copy_and_digest(out_of, level=level)
    protect(at(memory) + page * PAGE, PAGE, 0)
    with pytest.raises(UnusableMemoryError, match="a source cannot be read"):
        copy_and_digest(out_of, level=level)
    protect(at(memory), 4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
    copy_and_digest(out_of, level=level)
    del memory


@every_level
def test_a_read_only_mapping_of_a_file_is_an_error(level: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        with pytest.raises(UnusableMemoryError, match="a target is read-only") as caught:
            copy_and_digest(rows((at(RANDOM), at(memory), 8)), level=level)
        assert caught.value.exit_code == 14
        del memory
    assert path.read_bytes() == bytes(PAGE)


@every_level
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_file_cut_short_before_the_call_is_an_error(level: str, left: int, shm_dir: Path) -> None:
    """Pages behind the end of a file keep their mapping; touching one ends the process by SIGBUS."""
    other = np.zeros(3 * PAGE, np.uint8)
    with (shm_dir / "segment").open("wb+") as file:
        file.truncate(3 * PAGE)
        with mmap.mmap(file.fileno(), 3 * PAGE) as mapped:
            memory = np.frombuffer(mapped, np.uint8)
            memory[:] = 1
            file.truncate(left * PAGE)
            for part in range(left + 1, 4):
                with pytest.raises(UnusableMemoryError, match="a source lies behind the end of its file"):
                    copy_and_digest(rows((at(memory), at(other), part * PAGE)), level=level)
                with pytest.raises(UnusableMemoryError, match="a target lies behind the end of its file"):
                    copy_and_digest(rows((at(other), at(memory), part * PAGE)), level=level)
            copy_and_digest(rows((at(memory), at(other), left * PAGE)), level=level)
            assert (other[: left * PAGE] == 1).all()
            del memory


@every_level
def test_a_row_may_span_mappings(level: str, tmp_path: Path) -> None:
    """Neighbours in memory with other rights or another file are one range for a row."""
    path = tmp_path / "file"
    path.write_bytes(RANDOM[: 4 * PAGE].tobytes())
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 4 * PAGE) as mapped:
        memory, other = np.frombuffer(mapped, np.uint8), np.zeros(4 * PAGE, np.uint8)
        protect(at(memory) + PAGE, PAGE, mmap.PROT_READ)
        found = copy_and_digest(rows((at(memory) + 5, at(other), 3 * PAGE)), level=level)
        assert found.tolist() == [xxh3(memory[5 : 5 + 3 * PAGE])]
        del memory


@every_level
@pytest.mark.parametrize("count", [2, 100, 127, 128, 129, 300])
def test_each_of_many_mappings_is_looked_at(level: str, count: int) -> None:
    """The kernel is asked for a few of them one by one, and for all of very many."""
    with mmap.mmap(-1, count * PAGE) as mapped:
        memory, other = np.frombuffer(mapped, np.uint8), np.zeros(count * PAGE, np.uint8)
        for page in range(0, count, 2):
            protect(at(memory) + page * PAGE, PAGE, mmap.PROT_READ)
        out_of = rows(*((at(memory) + page * PAGE, at(other) + page * PAGE, PAGE) for page in range(count)))
        copy_and_digest(out_of, level=level)
        whole = rows((at(memory), at(other), count * PAGE))
        copy_and_digest(whole, level=level)
        protect(at(memory) + (count - 1) * PAGE, PAGE, 0)
        for wrong in (out_of, whole):
            with pytest.raises(UnusableMemoryError, match="a source cannot be read") as caught:
                copy_and_digest(wrong, level=level)
            assert f"row {len(wrong) - 1} of {len(wrong)}" in str(caught.value)
        del memory


@every_level
def test_the_check_leaves_no_descriptor_open(level: str, shm_dir: Path) -> None:
    with (shm_dir / "segment").open("wb+") as file:
        file.truncate(PAGE)
        with mmap.mmap(file.fileno(), PAGE) as mapped:
            memory = np.frombuffer(mapped, np.uint8)
            before = os.listdir("/proc/self/fd")  # noqa: PTH208
            for _ in range(3):
                copy_and_digest(rows((at(memory), 0, PAGE)), level=level)
            assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
            del memory
