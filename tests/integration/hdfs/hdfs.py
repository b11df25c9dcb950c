"""webhdfs:// against a NameNode and a DataNode: the conformance suite, faults, and a whole job (make test-hdfs).

The servers are Hadoop's own (tests/integration/hdfs/hadoop.sh); where they are not installed all of this is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hdfs import USER, Hdfs, hdfs, missing
from support.paths import TESTS
from support.proxy import Proxy
from support.ranks import wait_for
from support.slots import make_pin, shard
from unit.storage.test_store import TestConformance

from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.errors import ConfigError, RootError, StoreError
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES, Store

__all__ = ["TestConformance"]

pytestmark = [pytest.mark.timeout(300)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    if what := missing():
        pytest.skip(f"{what} is not installed: tests/integration/hdfs/hadoop.sh install .hadoop-jars")
    with hdfs(tmp_path_factory.mktemp("hdfs")) as started:
        yield started


@pytest.fixture
def store(server: Hdfs, tmp_path: Path) -> Iterator[Store]:
    opened = server.open(f"runs/{tmp_path.name}")
    yield opened
    opened.close()


@pytest.fixture
def proxy(server: Hdfs) -> Iterator[Proxy]:
    with Proxy(server.endpoint) as started:
        yield started


def blob(parts: int) -> list[memoryview]:
    return [memoryview(bytes([number]) * PART_BYTES) for number in range(parts)]


def names(store: Store) -> list[str]:
    """Return all files below the root, temporary ones too."""
    fs = store._open()  # type: ignore[attr-defined]
    return sorted(fs.find(store._path("")))  # type: ignore[attr-defined]


class Parts:
    """Some parts; before the last one something is done, once."""

    def __init__(self, count: int, work: Callable[[], object]) -> None:
        self._parts, self._work = blob(count), [work]

    def __iter__(self) -> Iterator[memoryview]:
        yield from self._parts[:-1]
        if self._work:
            self._work.pop()()
        yield self._parts[-1]


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


# -- the root ----------------------------------------------------------------------------------------


def test_root_that_is_not_there_or_is_a_file_or_belongs_to_others_is_named(server: Hdfs, tmp_path: Path) -> None:
    path = f"roots/{tmp_path.name}"
    with pytest.raises(RootError, match="does not exist"):
        server.open(path).check(write=False)
    server.open(path).put("file", b"x")
    with pytest.raises(RootError, match="is a file"):
        server.open(f"{path}/file").check()
    strange = server.open(path, user="stranger")
    strange.check(write=False)
    writes: list[Callable[[], object]] = [strange.check, lambda: strange.put("a", b"x"), lambda: strange.delete("file")]
    for write in writes:
        with pytest.raises(RootError, match="was refused") as caught:
            write()
        assert "stranger" in caught.value.found
    with pytest.raises(RootError, match="was refused") as caught:
        open_store(server.url(path)).check()
    assert "dr.who" in caught.value.found
    assert [info.key for info in server.open(path).list()] == ["file"]


def test_folder_that_cannot_be_read_is_an_error_and_never_looks_empty(server: Hdfs, tmp_path: Path) -> None:
    store = server.open(f"roots/{tmp_path.name}")
    store.put("step-1/MANIFEST", b"x")
    store._open().chmod(store._path("step-1"), "700")  # type: ignore[attr-defined]
    with pytest.raises(RootError, match="was refused"):
        server.open(f"roots/{tmp_path.name}", user="stranger").list()


def test_option_that_the_client_does_not_know_is_refused(server: Hdfs) -> None:
    with pytest.raises(ConfigError, match="no such storage option"):
        server.open("runs", usr="x")


# -- the answer, the server or the writer is lost ------------------------------------------------------


@pytest.mark.parametrize("options", ["NONE", "OVERWRITE"])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_rename_without_an_answer_is_done_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, lost: str, options: str
) -> None:
    assert store.is_conditional
    fs = store._open()  # type: ignore[attr-defined]
    real, calls = fs._call, []

    def call(operation: str, *arguments: Any, **words: Any) -> Any:
        if operation != "RENAME":
            return real(operation, *arguments, **words)
        calls.append(words["renameoptions"])
        if len(calls) > 1:
            return real(operation, *arguments, **words)
        if lost == "answer":
            real(operation, *arguments, **words)
        raise ConnectionResetError("lost")

    monkeypatch.setattr(fs, "_call", call)
    if options == "NONE":
        assert store.put_if_absent("claim", b"mine")
    else:
        store.put("claim", b"mine")
    assert calls == [options] * (2 if lost == "request" else 1)
    assert store.get("claim") == b"mine"
    assert not store.put_if_absent("claim", b"theirs")
    assert names(store) == [store._path("claim")]  # type: ignore[attr-defined]


def test_rename_without_an_answer_where_another_was_first_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.put_if_absent("claim", b"theirs")
    fs = store._open()  # type: ignore[attr-defined]
    real = fs._call

    def call(operation: str, *arguments: Any, **words: Any) -> Any:
        if operation == "RENAME":
            raise ConnectionResetError("lost")
        return real(operation, *arguments, **words)

    monkeypatch.setattr(fs, "_call", call)
    assert not store.put_if_absent("claim", b"mine")
    assert names(store) == [store._path("claim")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("which", ["namenode", "datanode"])
def test_server_killed_and_started_in_mid_upload_the_upload_completes(server: Hdfs, store: Store, which: str) -> None:
    starting = threading.Thread(target=server.start, args=(which,))

    def kill() -> None:
        server.kill(which)
        starting.start()

    store.put_object("big", Parts(3, kill), 3 * PART_BYTES)
    starting.join()
    out = bytearray(3 * PART_BYTES)
    store.get_range("big", 0, memoryview(out))
    assert bytes(out) == b"".join(blob(3))
    assert [info.key for info in store.list()] == ["big"]
    store.sweep(older_than_s=0)
    assert names(store) == [store._path("big")]  # type: ignore[attr-defined]


def test_server_that_stays_away_fails_the_upload_and_the_next_one_succeeds(
    server: Hdfs, proxy: Proxy, tmp_path: Path
) -> None:
    path = f"runs/{tmp_path.name}"
    through = open_store(f"webhdfs://{proxy.endpoint.removeprefix('http://')}/{path}", **server.options(retries=2))
    with pytest.raises(StoreError, match="big"):
        through.put_object("big", Parts(3, proxy.stop), 3 * PART_BYTES)
    for look in (through.list, through.folders, lambda: through.head("big"), lambda: through.get("big")):
        with pytest.raises(StoreError):
            look()
    proxy.start()
    assert through.head("big") is None
    through.put_object("big", blob(2), 2 * PART_BYTES)
    assert len(server.open(path).sweep(older_than_s=3600)) <= 1, "the writer lives: only what is old goes"
    server.open(path).sweep(older_than_s=0)
    assert names(through) == [f"/{path}/big"]


def test_server_that_never_answers_is_given_up(server: Hdfs, proxy: Proxy, tmp_path: Path) -> None:
    url = f"webhdfs://{proxy.endpoint.removeprefix('http://')}/runs/{tmp_path.name}"
    through = open_store(url, **server.options(retries=2, timeout_s=0.5))
    proxy.is_stalled = True
    with pytest.raises(StoreError, match="failed"):
        through.put("a", b"x")
    proxy.is_stalled = False
    patient = open_store(url, **server.options())
    patient.put("a", b"x")
    assert patient.get("a") == b"x"


def test_answer_cut_in_its_body_is_read_again(server: Hdfs, store: Store) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5 << 20, dtype=np.uint8)
    store.put_object("big", [data.data], data.nbytes)
    with Proxy(server.data_endpoint) as proxy:
        place = {server.data_endpoint.removeprefix("http://"): proxy.endpoint.removeprefix("http://")}
        proxy.cut_after, proxy.cuts = 1 << 20, 2
        through = open_store(store.url, **server.options(data_proxy=place))
        out = np.zeros_like(data)
        through.get_range("big", 0, out.data)
        assert np.array_equal(out, data)
        assert proxy.cuts == 0
        through.close()


def test_error_of_the_data_node_is_never_taken_for_data(
    server: Hdfs, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks the NameNode where, and the DataNode for the bytes: the file may go in between."""
    store.put("small", b"x" * 500)
    fs = store._open()  # type: ignore[attr-defined]
    real = fs._call

    def call(operation: str, *arguments: Any, **words: Any) -> Any:
        answer = real(operation, *arguments, **words)
        if operation == "OPEN":
            real("DELETE", "delete", path=store._path("small"))  # type: ignore[attr-defined]
        return answer

    monkeypatch.setattr(fs, "_call", call)
    with pytest.raises(StoreError, match="small"):
        store.get("small")


