"""Several nodes: one decision per job, whatever their speed; a lost leader is taken over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.daemons import assert_bitwise, daemon_of, forked, identities
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint import writer
from flashckpt.checkpoint.intents import Proposals
from flashckpt.checkpoint.root_records import MANIFEST
from flashckpt.checkpoint.writer import write_together
from flashckpt.core.intent import NodeProposal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import coordinator, flush, messaging, negotiation, persist
from flashckpt.daemon.persister.agreement import Search, choose_proposal, next_candidate, of_other_nodes
from flashckpt.daemon.persister.housekeeping import Housekeeper
from flashckpt.daemon.persister.retire import superseded
from flashckpt.daemon.persister.seeker import Seeker
from flashckpt.daemon.persister.service import Daemon
from flashckpt.faults import CRASH_POINTS
from flashckpt.shm.inventory import scan
from flashckpt.shm.segment import Pin
from flashckpt.storage.store import Store

assert "persist.after-intent" in CRASH_POINTS
NODES = 3


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeJob]]:
    """One job on three nodes of two ranks each: three memory tiers, one root."""
    monkeypatch.setattr(persist, "LEASE_S", 0.0)
    monkeypatch.setattr(messaging, "ROOT_LOOK_S", 0.0)
    made = []
    for node in range(NODES):
        memory = tmp_path / f"node{node}"
        memory.mkdir()
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(memory))
        made.append(
            FakeJob(str(tmp_path / "root"), world=2 * NODES, ranks=[2 * node, 2 * node + 1], nodes=NODES, node=node)
        )
    for job in made[1:]:
        job.record = made[0].record
        job.directory.write_generation(job.record)
    yield made
    for job in made:
        job.die()


@contextlib.contextmanager
def daemons_of(nodes: list[FakeJob]) -> Iterator[list[Daemon]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(daemon_of(node)) for node in nodes]


def turn_all(daemons: list[Daemon], condition: Callable[[], object], what: str) -> None:
    def once() -> object:
        for daemon in daemons:
            daemon.turn()
        return condition()

    wait_for(once, what=what)


def test_a_commit_longer_than_its_lease_keeps_it_and_no_other_node_begins_one(
    nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of all persisters moves by 1.5 s with each round; the commit ends when the test says so."""
    clock = SimpleNamespace(now=1000.0, time=time.time)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(persist, "LEASE_S", 5.0)
    monkeypatch.setattr(coordinator, "time", clock)
    monkeypatch.setattr(flush, "time", clock)
    monkeypatch.setattr(flush, "QUICK_S", 0.0)
    may_end, begun = threading.Event(), []

    def commit(store: Store, prefix: str, writers: Any, **more: Any) -> bool:
        if store.head(f"{prefix}/{MANIFEST}") is None:
            begun.append(prefix)
            assert may_end.wait(60)
        return writer.commit(store, prefix, writers, **more)

    monkeypatch.setattr(coordinator, "commit", commit)
    with daemons_of(nodes) as daemons, contextlib.ExitStack() as stack:
        stack.callback(may_end.set)  # also where the test fails: the daemons wait for their commits
        for job in nodes:
            job.step(10, persist=True)

        def rounds(condition: Callable[[], object]) -> Callable[[], object]:
            def once() -> object:
                clock.now += 1.5
                return condition()

            return once

        turn_all(daemons, rounds(lambda: begun), "the commit to begin")
        ends_s = clock.now + 4 * persist.LEASE_S
        turn_all(daemons, rounds(lambda: clock.now > ends_s), "four times the lease to pass")
        assert identities(nodes[0]) == []
        leases = list(Path(nodes[0].root).glob("*/committer.*"))
        assert (len(begun), len(leases)) == (1, 1), "one commits, and nobody has taken the lease over"
        assert [daemon.error for daemon in daemons] == ["", "", ""], "the turns of all nodes continue meanwhile"
        may_end.set()
        turn_all(daemons, rounds(lambda: (1, 10) in identities(nodes[0])), "the commit")
    assert_bitwise(nodes, (1, 10))


