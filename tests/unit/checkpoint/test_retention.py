"""What is kept, what is deleted, in which order, and who is never deleted under."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import wait_for
from support.slots import make_pin, shard

from flashckpt import faults
from flashckpt.checkpoint.catalog import (
    CheckpointInfo,
    list_checkpoints,
    newest_checkpoint,
    read_contents,
    read_manifest,
)
from flashckpt.checkpoint.intents import abandon_intent, abandoned_reason, close_intent, list_intents, put_intent
from flashckpt.checkpoint.retention import (
    LEASE_S,
    TOMBSTONE_AGE_S,
    Policy,
    ReadLease,
    choose_expired,
    decode_lease,
    keep,
    kept_prefixes,
    leased,
    leased_prefixes,
    prune,
    reading,
    unkeep,
)
from flashckpt.checkpoint.root_records import (
    CATALOG,
    MANIFEST,
    claim_generation,
    newest_generation,
    owns_generation,
    prefix_of,
    read_generations,
)
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.intent import Intent
from flashckpt.core.lineage import Generation
from flashckpt.core.schema import HEAD_BYTES, TensorFigures
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, NoCheckpointError, RootError
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore
from flashckpt.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def make(store: Store, *steps: int, generation: int = 1, parent: SnapshotId | None = None) -> None:
    for step in steps:
        prefix = prefix_of(generation, step)
        persist_slot(make_pin([shard("w", (40_000,))], step=step, generation=generation, parent=parent), store, prefix)
        commit(store, prefix, [0])


def steps_of(store: Store) -> list[int]:
    return [info.step for info in list_checkpoints(store)][::-1]


def info(generation: int, step: int) -> CheckpointInfo:
    return CheckpointInfo(prefix=prefix_of(generation, step), generation=generation, step=step)


IDENTITIES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), unique=True, max_size=20)


@settings(deadline=None)  # how long an example takes says nothing on a busy machine
@given(
    identities=IDENTITIES,
    keep_last=st.integers(0, 6),
    keep_every=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_newest_valid_marked_and_leased_ones_always_stay(
    identities: list[SnapshotId], keep_last: int, keep_every: int | None, data: st.DataObject
) -> None:
    infos = [info(*identity) for identity in identities]
    some = st.sets(st.sampled_from(identities)) if identities else st.just(set())
    abandoned, marked, leased = data.draw(some), data.draw(some), data.draw(some)
    expired = choose_expired(
        infos,
        Policy(keep_last=keep_last, keep_every=keep_every),
        abandoned=abandoned,
        kept={prefix_of(*i) for i in marked},
        leased={prefix_of(*i) for i in leased},
    )
    gone = {i.identity for i in expired}
    live = sorted(set(identities) - abandoned, reverse=True)
    assert not gone & (marked | leased)
    assert not gone & set(live[: max(1, keep_last)])
    if keep_every:
        assert all(step % keep_every for _, step in gone - abandoned)
    free = {i for i in live[max(1, keep_last) :] if not (keep_every and i[1] % keep_every == 0)} - marked - leased
    assert free <= gone
    assert choose_expired(infos, Policy(keep_last=None)) == []


def test_suspect_checkpoints_take_no_place_of_clean_ones() -> None:
    clean, bad = (
        [info(1, step) for step in (10, 20, 30)],
        [replace(info(1, step), suspects=1) for step in range(40, 70, 10)],
    )
    expired = choose_expired([*clean, *bad], Policy(keep_last=2))
    assert [one.step for one in expired] == [10, 40]  # 20 and 30 are the newest clean ones, 50 and 60 the newest of all
    assert choose_expired([clean[0], *bad], Policy(keep_last=1)) == [bad[0], bad[1]]
    assert choose_expired(bad, Policy(keep_last=1)) == bad[:2]


def test_retention_sees_what_is_suspect_without_a_catalogue(store: Store) -> None:
    make(store, 10, 20)
    for step in (30, 40, 50):
        pin = make_pin([shard("w", (40_000,))], step=step)
        figures = TensorFigures.unknown(1)
        figures.suspect[0] = True
        pin.manifest_ = replace(pin.manifest_, figures=figures)
        persist_slot(pin, store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
    for _ in range(2):  # the second time the catalogue has what the first one added
        prune(store, Policy(keep_last=1))
        assert steps_of(store) == [20, 50]
    assert [one.suspects for one in list_checkpoints(store)] == [1, 0]
    assert not [one for one in store.list(CATALOG) if "000050" in one.key and "deleted" not in one.key]


def test_policy_keeps_the_last_the_multiples_and_the_marked(store: Store) -> None:
    make(store, 5, 10, 15, 20, 25, 30, 35)
    keep(store, prefix_of(1, 5))
    would = prune(store, Policy(keep_last=2, keep_every=20), dry_run=True)
    assert steps_of(store) == [5, 10, 15, 20, 25, 30, 35]
    swept = prune(store, Policy(keep_last=2, keep_every=20))
    assert steps_of(store) == [5, 20, 30, 35]
    assert swept.checkpoints == would.checkpoints == tuple(prefix_of(1, s) for s in (10, 15, 25))
    assert swept.nbytes > 3 * 160_000
    unkeep(store, prefix_of(1, 5))
    prune(store, Policy(keep_last=1))
    assert steps_of(store) == [35]
    prune(store, Policy(keep_last=0))
    assert steps_of(store) == [35]


def test_mark_on_a_checkpoint_that_is_not_there_is_refused(store: Store) -> None:
    make(store, 5)
    with pytest.raises(NoCheckpointError, match="step-000000006"):
        keep(store, prefix_of(1, 6))


def test_mark_that_comes_while_others_are_deleted_holds_or_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has read the marks and chosen: whoever is first of the two has it, and nobody is told otherwise."""
    make(store, 10, 20, 30)
    refused: list[str] = []

    def between(name: str) -> None:
        if name == "persist.before-prune":
            keep(store, prefix_of(1, 10))
        elif name in ("persist.after-claim", "persist.during-prune"):
            with pytest.raises(NoCheckpointError) as error:
                keep(store, prefix_of(1, 20))
            refused.append(error.value.problem + error.value.found)

    monkeypatch.setattr("flashckpt.checkpoint.retention.crash_point", between)
    assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 20),)
    assert "has begun to delete it" in refused[0]
    assert "was deleted" in refused[1]
    assert steps_of(store) == [10, 30]
    assert kept_prefixes(store) == {prefix_of(1, 10)}
    assert [info.key for info in store.list("keep/")] == [f"keep/{prefix_of(1, 10)}"]


