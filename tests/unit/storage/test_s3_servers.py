"""Servers that lack something of S3, through both clients: commits, retention and sweeps on them; each lack is said once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.s3_stub import s3_stub
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.root_records import claim_generation, prefix_of
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.housekeeping import sweep_root
from flashckpt.errors import DamagedError, FlashckptError, ObjectMissingError, StoreError
from flashckpt.storage import conditional
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES, Store
from flashckpt.stores import s3_session

both = pytest.mark.parametrize("client", ["s3fs", "obstore"])
UNKNOWN = [(501, "NotImplemented"), (405, "MethodNotAllowed")]
LACKS: list[dict[str, Any]] = [
    {},
    *({"refused": {kind: (501, "NotImplemented")}} for kind in ("batch", "uploads", "condition")),
    {"refused": {"batch": (400, "MalformedXML"), "uploads": (405, "MethodNotAllowed")}},
    {"keeps_folders": True},
    {"range_error": (400, "InvalidArgument")},
    {"ignores_conditions": True, "keeps_folders": True, "refused": {"batch": (405, ""), "uploads": (501, "")},
     "range_error": (500, "InternalError")},
]  # fmt: skip


def named(lack: dict[str, Any]) -> str:
    return "-".join(f"{name}:{value}" for name, value in lack.items()) or "nothing"


def make(store: Store, *steps: int) -> None:
    for step in steps:
        prefix = prefix_of(1, step)
        persist_slot(make_pin([shard("w", (4000,))], step=step), store, prefix)
        commit(store, prefix, [0])


def steps_of(store: Store) -> list[int]:
    return [info.step for info in list_checkpoints(store)][::-1]


@pytest.mark.matrix
@both
@pytest.mark.parametrize("lack", LACKS, ids=named)
def test_whole_life_of_a_root(
    lack: dict[str, Any], client: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conditional, "SETTLE_S", 0.0)
    s3_session.say_once.cache_clear()
    with s3_stub(**lack) as stub, caplog.at_level(logging.WARNING, "flashckpt"):
        for number in (1, 2) if len(stub.refused) > 1 else (1,):  # as the daemon does: a connection for each pass
            store = open_store("s3://bucket/run", **stub.options(backend=client))
            store.check()
            assert (getattr(store, "_obstore", None) is not None) == (client == "obstore")
            assert store.is_conditional == ("condition" not in stub.refused and not stub.ignores_conditions)
            assert store.put_if_absent(f"claim{number}", b"x")
            assert not store.put_if_absent(f"claim{number}", b"y")
            make(store, 10 * number, 10 * number + 1)
            orphan = prefix_of(1, number)
            store.put(f"{orphan}/r00000.p0.fck", b"never committed")
            assert sweep(store, older_than_s=0).orphans == (orphan,)
            sweep_root(store, Policy(keep_last=1), SnapshotId(1, 10 * number + 1))
            assert steps_of(store) == [10 * number + 1]
            assert not any(info.key.startswith(f"{orphan}/r") for info in store.list())
            assert "probe" not in store.folders()
            with pytest.raises(DamagedError, match="truncated"):
                store.get_range("claim1", 5, memoryview(bytearray(4)))
            with pytest.raises(ObjectMissingError):
                store.get_range("absent", 5, memoryview(bytearray(4)))
            store.close()
    said = [record.getMessage() for record in caplog.records]
    lacks = {"batch": "has no batch delete", "uploads": "cannot list unfinished uploads"}
    for kind, words in lacks.items():
        assert sum(words in text for text in said) == (kind in stub.refused)


@both
def test_server_that_says_slow_down_costs_attempts_and_nothing_else(client: str) -> None:
    """Longer than one upload repeats its requests: it fails as a request that may succeed later, and later it does."""
    with s3_stub(refused={"begin": (503, "SlowDown")}) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client))
        parts = [memoryview(bytes(PART_BYTES)), memoryview(b"rest")]
        with pytest.raises(StoreError, match="SlowDown"):
            store.put_object("big", parts, PART_BYTES + 4)
        assert store.list() == []
        stub.refused.clear()
        store.put_object("big", parts, PART_BYTES + 4)
        head = store.head("big")
        assert head is not None
        assert head.nbytes == PART_BYTES + 4
        assert not stub.uploads
        store.close()


PASSING = [
    (500, "InternalError"), (502, ""), (503, "SlowDown"), (507, "InsufficientStorage"), (408, ""), (425, ""), (429, ""),
    (400, "RequestTimeout"), (400, "BadDigest"), (409, "OperationAborted"), (409, "ConditionalRequestConflict"),
    (403, "QuotaExceeded"),
]  # fmt: skip
PERMANENT = [
    (301, "PermanentRedirect"), (307, ""), (400, "InvalidArgument"), (400, "ExpiredToken"), (401, ""), (402, ""),
    (403, "AccessDenied"), (404, "NoSuchBucket"), (405, "MethodNotAllowed"), (405, ""), (410, ""), (411, ""), (501, ""),
]  # fmt: skip


def asks(store: Store) -> dict[str, Callable[[], object]]:
    big = [memoryview(bytes(PART_BYTES + 1))]
    return {
        "list": store.list,
        "get": partial(store.get, "there"),
        "put": partial(store.put, "a", b"x"),
        "condition": partial(store.put_if_absent, "a", b"x"),
        "part": partial(store.put_object, "b", big, PART_BYTES + 1),
    }


@pytest.mark.matrix
@both
def test_exit_code_says_whether_trying_again_can_help_whatever_was_asked(client: str) -> None:
    """The same for the root and for an object in it: what a server does not have today it does not have tomorrow."""
    found: dict[str, list[tuple[int, str]]] = {}
    with s3_stub() as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, conditional=True, retries=1))
        store.put("there", b"x")
        for kind, ask in asks(store).items():
            for answer in (*PASSING, *PERMANENT):
                stub.refused = {kind: answer}
                with pytest.raises(FlashckptError) as caught:
                    ask()
                found.setdefault(f"{kind} {caught.value.settle()}", []).append(answer)
        store.close()
    assert found == {
        f"{kind} {code}": those for kind in asks(store) for code, those in ((41, PASSING), (13, PERMANENT))
    }


@both
@pytest.mark.parametrize(("answer", "times"), [((500, "InternalError"), 3), ((400, "InvalidArgument"), 1)])
def test_each_request_is_sent_as_often_as_the_option_retries_says(
    answer: tuple[int, str], times: int, client: str
) -> None:
    """And not once more for each of them by the client below."""
    sent: dict[str, int] = {}
    with s3_stub() as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, conditional=True, retries=3))
        for kind, ask in asks(store).items():
            stub.refused, start = {kind: answer}, len(stub.asked)
            with pytest.raises(FlashckptError):
                ask()
            queries = [(one.method, re.sub(r"uploadId=[^&]*", "", one.query)) for one in stub.asked[start:]]
            queries = [one for one in queries if kind != "part" or "partNumber" in one[1]]
            sent[kind] = max(map(queries.count, queries))
        store.close()
    assert sent == dict.fromkeys(asks(store), times)


@both
def test_a_write_at_the_same_time_is_not_taken_for_an_object_that_is_there(client: str) -> None:
    """S3 answers it with 409, and neither of both need succeed."""
    with s3_stub(passing={"condition": (409, "ConditionalRequestConflict", 2)}) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, conditional=True, retries=4))
        assert store.put_if_absent("claim", b"mine")
        assert store.get("claim") == b"mine"
        assert not store.put_if_absent("claim", b"others")
        store.close()


@both
def test_completion_that_is_never_answered_ends_in_an_error_and_shows_nothing(client: str) -> None:
    with s3_stub(silent={"complete"}) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, timeout_s=0.5))
        parts = [memoryview(bytes(PART_BYTES)), memoryview(b"rest")]
        with pytest.raises(StoreError):
            store.put_object("big", parts, PART_BYTES + 4)
        assert store.list() == []
        stub.silent.clear()
        store.put_object("big", parts, PART_BYTES + 4)
        assert [info.key for info in store.list()] == ["big"]
        store.close()


@both
@pytest.mark.parametrize("refusal", [(405, "MethodNotAllowed"), (404, "NoSuchUpload")])
def test_refused_abort_does_not_hide_that_the_upload_failed(client: str, refusal: tuple[int, str]) -> None:
    with s3_stub(refused={"part": (500, "InternalError"), "abort": refusal}) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client))
        with pytest.raises(StoreError, match=r"InternalError|the upload of big to s3://bucket/run failed") as raised:
            store.put_object("big", [memoryview(bytes(PART_BYTES)), memoryview(b"rest")], PART_BYTES + 4)
        assert type(raised.value) is StoreError
        store.close()


@pytest.mark.matrix
@both
def test_root_that_was_copied_to_a_bucket_loses_nothing_to_the_sweep(client: str, tmp_path: Path) -> None:
    """In the order of a plain copy, with its times; in the middle of it, after it, and with a job that begins there."""
    local = open_store(tmp_path)
    assert claim_generation(local, Generation(number=1, token="t"))
    make(local, 10, 20, 30)
    with s3_stub() as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client))
        infos = local.list()
        for info in infos[: len(infos) // 2]:
            store.put(info.key, local.get(info.key))
        sweep(store)
        for info in infos[len(infos) // 2 :]:
            store.put(info.key, local.get(info.key))
        stub.objects = {name: (data, written - 86400.0) for name, (data, written) in stub.objects.items()}
        assert claim_generation(store, Generation(number=2, token="u", parent=SnapshotId(1, 30)))
        for _ in range(2):
            sweep_root(store, Policy(keep_last=3), SnapshotId(1, 30))
            assert steps_of(store) == [10, 20, 30]
            for info in infos:
                if info.key.startswith("step-"):
                    assert store.get(info.key) == local.get(info.key)
        store.close()
