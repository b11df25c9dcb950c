"""Partners and the rows that go to them: properties of pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.planning.test_directory import box, manifest

from flashckpt.core.manifest import decode_manifest, encode_manifest
from flashckpt.core.records import chunk_count
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.replicate.partners import partner_map, senders_to
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision, decide
from flashckpt.replicate.replica_rows import ReplicaMap, masks_of, replica_manifest, row_keys, rows_for

DOMAINS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


@given(domains=DOMAINS, replicas=st.integers(0, 2))
def test_each_node_has_partners_of_other_nodes_and_is_as_often_a_partner(domains: list[str], replicas: int) -> None:
    found = partner_map(domains, replicas)
    count = min(replicas, len(domains) - 1)
    for node, partners in enumerate(found):
        assert len(set(partners)) == len(partners) == count
        assert node not in partners
        assert len(senders_to(found, node)) == count
    assert found == partner_map(list(domains), replicas)


@given(domains=DOMAINS)
def test_partner_is_in_another_domain_as_often_as_a_one_to_one_map_allows(domains: list[str]) -> None:
    found = partner_map(domains, 1)
    largest = max(Counter(domains).values())
    best = len(domains) if 2 * largest <= len(domains) else 2 * (len(domains) - largest)
    assert sum(domains[p[0]] != domains[node] for node, p in enumerate(found) if p) == best


@given(groups=st.integers(3, 5), size=st.integers(1, 4))
def test_two_partners_lie_in_two_other_domains_where_there_are_three_of_a_size(groups: int, size: int) -> None:
    domains = [f"rack{k % groups}" for k in range(groups * size)]
    for node, partners in enumerate(partner_map(domains, 2)):
        assert len({domains[node], *(domains[p] for p in partners)}) == 3


@settings(max_examples=200)
@given(
    domains=st.lists(st.sampled_from("abcd"), min_size=1, max_size=6),
    replicas=st.integers(1, 2),
    per_node=st.integers(1, 2),
    data=st.data(),
)
def test_each_row_is_held_by_enough_nodes_and_sent_by_one_rank_only_where_it_is_not(
    domains: list[str], replicas: int, per_node: int, data: st.DataObject
) -> None:
    nodes = len(domains)
    partners = partner_map(domains, replicas)
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    rows = st.lists(st.integers(0, 9), max_size=8, unique=True)
    keys = {rank: np.array(data.draw(rows), np.uint64) for rank in range(len(node_of))}
    known = ReplicaMap(node_of=node_of, domains=domains, partners=partners, replicas=replicas)
    masks = known.masks(keys)
    for key in range(10):
        holders = {node_of[rank] for rank, own in keys.items() if key in own.tolist()}
        sent = [(rank, int(masks[rank][own.tolist().index(key)])) for rank, own in keys.items() if key in own.tolist()]
        senders = [(rank, mask) for rank, mask in sent if mask]
        assert len(senders) <= 1
        targets = {partners[node_of[rank]][k] for rank, mask in senders for k in range(2) if mask >> k & 1}
        assert not targets & holders
        if not holders:
            continue
        copies = len(holders | targets)
        domains_before = len({domains[node] for node in holders})
        if domains_before > replicas:
            assert not targets
        else:
            assert copies >= min(replicas + 1, nodes)
            assert len(targets) <= replicas + 1 - domains_before


def test_data_parallel_replicas_on_two_nodes_are_not_sent_and_what_one_rank_alone_holds_is() -> None:
    rows = [box("w", (8, 4), (0, 0), (8, 4)), box("rng@rank0", (16,), (0,), (16,))]
    others = [rows[0], box("rng@rank1", (16,), (0,), (16,))]
    known = ReplicaMap(node_of=[0, 1], domains=["a", "b"], partners=partner_map(["a", "b"], 1), replicas=1)
    masks = known.masks({r: row_keys(manifest(r, one).table) for r, one in enumerate((rows, others))})
    assert [mask.tolist() for mask in masks.values()] == [[0, 1], [0, 1]]


def test_rows_nobody_asked_about_go_to_all_partners() -> None:
    known = np.array([5, 3], np.uint64)
    found = masks_of(np.array([3, 4, 5], np.uint64), known, np.array([1, 2], np.uint8), unknown=3)
    assert found.tolist() == [2, 3, 1]
    assert rows_for(found, 1).tolist() == [0, 1]
    assert masks_of(known, known[:0], np.zeros(0, np.uint8), unknown=1).tolist() == [1, 1]


def test_replica_manifest_holds_the_rows_close_together_with_their_digests_and_all_values() -> None:
    shards = [box(f"w{k}", (700, 1000), (0, 0), (700, 1000)) for k in range(3)]
    whole = manifest(2, [*shards, box("b", (3,), (0,), (3,))], {"step": 4})
    part = decode_manifest(encode_manifest(replica_manifest(whole, np.array([1, 3]))))
    assert part.is_part
    assert not decode_manifest(encode_manifest(whole)).is_part
    assert [part.table.fqn(row) for row in range(2)] == ["w1", "b"]
    assert part.values == {"step": 4}
    assert part.table.byte_offset.tolist() == [0, -(-shards[0].nbytes // 4096) * 4096]
    chunks = chunk_count(shards[0].nbytes)
    assert part.digests.tolist() == [*range(chunks, 2 * chunks), 3 * chunks]


def ids(*steps: int) -> tuple[SnapshotId, ...]:
    return tuple(SnapshotId(1, step) for step in steps)


def report(
    held: Sequence[int],
    replicated: Sequence[int] = (),
    target: int | None = None,
    *,
    kept: int | None = None,
    everywhere: int | None = None,
    committed: int | None = None,
    reached: Sequence[int] | None = None,
) -> NodeReport:
    """A report of a node; where it passes its partner over, `reached` says what the others hold."""
    return NodeReport(
        held=ids(*held),
        replicated=ids(*replicated),
        target=SnapshotId(1, target) if target else None,
        everywhere=SnapshotId(1, everywhere or kept or 0) if everywhere or kept else None,
        kept=SnapshotId(1, kept) if kept else None,
        committed=SnapshotId(1, committed) if committed else None,
        passed_over=() if reached is None else (1,),
        reached=None if reached is None else ids(*reached),
    )


def test_newest_that_all_hold_is_sent_and_stays_the_target_until_it_is_everywhere() -> None:
    assert decide([report([2, 4]), report([2])]).target == (1, 2)
    assert decide([report([2, 4], target=2), report([2, 4])]).target == (1, 2)
    assert decide([report([4], [2]), report([2, 4], target=2)]).target == (1, 2)
    done = decide([report([4], [2]), report([4], [2])])
    assert (done.everywhere, done.kept, done.target) == ((1, 2), (1, 2), (1, 4))
    assert decide([report([4], [2]), None]).target is None
    assert decide([report([3, 4]), report([3, 4])], every=3).target == (1, 3)


def test_what_one_node_has_lost_is_not_sent() -> None:
    found = decide([report([6], [2, 4]), report([6], [2])])
    assert (found.everywhere, found.target) == ((1, 2), (1, 6))


def test_silent_node_is_passed_over_what_was_everywhere_stays_and_the_rest_moves_on_beside_it() -> None:
    def both(held: Sequence[int], sent: Sequence[int], target: int | None) -> RoundDecision:
        sends, cannot = report(held, sent, target, kept=2), report(held, [2], target, kept=2, reached=sent)
        return decide([sends, cannot, None], silent={2})

    first = both([2, 4], [2], None)
    assert (first.kept, first.target, first.without) == ((1, 2), (1, 4), (1, 2))
    second = both([2, 4], [2, 4], 4)
    assert (second.kept, second.target) == ((1, 2), (1, 4))  # nothing newer: it stays where it comes from, too
    third = both([2, 4, 6], [2, 4], 4)
    assert (third.kept, third.target) == ((1, 2), (1, 6))


def test_what_has_arrived_from_all_but_a_silent_node_may_be_everywhere_and_stays_until_storage_has_it() -> None:
    """The silent one may have had that decision of a process that is gone, and let go of what was everywhere before."""
    for committed, kept, target in ((None, 2, 4), (2, 2, 4), (4, 4, 6)):
        one = report([2, 4, 6], [2, 4], 4, kept=2, committed=committed)
        found = decide([one, one, None], silent={2})
        assert (found.kept, found.target) == ((1, kept), (1, target)), committed


def test_what_was_everywhere_gives_way_without_a_node_only_once_it_is_on_storage() -> None:
    for committed, kept in ((None, 2), (1, 2), (2, 4), (3, 4)):
        them = [report([4, 6], [2, 4], 4, kept=2, committed=committed), report([4, 6], [2], 4, kept=2, reached=[2, 4])]
        assert decide(them).kept == (1, kept), committed
    later = report([6, 8], [4, 6], 6, everywhere=2, kept=4, committed=2)
    assert decide([later, report([6, 8], [2], 6, everywhere=2, kept=4, reached=[4, 6])]).kept == (1, 6)
    alone = decide([report([4], [4], 4), report([4], [], 4, reached=[4])])
    assert alone.kept == (1, 4)  # nothing was everywhere before


def test_what_is_kept_stays_so_for_a_process_that_has_just_begun_to_decide_and_when_the_node_is_back() -> None:
    back = decide([report([6], [4], kept=4), report([6], [4], kept=4), report([6], [2], kept=2)])
    assert (back.kept, back.everywhere, back.target, back.without) == ((1, 4), None, (1, 6), ())
    holds_it = decide([report([6], [4], kept=4), report([6], [4], kept=4), report([4, 6], [2], kept=2)])
    assert holds_it.target == (1, 4)
    done = decide([report([6], [4, 6], kept=4), report([6], [4, 6], kept=4), report([6], [2, 6], kept=2)])
    assert (done.everywhere, done.kept) == ((1, 6), (1, 6))
