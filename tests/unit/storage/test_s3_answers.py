"""Answers of S3 that a user can do something about, through both clients: each says what is wrong and what to do, and leaves nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.s3_stub import s3_stub

from flashckpt.cli.common import parse_options
from flashckpt.errors import ConfigError, RootError, StoreError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES

both = pytest.mark.parametrize("client", ["s3fs", "obstore"])


@pytest.mark.matrix
@both
@pytest.mark.parametrize("kept", [False, True])
def test_bucket_of_another_region_is_used_there_and_one_with_locks_is_given_checksums(client: str, kept: bool) -> None:
    """What botocore can do about it is done for both clients; the first request shows it."""
    with s3_stub(**({"is_locking": True} if kept else {"region": "eu-x"})) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, conditional=True))
        store.put("a", b"x")
        assert store.put_if_absent("claim", b"x")
        assert not store.put_if_absent("claim", b"y")
        store.put_object("big", [memoryview(bytes(PART_BYTES)), memoryview(b"rest")], PART_BYTES + 4)
        out = bytearray(6)
        store.get_range("big", PART_BYTES - 2, memoryview(out))
        assert bytes(out) == b"\0\0rest"
        assert [info.key for info in store.list()] == ["a", "big", "claim"]
        assert stub.uploads == {}
        store.close()


@both
@pytest.mark.parametrize(
    ("answer", "problem", "remedy"),
    [
        ((403, "RequestTimeTooSkewed"), "the clock of this machine is not that of the server", "timedatectl"),
        ((301, "PermanentRedirect"), "not at the endpoint and in the region", "AWS_DEFAULT_REGION"),
        ((400, "IllegalLocationConstraintException"), "not at the endpoint and in the region", "AWS_DEFAULT_REGION"),
        ((403, "AccessDenied"), "the credentials for .* were refused", "correct the credentials"),
    ],
)
def test_answer_says_what_is_wrong_and_what_to_do(
    client: str, answer: tuple[int, str], problem: str, remedy: str
) -> None:
    with s3_stub(refused=dict.fromkeys(("list", "get", "put", "begin"), answer)) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, conditional=True))
        big = [memoryview(bytes(PART_BYTES)), memoryview(b"rest")]
        for ask in (store.check, partial(store.get, "a"), partial(store.put_object, "b", big, PART_BYTES + 4)):
            with pytest.raises(RootError, match=problem) as caught:
                ask()
            assert remedy in caught.value.remedy
        assert (stub.objects, stub.uploads) == ({}, {})
        store.close()


@both
def test_endpoint_without_tls_is_not_asked_again_and_again(client: str) -> None:
    """It is not one that cannot be reached: trying again cannot help."""
    with s3_stub() as stub:
        there = stub.endpoint.replace("http:", "https:")
        store = open_store("s3://bucket/run", **stub.options(backend=client, endpoint_url=there))
        for ask in (store.check, partial(store.get, "a")):
            with pytest.raises(RootError, match="does not speak TLS") as caught:
                ask()
            assert "http://" in caught.value.remedy
        store.close()


@both
def test_upload_that_is_completed_with_an_error_in_its_answer_is_tried_again(client: str) -> None:
    """S3 answers 200 before it knows, and says in the body that it failed."""
    with s3_stub(passing={"complete": (200, "InternalError", 2)}) as stub:
        store = open_store("s3://bucket/run", **stub.options(backend=client, retries=3))
        big = [memoryview(bytes(PART_BYTES)), memoryview(b"rest")]
        store.put_object("big", big, PART_BYTES + 4)
        assert [info.nbytes for info in store.list()] == [PART_BYTES + 4]
        stub.passing["complete"] = (200, "InternalError", 9)
        with pytest.raises(StoreError, match="InternalError") as caught:
            store.put_object("other", big, PART_BYTES + 4)
        assert "reached" not in caught.value.problem
        store.close()


@both
@pytest.mark.parametrize("prefix", ["a b+c", "läuf/ü", "100%", "a//b", "./a", "a&b"])
def test_prefix_is_taken_letter_by_letter(client: str, prefix: str) -> None:
    """By both clients alike; one that obstore refuses goes through s3fs."""
    with s3_stub() as stub:
        options = stub.options(backend="s3fs" if client == "s3fs" else "auto", conditional=True)
        store = open_store(f"s3://my.bucket/{prefix}", **options)
        store.put("k/a", b"x")
        assert store.get("k/a") == b"x"
        assert [info.key for info in store.list()] == ["k/a"]
        assert store.folders() == ["k"]
        assert [*stub.objects] == [f"{prefix}/k/a"]
        store.close()


@pytest.mark.parametrize(
    "wrong",
    [{"requester_pays": "false"}, {"client_kwargs": "eu-x"}, {"retries": "many"}, {"retries": 0}, {"timeout_s": -1}],
)
def test_storage_option_of_another_kind_is_refused_before_it_is_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        open_store("s3://bucket/run", **wrong)


def test_options_of_a_command_line_are_what_they_say() -> None:
    given = ("anon=false", 'client_kwargs={"region_name": "eu-x"}', "key=007", "token=a=b")
    assert parse_options(given) == {
        "anon": False, "client_kwargs": {"region_name": "eu-x"}, "key": "007", "token": "a=b",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="client_kwargs"):
        parse_options(("client_kwargs={eu-x}",))
