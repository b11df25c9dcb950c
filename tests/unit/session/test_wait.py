"""`ckpt.wait()` ends also where training was quicker than the daemon."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir, net
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- fixtures
from support.proxy import Proxy
from support.ranks import wait_for
from support.s3 import s3_server

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import attempts, coordinator, service
from flashckpt.daemon.persister.service import Daemon
from flashckpt.errors import PersistError, StoreError, UnsupportedStateError
from flashckpt.session import durability
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
from flashckpt.storage.factory import open_store


def test_persist_step_overwritten_before_the_daemon_came_wait_has_a_newer_one_persisted(tmp_path: Path) -> None:
    """The snapshot of the persist step is gone from all slots when the daemon starts: it persists the newest instead."""
    agent_dir()  # nobody starts a daemon
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=4, job="t") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()
        for step in range(1, 8):
            model(torch.ones(2, 24)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            ckpt._alive()._stager.finish()  # every snapshot is taken, so that 5, 6 and 7 fill the slots
        JobDirectory.open("t").ensure_daemon()
        ckpt.wait(timeout=60)
    (info,) = list_checkpoints(open_store(tmp_path / "root"))
    assert info.step == 7


def test_a_step_between_the_intervals_is_persisted_on_request(tmp_path: Path) -> None:
    """As the last step of a run: `wait()` returns when it is on storage, and none of the others is."""
    agent_dir()
    model = net()
    with Checkpointer(str(tmp_path / "root"), snapshot_every=4, persist_every=100, job="t") as ckpt:
        ckpt.track(model=model)
        ckpt.restore()
        for step in range(1, 8):
            ckpt.step(step, persist=step == 7)
        JobDirectory.open("t").ensure_daemon()
        ckpt.wait(timeout=60)
        assert [info.step for info in list_checkpoints(open_store(tmp_path / "root"))] == [7]
        assert "000007" in (tmp_path / "root" / "LATEST").read_text()  # a script that reads it now is told of this one


def test_where_time_decides_wait_does_not_wait_for_it(tmp_path: Path) -> None:
    with begun(tmp_path / "root", persist_every="7d") as ckpt, turning("t"):
        for step in (1, 2):  # the first one is persisted at once, the second one only where it is asked for
            ckpt.step(step)
            ckpt.wait(timeout=60)
    assert [info.step for info in list_checkpoints(open_store(tmp_path / "root"))] == [2, 1]


class Fault:
    """A root on which writing data fails while `error` is set, and what the daemon did about it."""

    def __init__(self, root: str) -> None:
        self.inner, self.error, self.attempts = open_store(root), "", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_object(self, key: str, parts: Any, nbytes: int | None = None) -> None:
        if self.error:
            self.attempts += 1
            raise StoreError(self.error)
        self.inner.put_object(key, parts, nbytes)


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Failing storage, and a daemon that would wait for an hour before it tries again by itself."""
    found = Fault(str(tmp_path / "root"))
    monkeypatch.setattr(coordinator, "open_store", lambda *_, **__: found)
    monkeypatch.setattr(attempts, "BACKOFF_S", (3600.0,))
    return found


@contextlib.contextmanager
def turning(job: str) -> Iterator[Daemon]:
    """A daemon that turns in a thread."""
    directory = JobDirectory.open(job)
    lock = directory.hold_daemon()
    assert lock is not None
    daemon, end = Daemon(directory, lock, service.DaemonTimeouts(linger_s=3600.0)), threading.Event()

    def turn() -> None:
        while not end.wait(0.005):
            daemon.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield daemon
    finally:
        end.set()
        thread.join()
        daemon.close()


def begun(root: Path, **settings: Any) -> Checkpointer:
    agent_dir()
    ckpt = Checkpointer(root, **{"snapshot_every": 1, "persist_every": 1, "job": "t", **settings})
    ckpt.track(model=net())
    ckpt.restore()
    return ckpt


@pytest.mark.parametrize("timeout", [30, None])
def test_storage_is_back_wait_has_it_tried_at_once_and_raises_no_old_error(
    timeout: float | None, tmp_path: Path, fault: Fault
) -> None:
    ckpt = begun(tmp_path / "root")
    fault.error = "no space left"
    ckpt.step(1)
    with turning("t") as daemon:
        wait_for(lambda: daemon.error, what="the failure")
        before = fault.attempts
        fault.error = ""
        ckpt.wait(timeout)
        assert fault.attempts == before
    assert [i.step for i in list_checkpoints(open_store(tmp_path / "root"))] == [1]
    crash(ckpt)


