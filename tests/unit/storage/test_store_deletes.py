"""A batch delete on S3 of which some keys fail: each is tried again, reported, or was not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import RootError, StoreError
from flashckpt.storage.factory import open_store
from flashckpt.stores.s3 import S3Store


class RefusedError(Exception):
    """As botocore raises it."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Client:
    """Answers `delete_objects` with one code for each key that is in `codes`, as often as there are codes."""

    def __init__(self, codes: dict[str, list[str]], *, refuses: Exception | None = None) -> None:
        self.codes, self.refuses = codes, refuses
        self.batches: list[list[str]] = []
        self.single: list[str] = []

    async def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:  # noqa: N803
        assert Bucket == "bucket"
        if self.refuses is not None:
            raise self.refuses
        keys = [one["Key"] for one in Delete["Objects"]]
        self.batches.append(keys)
        failed = [{"Key": key, "Code": self.codes[key].pop(0), "Message": "m"} for key in keys if self.codes.get(key)]
        return {"Errors": failed}

    async def delete_object(self, *, Bucket: str, Key: str) -> None:  # noqa: N803
        assert Bucket == "bucket"
        self.single.append(Key)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr("flashckpt.stores.s3.FIRST_PAUSE_S", 0.0)
    return S3Store("s3://bucket/run", {"retries": 3})


def use(monkeypatch: pytest.MonkeyPatch, store: S3Store, client: Client) -> None:
    import asyncio

    monkeypatch.setattr(store, "_call", lambda key, work: asyncio.run(work(client)))


def delete(store: S3Store, keys: Sequence[str]) -> None:
    store.delete_many(list(keys))


def test_keys_go_a_thousand_at_a_time(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client({})
    use(monkeypatch, store, client)
    delete(store, [str(number) for number in range(2500)])
    assert [len(batch) for batch in client.batches] == [1000, 1000, 500]
    assert client.batches[0][0] == "run/0"


def test_only_the_keys_that_failed_for_a_moment_are_sent_again(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client({"run/b": ["SlowDown", "InternalError"], "run/c": ["NoSuchKey"]})
    use(monkeypatch, store, client)
    delete(store, ["a", "b", "c"])
    assert client.batches == [["run/a", "run/b", "run/c"], ["run/b"], ["run/b"]]


def test_each_key_that_stays_is_counted_and_the_first_one_named(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client({"run/b": ["AccessDenied"], "run/c": ["AccessDenied"]})
    use(monkeypatch, store, client)
    with pytest.raises(RootError, match=r"2 objects of s3://bucket/run could not be deleted") as raised:
        delete(store, ["a", "b", "c"])
    assert raised.value.found.startswith("b: AccessDenied")
    busy = Client({"run/b": ["SlowDown"] * 9})
    use(monkeypatch, store, busy)
    with pytest.raises(StoreError, match="1 objects"):
        delete(store, ["a", "b"])
    assert len(busy.batches) == 3


def test_server_without_batch_delete_is_asked_key_by_key(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client({}, refuses=RefusedError("NotImplemented", 501))
    use(monkeypatch, store, client)
    delete(store, ["a", "b"])
    delete(store, ["c"])
    assert sorted(client.single) == ["run/a", "run/b", "run/c"]


def test_directory_deletes_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"x")
    (tmp_path / "root" / "a" / "folder").mkdir()
    with pytest.raises((RootError, StoreError), match=r"1 objects of .* could not be deleted"):
        store.delete_many(["a/1", "a/folder", "a/2", "b/1"])
    assert store.list() == []
