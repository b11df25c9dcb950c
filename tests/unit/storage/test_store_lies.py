"""An S3 server, or something before it, that answers with the wrong ETag or other bytes: noticed, said, never committed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.proxy import Proxy
from support.s3 import Server, s3_server
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.root_records import MANIFEST, prefix_of
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.errors import DamagedError, FlashckptError, StoreError
from flashckpt.storage.store import PART_BYTES, Store
from flashckpt.stores.s3_session import Tags

both = pytest.mark.parametrize("backend", ["s3fs", "obstore"])
PREFIX = prefix_of(1, 10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as started:
        yield started


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.endpoint) as started:
        yield started


@pytest.fixture
def opened(server: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    stores: list[Store] = []

    def open_(backend: str) -> Store:
        stores.append(server.open(tmp_path.name, endpoint_url=proxy.endpoint, backend=backend, retries=2))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def other_tag(data: bytes) -> bytes:
    """Another digest in every ETag, of the header and of XML."""
    turned = bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0")
    pattern = rb'(?i)(etag(?:: "|>(?:"|&quot;)))([0-9a-f]{32})'
    return re.sub(pattern, lambda found: found[1] + found[2].translate(turned), data)


def other_bytes(data: bytes) -> bytes:
    """Another last byte in whatever is one of our records."""
    is_ours = b"FCK" in data and b"<?xml" not in data
    return data[:-1] + bytes([data[-1] ^ 1]) if is_ours else data


@both
def test_wrong_tag_of_bytes_that_were_stored_right_costs_one_read_and_is_believed_no_more(
    opened: Callable[[str], Store], proxy: Proxy, backend: str
) -> None:
    """As with KMS keys, where no tag is a digest: the checkpoint is whole."""
    store, proxy.rewrite = opened(backend), other_tag
    persist_slot(make_pin([shard("w", (300_000,))]), store, PREFIX)
    assert commit(store, PREFIX, [0])
    assert [info.step for info in list_checkpoints(store)] == [10]


@both
def test_object_that_is_read_back_with_other_bytes_counts_as_not_written(
    opened: Callable[[str], Store], proxy: Proxy, backend: str
) -> None:
    store = opened(backend)
    store.put("first", b"whatever")  # its tag fits: this server's tags are digests
    proxy.rewrite = lambda data: other_bytes(other_tag(data))
    with pytest.raises(StoreError, match="holds other bytes under index") as caught:
        store.put("index", b"FCK" + bytes(range(200)))
    assert "MD5" in caught.value.expected


@both
def test_nothing_is_committed_from_an_index_that_is_read_back_with_other_bytes(
    opened: Callable[[str], Store], proxy: Proxy, backend: str
) -> None:
    store = opened(backend)
    persist_slot(make_pin([shard("w", (300_000,))]), store, PREFIX)
    proxy.rewrite = other_bytes
    with pytest.raises(DamagedError, match="index"):
        commit(store, PREFIX, [0])
    proxy.rewrite = None
    assert store.head(f"{PREFIX}/{MANIFEST}") is None
    assert commit(store, PREFIX, [0]), "and it is, once the server is well"


@both
def test_manifest_that_the_server_tags_and_returns_otherwise_is_reported_and_is_never_chosen_from_what_it_returns(
    opened: Callable[[str], Store], proxy: Proxy, backend: str
) -> None:
    store = opened(backend)
    persist_slot(make_pin([shard("w", (300_000,))]), store, PREFIX)
    real = type(store).put_if_absent

    def lying(self: Store, key: str, data: bytes) -> bool:
        proxy.rewrite = lambda block: other_bytes(other_tag(block))
        return real(self, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "put_if_absent", lying)
        with pytest.raises(FlashckptError, match=r"other bytes|could not be committed"):
            commit(store, PREFIX, [0])
    assert list_checkpoints(store, whole=True) == []


def test_multipart_object_that_was_put_together_from_other_parts_is_not_indexed(
    opened: Callable[[str], Store], proxy: Proxy
) -> None:
    store = opened("s3fs")
    store.check()

    def only_the_whole(data: bytes) -> bytes:
        return other_tag(data) if b"CompleteMultipartUploadResult" in data else data

    proxy.rewrite = only_the_whole
    pin = make_pin([shard("w", (PART_BYTES // 4 + 5000,))])
    with pytest.raises(StoreError, match="from other parts"):
        persist_slot(pin, store, PREFIX)
    assert [info.key for info in store.list(PREFIX) if info.key.endswith(".idx") or MANIFEST in info.key] == []
    proxy.rewrite = None
    persist_slot(pin, store, PREFIX)
    assert commit(store, PREFIX, [0])


def test_tags_are_judged_only_where_they_are_known_to_be_digests() -> None:
    tags, body = Tags(), b"abc"
    digest, wrong = hashlib.md5(body, usedforsecurity=False).hexdigest(), "0" * 32
    assert not any(tags.doubt(tag, body) for tag in (None, "", '"not a digest"', f"{wrong}-2"))
    tags.check_parts("s3://b", "k", tag=f"{wrong}-1", parts=[digest])
    assert tags.doubt(f'"{wrong}"', body)
    tags.settle("s3://b", "k", tag=wrong, body=body, stored=body)
    assert tags.are_digests is False
    assert not tags.doubt(wrong, body)
    known = Tags()
    assert not known.doubt(f'"{digest.upper()}"', body)
    assert known.are_digests
    known.settle("s3://b", "k", tag=wrong, body=body, stored=body)
    assert known.are_digests, "one wrong tag of right bytes does not end the checks"
    with pytest.raises(StoreError):
        known.settle("s3://b", "k", tag=wrong, body=body, stored=b"abx")
    with pytest.raises(StoreError):
        known.check_parts("s3://b", "k", tag=f'"{wrong}-1"', parts=[f'"{digest}"'])
