"""What each backend does when storage misbehaves: every fault is named, nothing half-done is visible, retries succeed."""

from __future__ import annotations

import errno
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.proxy import Proxy
from support.s3 import Server, free_port, s3_server
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.indexes import missing_writers
from flashckpt.checkpoint.root_records import claim_generation, owns_generation, prefix_of
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.lineage import Generation
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, RootError, StoreError
from flashckpt.storage import posix
from flashckpt.storage.conditional import publish_unconditional
from flashckpt.storage.factory import is_process_local, open_store
from flashckpt.storage.posix import PosixStore
from flashckpt.storage.store import PART_BYTES, ObjectInfo, Store
from flashckpt.stores.obstore_store import CredentialChain

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


def writes(store: Store) -> list[Callable[[], None]]:
    return [store.check, lambda: store.put("a", b"x"), lambda: store.put_object("a", blob(2))]


# -- the root is unusable: said at once, told apart --------------------------------------------------


@both
def test_missing_bucket_is_named(server: Server, backend: str) -> None:
    store = server.open("run", bucket="flashckpt-no-such-bucket", backend=backend)
    operations: list[Callable[[], object]] = [
        store.check,
        store.list,
        store.folders,
        lambda: store.put("a", b"x"),
        lambda: store.put_object("a", blob(2)),
        lambda: store.get("a"),
        store.sweep,
    ]
    for operation in operations:
        with pytest.raises(RootError, match="bucket flashckpt-no-such-bucket does not exist"):
            operation()
    store.close()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers everything with one S3 error."""

    code, status = "AccessDenied", 403
    protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815 -- the names http.server calls

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.matrix
@both
@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "AccessDenied"])
def test_refused_credentials_are_named_without_retries(backend: str, code: str) -> None:
    handler = type("Handler", (Refusing,), {"code": code, "status": 400 if code == "ExpiredToken" else 403})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as refusing:
        thread = threading.Thread(target=refusing.serve_forever, daemon=True)
        thread.start()
        store = Server(endpoint=f"http://127.0.0.1:{refusing.server_port}").open("run", backend=backend)
        for operation in writes(store):
            with pytest.raises(RootError, match=r"credentials for s3://.* were refused") as caught:
                operation()
            assert code in caught.value.found
        store.close()
        refusing.shutdown()
        thread.join(30)


@pytest.mark.skipif(not REAL, reason="moto does not check signatures; runs in make test-s3")
@both
@pytest.mark.parametrize("wrong", [{"key": "nobody"}, {"secret": "wrong"}])
def test_wrong_credentials_are_refused_by_a_real_server(server: Server, backend: str, wrong: dict[str, str]) -> None:
    store = server.open("run", backend=backend, **wrong)
    with pytest.raises(RootError, match=r"credentials for s3://.* were refused"):
        store.check()
    store.close()


@both
def test_no_credentials_at_all_are_named(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://bucket/run", backend=backend, endpoint_url="http://127.0.0.1:9", retries=1)
    with pytest.raises(RootError, match="no credentials for s3://bucket/run"):
        store.put("a", b"x")
    store.close()


def test_rotated_credentials_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = CredentialChain("s3://bucket/run")
    for key in ("first", "second"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        answer = chain()
        assert answer["access_key_id"] == key
        assert 0 < answer["expires_at"].timestamp() - time.time() <= CredentialChain.REFRESH_S


@both
def test_unreachable_endpoint_is_named_within_its_retries(backend: str) -> None:
    nobody = Server(endpoint=f"http://127.0.0.1:{free_port()}")
    store = nobody.open("run", backend=backend, retries=2)
    for operation in writes(store):
        with pytest.raises(StoreError, match=r"endpoint of s3://.* cannot be reached"):
            operation()
    store.close()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("https://host/run", {}, "cannot hold checkpoints"),
        ("simplecache::s3://b/run", {}, "cannot hold checkpoints"),
        ("s3:///run", {}, "names no bucket"),
        ("s3://b/run", {"backend": "rados"}, "unknown S3 backend"),
        ("nonsense://b/run", {}, "cannot be opened"),
        ("/tmp/run", {"key": "x"}, "takes no storage options"),
    ],
)
def test_url_that_cannot_be_a_root_is_refused(url: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url, **options).check()


def test_memory_roots_are_known_as_such() -> None:
    assert is_process_local("memory://run")
    assert not is_process_local("s3://b/run")
    assert not is_process_local("/tmp/run")


@both
def test_answer_cut_in_its_body_is_read_again(server: Server, proxy: Proxy, backend: str, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5 << 20, dtype=np.uint8)
    store = through(proxy, server, tmp_path.name, backend=backend, retries=6)
    store.put_object("big", [data.data], data.nbytes)
    proxy.cut_after, proxy.cuts = 1 << 20, 2
    out = np.zeros_like(data)
    store.get_range("big", 0, out.data)
    assert np.array_equal(out, data)
    assert proxy.cuts == 0
    store.close()


@both
def test_server_that_never_answers_is_given_up(server: Server, proxy: Proxy, backend: str, tmp_path: Path) -> None:
    store = through(proxy, server, tmp_path.name, backend=backend, retries=2, timeout_s=0.5)
    proxy.is_stalled = True
    begin = time.monotonic()
    with pytest.raises(StoreError, match="cannot be reached"):
        store.put("a", b"x")
    assert time.monotonic() - begin < 30
    proxy.is_stalled = False
    store.put("a", b"x")
    assert store.get("a") == b"x"
    store.close()


# -- surprises of object stores ----------------------------------------------------------------------


class Lagging(PosixStore):
    """Lists what was there before the last `behind` writes."""

    behind = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def _publish(self, key: str, *args: object) -> bool:
        self.written.append(key)
        return super()._publish(key, *args)  # type: ignore[arg-type]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        hidden = set(self.written[len(self.written) - self.behind :])
        return [info for info in super().list(prefix) if info.key not in hidden]


def test_listing_that_lags_delays_the_commit_but_never_falsifies_it(tmp_path: Path) -> None:
    store = Lagging(tmp_path)
    persist_slot(make_pin([shard("w", (999,))]), store, prefix_of(1, 10))
    store.behind = 1
    assert missing_writers(store, prefix_of(1, 10), [0]) == [0]
    assert commit(store, prefix_of(1, 10), [0])  # reads the index by its name
    store.behind = 2
    assert [info.step for info in list_checkpoints(store)] == [10]
    store.behind = 0
    assert missing_writers(store, prefix_of(1, 10), [0]) == []


@both
def test_server_that_ignores_conditions_is_found_out_and_one_claimer_wins(
    server: Server, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashckpt.storage.conditional.SETTLE_S", 0.2)
    stores = [server.open(tmp_path.name, backend=backend) for _ in range(2)]
    for store in stores:  # as rclone's server does: accepts the condition and overwrites
        monkeypatch.setattr(store, "_create", lambda key, data, store=store: store.put(key, data) or True)
    assert not stores[0].is_conditional
    assert "does not honour conditional writes" in caplog.text
    claims = [Generation(number=1, token=token) for token in ("a", "b")]
    won: list[bool] = [False, False]
    barrier = threading.Barrier(2)

    def claim(place: int) -> None:
        barrier.wait(30)
        won[place] = claim_generation(stores[place], claims[place])

    threads = [threading.Thread(target=claim, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1
    assert [owns_generation(stores[0], claim) for claim in claims] == won
    assert not publish_unconditional(stores[0], "generations/000001", b"later")
    for store in stores:
        store.close()


@both
def test_checkpoint_goes_to_s3_and_back(server: Server, backend: str, tmp_path: Path) -> None:
    store = server.open(tmp_path.name, backend=backend)
    pins = [make_pin([shard(f"t{rank}", (300_000,))], rank=rank, world_size=2) for rank in range(2)]
    for pin in pins:
        persist_slot(pin, store, prefix_of(1, 10))
    wins = [commit(store, prefix_of(1, 10), [0, 1]), commit(store, prefix_of(1, 10), [0, 1])]
    assert wins == [True, False]
    other = server.open(tmp_path.name, backend="s3fs" if backend == "obstore" else "obstore")
    (info,) = list_checkpoints(other)
    assert (info.step, info.writers, info.nbytes) == (10, 2, 2_400_000)
    store.close()
    other.close()


# -- directories ------------------------------------------------------------------------------------


def test_failed_fsync_rewrites_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    calls: list[str] = []
    real = os.fsync

    def failing(fd: int) -> None:
        calls.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr("flashckpt.storage.direct_io.os.fsync", failing)
    data = [memoryview(bytes(5000)), memoryview(b"tail")]
    store.put_object("a", data, 5004)
    assert store.get("a") == bytes(5000) + b"tail"
    assert calls[0] != calls[1]  # another file, not another try at the same one
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_fsync_that_fails_again_is_reported_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("flashckpt.storage.direct_io.os.fsync", failing)
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match=r"cannot write .*/x/a"):
        store.put("x/a", b"data")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("when", ["open", "write"])
def test_file_system_without_direct_io_is_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real_open, real_write = os.open, os.pwrite
    direct: set[int] = set()

    def opening(path: str, flags: int, *args: int, **more: Any) -> int:
        if when == "open" and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        fd = real_open(path, flags, *args, **more)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def writing(fd: int, data: memoryview, offset: int) -> int:
        if fd in direct:
            raise OSError(22, "Invalid argument")
        return real_write(fd, data, offset)

    monkeypatch.setattr("flashckpt.storage.direct_io.os.open", opening)
    monkeypatch.setattr("flashckpt.storage.direct_io.os.pwrite", writing)
    data = np.random.default_rng(0).integers(0, 256, 3 * PART_BYTES + 17, dtype=np.uint8)
    store = open_store(tmp_path)
    store.put_object("a", [data.data[:5], data.data[5:]], data.nbytes)
    assert store.get("a") == data.tobytes()


@pytest.mark.parametrize("direct", [True, False])
def test_ranges_at_any_place_and_alignment_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    data = np.random.default_rng(0).integers(0, 256, (9 << 20) + 1234, dtype=np.uint8)
    store = open_store(tmp_path)
    store.put_object("a", [data.data], data.nbytes)
    if not direct:
        monkeypatch.setattr("flashckpt.storage.direct_io.DIRECT_READ_BYTES", 1 << 40)
    memory = np.zeros(data.nbytes + 8192, np.uint8)
    aligned = -memory.ctypes.data % 4096
    for start in (0, 4096, 5, 4095, 1 << 20, (1 << 20) + 64):
        for shift in (aligned, aligned + 1):
            for length in (1 << 20, (5 << 20) + 7, data.nbytes - start):
                out = memory[shift : shift + length]
                out[:] = 0
                store.get_range("a", start, out.data)
                assert np.array_equal(out, data[start : start + length]), (start, shift, length)
        with pytest.raises(DamagedError, match="truncated"):
            store.get_range("a", start, memory[: data.nbytes - start + 1].data)


def test_file_system_without_hard_links_falls_back_to_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("flashckpt.storage.posix.os.link", refusing)
    monkeypatch.setattr("flashckpt.storage.conditional.SETTLE_S", 0.01)
    store = open_store(tmp_path)
    assert not store.is_conditional
    assert "does not honour conditional writes" in caplog.text
    assert store.put_if_absent("a", b"first")
    assert not store.put_if_absent("a", b"second")
    assert store.get("a") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folder_that_cannot_be_read_is_an_error_and_never_looks_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.put("generations/000001", b"x")

    def refusing(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refusing)  # root may read everything, so the refusal is made here
    for look in (lambda: store.list("generations/"), store.folders, store.sweep):
        with pytest.raises(RootError, match="Permission denied"):
            look()


def test_folder_of_another_protocol_that_cannot_be_read_is_an_error_and_never_looks_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    store = open_store(f"memory://{tmp_path.name}")
    store.put("step-1/MANIFEST", b"x")
    real, broken = MemoryFileSystem.ls, [f"/{tmp_path.name}/step-1"]

    def ls(fs: object, path: str, **options: object) -> object:
        if path in broken:
            raise OSError("the server does not answer")
        return real(fs, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    for place in (f"/{tmp_path.name}/step-1", f"/{tmp_path.name}"):
        broken[:] = [place]
        with pytest.raises(StoreError, match="does not answer"):
            store.list()


def test_rename_whose_answer_was_lost_is_a_success_and_writes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats the request after a restart of the server, and then finds no source."""
    real, calls = Path.rename, []

    def twice(source: Path, target: Path) -> None:
        calls.append(target.name)
        real(source, target)
        real(source, target)

    monkeypatch.setattr(Path, "rename", twice)
    store = open_store(tmp_path)
    store.put("a", b"x")
    store.put_object("b", blob(1))
    assert calls == ["a", "b"]
    assert store.get("a") == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_link_whose_answer_was_lost_is_won_whatever_the_count_of_links_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def twice(source: Path, target: Path) -> None:
        real(source, tmp_path / f"{source.name}.third")  # NFS tells a count that it remembers: not two
        real(source, target)
        real(source, target)

    store = open_store(tmp_path)
    assert store.is_conditional
    monkeypatch.setattr("flashckpt.storage.posix.os.link", twice)
    assert store.put_if_absent("a", b"first")
    assert not store.put_if_absent("a", b"second")


