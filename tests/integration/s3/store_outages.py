"""Whole uploads to S3 whose server or process ends in the middle: nothing half done is visible, memory stays bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import TESTS
from support.proxy import Proxy
from support.ranks import wait_for
from support.s3 import Server, s3_server
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.writer import commit, persist_slot, write_together
from flashckpt.errors import StoreError
from flashckpt.storage.store import PART_BYTES, Store

BACKENDS = ("s3fs", "obstore")
both = pytest.mark.parametrize("backend", BACKENDS)
REAL = "S3_TEST_ENDPOINT" in os.environ


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as started:
        yield started


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.endpoint) as started:
        yield started


def through(proxy: Proxy, server: Server, path: str, **options: object) -> Store:
    return server.open(path, endpoint_url=proxy.endpoint, **options)


def blob(parts: int) -> list[memoryview]:
    return [memoryview(bytes([number]) * PART_BYTES) for number in range(parts)]


def unfinished(server: Server) -> list[str]:
    return [u["Key"] for u in server.client().list_multipart_uploads(Bucket=server.bucket).get("Uploads") or ()]


# -- the server or the network misbehaves in the middle ----------------------------------------------


@both
def test_server_stopped_and_restarted_in_mid_upload_the_upload_completes(
    server: Server, proxy: Proxy, backend: str, tmp_path: Path
) -> None:
    store = through(proxy, server, tmp_path.name, backend=backend, retries=8)
    seen = threading.Event()

    class Parts:
        def __iter__(self) -> Iterator[memoryview]:
            for number, part in enumerate(blob(6)):
                if number == 5 and not seen.is_set():
                    wait_for(lambda: proxy.uploaded > PART_BYTES, what="the first part on its way")
                    seen.set()
                yield part

    upload = threading.Thread(target=store.put_object, args=("big", Parts(), 6 * PART_BYTES))
    upload.start()
    assert seen.wait(60)
    proxy.stop()
    proxy.start()
    upload.join(100)
    assert not upload.is_alive()
    out = bytearray(6 * PART_BYTES)
    store.get_range("big", 0, memoryview(out))
    assert bytes(out) == b"".join(blob(6))
    assert unfinished(server) == []
    store.close()


@both
def test_server_that_stays_away_fails_the_upload_and_the_next_one_succeeds(
    server: Server, proxy: Proxy, backend: str, tmp_path: Path
) -> None:
    store = through(proxy, server, tmp_path.name, backend=backend, retries=2)

    class Parts:
        def __iter__(self) -> Iterator[memoryview]:
            for number, part in enumerate(blob(6)):
                if number == 5:
                    proxy.stop()
                yield part

    with pytest.raises(StoreError, match=r"big|endpoint of s3://.* cannot be reached"):
        store.put_object("big", Parts(), 6 * PART_BYTES)
    proxy.start()
    assert store.head("big") is None
    store.put_object("big", blob(2), 2 * PART_BYTES)
    info = store.head("big")
    assert info is not None
    assert info.nbytes == 2 * PART_BYTES
    server.open(tmp_path.name, backend=backend).sweep(older_than_s=0)
    assert unfinished(server) == []
    store.close()


@both
def test_slow_server_only_takes_longer(server: Server, proxy: Proxy, backend: str, tmp_path: Path) -> None:
    store = through(proxy, server, tmp_path.name, backend=backend)
    proxy.bytes_s = 30e6
    store.put_object("big", blob(3), 3 * PART_BYTES)
    info = store.head("big")
    assert info is not None
    assert info.nbytes == 3 * PART_BYTES
    store.close()


PERSIST = """
import sys
from support.slots import make_pin, shard
from flashckpt.checkpoint.writer import PersistOptions, persist_slot
from support.s3 import Server
server = Server(endpoint=sys.argv[1], bucket=sys.argv[2])
pin = make_pin([shard("w", (14_000_000,))])
persist_slot(pin, server.open(sys.argv[3], backend=sys.argv[4]), "step-000000010.g1")
"""


@both
def test_killed_in_mid_upload_nothing_is_visible_and_the_sweep_aborts_it(
    server: Server, backend: str, tmp_path: Path
) -> None:
    root = TESTS
    done = subprocess.run(
        [sys.executable, "-c", PERSIST, server.endpoint, server.bucket, tmp_path.name, backend],
        env={**os.environ, "FLASHCKPT_CRASH_AT": "persist.during-pack:3", "PYTHONPATH": f"{root}:{root.parent}"},
        timeout=90,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    store = server.open(tmp_path.name, backend=backend)
    assert store.list() == []
    if REAL:  # moto says 2010 for every upload
        assert store.sweep(older_than_s=3600) == []  # it might be a living writer's
    left = unfinished(server)
    assert len(store.sweep(older_than_s=0)) == len(left) == 1
    assert unfinished(server) == []
    pin = make_pin([shard("w", (14_000_000,))])
    persist_slot(pin, store, "step-000000010.g1")
    assert commit(store, "step-000000010.g1", [0])
    assert [info.step for info in list_checkpoints(store)] == [10]
    store.close()


TOGETHER = """
import sys
from support.slots import make_pin, shard
from flashckpt.checkpoint.writer import write_together
from support.s3 import Server
server = Server(endpoint=sys.argv[1], bucket=sys.argv[2])
pins = [make_pin([shard(f"w{rank}", (100_001,))], rank=rank, world_size=4) for rank in range(4)]
write_together(pins, server.open(sys.argv[3], backend=sys.argv[4]), "step-000000010.g1")
"""


@both
def test_killed_between_the_bytes_of_ranks_that_share_an_object_nothing_is_there_and_the_next_writer_finishes(
    server: Server, backend: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, server.endpoint, server.bucket, tmp_path.name, backend],
        env={**os.environ, "FLASHCKPT_CRASH_AT": "persist.during-pack:2", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        timeout=90,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    store = server.open(tmp_path.name, backend=backend)
    assert store.list() == []
    assert unfinished(server) == []
    pins = [make_pin([shard(f"w{rank}", (100_001,))], rank=rank, world_size=4) for rank in range(4)]
    put_indexes(store, "step-000000010.g1", write_together(pins, store, "step-000000010.g1"))
    assert commit(store, "step-000000010.g1", range(4))
    merged = read_manifest(store, "step-000000010.g1")
    assert merged.objects == ["r00000-00003.p0.fck"]
    for pin in pins:
        (row,) = merged.table.rows(f"w{pin.manifest().rank}")
        out = bytearray(400_004)
        store.get_range("step-000000010.g1/r00000-00003.p0.fck", int(merged.table.byte_offset[row]), memoryview(out))
        assert bytes(out) == bytes(pin.row(0))
    store.close()


MEMORY = """
import resource, sys
from support.s3 import Server
store = Server(endpoint=sys.argv[1], bucket=sys.argv[2]).open(sys.argv[3], backend=sys.argv[4])
part = memoryview(bytes(range(256)) * (1 << 16))
store.put_object("warm", [part] * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.put_object("big", [part] * 8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@both
def test_memory_of_an_upload_is_bounded_by_the_parts_in_flight(server: Server, backend: str, tmp_path: Path) -> None:
    root = TESTS
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, server.endpoint, server.bucket, tmp_path.name, backend],
        env={**os.environ, "PYTHONPATH": f"{root}:{root.parent}"},
        timeout=90,
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) < 110 << 10  # KiB; the object has 128 MiB