PERSIST = """
import json, sys
from support.slots import make_pin, shard
from flashckpt.checkpoint.writer import persist_slot
from flashckpt.storage.factory import open_store
pin = make_pin([shard("w", (14_000_000,))])
persist_slot(pin, open_store(sys.argv[1], **json.loads(sys.argv[2])), "step-000000010.g1")
"""


def test_killed_in_mid_upload_nothing_is_visible_and_the_sweep_removes_it_at_once(server: Hdfs, store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PERSIST, store.url, json.dumps(server.options())],
        env={**ENVIRONMENT, "FLASHCKPT_CRASH_AT": "persist.during-pack:3"}, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert store.list() == []
    (left,) = names(store)
    assert store.sweep() == [left.removeprefix(store._path("") + "/")]  # type: ignore[attr-defined]
    assert names(store) == []
    pin = make_pin([shard("w", (14_000_000,))])
    persist_slot(pin, store, "step-000000010.g1")
    assert commit(store, "step-000000010.g1", [0])
    assert [info.step for info in list_checkpoints(store)] == [10]


# -- a job ---------------------------------------------------------------------------------------------


class Job:
    """A run of job.py with memory of its own: what it restores is on storage."""

    def __init__(self, root: str, options: dict[str, Any], memory: Path, last: int, pause: int = 0) -> None:
        memory.mkdir()
        self._memory = memory
        self._log = memory.with_suffix(".log")
        program = [sys.executable, str(TESTS / "integration" / "hdfs" / "job.py"), root, json.dumps(options)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, str(last), str(pause)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, "FLASHCKPT_SHM_DIR": str(memory), "FLASHCKPT_DAEMON_LINGER": "0.2"},
            )  # fmt: skip

    def told(self, what: str) -> list[Any]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith('["')]
        return [value for name, value in lines if name == what]

    def until(self, what: str, value: Any) -> None:
        def is_told() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            return value in self.told(what)

        wait_for(is_told, deadline_s=120, what=f"the job to tell {what} {value}")

    def end(self) -> None:
        self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self._log.read_text()

    def kill(self) -> None:
        """Kill it as a node that loses its power: the daemon first, which would persist what is in memory."""
        mine = f"FLASHCKPT_SHM_DIR={self._memory}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if path.parent.name != str(self.process.pid) and mine in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.communicate(timeout=60)


