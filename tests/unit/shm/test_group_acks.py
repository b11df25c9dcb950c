"""Records of groups of ranks: merged in any order they say what the ranks' own lists say, and never more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.acks import (
    MAX_COMMON,
    MAX_OTHERS,
    NOBODY,
    AckedSnapshots,
    decode_group,
    encode_group,
    merge_acks,
    node_acks,
)
from flashckpt.shm.control import MAX_COMPLETE, RankAcks

IDS = st.integers(1, 9).map(lambda step: SnapshotId(2, step))
LISTS = st.builds(RankAcks.of, st.lists(IDS, unique=True, max_size=6), st.none() | IDS)
LONG = st.lists(st.integers(1, 40).map(lambda step: SnapshotId(2, step)), unique=True, max_size=MAX_COMPLETE + 8)
RANKS = st.lists(st.none() | LISTS, min_size=1, max_size=8)


def from_lists(held: Sequence[RankAcks | None], restored: SnapshotId | None) -> AckedSnapshots:
    """What follows, computed from all lists at once."""
    lists = [part for part in held if part is not None]
    everything = {identity for part in lists for identity in part.complete}
    unrecoverable = {i for i in everything if i != restored and any(p.lacks(i) for p in lists)}
    common: set[SnapshotId] = {restored} if restored is not None else set()
    if lists and len(lists) == len(held):
        common |= set.intersection(*(set(part.complete) for part in lists))
    return AckedSnapshots(common=tuple(sorted(common, reverse=True)), unrecoverable=frozenset(unrecoverable))


def cut(ranks: Sequence[Any], at: Sequence[int]) -> list[Sequence[Any]]:
    ends = sorted({0, len(ranks), *(one % (len(ranks) + 1) for one in at)})
    return [ranks[a:b] for a, b in itertools.pairwise(ends)]


@given(RANKS, st.lists(st.integers(0, 8), max_size=3), st.none() | IDS)
def test_by_way_of_nodes_the_same_is_known_as_from_all_lists(ranks: Any, at: Any, restored: Any) -> None:
    nodes = [node_acks(part) for part in cut(ranks, at)]
    assert merge_acks(nodes).known(restored) == from_lists(ranks, restored)
    assert merge_acks([*nodes, *nodes[::-1]]) == merge_acks(nodes), "an equal record given twice changes nothing"
    assert merge_acks([merge_acks(nodes[:1]), *nodes[1:]]) == merge_acks(nodes)


@given(
    st.lists(st.builds(RankAcks.of, LONG, st.none() | IDS), min_size=1, max_size=6),
    st.lists(st.integers(0, 8), max_size=3),
)
def test_lists_that_were_cut_say_less_and_nothing_else(ranks: Any, at: Any) -> None:
    found, whole = merge_acks([node_acks(part) for part in cut(ranks, at)]).known(), from_lists(ranks, None)
    assert found.common == whole.common
    assert found.unrecoverable <= whole.unrecoverable


def test_of_more_ids_than_fit_the_newest_are_kept_and_older_ones_are_not_judged() -> None:
    """Were an id that was cut off taken for one that the group does not hold, its last copy could go."""
    ranks = [RankAcks.of([SnapshotId(2, 16 * rank + i) for i in range(10)]) for rank in range(40)]
    first, second = merge_acks([node_acks(ranks[:20])]), node_acks(ranks[20:])
    full = merge_acks([first, second])
    assert len(full.lacked) + len(full.open) == MAX_OTHERS
    oldest_kept = min((*full.lacked, *full.open))
    assert full.listed_above < oldest_kept
    for identity in (i for rank in ranks for i in rank.complete if i < oldest_kept):
        assert not full.lacks(identity)
    same = [RankAcks.of([SnapshotId(2, step) for step in range(MAX_COMPLETE)])] * 3
    assert len(node_acks(same).common) == MAX_COMMON


@given(RANKS)
def test_records_survive_their_bytes(ranks: Any) -> None:
    what = node_acks(ranks)
    assert decode_group(encode_group(what)) == what


@pytest.mark.parametrize("raw", [b"", b"x" * 63, b"\xff" * 64, encode_group(NOBODY) + b"\0" * 16])
def test_bytes_that_are_no_record_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|ids"):
        decode_group(raw)