@pytest.mark.parametrize("timeout", [30, None])
def test_storage_still_fails_wait_raises_what_it_says_now_and_the_next_wait_tries_again(
    timeout: float | None, tmp_path: Path, fault: Fault
) -> None:
    ckpt = begun(tmp_path / "root")
    fault.error = "no space left"
    ckpt.step(1)
    with turning("t") as daemon:
        wait_for(lambda: daemon.error, what="the failure")
        for attempt, text in enumerate(("the token has expired", "connection refused")):
            fault.error = text
            with pytest.raises(PersistError, match=text):
                ckpt.wait(timeout)
            assert fault.attempts == attempt + 2, "tried once for each call"
        fault.error = ""
        ckpt.wait(timeout)
    crash(ckpt)


def test_an_attempt_that_was_under_way_and_fails_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began before `wait()`: what it met may be over. The one after it counts."""
    monkeypatch.setattr(attempts, "BACKOFF_S", (3600.0,))
    store, entered, go = Fault(str(tmp_path / "root")), threading.Event(), threading.Event()
    real = store.inner.put_object

    def put_object(key: str, parts: Any, nbytes: int | None = None) -> None:
        store.attempts += 1
        if store.attempts == 1:
            raise StoreError("the first fault")
        if store.attempts == 2:
            entered.set()
            assert go.wait(60)
            raise StoreError("the second fault")
        real(key, parts, nbytes)

    monkeypatch.setattr(store, "put_object", put_object, raising=False)
    monkeypatch.setattr(coordinator, "open_store", lambda *_, **__: store)
    ckpt = begun(tmp_path / "root")
    ckpt.step(1)
    with turning("t") as daemon:
        wait_for(lambda: daemon.error, what="the first fault")
        JobDirectory.open("t").ask("retry-now")
        assert entered.wait(60)
        asked = ckpt._alive().directory.ask

        def ask(name: str, **options: int) -> int:
            found = asked(name, **options)
            go.set()
            return found

        monkeypatch.setattr(ckpt._alive().directory, "ask", ask)
        ckpt.wait(30)
        assert store.attempts == 3
    crash(ckpt)


def test_wait_says_why_snapshots_were_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object, **__: object) -> bytes:
        raise UnsupportedStateError("the value of 'x' cannot be held")

    monkeypatch.setattr("flashckpt.snapshot.stager.encode_manifest", encode)
    ckpt = begun(tmp_path / "root", persist_every=2)
    for step in (1, 2, 3, 4):
        ckpt.step(step)
    with turning("t"), pytest.raises(PersistError, match="step 4 of generation 1 is not on storage") as caught:
        ckpt.wait(30)
    assert "the snapshot of step 4 was discarded: the value of 'x' cannot be held" in caught.value.found
    assert "no snapshot of it" in caught.value.state
    crash(ckpt)


def test_a_persist_step_whose_snapshot_was_discarded_is_made_up_for_by_the_next_one(tmp_path: Path) -> None:
    ckpt = begun(tmp_path / "root", persist_every=2)
    life = ckpt._alive()
    ckpt.step(1)
    ckpt.step(2)
    life._stager.finish()
    life._wanted.discarded(SnapshotId(1, 2), ValueError("changed while it was copied"), persist=True)
    ckpt.step(3)
    life._stager.finish()
    assert life._wanted.taken == (1, 3)
    with turning("t"):
        ckpt.wait(30)
    assert list_checkpoints(open_store(tmp_path / "root"))[0].step == 3
    crash(ckpt)


def test_a_snapshot_that_cannot_be_taken_any_more_is_said_and_the_newest_one_is_persisted(tmp_path: Path) -> None:
    """The optimizer has stepped since the skipped persist step: what is there now is no whole step."""
    agent_dir()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path / "root", snapshot_every=1, persist_every=2, job="t")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    life = ckpt._alive()
    ckpt.step(1)
    ckpt.step(2)
    life._stager.finish()
    life._wanted.discarded(SnapshotId(1, 2), ValueError("changed while it was copied"), persist=True)
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    with turning("t"):
        with pytest.raises(PersistError, match="step 2 of generation 1") as caught:
            ckpt.wait(30)
        assert "call wait() right after ckpt.step()" in caught.value.found
        assert "changed while it was copied" in caught.value.found
        wait_for(lambda: list_checkpoints(open_store(tmp_path / "root")), what="the newest one")
    crash(ckpt)


@pytest.mark.matrix
@pytest.mark.usefixtures("default_client")
def test_s3_blip_between_two_waits_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused credentials and a server that is gone, through a real proxy; then all is well again."""
    monkeypatch.setattr(attempts, "BACKOFF_S", (3600.0,))
    with s3_server() as server:
        proxy = Proxy(server.endpoint)
        options = server.options(retries=1, timeout_s=5.0) | {"endpoint_url": proxy.endpoint}
        ckpt = begun(f"s3://{server.bucket}/run", storage_options=options)  # type: ignore[arg-type]  # a URL will do
        with turning("t") as daemon:
            ckpt.step(1)
            ckpt.wait(30)
            proxy.refused_key = str(options["key"])
            ckpt.step(2)
            with pytest.raises(PersistError):
                ckpt.wait(30)
            proxy.refused_key = None
            ckpt.wait(30)
            proxy.stop()
            ckpt.step(3)
            wait_for(lambda: daemon.error, what="the failure")
            proxy.start()
            ckpt.wait(30)
        steps = [i.step for i in list_checkpoints(server.open("run"))]
        assert steps[0] == 3
        crash(ckpt)
        proxy.stop()


