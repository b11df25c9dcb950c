"""Where an s3:// root is: every place a setting can come from, through both clients, as botocore reads it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf
from support.paths import TESTS
from support.ranks import wait_for
from support.s3_stub import Stub, s3_stub

from flashckpt.errors import ConfigError, RootError
from flashckpt.storage.factory import open_in_rank, open_store, place_of
from flashckpt.storage.store import PART_BYTES
from flashckpt.stores.obstore_store import CredentialChain, ObstoreStore
from flashckpt.stores.s3 import S3Store
from flashckpt.stores.s3_address import address_of

CLIENTS = ("s3fs", "obstore")
HERE, OTHER = "http://private.example", "http://other.example"
CONFIG = f"""[profile plain]
endpoint_url = {HERE}
region = eu-x
[profile services]
services = mine
region = eu-x
[profile virtual]
endpoint_url = {HERE}
region = eu-x
s3 =
  addressing_style = virtual
[profile keys]
aws_access_key_id = of-profile
aws_secret_access_key = s
endpoint_url = {HERE}
[services mine]
s3 =
  endpoint_url = {HERE}
"""
KEYS = {"AWS_ACCESS_KEY_ID": "of-env", "AWS_SECRET_ACCESS_KEY": "s"}
SOURCES: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, str, str]]] = {
    "variable": ({"AWS_ENDPOINT_URL": HERE}, {}, ("private.example/bucket", "of-env", "us-east-1")),
    "variable of s3": (
        {"AWS_ENDPOINT_URL": OTHER, "AWS_ENDPOINT_URL_S3": HERE, "AWS_DEFAULT_REGION": "eu-x"}, {},
        ("private.example/bucket", "of-env", "eu-x"),
    ),
    "names that only obstore knows": (
        {"AWS_ENDPOINT_URL": HERE, "AWS_ENDPOINT": OTHER, "AWS_REGION": "eu-x", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
         "AWS_SKIP_SIGNATURE": "true", "AWS_BUCKET": "other", "AWS_BUCKET_NAME": "other"}, {},
        ("private.example/bucket", "of-env", "us-east-1"),
    ),
    "profile": ({"AWS_PROFILE": "plain"}, {}, ("private.example/bucket", "of-env", "eu-x")),
    "services section": ({"AWS_PROFILE": "services"}, {}, ("private.example/bucket", "of-env", "eu-x")),
    "addressing style": ({"AWS_PROFILE": "virtual"}, {}, ("bucket.private.example", "of-env", "eu-x")),
    "addressing style as an option": (
        {"AWS_ENDPOINT_URL": HERE, "AWS_DEFAULT_REGION": "eu-x"}, {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
        ("bucket.private.example", "of-env", "eu-x"),
    ),
    "default profile": (
        {"AWS_DEFAULT_PROFILE": "plain", "AWS_DEFAULT_REGION": "eu-y"}, {}, ("private.example/bucket", "of-env", "eu-y"),
    ),
    "keys of a profile": (
        {"AWS_PROFILE": "keys", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, {},
        ("private.example/bucket", "of-profile", "us-east-1"),
    ),
    "option before variable": (
        {"AWS_ENDPOINT_URL_S3": OTHER, "AWS_DEFAULT_REGION": "eu-y"},
        {"endpoint_url": HERE, "client_kwargs": {"region_name": "eu-x"}}, ("private.example/bucket", "of-env", "eu-x"),
    ),
    "option inside another": (
        {"AWS_ENDPOINT_URL": OTHER},
        {"client_kwargs": {"endpoint_url": HERE, "aws_access_key_id": "inside", "aws_secret_access_key": "s"}},
        ("private.example/bucket", "inside", "us-east-1"),
    ),
    "configured ones ignored": (
        {"AWS_ENDPOINT_URL": OTHER, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, {"endpoint_url": HERE},
        ("private.example/bucket", "of-env", "us-east-1"),
    ),
    "anonymous": ({"AWS_ENDPOINT_URL": HERE}, {"anon": True}, ("private.example/bucket", "", "")),
    "keys as options, without the token of others": (
        {"AWS_ENDPOINT_URL": HERE, "AWS_SESSION_TOKEN": "of-others"}, {"key": "given", "secret": "s"},
        ("private.example/bucket", "given", "us-east-1"),
    ),
    "fsspec": ({}, {"of fsspec": {"endpoint_url": HERE, "key": "of-fsspec", "secret": "s"}},
        ("private.example/bucket", "of-fsspec", "us-east-1")),
}  # fmt: skip
"""Environment, storage options, and what a request must show: where it went, the key and the region that signed it."""
PUBLIC: dict[str, dict[str, str]] = {
    "nothing": {},
    "region": {"AWS_DEFAULT_REGION": "eu-central-1"},
    "endpoints ignored": {"AWS_ENDPOINT_URL": OTHER, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_DEFAULT_REGION": "eu-x"},
    "dual stack": {"AWS_USE_DUALSTACK_ENDPOINT": "true", "AWS_DEFAULT_REGION": "eu-central-1"},
    "profile without endpoint": {"AWS_PROFILE": "services", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
}  # fmt: skip


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with s3_stub() as started:
        yield started


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: Stub) -> pytest.MonkeyPatch:
    """An environment with the configuration above, in which http:// goes to the stub whatever the host is called."""
    for name in os.environ:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HTTP_PROXY", stub.endpoint)
    monkeypatch.setenv("http_proxy", stub.endpoint)
    stub.asked.clear()
    stub.objects.clear()
    return monkeypatch