def test_mark_of_a_checkpoint_that_was_deleted_meanwhile_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, 10, 20)
    put_if_absent = store.put_if_absent

    def late(key: str, data: bytes) -> bool:
        if data == b"":
            assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 10),)
        return put_if_absent(key, data)

    monkeypatch.setattr(store, "put_if_absent", late)
    with pytest.raises(NoCheckpointError, match="was deleted"):
        keep(store, prefix_of(1, 10))
    assert store.list("keep/") == []


def test_checkpoints_that_a_later_generation_left_behind_go_first(store: Store) -> None:
    make(store, 10, 20, 30)
    assert claim_generation(store, Generation(number=1, token="a", parent=None))
    assert claim_generation(store, Generation(number=2, token="b", parent=SnapshotId(1, 10)))
    make(store, 15, generation=2, parent=SnapshotId(1, 10))
    newest = newest_checkpoint(store)
    assert newest is not None
    assert newest.identity == (2, 15)
    prune(store, Policy(keep_last=2))
    assert [i.identity for i in list_checkpoints(store)] == [(2, 15), (1, 10)]


def test_generation_that_begins_while_retention_works_keeps_what_it_began_with(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, 10, 20)
    assert claim_generation(store, Generation(number=1, token="a", parent=None))
    back = Generation(number=2, token="b", parent=SnapshotId(1, 10))
    points = iter(["persist.after-claim"])

    def between(name: str) -> None:
        if name == "persist.after-claim" and next(points, None):
            assert claim_generation(store, back)

    monkeypatch.setattr("flashckpt.checkpoint.retention.crash_point", between)
    assert prune(store, Policy(keep_last=1)).checkpoints == ()
    assert steps_of(store) == [10, 20]
    assert store.list("keep/") == [], "it may be marked again"
    assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 20),)


def test_reader_holds_its_checkpoint_against_retention_until_it_lets_go(store: Store) -> None:
    make(store, 10, 20, 30)
    with reading(store, prefix_of(1, 10), seconds=2.0) as manifest:
        assert manifest.step == 10

        def expires_s() -> float:
            key = store.list("leases/")[0].key
            return decode_lease(store.get(key), key)

        first = expires_s()
        wait_for(lambda: expires_s() > first, what="the lease to be renewed")
        prune(store, Policy(keep_last=1))
        assert steps_of(store) == [10, 30]
    prune(store, Policy(keep_last=1))
    assert steps_of(store) == [30]
    assert store.list("leases/") == []