def test_all_nodes_persist_the_same_step_and_it_is_whole(nodes: list[FakeJob]) -> None:
    with daemons_of(nodes) as daemons:
        for job in nodes:
            job.step(10, persist=True)
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 10)], "the commit")
        turn_all(daemons, lambda: all(d.persisting and d.persisting.flush is None for d in daemons), "all to unpin")
        assert [d.error for d in daemons] == ["", "", ""]
    assert_bitwise(nodes, (1, 10))


def test_the_snapshot_to_meet_at_is_held_however_long_the_root_takes(
    nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 has promised step 20. While it waits for the root, step 20 is taken, and five more."""
    node, read = nodes[1], Proposals.read
    meeting = SnapshotId(1, 20)

    def slowly(self: Proposals, store: Store, generation: int, *, of_all: bool = True) -> list[NodeProposal]:
        if (1, 15) in node.common():
            node.step(20, persist=True)
            wait_for(lambda: all(rank.segment.busy() for rank in node.ranks), what="step 20 to be held", deadline_s=5)
            assert all(node.step(step) for step in range(21, 26))
        return read(self, store, generation, of_all=of_all)

    monkeypatch.setattr(Proposals, "read", slowly)
    with daemon_of(node) as daemon:
        node.step(10, persist=True)
        daemon.turn()
        assert daemon.persisting is not None
        leader = NodeProposal(ranks=(0, 1), world_size=2 * NODES, at_least=meeting)
        Proposals().publish(daemon.persisting._connected(), 1, leader)
        daemon.turn()
        assert daemon.persisting.negotiation.sought == meeting
        node.step(15)
        daemon.turn()
        assert meeting in node.common()
        daemon.turn()
        assert daemon.persisting.negotiation.candidate == meeting


def test_what_is_held_is_let_go_where_a_restore_empties_its_slots(nodes: list[FakeJob]) -> None:
    node = nodes[1]
    seeker, before = Seeker(lambda: scan(node.directory)), scan(node.directory)
    with seeker.seeking(SnapshotId(1, 20)):
        node.step(20, persist=True)
        wait_for(lambda: all(rank.segment.busy() for rank in node.ranks), what="step 20 to be held", deadline_s=5)
    seeker.let_go(before)
    assert all(rank.segment.busy() for rank in node.ranks), "the turn that is over did not know of it"
    for rank in node.ranks:
        for slot in rank.segment.busy():
            rank.segment.mark_empty(slot)
    seeker.let_go(scan(node.directory))
    assert not any(rank.segment.busy() for rank in node.ranks), "else a rank with two slots takes no snapshot any more"


def test_a_limit_on_threads_keeps_nobody_from_asking_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    seeker, asked = Seeker(lambda: pytest.fail("no thread looks")), list[bool]()
    with seeker.seeking(SnapshotId(1, 20)):
        asked.append(True)
    seeker.let_go()
    assert asked


def test_only_the_node_with_rank_0_sweeps_for_all(nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "SWEEP_EVERY_S", 0.0)
    asked: list[Housekeeper] = []
    monkeypatch.setattr(Housekeeper, "sweep", lambda keeper, committed: asked.append(keeper))
    with daemons_of(nodes) as daemons:
        for job in nodes:
            job.step(10, persist=True)
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 10)] and len(asked) >= 2 * NODES, "sweeps")
        first = daemons[0].persisting
        assert first is not None
        assert {id(keeper) for keeper in asked} == {id(first.housekeeper)}


class _Clock:
    """Makes a persist take a number of steps of training: time is what the loop says."""

    def __init__(self, durations: dict[int, int]) -> None:
        self.durations, self.now = durations, 0
        self.changed = threading.Condition()

    def persist(self, pins: list[Pin], *args: Any) -> object:
        with self.changed:
            end = self.now + self.durations[pins[0].header.rank // 2]
            self.changed.wait_for(lambda: self.now >= end, timeout=30)
        return write_together(pins, *args)

    def tick(self) -> None:
        with self.changed:
            self.now += 1
            self.changed.notify_all()


@pytest.mark.matrix
def test_three_daemons_of_different_speed_all_slower_than_the_interval_still_commit(
    nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Persist steps come every 4 steps; a persist takes 6, 9 and 14; daemons look every 1, 2 and 3 steps."""
    clock = _Clock({0: 6, 1: 9, 2: 14})
    monkeypatch.setattr(flush, "write_together", clock.persist)
    with daemons_of(nodes) as daemons:
        for step in range(1, 161):
            for job in nodes:
                assert job.step(step, persist=step % 4 == 0), "training is never slowed, no snapshot is skipped"
            clock.tick()
            for node, daemon in enumerate(daemons):
                if step % (node + 1) == 0:
                    daemon.turn()
        clock.now = 10**6
        clock.tick()
        turn_all(daemons, lambda: all(d.persisting and d.persisting.flush is None for d in daemons), "the last commit")
        skipped = daemons[0].persisting.skipped if daemons[0].persisting else 0
        assert [d.error for d in daemons] == ["", "", ""]
    done = identities(nodes[0])
    assert len(done) >= 3, done  # keep_last is 3: what was committed before was pruned
    assert done[-1][1] >= 120
    assert skipped >= 10
    for identity in done:
        assert_bitwise(nodes, identity)


def test_leader_lost_after_its_index_is_taken_over(nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(daemon_of(nodes[0]))
        others = [stack.enter_context(daemon_of(node)) for node in nodes[1:]]
        for job in nodes:
            job.step(10, persist=True)
        turn_all([*others, leader], lambda: leader.persisting and leader.persisting.flush, "the intent")
        assert leader.persisting is not None
        assert leader.persisting.flush is not None
        writes = leader.persisting.flush
        wait_for(lambda: not writes.is_writing, what="the leader's own slots")
        turn_all(others, lambda: identities(nodes[0]) == [(1, 10)], "another node to commit")
    assert_bitwise(nodes, (1, 10))


@pytest.mark.parametrize("point", ["lease.before-take", "lease.after-take"])
def test_leader_killed_about_its_lease_another_node_commits(nodes: list[FakeJob], point: str) -> None:
    with daemons_of(nodes[1:]) as others, forked(nodes[0], crash_at=point) as leader:
        for job in nodes:
            job.step(10, persist=True)

        def dead() -> bool:
            for daemon in others:
                daemon.turn()
            return leader.poll() is not None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(persist, "LEASE_S", 1e6)  # nobody else takes it before
            wait_for(dead, what="the leader to die")
        leader.wait_killed()
        assert identities(nodes[0]) == []
        assert bool(list(Path(nodes[0].root).rglob("committer.*"))) == (point == "lease.after-take")
    with daemons_of(nodes[1:]) as others:
        turn_all(others, lambda: identities(nodes[0]) == [(1, 10)], "another node to commit")
    assert_bitwise(nodes, (1, 10))


def test_leader_lost_before_its_index_next_daemon_of_its_node_finishes(nodes: list[FakeJob]) -> None:
    with daemons_of(nodes[1:]) as others:
        with daemon_of(nodes[0]) as leader:
            for job in nodes:
                job.step(10, persist=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flush.Flush, "start", lambda self, store, ranks: None)
                turn_all([*others, leader], lambda: leader.persisting and leader.persisting.flush, "the intent")
        turn_all(others, lambda: all(d.persisting and d.persisting.flush for d in others), "the others to join")
        assert identities(nodes[0]) == []
        with daemon_of(nodes[0]) as again:
            turn_all([*others, again], lambda: identities(nodes[0]) == [(1, 10)], "the commit")
    assert_bitwise(nodes, (1, 10))


def test_snapshot_gone_on_one_node_intent_is_given_up_by_all_and_the_next_one_is_committed(
    nodes: list[FakeJob],
) -> None:
    with daemons_of(nodes) as daemons:
        for job in nodes:
            job.step(10, persist=True)
        for job in nodes[2:]:  # far ahead: step 10 is overwritten before its daemon hears of the intent
            for step in (11, 12, 13):
                job.step(step)
        daemons[0].turn(), daemons[1].turn()
        for step in range(11, 21):
            for job in nodes:
                if step > 13 or job is not nodes[2]:
                    job.step(step, persist=step == 20)
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 20)], "the commit of step 20")
    assert_bitwise(nodes, (1, 20))


