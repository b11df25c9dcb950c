"""Every backend passes one class: what persist, commit, restore and retention rely on."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.s3 import Server, s3_server

from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES, Store

S3_BACKENDS = ("s3fs", "obstore")
BACKENDS = S3_BACKENDS if "S3_TEST_ENDPOINT" in os.environ else ("posix", "memory", *S3_BACKENDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "posix":
        opened = open_store(tmp_path / "root")
    elif request.param == "memory":
        opened = open_store(f"memory://{tmp_path.name}")
    else:
        server = request.getfixturevalue("server")
        opened = server.open(tmp_path.name, backend=request.param)
    yield opened
    opened.close()


@pytest.mark.matrix
class TestConformance:
    """One class for all backends; a server that is not a mock runs the same tests by `make test-s3`."""

    def test_small_object_is_read_back_and_replaced(self, store: Store) -> None:
        store.put("a/b", b"one")
        store.put("a/b", b"two")
        assert store.get("a/b") == b"two"
        info = store.head("a/b")
        assert info is not None
        assert (info.key, info.nbytes) == ("a/b", 3)

    def test_missing_object_is_named(self, store: Store) -> None:
        assert store.head("nothing/here") is None
        with pytest.raises(ObjectMissingError, match="nothing/here"):
            store.get("nothing/here")
        with pytest.raises(ObjectMissingError, match="nothing/here"):
            store.get_range("nothing/here", 0, memoryview(bytearray(4)))
        store.delete("nothing/here")

    def test_many_objects_are_deleted_together(self, store: Store) -> None:
        keys = [f"folder/{number}" for number in range(3)] + ["other/1"]
        for key in (*keys, "folder/stays"):
            store.put(key, b"x")
        store.delete_many([*keys, "not/there"])
        assert [info.key for info in store.list()] == ["folder/stays"]
        assert store.folders() == ["folder"]
        store.delete_many([])

    def test_conditional_put_keeps_the_first(self, store: Store) -> None:
        assert store.is_conditional
        assert store.put_if_absent("claim", b"first")
        assert not store.put_if_absent("claim", b"second")
        assert store.get("claim") == b"first"

    def test_concurrent_committers_exactly_one_wins(self, store: Store) -> None:
        assert store.is_conditional
        wins: list[bytes] = []
        barrier = threading.Barrier(8)

        def commit(mine: bytes) -> None:
            barrier.wait(30)
            if store.put_if_absent("MANIFEST", mine):
                wins.append(mine)

        threads = [threading.Thread(target=commit, args=(bytes([index]) * 1000,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert store.get("MANIFEST") == wins[0]

    @pytest.mark.parametrize("nbytes", [0, 1, 5000, PART_BYTES, 2 * PART_BYTES + 4097])
    def test_large_object_is_read_back_by_range(self, store: Store, nbytes: int) -> None:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
        cuts = sorted({0, 3, nbytes // 3, nbytes // 2 // 4096 * 4096, nbytes})
        parts = [data.data[a:b] for a, b in itertools.pairwise(cuts) if 0 <= a < b <= nbytes]
        store.put_object("big", parts, nbytes)
        info = store.head("big")
        assert info is not None
        assert info.nbytes == nbytes
        for start, length in ((0, nbytes), (nbytes // 2, nbytes - nbytes // 2), (max(0, nbytes - 1), min(1, nbytes))):
            out = np.zeros(length, np.uint8)
            store.get_range("big", start, out.data)
            assert np.array_equal(out, data[start : start + length])

    def test_object_of_unknown_size_is_streamed(self, store: Store) -> None:
        store.put_object("unknown", [memoryview(b"abc"), memoryview(b"defgh")])
        assert store.get("unknown") == b"abcdefgh"

    def test_truncated_object_is_damaged_not_short(self, store: Store) -> None:
        store.put("short", b"12345")
        for start in (0, 3, 9):
            with pytest.raises(DamagedError, match=r"short.*truncated"):
                store.get_range("short", start, memoryview(bytearray(10)))

    def test_failing_source_publishes_nothing(self, store: Store) -> None:
        class Failing:
            def __iter__(self) -> Iterator[memoryview]:
                yield memoryview(bytes(PART_BYTES))
                yield memoryview(bytes(PART_BYTES))
                raise DamagedError("the slot changed")

        with pytest.raises(DamagedError, match="the slot changed"):
            store.put_object("x/failing", Failing(), 3 * PART_BYTES)
        assert store.head("x/failing") is None
        assert store.list("x/") == []
        assert store.sweep(older_than_s=0) == []

    def test_generator_that_cannot_start_again_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="iterated again"):
            store.put_object("x", (memoryview(b"1") for _ in range(2)))

    def test_a_listing_looks_at_no_file_of_another_prefix(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The packs of 16,384 ranks are listed a thousand at a time: looked at each time, they took 16 s of a commit."""
        store, real = open_store(str(tmp_path / "posix")), Path.stat
        seen: list[str] = []
        for key in ("s/r01000.idx", "s/r02000.idx", "t/r01000.idx", "r01"):
            store.put(key, b"x")

        def stat(path: Path, **more: Any) -> os.stat_result:
            seen.append(path.name)
            return real(path, **more)

        monkeypatch.setattr(Path, "stat", stat)
        assert [info.key for info in store.list("s/r01")] == ["s/r01000.idx"]
        assert "r02000.idx" not in seen

    def test_listing_is_by_prefix_and_sorted(self, store: Store) -> None:
        for key in ("s-1/MANIFEST", "s-1/r0.idx", "s-10/r0.idx", "LATEST", "s-1/deep/er"):
            store.put(key, b"x")
        assert [info.key for info in store.list("s-1/")] == ["s-1/MANIFEST", "s-1/deep/er", "s-1/r0.idx"]
        assert [info.key for info in store.list("s-1")] == [
            "s-1/MANIFEST",
            "s-1/deep/er",
            "s-1/r0.idx",
            "s-10/r0.idx",
        ]
        assert len(store.list()) == 5
        assert store.folders() == ["s-1", "s-10"]
        assert store.folders("s-1/") == ["deep"]
        assert store.list("absent/") == []
        assert store.folders("absent/") == []

    def test_deleted_object_is_gone(self, store: Store) -> None:
        store.put("s/a", b"x")
        store.delete("s/a")
        assert store.head("s/a") is None
        assert store.list("s/") == []
        assert store.folders() == []

    def test_check_of_a_usable_root(self, store: Store) -> None:
        store.check(write=True)
        store.check(write=False)
        assert [info.key for info in store.list()] == []

    def test_forked_child_uses_the_store_of_its_parent(self, store: Store) -> None:
        if store.url.startswith("memory:"):
            pytest.skip("memory:// lives in one process")
        store.put("parent", b"parent")
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_child_writes, args=(store,))
        child.start()
        child.join(60)
        code = child.exitcode
        child.kill()  # one that hangs would keep this process from its end
        assert code == 0
        assert store.get("child") == b"parent"


def _child_writes(store: Store) -> None:
    store.put_object("child", [memoryview(store.get("parent"))])
    os._exit(0)