def test_root_that_may_only_be_read_is_read_without_a_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, 10)

    def refusing(key: str, data: bytes) -> None:
        raise RootError(f"cannot write {key}")

    monkeypatch.setattr(store, "put", refusing)
    with reading(store, prefix_of(1, 10)) as manifest:
        assert manifest.step == 10


def test_dead_readers_lease_expires(store: Store) -> None:
    make(store, 10, 20)
    ReadLease(store, prefix_of(1, 10), seconds=100)
    prune(store, Policy(keep_last=1))
    assert steps_of(store) == [10, 20]
    prune(store, Policy(keep_last=1), now_s=time.time() + LEASE_S + 1)
    assert steps_of(store) == [20]
    sweep(store, now_s=time.time() + LEASE_S + 1)
    assert store.list("leases/") == []


def test_lease_of_a_reader_whose_clock_is_behind_holds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage says when the lease was written: what the reader's machine believes of the time does not matter."""
    make(store, 10, 20)
    behind_s = time.time() - 86_400
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: behind_s)
        ReadLease(store, prefix_of(1, 10))
    prune(store, Policy(keep_last=1))
    sweep(store)
    assert steps_of(store) == [10, 20]


def test_lease_taken_during_the_deletion_keeps_the_data(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader looked at MANIFEST just before it was deleted: it may read on."""
    make(store, 10, 20)
    taken: list[ReadLease] = []

    def between(name: str) -> None:
        if name == "persist.during-prune":
            taken.append(ReadLease(store, prefix_of(1, 10)))

    monkeypatch.setattr("flashckpt.checkpoint.retention.crash_point", between)
    assert prune(store, Policy(keep_last=1)).checkpoints == ()
    assert store.head(f"{prefix_of(1, 10)}/r00000.p0.fck") is not None
    assert sweep(store, older_than_s=0).orphans == ()
    with pytest.raises(NoCheckpointError), reading(store, prefix_of(1, 10)):
        pass
    taken[0].close()
    assert sweep(store).orphans == (prefix_of(1, 10),)
    assert store.head(f"{prefix_of(1, 10)}/r00000.p0.fck") is None


@pytest.mark.parametrize(
    "point",
    [
        "persist.before-prune",
        "persist.after-claim",
        "persist.before-tombstone",
        "persist.during-prune",
        "persist.after-prune",
        "store.before-publish",
    ],
)
def test_killed_while_pruning_no_half_checkpoint_is_visible_and_the_sweep_finishes(store: Store, point: str) -> None:
    make(store, 10, 20, 30)
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(point)
            prune(store, Policy(keep_last=1))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    for entry in list_checkpoints(store):
        merged = read_manifest(store, entry)
        assert all(store.head(f"{entry.prefix}/{name}") for name in merged.objects)
    prune(store, Policy(keep_last=1))
    sweep(store)
    assert steps_of(store) == [30]
    left = [i.key for i in store.list("step-") if not i.key.startswith(prefix_of(1, 30))]
    assert all(key.endswith(MANIFEST) for key in left)
    sweep(store, now_s=time.time() + TOMBSTONE_AGE_S + 1)
    assert [name for name in store.folders() if name.startswith("step-")] == [prefix_of(1, 30)]
    assert [key for info in store.list(CATALOG) if not (key := info.key).startswith(CATALOG + prefix_of(1, 30))] == []
    assert store.list("keep/") == []
    assert not list(Path(store.url).rglob("*.tmp"))


def test_uncommitted_folder_is_swept_only_when_nobody_can_need_it(store: Store) -> None:
    persist_slot(make_pin([shard("w", (9,))], step=10), store, prefix_of(1, 10))
    persist_slot(make_pin([shard("w", (9,))], step=40), store, prefix_of(1, 40))
    assert list(read_contents(store, verify=0).uncommitted) == [prefix_of(1, 10), prefix_of(1, 40)]
    assert sweep(store, older_than_s=0).orphans == ()  # nothing is committed: nothing is certain
    make(store, 20)
    assert sweep(store).orphans == ()  # too young
    put_intent(store, Intent(generation=1, step=10, writers=(0,)))
    assert sweep(store, older_than_s=0).orphans == ()  # an intent is open
    close_intent(store, 1, 10)
    would = sweep(store, older_than_s=0, dry_run=True)
    assert would.orphans == (prefix_of(1, 10),)
    assert len(store.list(prefix_of(1, 10))) == 2
    assert sweep(store, older_than_s=0).orphans == (prefix_of(1, 10),)
    assert [i.key for i in store.list(prefix_of(1, 10))] == [f"{prefix_of(1, 10)}/{MANIFEST}"]
    # newer than the newest commit: it may still come
    assert list(read_contents(store, verify=0).uncommitted) == [prefix_of(1, 40)]


def test_missing_right_to_sweep_uploads_is_said_and_stops_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, 10)

    def refusing(*, older_than_s: float) -> list[str]:
        raise RootError("the credentials were refused", found="AccessDenied")

    monkeypatch.setattr(store, "sweep", refusing)
    assert sweep(store).temporary == ()
    assert "cannot be swept: AccessDenied" in caplog.text


def test_damaged_manifest_is_never_swept(store: Store) -> None:
    make(store, 10, 20)
    path = Path(store.url) / prefix_of(1, 10) / MANIFEST
    path.write_bytes(path.read_bytes()[:-1])
    assert sweep(store, older_than_s=0).orphans == ()
    assert (path.parent / "r00000.p0.fck").exists()


def test_generation_is_claimed_once_and_known_again_by_its_token(store: Store) -> None:
    mine = Generation(number=4, token="mine", parent=SnapshotId(3, 120), world_size=8, created_s=5.0)
    assert newest_generation(store) == 0
    assert claim_generation(store, mine)
    assert not claim_generation(store, Generation(number=4, token="theirs"))
    assert claim_generation(store, mine)  # the answer to the first try was lost
    assert owns_generation(store, mine)
    assert read_generations(store) == [mine]
    assert newest_generation(store) == 4
    make(store, 10, generation=7)
    assert newest_generation(store) == 7
    store.put("generations/000005", b"\x93garbage")
    with pytest.raises(DamagedError, match="000005"):
        read_generations(store)


@pytest.mark.parametrize("point", ["generation.before-claim", "generation.after-claim", "store.before-publish"])
def test_killed_while_claiming_the_next_life_claims_a_number_of_its_own(store: Store, point: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(point)
            claim_generation(store, Generation(number=1, token="dead"))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    number = newest_generation(store) + 1
    assert claim_generation(store, Generation(number=number, token="next"))
    assert number == (2 if point == "generation.after-claim" else 1)


def test_intent_is_decided_once_taken_over_and_closed(store: Store) -> None:
    intent = Intent(generation=3, step=120, writers=(0, 1, 5), leader="node0", created_s=1.5)
    assert put_intent(store, intent)
    assert not put_intent(store, Intent(generation=3, step=120, writers=(0,)))
    assert list_intents(store) == [intent]
    later = Intent(generation=3, step=140, writers=(0, 1, 5))
    put_intent(store, later)
    assert list_intents(store) == [later, intent]
    assert abandoned_reason(store, 3, 120) is None
    abandon_intent(store, 3, 120, "rank 5 lost its slot")
    assert abandoned_reason(store, 3, 120) == "rank 5 lost its slot"
    assert list_intents(store) == [later]
    close_intent(store, 3, 120)
    close_intent(store, 3, 140)
    assert store.list("intents/") == []


@pytest.mark.parametrize("point", ["persist.before-intent", "persist.after-intent", "store.before-publish"])
def test_killed_while_deciding_the_next_leader_decides_or_finds_the_decision(store: Store, point: str) -> None:
    intent = Intent(generation=3, step=120, writers=(0,))
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(point)
            put_intent(store, intent)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    put_intent(store, intent)
    assert list_intents(store) == [intent]


def test_leases_are_by_checkpoint(store: Store) -> None:
    first, second = ReadLease(store, prefix_of(1, 10)), ReadLease(store, prefix_of(1, 10))
    first.close()
    assert leased_prefixes(store) == {prefix_of(1, 10)}
    second.close()
    assert leased_prefixes(store) == set()


class Counting(PosixStore):
    """A root that counts the bytes read of MANIFESTs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.read_bytes += len(data) if key.endswith(MANIFEST) else 0
        return data

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        super().get_range(key, start, out)
        self.read_bytes += len(out) if key.endswith(MANIFEST) else 0


def test_listing_commit_and_sweep_read_the_start_of_each_manifest_only(tmp_path: Path) -> None:
    wide = [shard(f"layers.{i}.weight", (3,)) for i in range(2000)]
    store = Counting(tmp_path / "root")
    for step in (10, 20, 30):
        persist_slot(make_pin(wide, step=step), store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
    size = store.head(f"{prefix_of(1, 10)}/{MANIFEST}")
    assert size is not None
    assert size.nbytes > 30 * HEAD_BYTES
    store.read_bytes = 0
    newest = newest_checkpoint(store)
    assert newest is not None
    assert (newest.identity, newest.tensors, newest.nbytes, newest.is_whole) == ((1, 30), 2000, 24_000, False)
    sweep(store)
    assert not commit(store, prefix_of(1, 30), [0]), "it is there already"
    assert not prune(store, Policy(keep_last=3)).checkpoints
    assert store.read_bytes <= 8 * HEAD_BYTES
    assert newest_checkpoint(store, whole=True) == replace(newest, is_whole=True)
    assert store.read_bytes > size.nbytes


def test_retention_counts_only_manifests_that_hold_whole(tmp_path: Path) -> None:
    """A flipped bit behind the summary is not seen by a listing; before anything is deleted it is."""
    store = open_store(tmp_path / "root")
    for step in (10, 20, 30):
        make(store, step)
    path = tmp_path / "root" / prefix_of(1, 30) / MANIFEST
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert steps_of(store) == [10, 20, 30]
    assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 10),)
    newest = newest_checkpoint(store, whole=True)
    assert newest is not None
    assert newest.step == 20
    assert path.exists(), "what is damaged is left to be looked at"