def test_snapshot_given_up_before_all_persisters_started_again_does_not_block_newer_ones(nodes: list[FakeJob]) -> None:
    """It is the newest that all hold; deciding on it again would change nothing, for its intent is marked."""
    for job in nodes:
        job.step(10, persist=True)
    segment = nodes[1].ranks[0].segment
    with segment.path.open("r+b") as file:  # a bit flips in the slot, after the digests were taken
        slot = next(k for k, header in enumerate(segment.headers()) if header.is_complete)
        file.seek(segment.spec.data_at(slot) + 5)
        file.write(b"\xff\xfe")
    with daemons_of(nodes) as daemons:
        turn_all(
            daemons, lambda: all(d.persisting and d.persisting.floor == (1, 10) for d in daemons), "all to give it up"
        )
    with daemons_of(nodes) as daemons:
        for _ in range(5):
            for daemon in daemons:
                daemon.turn()
        for job in nodes:
            job.step(20, persist=True)
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 20)], "the commit of step 20")
    assert_bitwise(nodes, (1, 20))


def test_machine_replaced_while_an_intent_is_open_does_not_make_the_others_wait(
    nodes: list[FakeJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job continues from that very step, so that the intent is not rolled back; nobody holds ranks 4 and 5 of it."""
    for job in nodes:
        job.step(10, persist=True)
    real = flush.Flush.start

    def start(self: flush.Flush, store: Store, ranks: Iterable[int]) -> None:
        if 4 not in ranks:  # the third node never writes
            real(self, store, ranks)

    with daemons_of(nodes[:2]) as daemons:
        with daemon_of(nodes[2]) as lost, pytest.MonkeyPatch.context() as patch:
            patch.setattr(flush.Flush, "start", start)
            turn_all([*daemons, lost], lambda: lost.persisting and lost.persisting.flush, "all to join the intent")
        (memory := tmp_path / "replaced").mkdir()
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(memory))
        after = FakeJob(nodes[0].root, world=2 * NODES, ranks=[4, 5], nodes=NODES, node=2)
        nodes[0].restart(2, SnapshotId(1, 10))
        job_again = [*nodes[:2], after]
        for job in job_again:
            job.generation, job.parent, job.record = 2, SnapshotId(1, 10), nodes[0].record
            job.directory.write_generation(job.record)
            job.step(11)
        try:
            with daemon_of(after) as successor:
                for _ in range(5):
                    for daemon in [*daemons, successor]:
                        daemon.turn()
                for job in job_again:
                    job.step(20, persist=True)
                turn_all([*daemons, successor], lambda: identities(nodes[0]) == [(2, 20)], "the commit of step 20")
            assert_bitwise(job_again, (2, 20))
        finally:
            after.die()


def test_persist_now_on_every_node_takes_the_newest_common_snapshot(nodes: list[FakeJob]) -> None:
    with daemons_of(nodes) as daemons:
        for job in nodes:
            job.step(5)
        nodes[0].step(6)
        nodes[1].step(6)
        for job in nodes:
            job.directory.request("persist-now")
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 5)], "the commit")
    assert_bitwise(nodes, (1, 5))


def test_nodes_restart_in_another_generation_old_and_new_snapshots_are_committed_whole(nodes: list[FakeJob]) -> None:
    with daemons_of(nodes) as daemons:
        for job in nodes:
            job.step(10, persist=True)
        turn_all(daemons, lambda: identities(nodes[0]) == [(1, 10)], "the first commit")
        for job in nodes:
            job.step(15)
        nodes[0].restart(2, SnapshotId(1, 15))
        for job in nodes:
            job.generation, job.parent, job.record = 2, SnapshotId(1, 15), nodes[0].record
            job.directory.write_generation(job.record)
            job.directory.request("persist-now")
        turn_all(daemons, lambda: (1, 15) in identities(nodes[0]), "the snapshot it was restored from")
        for job in nodes:
            job.step(20, persist=True)
        turn_all(daemons, lambda: (2, 20) in identities(nodes[0]), "the commit of the new generation")
        assert [d.error for d in daemons] == ["", "", ""]
    for identity in identities(nodes[0]):
        assert_bitwise(nodes, identity)


def test_node_of_several_retires_old_segments_only_after_a_commit_of_the_new_generation(nodes: list[FakeJob]) -> None:
    """What its own ranks hold says nothing of the other nodes (M1)."""
    job = nodes[-1]  # its memory tier is the one that is current
    for node in nodes:
        node.step(10)
    job.die()
    after = FakeJob(
        job.root,
        world=2 * NODES,
        ranks=[4, 5],
        nodes=NODES,
        generation=2,
        parent=SnapshotId(1, 10),
        shapes={"other": (12, 5)},
    )
    try:
        after.step(15)
        view = scan(after.directory, [after.record])
        assert superseded(view, after.record, None) == []
        assert superseded(view, after.record, SnapshotId(1, 10)) == []
        gone = superseded(view, after.record, SnapshotId(2, 15))
        assert sorted(held.rank for held in gone) == [4, 5]
        assert {held.header.generation for held in gone} == {1}
    finally:
        after.die()


# -- the pure decisions ----------------------------------------------------------------------------------


def ready(ranks: tuple[int, ...], pinned: SnapshotId | None, **more: object) -> NodeProposal:
    return NodeProposal(ranks=ranks, world_size=4, pinned=pinned, **more)  # type: ignore[arg-type]  # its fields


def test_no_intent_without_every_rank_or_without_agreement() -> None:
    assert choose_proposal([ready((0, 1), SnapshotId(1, 10))]) is None
    assert choose_proposal([ready((0, 1), SnapshotId(1, 10)), ready((2, 3), SnapshotId(1, 20))]) is None
    assert choose_proposal([ready((0, 1), SnapshotId(1, 10)), ready((2, 3), None)]) is None
    both = [ready((0, 1), SnapshotId(1, 10)), ready((2, 3), SnapshotId(1, 10))]
    assert choose_proposal(both) == ((1, 10), "policy")
    assert choose_proposal(both, floor=SnapshotId(1, 10)) is None


def test_record_left_behind_by_an_early_look_does_not_block_the_nodes() -> None:
    """A daemon saw rank 3's segment before rank 2's and said so: the later record of ranks 2 and 3 replaces it."""
    early, late, own = ready((3,), None), ready((2, 3), SnapshotId(1, 20)), ready((0, 1), SnapshotId(1, 20))
    assert of_other_nodes([early, late, own], (0, 1)) == [late]
    assert of_other_nodes([early, late, own], (2, 3)) == [own]  # its own are left out, under whatever name
    assert choose_proposal([own, early, late]) is None
    assert choose_proposal([own, *of_other_nodes([early, late, own], (0, 1))]) == ((1, 20), "policy")


def test_records_of_many_nodes_are_not_compared_with_each_other() -> None:
    """The leader looks at those of all nodes in every turn."""
    looked = []

    class Ranks(tuple[int, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[int]:
            looked.append(self)
            return super().__iter__()

    nodes = [ready(Ranks((2 * at, 2 * at + 1)), None) for at in range(100)]
    assert of_other_nodes([*nodes, ready((7,), None), ready((), None)], (0, 1)) == nodes[1:]
    assert len(looked) <= 2 * len(nodes)
    assert of_other_nodes([ready((), None)], (0, 1)) == [ready((), None)]


def test_urgent_request_takes_the_newest_shared_snapshot() -> None:
    one = ready((0, 1), SnapshotId(1, 10), complete=((1, 10), (1, 12), (1, 13)), urgent=True)
    two = ready((2, 3), None, complete=((1, 10), (1, 12)))
    assert choose_proposal([one, two]) == ((1, 12), "request")
    assert choose_proposal([one, two], floor=SnapshotId(1, 12)) is None


def candidate(
    search: Search, flagged: list[int], *, newest: int, others: list[NodeProposal], **more: Any
) -> tuple[Search, SnapshotId | None]:
    held = [SnapshotId(1, step) for step in flagged]
    return next_candidate(
        search, flagged=held, newest=SnapshotId(1, newest), floor=SnapshotId(1, 2), others=others, **more
    )


def test_a_node_offers_what_all_ranks_hold_and_follows_another_in_any_case() -> None:
    """Pinned by some before all hold it, a snapshot of two slots leaves none for one that all could hold."""
    silent, common = ready((2, 3), None), SnapshotId(1, 8)
    for known, wanted in ((None, 12), ([common], 8), ([], None)):
        search, found = candidate(Search(), [8, 12], newest=12, others=[silent], common=known)
        assert found == (wanted and SnapshotId(1, wanted)), known
        assert search.target == (found or Search().target)
    other = ready((2, 3), SnapshotId(1, 12))
    assert candidate(Search(), [8, 12], newest=12, others=[other], common=[common])[1] == (1, 12)


def test_a_node_that_missed_answers_with_what_it_holds_only_where_others_have_a_slot_for_it() -> None:
    passed = [ready((2, 3), SnapshotId(1, 10))]
    for slots, target, wanted in ((3, 12, SnapshotId(1, 12)), (2, 13, None)):
        search, found = candidate(Search(), [12], newest=12, others=passed, spacing=6, slots=slots)
        assert (search.target, found) == (SnapshotId(1, target), wanted), slots
        skipped = Search(target=SnapshotId(1, 10))
        search, found = candidate(skipped, [12], newest=12, others=passed, spacing=6, slots=slots)
        assert (search.target, found) == (SnapshotId(1, target), wanted), slots


def test_lateness_more_than_doubles_the_distance_to_the_next_meeting_and_a_skipped_step_does_not() -> None:
    search, late = Search(misses=2), Search()
    for step in range(10, 200, 10):  # it knew the step, and had no slot for it
        search = Search(target=SnapshotId(1, step), misses=search.misses)
        passed = [ready((2, 3), SnapshotId(1, step))]
        search, found = candidate(search, [step + 2], newest=step + 2, others=passed, spacing=4)
        assert (found, search.target) == (None, SnapshotId(1, step + 8))
    far = []
    for step in range(10, 60, 10):  # it learns of the step when that is gone
        late, found = candidate(
            Search(misses=late.misses),
            [step + 2],
            newest=step + 2,
            others=[ready((2, 3), SnapshotId(1, step))],
            spacing=4,
            slots=2,
        )
        far.append(late.target.step - step - 2)
    assert far == [1, 2, 6, 14, 30], "at first the next persist step, whichever it is"


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 6),
    looks=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    ahead=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_nodes_that_ask_the_root_at_any_rate_end_up_pinning_the_same_snapshot(
    every: int, looks: list[int], ahead: list[int]
) -> None:
    """Slots are looked at in each step, the root every `looks` steps; what a node has overwritten is gone."""
    count = len(looks)
    searches = [Search()] * count
    pins: list[SnapshotId | None] = [None] * count
    held: list[list[SnapshotId]] = [[] for _ in looks]
    heard: list[list[NodeProposal]] = [[] for _ in looks]
    said: dict[int, NodeProposal] = {}
    for step in range(1, 3000):
        for node in range(count):
            slots = [i for i in held[node] if i != pins[node]][-2:]  # three slots, one pinned
            held[node] = sorted({*slots, SnapshotId(1, step + ahead[node]), *(pin for pin in [pins[node]] if pin)})
            asks = step % looks[node] == 0
            if asks:
                heard[node] = [one for other, one in said.items() if other != node]
            searches[node], pins[node] = next_candidate(
                searches[node],
                flagged=[i for i in held[node] if i[1] % every == 0],
                newest=held[node][-1],
                floor=SnapshotId(0, 0),
                others=heard[node] or [NodeProposal(ranks=(99,), world_size=count)],
                spacing=every,
            )
            if asks:
                said[node] = NodeProposal(
                    ranks=(node,), world_size=count, pinned=pins[node], at_least=searches[node].target
                )
        if len(said) == count and choose_proposal(said.values()) is not None and len(set(pins)) == 1:
            return
    raise AssertionError(f"no agreement in 3000 steps: {pins}, {searches}")
