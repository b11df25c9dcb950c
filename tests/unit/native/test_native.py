"""The copy with digests: equal to memmove and to the xxhash package at every level; rows that make no sense."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_rows import LEVELS, PAGE, RANDOM, aligned, at, every_level, pages, protect, rows, sanitized, xxh3

from flashckpt.core.records import CHUNK_BYTES, chunk_digests
from flashckpt.errors import ConfigError
from flashckpt.native import (
    LEVEL_VARIABLE,
    DescriptorError,
    copy_and_digest,
    descriptors,
    digest_ranges,
    implementation,
)

__all__ = ["pages"]  # a fixture

# -- equal to memmove and xxhash ---------------------------------------------------------------------------------------


@every_level
def test_every_length_up_to_2048(level: str) -> None:
    """All lengths as rows of one call, each copied to a place of its own with a byte between two."""
    lengths = np.arange(2049)
    starts = np.cumsum(lengths + 1) - (lengths + 1)
    target = np.full(int(starts[-1] + 2050), 0xAA, np.uint8)
    source = RANDOM[: len(target)]
    table = np.stack((at(source) + starts, at(target) + starts, lengths), axis=1)
    found = copy_and_digest(table, level=level)
    expected = [xxh3(source[a : a + n]) for a, n in zip(starts, lengths, strict=True) if n]
    assert found.tolist() == expected
    between = np.ones(len(target), bool)
    for a, n in zip(starts, lengths, strict=True):
        between[a : a + n] = False
    assert (target[between] == 0xAA).all()
    assert (target[~between] == source[~between]).all()


@every_level
@pytest.mark.parametrize("nbytes", [100, 3 * 4096 - 1, 17 * 1024 + 64])
def test_every_alignment_of_source_and_target(level: str, nbytes: int) -> None:
    """One call per alignment of the source: 64 rows, each to a strip with another alignment of its own."""
    strip = -(-nbytes // 64) * 64 + 128
    source, target = aligned(nbytes + 64), aligned(64 * strip)
    source[:] = RANDOM[: len(source)]
    strips = target.reshape(64, strip)
    for a in range(64):
        target[:] = 0xAA
        table = rows(*((at(source) + a, at(strips[b]) + b, nbytes) for b in range(64)))
        found = copy_and_digest(table, check=False, level=level)
        assert set(found.tolist()) == {xxh3(source[a : a + nbytes])}
        for b, one in enumerate(strips):
            assert (one[b : b + nbytes] == source[a : a + nbytes]).all()
            one[b : b + nbytes] = 0xAA
        assert (target == 0xAA).all()


@every_level
@settings(max_examples=40)
@given(data=st.data())
def test_sampled_lengths_up_to_4_mib(level: str, data: st.DataObject) -> None:
    edges = [1024 * k + e for k in (1, 2, 16, 1023, 1024, 1025, 3072) for e in (-64, -1, 0, 1, 63)]
    nbytes = data.draw(st.sampled_from(edges) | st.integers(0, 4 << 20))
    a, b = data.draw(st.integers(0, 64)), data.draw(st.integers(0, 64))
    source = RANDOM[: a + nbytes].copy()[a:]  # ends where its memory ends: a sanitizer sees a read behind it
    target = np.zeros(nbytes + 128, np.uint8)
    found = copy_and_digest(rows((at(source), at(target) + b, nbytes)), level=level)
    assert (found == chunk_digests(source)).all()
    assert found.shape == (-(-nbytes // CHUNK_BYTES),)
    assert (target[b : b + nbytes] == source).all()
    assert not target[:b].any()
    assert not target[b + nbytes :].any()


@every_level
@settings(max_examples=40)
@given(
    sizes=st.lists(
        st.integers(0, 700) | st.sampled_from([2047, 2048, 5000, CHUNK_BYTES, CHUNK_BYTES + 1]), max_size=30
    ),
    seed=st.integers(0, 2**32),
)
def test_many_rows_in_any_order(level: str, sizes: list[int], seed: int) -> None:
    """Targets in another order than rows, digests at given places, some rows copied only and some digested only."""
    draw = np.random.default_rng(seed)
    nbytes = np.array(sizes, np.int64)
    places, order = np.zeros(len(sizes), np.int64), draw.permutation(len(sizes))
    places[order] = np.cumsum(nbytes[order]) - nbytes[order]
    target = np.zeros(int(nbytes.sum()), np.uint8)
    sources = draw.integers(0, len(RANDOM) - nbytes.max(initial=0), len(sizes))
    kind = draw.integers(0, 3, len(sizes))  # both, copied only, digested only
    table = np.stack((at(RANDOM) + sources, np.where(kind == 2, 0, at(target) + places), nbytes), axis=1)
    counts = -(-nbytes // CHUNK_BYTES)
    first = np.where(kind == 1, -1, np.cumsum(counts) - counts)
    out = np.full(int(counts.sum()) + 1, 5, np.uint64)
    assert copy_and_digest(table, digests=out, first_chunks=first, level=level) is out
    for row, size in enumerate(sizes):
        source = RANDOM[sources[row] : sources[row] + size]
        copied = target[places[row] : places[row] + size]
        assert (copied == (0 if kind[row] == 2 else source)).all()
        found = out[np.cumsum(counts)[row] - counts[row] :][: counts[row]]
        assert (found == (5 if kind[row] == 1 else chunk_digests(source))).all()
    assert out[-1] == 5


@every_level
def test_digests_of_rows_follow_each_other(level: str) -> None:
    """Without indexes: those of a row of several chunks, of one without a byte, of the next."""
    sizes = [3 * CHUNK_BYTES, 0, CHUNK_BYTES + 1, 7]
    target = np.zeros(sum(sizes), np.uint8)
    places = np.cumsum(sizes) - sizes
    table = rows(
        *((at(RANDOM) + k, at(target) + place, n) for k, (place, n) in enumerate(zip(places, sizes, strict=True)))
    )
    expected = [chunk_digests(RANDOM[k : k + n]) for k, n in enumerate(sizes)]
    assert copy_and_digest(table, level=level).tolist() == np.concatenate(expected).tolist()


@every_level
def test_without_digests_it_is_a_copy(level: str) -> None:
    target = np.zeros((3 << 20) + 5, np.uint8)
    source = RANDOM[: len(target)]
    assert not copy_and_digest(rows((at(source), at(target), len(target))), digest=False, level=level).size
    assert (target == source).all()


@every_level
def test_no_rows_and_empty_rows_are_fine(level: str) -> None:
    assert copy_and_digest(rows(), level=level).shape == (0,)
    assert copy_and_digest(rows((0, 0, 0), (1, 2, 0)), level=level).shape == (0,)


@every_level
def test_no_byte_outside_the_rows_is_read(level: str, pages: mmap.mmap) -> None:
    """The pages around the source are forbidden; a vector that reaches over an end would crash."""
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = RANDOM[: len(memory)]
    protect(at(memory), PAGE, mmap.PROT_READ & 0)
    protect(at(memory) + 3 * PAGE, PAGE, 0)
    inside = memory[PAGE : 3 * PAGE]
    target = np.zeros(2 * PAGE, np.uint8)
    for nbytes in [*range(1, 300), 1023, 1024, 1025, 2047, 2048, 2049, 5000, 2 * PAGE]:
        for part in (inside[:nbytes], inside[len(inside) - nbytes :]):
            found = copy_and_digest(rows((at(part), at(target), nbytes)), check=False, level=level)
            assert found.tolist() == [xxh3(part)]
    del memory, inside, part


@every_level
def test_threads_copy_side_by_side(level: str) -> None:
    """Other threads run meanwhile, so the level's scratch state must be each call's own."""
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        source, target = RANDOM[number : number + (2 << 20)], np.zeros(2 << 20, np.uint8)
        found[number] = copy_and_digest(rows((at(source), at(target), len(target))), level=level).tolist()
        assert (source == target).all()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: chunk_digests(RANDOM[number : number + (2 << 20)]).tolist() for number in range(4)}


# -- refused before a byte is touched ----------------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((1, 1, -1), "a size is negative"),
        ((0, 4096, 1), "outside the address space"),
        ((-5, 4096, 1), "outside the address space"),
        ((4096, -5, 1), "outside the address space"),
        ((4096, 2**63 - 2, 8), "outside the address space"),
        ((2**63 - 2, 0, 8), "outside the address space"),
    ],
)
def test_rows_that_make_no_sense_are_refused(level: str, row: tuple[int, int, int], words: str) -> None:
    target = np.zeros(8, np.uint8)
    good = (at(RANDOM), at(target), 8)
    with pytest.raises(DescriptorError, match=words) as caught:
        copy_and_digest(rows(good, row), level=level)
    assert "row 1 of 2" in caught.value.found
    assert caught.value.state == "Nothing was copied."
    assert not target.any()


@every_level
def test_nothing_to_do_is_refused(level: str) -> None:
    with pytest.raises(DescriptorError, match="nothing to do"):
        copy_and_digest(rows((at(RANDOM), 0, 8)), digest=False, level=level)
    with pytest.raises(DescriptorError, match="nothing to do"):
        copy_and_digest(rows((at(RANDOM), 0, 8)), first_chunks=np.array([-1]), level=level)


@every_level
@pytest.mark.parametrize(("first", "room"), [(1, 1), (0, 0), (-1 + 2**62, 4), (2, 4)])
def test_digests_outside_their_array_are_refused(level: str, first: int, room: int) -> None:
    out = np.full(room + 8, 5, np.uint64)
    with pytest.raises(DescriptorError, match="digests would lie outside"):
        copy_and_digest(
            rows((at(RANDOM), 0, 3 * CHUNK_BYTES)), digests=out[:room], first_chunks=np.array([first]), level=level
        )
    assert (out == 5).all()


@every_level
@settings(max_examples=100)
@given(
    table=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 40)), st.integers(0, 12)), max_size=5
    )
)
def test_overlaps_are_refused_and_nothing_else(level: str, table: list[tuple[int, int | None, int]]) -> None:
    """Against every byte by itself; rows lie within one small array."""
    memory = RANDOM[:64].copy()
    before, base = memory.copy(), at(memory)
    copied = [(a, b, n) for a, b, n in table if b is not None and n]
    written = [byte for _, b, n in copied for byte in range(b, b + n)]
    read = {byte for a, _, n in table for byte in range(a, a + n)}
    bad = len(set(written)) < len(written) or bool(set(written) & read)
    order = rows(*((base + a, 0 if b is None else base + b, n) for a, b, n in table))
    if bad:
        with pytest.raises(DescriptorError, match=r"lies? over"):
            copy_and_digest(order, check=False, level=level)
        assert (memory == before).all()
    else:
        found = copy_and_digest(order, check=False, level=level)
        assert found.tolist() == [xxh3(before[a : a + n]) for a, _, n in table if n]
        for a, b, n in copied:
            assert (memory[b : b + n] == before[a : a + n]).all()


@every_level
@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 3), np.int32),
        np.zeros((2, 3), np.uint64),
        np.zeros((2, 3), ">i8"),
        np.zeros((2, 2), np.int64),
        np.zeros(3, np.int64),
        np.zeros((4, 3), np.int64)[::2],
        np.zeros((3, 4), np.int64).T,
        [[1.0, 2.0, 3.0]],
    ],
    ids=str,
)
def test_descriptors_of_another_form_are_refused(level: str, wrong: object) -> None:
    with pytest.raises(DescriptorError, match="have another form") as caught:
        copy_and_digest(wrong, level=level)
    assert "int64[n, 3]" in caught.value.expected


@every_level
def test_outputs_of_another_form_are_refused(level: str) -> None:
    row = rows((at(RANDOM), 0, 8))
    frozen = np.zeros(1, np.uint64)
    frozen.flags.writeable = False
    wrong: list[Any] = [np.zeros(1, np.int64), np.zeros((1, 1), np.uint64), np.zeros(4, np.uint64)[::2], frozen]
    for out in wrong:
        with pytest.raises(DescriptorError, match="array of digests"):
            copy_and_digest(row, digests=out, level=level)
    for first in (np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros((1, 1), np.int64)):
        with pytest.raises(DescriptorError, match="indexes of digests"):
            copy_and_digest(row, first_chunks=first, level=level)


# -- which one runs ----------------------------------------------------------------------------------------------------


def test_the_best_level_runs_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = {level: level if level == "python" else f"native {level}" for level in LEVELS}
    assert LEVELS[0] == "python"
    assert implementation() == name[LEVELS[-1]]
    for level in LEVELS:
        monkeypatch.setenv(LEVEL_VARIABLE, level)
        assert implementation() == name[level]
    absent = next(name for name in ("neon", "avx2") if name not in LEVELS)
    monkeypatch.setenv(LEVEL_VARIABLE, absent)
    with pytest.raises(ConfigError, match=f"unsupported copy implementation '{absent}'") as caught:
        copy_and_digest(rows())
    assert "python" in caught.value.expected
    with pytest.raises(ConfigError, match=f"unsupported copy implementation '{absent}'"):
        implementation()


def test_errors_of_both_parts_are_the_same_list() -> None:
    """The numbers of `enum problem` are the indexes of PROBLEMS, by the names of both."""
    text = (Path(descriptors.__file__).parent / "check.h").read_text()
    names = [line.split(",")[0].strip() for line in text.split("enum problem {")[1].split("}")[0].strip().splitlines()]
    assert names[-1] == "NO_MEMORY"
    assert len(names) - 1 == len(descriptors.PROBLEMS)
    assert [getattr(descriptors, name) for name in names[:-1]] == list(range(len(names) - 1))


def test_without_the_c_part_python_runs() -> None:
    code = (
        "import sys; sys.modules['flashckpt.native._copy'] = None\n"
        "from flashckpt import native\n"
        "assert native.levels() == ('python',), native.levels()\n"
        "assert native.implementation() == 'python'\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=sanitized.clean_environment()).returncode == 0


def test_ranges_of_a_buffer_are_digested_in_their_order(copied_by: str) -> None:
    data = RANDOM[: (2 << 20) + 5].tobytes()
    found = digest_ranges(memoryview(data), [7, 0, 3], [(1 << 20) + 9, 0, 2])
    pieces = [data[7 : 7 + (1 << 20)], data[7 + (1 << 20) : 16 + (1 << 20)], data[3:5]]
    assert found.tolist() == [xxh3(np.frombuffer(piece, np.uint8)) for piece in pieces]
    assert digest_ranges(b"", [], []).size == 0
    with pytest.raises(ValueError, match="of a buffer of"):
        digest_ranges(data, [len(data) - 1], [2])


def test_ranges_that_follow_each_other_are_digested_chunk_by_chunk(copied_by: str) -> None:
    """Whole chunks are read side by side, up to four; whatever follows them, and a short one ends the run."""
    mib, data = 1 << 20, np.resize(RANDOM, 11 << 20)
    sizes = [mib] * 6 + [0, 5, mib, mib - 1, mib, mib]
    starts = [3 + sum(sizes[:at]) for at in range(len(sizes))]
    found = digest_ranges(data.data, starts, sizes)
    chunks = [data[start : start + size] for start, size in zip(starts, sizes, strict=True) if size]
    assert found.tolist() == [xxh3(chunk) for chunk in chunks]
    apart = digest_ranges(data.data, [0, mib], [mib - 5, mib])
    assert apart.tolist() == [xxh3(data[: mib - 5]), xxh3(data[mib : 2 * mib])]
    whole = digest_ranges(data.data, [1], [10 * mib + 7])
    assert whole.tolist() == [xxh3(data[at : min(at + mib, 10 * mib + 8)]) for at in range(1, 10 * mib + 2, mib)]
