"""Links, FIFOs, devices, directories and sockets in place of our files: refused in a clear error, or healed; never waited for.

Every name that a job directory and a root in a directory have, times everything that can stand there instead.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import ended, fork
from support.one_rank import agent_of_the_test  # noqa: F401 -- a fixture
from support.slots import make_pin, shard

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints, newest_checkpoint, read_manifest
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.root_records import claim_generation, prefix_of, read_generations
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.intent import NodeMessage
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.housekeeping import sweep_root
from flashckpt.errors import FlashckptError, SharedMemoryError, StoreError
from flashckpt.shm.control import Control, ControlView
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory, memory_root
from flashckpt.shm.messages import MessageFiles
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

LIMIT_S = 60
"""Of one operation; those that hang would do so for ever."""


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # a short way to it: the name of a socket has 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


KINDS: dict[str, Callable[[Path], object]] = {
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "link elsewhere": lambda path: path.symlink_to("/proc/self/status"),
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "FIFO": os.mkfifo,
    "directory": lambda path: path.mkdir(),
    "full directory": lambda path: (path / "inside").mkdir(parents=True),
    "socket": _socket,
}
RECORDS = (
    "control", "live.lock", "daemon.lock", "daemon.log", "job.msgpack", "generation.msgpack", "daemon.msgpack", "outgoing",
    "incoming", "events/r00000", "events/incoming", "requests/persist-now", "requests/retry-now", "requests/ended",
)  # fmt: skip


@contextlib.contextmanager
def limited(what: str, *, is_healed: bool = False) -> Iterator[None]:
    """Fail where something waits; a refusal has to be one of ours, and say what it is about."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT_S)
    try:
        yield
    except FlashckptError:
        if is_healed:
            raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def displace(path: Path, kind: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    KINDS[kind](path)


def uses(job: JobDirectory) -> list[Callable[[], object]]:
    """All that is done with the files of a job directory outside a rank."""
    messages, control = MessageFiles(job.path), ControlView(job.control_path)
    return [
        lambda: job.write_config(JobConfig(job="j", root="/r")), job.read_config,
        lambda: job.write_generation(Generation(number=1)), job.read_generation,
        job.read_status, lambda: job.write_status(DaemonStatus()), job.read_status, job.status_mark,
        lambda: job.request("persist-now"), lambda: job.ask("retry-now"), lambda: job.asked_ns("retry-now"),
        lambda: job.request("ended"), lambda: job.asked_ns("ended"), lambda: job.notify(0),
        job.anyone_alive, job.daemon_alive, job.hold_daemon, job.forget_status,
        lambda: Control.open(job.control_path, rows=1), control.rows, lambda: control.stop_after,
        lambda: messages.send(NodeMessage(generation=1, ranks=(0,), world_size=1, proposes_in=1)),
        lambda: messages.received(1), lambda: messages.outgoing(1), lambda: messages.deliver(1, [b"x"]), messages.forget,
        lambda: JobDirectory.open(job.job),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_use_of_a_job_directory_waits_or_fails_without_a_word(kind: str) -> None:
    for number, name in enumerate(RECORDS):
        made = JobDirectory.open(f"j{number}")
        made.let_go()
        displace(made.path / name, kind)
        for use, call in enumerate(uses(JobDirectory(made.path))):
            with limited(f"use {use} with a {kind} as {name}"), contextlib.suppress(FileNotFoundError):
                call()


@pytest.mark.matrix
@pytest.mark.usefixtures("agent_of_the_test")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_starts_and_steps_or_says_what_is_wrong(kind: str, tmp_path: Path) -> None:
    for name in (
        "control",
        "live.lock",
        "job.msgpack",
        "generation.msgpack",
        "daemon.msgpack",
        "events/r00000",
        ".seg",
    ):
        root, job = tmp_path / name.replace("/", "-"), f"j-{name.replace('/', '-')}"
        _step(root, job)
        directory = JobDirectory.open(job, create=False)
        displace(directory.segments()[0] if name == ".seg" else directory.path / name, kind)
        with limited(f"a rank with a {kind} as {name}", is_healed=name in ("daemon.msgpack", "events/r00000", ".seg")):
            _step(root, job)


def _step(root: Path, job: str) -> None:
    ckpt = Checkpointer(root, snapshot_every=1, job=job)
    ckpt.track(model=torch.nn.Linear(2, 2))
    try:
        report = ckpt.restore()
        ckpt.step(1 if report is None else report.step + 1)
        ckpt.fence()
    finally:
        if ckpt._session is not None:
            ckpt._session.close()


def _filled(root: Path) -> None:
    store = open_store(root)
    assert claim_generation(store, Generation(number=1, token="t", world_size=1))
    for step in (10, 20):
        persist_slot(make_pin([shard("w", (4000,))], step=step), store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
    sweep_root(store, Policy(keep_last=5), SnapshotId(1, 20))
    store.put("intents/1-30.0", b"x")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_no_use_of_a_root_waits_or_fails_without_a_word(kind: str, tmp_path: Path) -> None:
    _filled(tmp_path / "names")
    names = [p.relative_to(tmp_path / "names").as_posix() for p in (tmp_path / "names").rglob("*") if p.is_file()]
    assert len(names) > 8
    for number, name in enumerate(names):
        root = tmp_path / f"root{number}"
        shutil.copytree(tmp_path / "names", root)
        displace(root / name, kind)
        for use, call in uses_of_root(open_store(root), name).items():
            with limited(f"{use} with a {kind} as {name}"):
                call()


def uses_of_root(store: Store, name: str) -> dict[str, Callable[[], Any]]:
    out = memoryview(bytearray(8))
    return {
        "list": store.list,
        "get": lambda: store.get(name),
        "range": lambda: store.get_range(name, 0, out),
        "head": lambda: store.head(name),
        "create": lambda: store.put_if_absent(name, b"y"),
        "checkpoints": lambda: list_checkpoints(store, damaged=True),
        "manifest": lambda: (found := newest_checkpoint(store)) and read_manifest(store, found),
        "generations": lambda: read_generations(store),
        "claim": lambda: claim_generation(store, Generation(number=2, token="u", world_size=1)),
        "sweep": lambda: sweep_root(store, Policy(keep_last=1), SnapshotId(1, 20)),
        "replaced": lambda: store.put(name, b"z"),
        "deleted": lambda: store.delete(name),
    }


@pytest.mark.usefixtures("agent_of_the_test")
@pytest.mark.parametrize("nbytes", [0, 1024, 200_000])
def test_a_limit_on_the_size_of_files_is_named(nbytes: int, tmp_path: Path) -> None:
    def limited_child() -> None:  # whatever the test's process writes into would be limited too
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        with pytest.raises(SharedMemoryError, match=f"ulimit -f: {nbytes} bytes"):
            _step(tmp_path / "run", "j")
        assert list(memory_root().iterdir()) == [], "a directory of nothing"
        with pytest.raises(StoreError, match="ulimit -f"):
            open_store(tmp_path / "root").put("a", bytes(300_000))

    assert ended(fork(limited_child)) == 0