@pytest.mark.matrix
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("source", SOURCES)
def test_both_clients_go_where_botocore_goes(config: pytest.MonkeyPatch, stub: Stub, source: str, client: str) -> None:
    environment, options, expected = SOURCES[source]
    for name, value in {**KEYS, **environment}.items():
        config.setenv(name, value)
        if not value:
            config.delenv(name)
    config.setitem(conf, "s3", options.get("of fsspec", {}))
    given = {name: value for name, value in options.items() if name != "of fsspec"}
    store = open_store("s3://bucket/run", backend=client, retries=1, timeout_s=5, **given)
    assert isinstance(store, ObstoreStore) is (client == "obstore")
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert [info.key for info in store.list()] == ["a"]
    store.put_object("b", [memoryview(b"x")])
    store.delete_many(["a", "b"])
    assert {(one.place, one.key, one.region) for one in stub.asked} == {expected}
    assert not any("x-amz-security-token" in one.headers for one in stub.asked)
    if isinstance(store, ObstoreStore):
        assert store._obstore is not None  # all but the deletions went through it
    store.close()


@pytest.mark.matrix
@pytest.mark.parametrize("source", PUBLIC)
def test_public_service_is_the_one_of_botocore(config: pytest.MonkeyPatch, source: str) -> None:
    import botocore.session

    for name, value in {**KEYS, **PUBLIC[source]}.items():
        config.setenv(name, value)
    client = botocore.session.Session().create_client("s3")
    store = open_store("s3://bucket/run", backend="obstore")
    assert isinstance(store, ObstoreStore)
    found = store._settings()["config"]
    assert (found["endpoint"], found["region"]) == (client.meta.endpoint_url, client.meta.region_name)
    assert client.meta.endpoint_url in place_of("s3://bucket/run", {})
    if source == "nothing":  # a bucket may be anywhere, and only botocore follows a redirect
        assert store._client() is None


@pytest.mark.matrix
def test_what_only_botocore_knows_goes_through_it(config: pytest.MonkeyPatch) -> None:
    config.setenv("AWS_DEFAULT_REGION", "eu-x")
    assert address_of("bucket", {}).is_plain
    assert not address_of("bucket", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}).is_plain
    assert not address_of("arn:aws:s3:eu-x:123456789012:accesspoint/mine", {}).is_plain
    config.setenv("AWS_CA_BUNDLE", "/etc/private.pem")
    assert not address_of("bucket", {}).is_plain


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("name", "value"), [("AWS_PROFILE", "absent"), ("AWS_ENDPOINT_URL", "127.0.0.1:9")])
def test_configuration_that_says_nothing_is_named(
    config: pytest.MonkeyPatch, client: str, name: str, value: str
) -> None:
    config.setenv(name, value)
    with pytest.raises(ConfigError, match="s3://bucket/run cannot be found"):
        open_store("s3://bucket/run", backend=client).get("a")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("option", "header"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}, ("x-amz-server-side-encryption", "aws:kms")),
        (
            {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "mine"}},
            ("x-amz-server-side-encryption-aws-kms-key-id", "mine"),
        ),
        ({"s3_additional_kwargs": {"StorageClass": "ONEZONE_IA"}}, ("x-amz-storage-class", "ONEZONE_IA")),
        ({"requester_pays": True}, ("x-amz-request-payer", "requester")),
    ],
)
def test_what_every_request_shall_say_is_said(
    config: pytest.MonkeyPatch, stub: Stub, option: dict[str, Any], header: tuple[str, str], client: str
) -> None:
    """By either client; a storage class obstore cannot say, so that such a root goes through s3fs."""
    is_obstore = client == "obstore" and "class" not in header[0]
    store = open_store("s3://bucket/run", **stub.options(backend="s3fs" if client == "s3fs" else "auto", **option))
    assert type(store) is (ObstoreStore if is_obstore else S3Store)
    store.put("small", b"x")
    assert store.put_if_absent("claim", b"x")
    store.put_object("big", [memoryview(bytes(20 << 20))], 20 << 20)
    store.list()
    store.delete_many(["small"])
    if isinstance(store, ObstoreStore):
        assert store._obstore is not None
    writes = [one for one in stub.asked if one.method == "PUT" and "partNumber" not in one.query]
    begins = [one for one in stub.asked if one.method == "POST" and one.query.startswith("uploads")]
    assert len(writes) >= 3
    assert len(begins) == 1
    said = stub.asked if "payer" in header[0] else writes + begins
    assert all(one.headers.get(header[0]) == header[1] for one in said)


