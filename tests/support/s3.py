"""S3 servers for the store tests: moto's in this process tree, or a real one named by the environment."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store
from support.ranks import wait_for

CLIENTS = {"s3fs": "S3Store", "obstore": "ObstoreStore"}
"""Class of the store that each client is used by."""
WITHOUT = Path(__file__).parent / "without"


@pytest.fixture(params=CLIENTS)
def default_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name the client that s3:// goes through where nothing chooses one, here and in programs that the test starts.

    With s3fs everything runs as after a plain `pip install flashckpt`, without obstore.
    """
    client = str(request.param)
    if client == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
        monkeypatch.setenv("WITHOUT_PACKAGES", "obstore")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(WITHOUT), os.environ.get("PYTHONPATH")))))
    else:
        pytest.importorskip("obstore")
    assert type(open_store("s3://bucket/run")).__name__ == CLIENTS[client]
    return client


@dataclass
class Server:
    """An S3 endpoint with one bucket; `stop` and `start` keep its port."""

    endpoint: str
    key: str = "test"
    secret: str = "testtest"
    bucket: str = field(default_factory=lambda: f"flashckpt-{secrets.token_hex(4)}")
    is_real: bool = False
    process: subprocess.Popen[bytes] | None = None

    def options(self, **changed: Any) -> dict[str, Any]:
        base = {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": "us-east-1"},
            "retries": 3,
            "timeout_s": 20.0,
        }
        return {**base, **changed}

    def open(self, path: str, **changed: Any) -> Store:
        return open_store(f"s3://{changed.pop('bucket', self.bucket)}/{path}", **self.options(**changed))

    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )

    def make_bucket(self) -> None:
        self.client().create_bucket(Bucket=self.bucket)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Give the server named by S3_TEST_ENDPOINT (`make test-s3`: a real one), else moto's, with a new bucket."""
    endpoint = os.environ.get("S3_TEST_ENDPOINT")
    if endpoint is None:
        with moto_server() as server:
            yield server
        return
    server = Server(endpoint=endpoint, is_real=True)
    server.make_bucket()
    yield server


@contextlib.contextmanager
def moto_server() -> Iterator[Server]:
    """Start moto's server in a process of its own and make a bucket."""
    port = free_port()
    server = Server(endpoint=f"http://127.0.0.1:{port}")
    start_moto(server, port)
    try:
        server.make_bucket()
        yield server
    finally:
        stop(server)


def start_moto(server: Server, port: int) -> None:
    program = Path(sys.executable).with_name("moto_server")
    server.process = subprocess.Popen(
        [str(program), "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: answers(server.endpoint), deadline_s=60, what="moto's server")


def stop(server: Server) -> None:
    if server.process is not None:
        server.process.kill()
        server.process.wait(30)
        server.process = None


def answers(endpoint: str) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(endpoint, timeout=5).close()
        return True
    return False
