"""One copy that two threads do: every row once, by one of them, with the digests of one thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from support.native_rows import RANDOM, at, every_level, xxh3

from flashckpt.native import DescriptorError, SharedCopy, copy_and_digest, copying, fallback


def cut(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows of these sizes through RANDOM, where their digests go, and the target that they are copied to."""
    target = np.zeros(len(RANDOM), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    made = np.column_stack((starts + at(RANDOM), starts + at(target), sizes)).astype(np.int64)
    chunks = -(-np.array(sizes) // (1 << 20))
    return made, np.cumsum(chunks) - chunks, target


@every_level
@pytest.mark.parametrize(
    "sizes", [[1 << 20] * 4, [1000] * 3000, [0, 5, 3 << 20, 0, 100]], ids=["long", "short", "mixed"]
)
def test_two_threads_copy_each_row_once(level: str, sizes: list[int]) -> None:
    rows, first, target = cut(sizes)
    expected = copy_and_digest(np.column_stack((rows[:, 0], rows[:, 0] * 0, rows[:, 2])), first_chunks=first)
    for _ in range(20):
        target[:] = 0
        digests = np.zeros(len(expected), np.uint64)
        shared = SharedCopy(rows, digests, first, level=level)
        with ThreadPoolExecutor(1) as other:
            joined = other.submit(shared.join)
            shared.run()
            assert 0 <= joined.result(60) <= sum(sizes)
        assert np.array_equal(digests, expected)
        assert np.array_equal(target[: sum(sizes)], RANDOM[: sum(sizes)])


@every_level
def test_rows_that_are_all_taken_leave_nothing_to_join(level: str) -> None:
    rows, first, _ = cut([2 << 20])
    digests = np.zeros(2, np.uint64)
    shared = SharedCopy(rows, digests, first, level=level)
    shared.run()
    assert shared.join() == 0
    assert digests.tolist() == [xxh3(RANDOM[: 1 << 20]), xxh3(RANDOM[1 << 20 : 2 << 20])]


@every_level
def test_one_that_joins_early_waits_for_the_check_and_copies_nothing_that_is_refused(level: str) -> None:
    rows, first, target = cut([4096, 4096])
    rows[1, 1] = rows[0, 1]  # two rows to one target
    shared = SharedCopy(rows, np.zeros(2, np.uint64), first, level=level)
    joined: list[int] = []
    thread = threading.Thread(target=lambda: joined.append(shared.join()))
    thread.start()
    with pytest.raises(DescriptorError, match="target"):
        shared.run()
    thread.join(60)
    assert joined == [0]
    assert not target.any()


@every_level
def test_one_that_joins_is_let_go_where_the_copy_could_not_begin(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, first, _ = cut([4096])
    shared = SharedCopy(rows, np.zeros(1, np.uint64), first, level=level)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    if copying.part is not None:
        monkeypatch.setattr(copying, "part", SimpleNamespace(run=fail, join=copying.part.join))
    monkeypatch.setattr(fallback, "checked", fail)
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(shared.join)
        with pytest.raises(MemoryError):
            shared.run()
        assert joined.result(60) == 0