@pytest.mark.parametrize(
    ("url", "options", "found"),
    [
        ("run", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "config_kwargs.s3.use_accelerate_endpoint: only s3fs"),
        ("run", {"config_kwargs": {"max_pool_connections": 8}, "version_aware": True},
         "config_kwargs.max_pool_connections, version_aware: only s3fs"),
        ("run", {"s3_additional_kwargs": {"StorageClass": "ONEZONE_IA"}}, "s3_additional_kwargs.StorageClass: only s3fs"),
        ("a//run", {}, "the prefix 'a//run': only s3fs"),
    ],
)  # fmt: skip
def test_a_client_that_is_asked_for_and_cannot_says_why(url: str, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/" + url) as refused:
        open_store("s3://bucket/" + url, backend="obstore", **options)
    assert found in str(refused.value)
    assert type(open_store("s3://bucket/" + url, **options)) is S3Store


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_that_were_replaced_in_their_file_are_read_again(
    config: pytest.MonkeyPatch, stub: Stub, client: str, tmp_path: Path
) -> None:
    """The request that the old ones were refused fails, as it may have been refused for good; the next one has the new."""
    file = tmp_path / "credentials"
    config.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    config.setenv("AWS_ENDPOINT_URL", stub.endpoint)
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = s\n")
    store = open_store("s3://bucket/run", backend=client, retries=2, timeout_s=5)
    store.put("a", b"1")
    config.setattr(stub, "expired", {"old"})
    file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = s\n")
    with contextlib.suppress(RootError):  # to HEAD there is no answer that says why
        store.head("a")
    with pytest.raises(RootError, match="ExpiredToken"):
        store.put("a", b"2")
    store.put("a", b"2")
    assert store.get("a") == b"2"
    assert stub.asked[-1].key == "new"
    assert client == "s3fs" or getattr(store, "_obstore", None) is not None
    store.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_that_expire_between_two_parts_are_named_and_the_upload_is_aborted_with_new_ones(
    config: pytest.MonkeyPatch, stub: Stub, client: str, tmp_path: Path
) -> None:
    """With the old ones it cannot be: the server keeps the parts, and they are paid for."""
    file = tmp_path / "credentials"
    keys = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    file.write_text(keys.format("old"))
    config.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    config.setenv("AWS_ENDPOINT_URL", stub.endpoint)

    class Parts:
        def __iter__(self) -> Iterator[memoryview]:
            for number in range(8):
                if number == 5:
                    config.setattr(stub, "expired", {"old"})
                yield memoryview(bytes([number]) * PART_BYTES)

    store = open_store("s3://bucket/run", backend=client, retries=2, timeout_s=5)
    with pytest.raises(RootError, match="credentials for s3://bucket/run were refused") as caught:
        store.put_object("big", Parts())
    assert "ExpiredToken" in caught.value.found
    assert len(stub.uploads) == 1
    file.write_text(keys.format("new"))
    store.put_object("big", Parts())
    assert list(stub.uploads) == []
    assert [one.key for one in stub.asked if one.method == "DELETE"] == ["old", "new"]
    assert len(stub.objects["run/big"][0]) == 8 * PART_BYTES
    store.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_that_expire_are_asked_for_again_before_a_request_fails(
    config: pytest.MonkeyPatch, stub: Stub, client: str, tmp_path: Path
) -> None:
    """As a profile's process, SSO or a role gives them, for minutes; here for a second."""
    config.setattr(stub, "expired", set())
    script = tmp_path / "give.py"
    script.write_text(
        "import datetime, json, os, sys\n"
        "until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)\n"
        "given = {'AccessKeyId': f'key-{os.getpid()}', 'SecretAccessKey': 's', 'SessionToken': 't'}\n"
        "print(json.dumps({'Version': 1, 'Expiration': until.isoformat(), **given}))\n"
    )
    profile = f"[profile given]\ncredential_process = {sys.executable} {script}\nendpoint_url = {stub.endpoint}\n"
    (tmp_path / "config").write_text(profile)
    config.setenv("AWS_PROFILE", "given")
    store = open_store("s3://bucket/run", backend=client, retries=1, timeout_s=5)

    def key() -> str:
        store.put("a", b"x")
        return stub.asked[-1].key

    first = key()
    assert first.startswith("key-")
    wait_for(lambda: key() != first, what="other keys")
    if client == "obstore":
        assert isinstance(store, ObstoreStore)
        assert store._obstore is not None
    store.close()


def test_keys_that_hold_for_long_are_not_asked_for_at_every_request(config: pytest.MonkeyPatch, stub: Stub) -> None:
    """A process of the profile or a request to a service gives them."""
    config.setattr(stub, "expired", set())
    asked: list[object] = []
    give = CredentialChain.__call__

    def counted(chain: CredentialChain) -> dict[str, Any]:
        asked.append(chain)
        return give(chain)

    config.setattr(CredentialChain, "__call__", counted)
    for name, value in KEYS.items():
        config.setenv(name, value)
    store = open_store("s3://bucket/run", backend="obstore", endpoint_url=stub.endpoint)
    wait_for(lambda: store.head("a") is None and len(stub.asked) >= 50, what="many requests")
    assert len(asked) == 1
    store.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_folders_that_others_marked_are_no_objects(stub: Stub, client: str) -> None:
    stub.objects.clear()
    for name in ("run/", "run/step/", "run/step/MANIFEST", "run/empty/", "run/catalog/entry", "run/none"):
        stub.objects[name] = (b"x" if name.endswith("MANIFEST") else b"", 0.0)
    store = open_store("s3://bucket/run", **stub.options(backend=client))
    assert [info.key for info in store.list()] == ["catalog/entry", "none", "step/MANIFEST"]
    store.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_ten_thousand_objects_are_listed_page_by_page(stub: Stub, client: str) -> None:
    stub.objects.clear()
    stub.objects |= {f"run/step/{number:05}": (b"x", 0.0) for number in range(10_000)}
    stub.asked.clear()
    store = open_store("s3://bucket/run", **stub.options(backend=client))
    found = store.list("step/")
    assert [info.key for info in found] == [f"step/{number:05}" for number in range(10_000)]
    assert len(stub.asked) == 10
    store.close()


FORKING = """
import os, sys
sys.path.insert(0, sys.argv[2])
from flashckpt.storage.factory import open_in_rank
options = {"endpoint_url": sys.argv[1], "key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}
store = open_in_rank("s3://bucket/run", options)
store.put("a", b"of the rank")
if not (child := os.fork()):
    from obstore.store import S3Store
    theirs = S3Store("bucket", endpoint=sys.argv[1], region="us-east-1", access_key_id="k", secret_access_key="s",
                     client_options={"allow_http": True})
    theirs.put("b", b"of the worker")
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_worker_of_a_rank_that_has_read_its_root_uses_obstore_itself(stub: Stub) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, stub.endpoint, str(TESTS.parent)],
        timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["0"], done.stderr
    assert stub.objects["b"][0] == b"of the worker"


def test_rank_reads_through_s3fs_unless_told_otherwise(stub: Stub) -> None:
    """Its loaders' workers are forked from it, and obstore hangs in them where it was used before."""
    assert type(open_in_rank("s3://bucket/run", stub.options())) is S3Store
    assert type(open_in_rank("s3://bucket/run", stub.options(backend="auto"))) is S3Store
    assert type(open_in_rank("s3://bucket/run", stub.options(backend="obstore"))) is ObstoreStore
