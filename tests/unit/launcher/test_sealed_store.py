"""Values of a rendezvous store that a stranger wrote, moved or kept from earlier: none counts."""

from __future__ import annotations

import json
import logging
import threading
from datetime import timedelta
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.utils.store import barrier

from flashckpt.daemon.launcher import findings, node_check, stop
from flashckpt.daemon.launcher.job_state import JobState
from flashckpt.daemon.launcher.sealed_store import MOST_BYTES, SealedStore
from flashckpt.daemon.launcher.stop import Group

SECRET = b"correct-horse-battery-staple"
STOP = "flashckpt/stop/request"


def sealed(store: HashStore, purpose: str = "round one", secret: bytes = SECRET) -> SealedStore:
    """Return a store whose waits end soon: most of these tests want to see one end in vain."""
    found = SealedStore(store, secret, purpose)
    found.set_timeout(timedelta(seconds=0.2))
    return found


def stop_of(store: SealedStore) -> bool:
    return stop.AgreedStop(cast("Any", None), 60.0).hear(store)


def test_values_of_the_job_are_read_and_every_byte_survives() -> None:
    store = HashStore()
    one, other = sealed(store), sealed(store)
    one.set("text", "fünf")
    one.set("bytes", bytes(range(256)))
    one.multi_set(["a", "b"], ["1", b"2"])
    assert other.get("text") == "fünf".encode()
    assert other.multi_get(["bytes", "a", "b"]) == [bytes(range(256)), b"1", b"2"]
    assert other.check(["text", "bytes", "a", "b"])
    other.wait(["a", "b"])
    assert not other.check(["a", "absent"])
    with pytest.raises(DistStoreError):
        other.wait(["absent"], timedelta(seconds=0.1))


FORGED = (b"", b"1", b"- 1", b"\xff\x00", b"0" * 64 + b" 1", b"[" * 100_000)


@pytest.mark.parametrize("value", FORGED)
def test_value_of_a_stranger_is_absent_with_one_line(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    mine = sealed(store)
    store.set(STOP, value)  # type: ignore[arg-type]  # torch takes bytes too
    with caplog.at_level(logging.WARNING, "flashckpt.dlrun"):
        for _ in range(3):
            assert not stop_of(mine)
        with pytest.raises(DistStoreError, match="no node of this job"):
            mine.get(STOP)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{STOP} in the rendezvous store is ignored, as if it were not there"
    ]
    mine.set(STOP, "1")
    assert stop_of(mine)


def test_signed_value_of_another_key_round_launch_or_secret_is_absent() -> None:
    store, mine = HashStore(), sealed(HashStore())
    earlier = JobState()
    earlier.draw()
    now = JobState()
    now.draw()
    assert earlier.token != now.token, "the same job and the same secret, launched again"
    others = [
        sealed(store, f"round job {earlier.token}"),
        sealed(store, "job job"),
        sealed(store, f"round job {now.token}", b"another secret of a job"),
        sealed(store, f"round job {now.token}", b""),
    ]
    mine = sealed(store, f"round job {now.token}")
    for other in others:
        other.set(STOP, "1")
        assert not stop_of(mine)
    mine.set("flashckpt/stop/other", "1")
    store.set(STOP, store.get("flashckpt/stop/other").decode())
    assert not stop_of(mine), "a signed value under another key"
    assert not stop_of(sealed(store, secret=b"")), "this node has no secret"


def test_forged_failure_report_is_not_shown_and_does_not_keep_the_true_one_away() -> None:
    store = HashStore()
    mine = sealed(store)
    store.set("flashckpt/first-failure", json.dumps({"rank": 0, "host": "victim", "cause": "forged", "step": 1}))
    store.set("flashckpt/node/2", json.dumps({"host": "victim", "ranks": [4]}))
    assert findings.read(mine) is None
    assert findings.describe_lost(mine, 2, "c").startswith("node c is gone")
    findings.publish(mine, findings.Finding(rank=3, host="b", cause="killed", step=7))
    assert findings.cause(sealed(store), {}) == "rank 3 on b failed first at step 7: killed"


def test_forged_node_check_does_not_begin_one() -> None:
    store, found = HashStore(), dict[int, bool]()
    store.set(f"{node_check.PREFIX}/new/0", "1")

    def one(node: int) -> None:
        mine = sealed(store)
        found[node] = node_check.is_due(Group(store=mine, rank=node, size=3), checked=True)

    threads = [threading.Thread(target=one, args=(node,)) for node in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: False, 1: False, 2: False}


def test_counter_counts_the_nodes_of_the_job_alone() -> None:
    store = HashStore()
    one, other = sealed(store), sealed(store)
    assert [one.add("left", 1), other.add("left", 1), one.add("left", 0)] == [1, 2, 2]
    store.set("left", "1000")
    assert [one.add("left", 0), other.add("left", 1)] == [0, 1]
    store.set("left", store.get("left").decode().replace(" 1", " 9"))
    assert one.add("left", 0) == 0


def test_barrier_of_torch_is_passed_by_the_nodes_of_the_job_and_not_opened_by_a_stranger() -> None:
    store = HashStore()
    store.set("end/num_members", "1")
    store.set("end/last_member", "<val_ignored>")
    with pytest.raises(DistStoreError):
        barrier(sealed(store), 2, "end", barrier_timeout=0.2)
    other = SealedStore(store, SECRET, "round one")
    barrier(other, 2, "end", barrier_timeout=60)  # the second one of two


def test_counter_that_is_changed_all_the_time_ends_in_one_error() -> None:
    class Busy(HashStore):
        def compare_set(self, _key: str, _expected: object, _wanted: object) -> bytes:
            return b"somebody else's"

    mine = SealedStore(Busy(), SECRET, "round one")
    mine.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match="could not be changed"):
        mine.add("left", 1)


def test_value_of_an_absurd_length_is_absent_even_if_it_is_signed() -> None:
    store = HashStore()
    mine = sealed(store)
    mine.set("key", "x" * MOST_BYTES)
    assert not mine.check(["key"])
    mine.set("key", "x" * (MOST_BYTES - 100))
    assert mine.check(["key"])


class Overtaken:
    """A store in which somebody else counts between the read and the swap of the first `add`."""

    def __init__(self, inner: HashStore) -> None:
        self.inner, self.is_first = inner, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compare_set(self, *words: Any) -> Any:
        if self.is_first:
            self.is_first = False
            assert sealed(self.inner).add("n", 1) == 1
        return self.inner.compare_set(*words)


def test_two_that_count_to_the_same_number_at_once_both_count() -> None:
    store: Any = Overtaken(HashStore())
    assert sealed(store).add("n", 1) == 2


def test_threads_that_count_together_lose_nothing() -> None:
    store = HashStore()
    threads = [
        threading.Thread(target=lambda: [SealedStore(store, SECRET, "p").add("n", 1) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert SealedStore(store, SECRET, "p").add("n", 0) == 80