def flashckpt(*words: str) -> str:
    code = "from flashckpt.cli.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_job_killed_after_a_persist_continues_from_it_with_the_same_losses(
    server: Hdfs, shm_dir: Path, tmp_path: Path
) -> None:
    url, options = server.url(f"jobs/{tmp_path.name}"), server.options()
    whole = Job(str(tmp_path / "local"), {}, shm_dir / "whole", last=8)
    whole.end()
    first = Job(url, options, shm_dir / "first", last=5, pause=4)
    first.until("durable", 4)
    first.kill()
    store = server.open(f"jobs/{tmp_path.name}")
    assert 4 in [info.step for info in list_checkpoints(store)]

    second = Job(url, options, shm_dir / "second", last=8)
    second.end()
    assert first.told("restored") == [None]
    assert second.told("restored") == [[4, ["storage"]]]
    steps = whole.told("step")
    assert len(steps) == 8
    assert first.told("step")[:4] == steps[:4]
    assert second.told("step") == steps[4:]

    rights = ("-o", f"user={USER}")
    (newest, *_) = json.loads(flashckpt("ls", url, *rights, "--json"))["checkpoints"]
    assert (newest["step"], newest["tier"], newest["state"]) == (8, "storage", "committed")
    flashckpt("gc", url, *rights, "--keep-last", "1", "--apply")
    assert [info.step for info in list_checkpoints(store)] == [8]
    flashckpt("verify", url, *rights)