def test_a_step_that_is_to_be_persisted_is_on_storage_whatever_the_interval(tmp_path: Path) -> None:
    ckpt = begun(tmp_path / "root", snapshot_every=100, persist_every=100)
    with turning("t"):
        ckpt.step(1)
        ckpt.step(2, persist=True)
        ckpt.step(3)
        ckpt.wait(30)
    assert [i.step for i in list_checkpoints(open_store(tmp_path / "root"))] == [2]
    crash(ckpt)


def test_a_step_that_is_to_be_persisted_waits_for_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it skipped, `wait()` would take it later: of a model that something else may have changed by then."""
    ckpt = begun(tmp_path / "root", snapshot_every=100, persist_every=100)
    life = ckpt._alive()
    take, refusals = life._take, iter([False, False])
    monkeypatch.setattr(life, "_take", lambda step, **how: next(refusals, True) and take(step, **how))
    ckpt.step(1, persist=True)
    assert life._wanted.taken == (1, 1)
    assert not life.stats.get("skipped")
    crash(ckpt)


def trained(root: Path, upto: int, *, wait_s: float, persist: bool = False) -> tuple[int, Checkpointer]:
    """Restore, train up to a step, and call wait(); return the step that was restored."""
    model = net()
    ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=5, job="t")
    ckpt.track(model=model)
    report = ckpt.restore()
    first = report.step if report else 0
    try:
        for step in range(first + 1, upto + 1):
            ckpt.step(step, persist=persist)
            ckpt._alive()._stager.finish()
        ckpt.wait(wait_s)
    finally:
        crash(ckpt)
    return first, ckpt


def test_steps_restored_from_memory_before_the_first_persist_step_are_not_waited_for(tmp_path: Path) -> None:
    """As without the restart: nothing is to be on storage yet."""
    for restored in (0, 4):
        assert trained(tmp_path / "root", 4, wait_s=0.2)[0] == restored


@pytest.mark.matrix
@pytest.mark.parametrize("last", [5, 7], ids=["of a persist step", "of another step"])
def test_what_was_restored_from_memory_is_waited_for_until_it_is_on_storage(tmp_path: Path, last: int) -> None:
    root = tmp_path / "root"
    with pytest.raises(PersistError, match="step 5 of generation 1"):
        trained(root, last, wait_s=0.2)
    with pytest.raises(PersistError, match=f"step {last} of generation 1 is not on storage"):
        trained(root, last, wait_s=0.2)
    JobDirectory.open("t").ensure_daemon()
    assert trained(root, last, wait_s=60)[0] == last
    assert max(info.step for info in list_checkpoints(open_store(root))) == last
    before = [info.identity for info in list_checkpoints(open_store(root))]
    assert trained(root, last, wait_s=60)[0] == last
    assert [info.identity for info in list_checkpoints(open_store(root))] == before, "it was there already"


def test_step_that_was_persisted_on_request_and_restored_from_memory_is_waited_for(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(PersistError, match="step 2 of generation 1 is not on storage"):
            trained(tmp_path / "root", 2, wait_s=0.2, persist=True)


def test_what_was_restored_from_storage_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    with pytest.raises(PersistError):
        trained(root, 5, wait_s=0.1)
    JobDirectory.open("t").ensure_daemon()
    trained(root, 5, wait_s=60)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "elsewhere"))
    assert trained(root, 5, wait_s=0.2)[0] == 5


def test_silent_daemon_ends_a_wait_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds its lock and says nothing, and nobody replaces it."""
    monkeypatch.setattr(durability, "SILENT_S", 0.3)
    lock = JobDirectory.open("t").hold_daemon()
    assert lock is not None
    with pytest.raises(PersistError, match="has reported nothing for"):
        trained(tmp_path / "root", 5, wait_s=60)
    lock.close()


def test_failures_of_the_persister_reach_the_callback_once_and_again_after_they_had_ended(tmp_path: Path) -> None:
    directory, seen = JobDirectory.open("t"), list[Exception]()
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=5, job="t")
    ckpt.on_failure = seen.append
    ckpt.track(model=net())
    ckpt.restore()
    for step, error in enumerate(["", "full", "full", "fuller", "", "full"], start=1):
        status = DaemonStatus(error=error and f"the disk is {error}\n  found:    0 B", failures=step, updated_ns=step)
        directory.write_status(status)
        ckpt.step(step)
    crash(ckpt)
    assert [getattr(error, "found", "") for error in seen] == ["the disk is full; found: 0 B"] * 2
    assert all(isinstance(error, PersistError) for error in seen)