def test_room_that_the_kernel_cannot_reserve_is_not_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library's posix_fallocate would write a byte into each page: on NFS a request each."""

    def refusing(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("room is asked of the C library"))
    store = open_store(tmp_path)
    store.put_object("a", blob(1), PART_BYTES)
    monkeypatch.setattr("flashckpt.storage.direct_io._fallocate", refusing)
    store.put_object("b", blob(1), PART_BYTES)
    assert store.get("a") == store.get("b") == bytes(PART_BYTES)


def test_stale_folder_is_empty_if_it_is_gone_and_an_error_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.put("there/a", b"x")

    def stale(path: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("os.scandir", stale)
    for look in (lambda: store.list("there/"), lambda: store.folders("there/"), store.sweep):
        with pytest.raises(StoreError, match="cannot"):
            look()
    (tmp_path / "there" / "a").unlink()
    (tmp_path / "there").rmdir()
    assert store.list("there/") == []
    assert store.folders("there/") == []


def test_deleted_file_that_nfs_keeps_while_it_is_open_is_no_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / "a" / ".nfs00000001").write_bytes(b"x")
    assert [info.key for info in store.list()] == ["a/b"]


def test_temporary_file_of_a_dead_writer_is_swept_at_once_and_a_living_ones_stays(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = store._temporary(tmp_path / "a")
    theirs = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    elsewhere = mine.with_name(f"a.ffffffff-{dead.pid}-00000000.tmp")
    for path in (mine, theirs, elsewhere):
        path.write_bytes(b"half")
    assert store.sweep() == [theirs.name]
    assert store.list() == []
    os.utime(elsewhere, (1, 1))
    assert store.sweep() == [elsewhere.name]
    assert mine.exists()


def test_file_that_its_writer_publishes_and_then_ends_is_not_called_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def published(path: Path, _: float) -> bool:
        path.rename(tmp_path / "a")
        return True

    store = PosixStore(tmp_path)
    store._temporary(tmp_path / "a").write_bytes(b"whole")
    monkeypatch.setattr(posix, "_is_orphan", published)
    assert store.sweep() == []
    assert store.get("a") == b"whole"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_full_and_read_only_file_systems_are_named_and_recovered(tmp_path: Path, fault: str) -> None:
    size = "1m" if fault == "full" else "64m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "flashckpt-test", str(tmp_path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount: {mounted.stderr.decode().strip()}")
    pin, prefix = make_pin([shard("w", (1_000_000,))]), prefix_of(1, 10)
    try:
        if fault == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        store = open_store(tmp_path)
        expected: type[FlashckptError] = StoreError if fault == "full" else RootError
        with pytest.raises(expected, match=str(tmp_path)) as caught:
            persist_slot(pin, store, prefix)
        assert caught.value.found in ("No space left on device", "Read-only file system")
        assert list_checkpoints(store) == []
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(tmp_path)], check=True)
        persist_slot(pin, store, prefix)
        assert commit(store, prefix, [0])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
