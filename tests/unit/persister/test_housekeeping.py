"""Retention and sweep in their own thread: nothing waits for them, and what comes meanwhile is done after it."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from support.ranks import wait_for

from flashckpt.checkpoint.retention import Policy
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import housekeeping
from flashckpt.daemon.persister.housekeeping import Housekeeper
from flashckpt.errors import RootError
from flashckpt.storage.store import Store


class Root:
    """Counts how often it was opened and closed."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    def open(self) -> Store:
        self.opened += 1
        return cast("Store", self)

    def close(self) -> None:
        self.closed += 1


def test_requests_return_at_once_and_those_that_wait_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def retain(store: Store, policy: Policy) -> None:
        del store, policy
        did.append("retain")
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(housekeeping, "apply_retention", retain)
    monkeypatch.setattr(housekeeping, "sweep_root", lambda store, policy, committed: did.append(f"sweep {committed}"))
    root = Root()
    keeper = Housekeeper(root.open, Policy())
    keeper.retain()
    assert begun.wait(60)
    for _ in range(5):
        keeper.retain()
    keeper.sweep(SnapshotId(1, 10))
    assert keeper.is_busy
    may_end.set()
    keeper.close(60)
    assert did == ["retain", "sweep step 10 of generation 1"], "a sweep includes retention"
    assert (root.opened, root.closed) == (1, 1)


def test_thread_that_cannot_be_started_is_tried_again_with_the_next_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    did: list[str] = []
    monkeypatch.setattr(housekeeping, "apply_retention", lambda *_: did.append("retain"))
    keeper = Housekeeper(Root().open, Policy())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        keeper.retain()
        keeper.retain()
    assert (keeper.is_busy, len(caplog.records)) == (False, 1)
    keeper.retain()
    keeper.close(60)
    assert did == ["retain"]


def test_failure_is_logged_once_and_the_next_request_connects_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(store: Store, policy: Policy) -> None:
        raise RootError("the credentials were refused")

    monkeypatch.setattr(housekeeping, "apply_retention", refused)
    root = Root()
    keeper = Housekeeper(root.open, Policy())
    for count in (1, 2):
        keeper.retain()
        wait_for(lambda: not keeper.is_busy, what="the end of the thread")
        assert root.opened == root.closed == count
    assert caplog.text.count("the credentials were refused") == 1