def test_a_lease_is_renewed_after_an_error_that_nobody_foresaw(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewals = []

    def renew(_: ReadLease) -> None:
        renewals.append(1)
        if len(renewals) == 2:
            raise ValueError("a client's own")

    monkeypatch.setattr(ReadLease, "renew", renew)
    with leased(store, prefix_of(1, 10), seconds=0.03):
        wait_for(lambda: len(renewals) > 2, what="another renewal")
    assert "could not be renewed: a client's own" in caplog.text


def dated(*ages_h: float, now_s: float) -> list[CheckpointInfo]:
    """Checkpoints of so many hours ago, the oldest of step 1."""
    return [replace(info(1, step), created_s=now_s - 3600 * age) for step, age in enumerate(sorted(ages_h)[::-1], 1)]


def test_checkpoints_are_kept_for_a_time_and_the_newest_in_any_case() -> None:
    now_s = 1_800_000_000.0
    infos = dated(50, 30, 23, 5, now_s=now_s)
    policy = Policy(keep_last=1, keep_last_s=86400)
    assert [one.step for one in choose_expired(infos, policy, now_s=now_s)] == [1, 2]
    assert [one.step for one in choose_expired(infos, policy, now_s=now_s + 10 * 86400)] == [1, 2, 3]


def test_the_first_of_each_interval_stays_and_no_later_one_takes_its_place() -> None:
    now_s = 1_800_000_000.0  # a whole hour
    infos = dated(2.9, 2.1, 1.9, 1.5, 0.5, 0.1, now_s=now_s)
    policy = Policy(keep_last=1, keep_every_s=3600)
    assert [one.step for one in choose_expired(infos, policy, now_s=now_s)] == [2, 4]
    gone = {1, 3}
    rest = [one for one in infos if one.step not in {2, 4}]
    assert choose_expired(rest, policy, now_s=now_s) == []
    abandoned = {one.identity for one in infos if one.step in gone}
    assert [one.step for one in choose_expired(infos, policy, abandoned=abandoned, now_s=now_s)] == [1, 3]
    suspect = [replace(one, suspects=1) if one.step in gone else one for one in infos]
    assert [one.step for one in choose_expired(suspect, policy, now_s=now_s)] == [1, 3]


def test_a_commit_leaves_what_is_younger_than_the_time(store: Store) -> None:
    make(store, 10, 20, 30)
    prune(store, Policy(keep_last=1, keep_last_s=3600))
    assert steps_of(store) == [10, 20, 30]
    prune(store, Policy(keep_last=1, keep_last_s=3600), now_s=time.time() + 4000)
    assert steps_of(store) == [30]
