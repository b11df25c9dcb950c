"""Who takes part in a synchronisation of groups that are separate runs, and which samples each trains next."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import DamagedError, LayoutError
from flashckpt.storage.posix import PosixStore
from flashckpt.trainer.config import from_values
from flashckpt.trainer.parallel.groups import rosters_of, run_of_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.separate_runs.meeting import GroupMeeting
from flashckpt.trainer.separate_runs.roster import Here, Roster, Synchronisations, decide, first_roster, refuse_others


def here(group: int, version: int, step: int = 4) -> Here:
    return Here(group=group, version=version, step=step, address=f"127.0.0.1:{group}")


def test_all_that_have_come_train_the_next_shares() -> None:
    found = decide(1, {group: here(group, 0) for group in range(3)}, first_roster(3))
    assert (found.groups, found.gave, found.shares, found.owed, found.unused) == (
        (0, 1, 2),
        (0, 1, 2),
        (3, 4, 5),
        (),
        6,
    )
    assert (found.step, found.base, found.address) == (4, 0, "127.0.0.1:0")


def test_the_share_of_a_group_that_is_left_out_goes_to_another() -> None:
    found = decide(1, {0: here(0, 0), 2: here(2, 0)}, first_roster(3))
    assert dict(zip(found.groups, found.shares, strict=True)) == {0: 1, 2: 3}
    assert found.unused == 4


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_group_that_is_left_out_is_named_also_the_last_one(absent: int, caplog: pytest.LogCaptureFixture) -> None:
    meeting = GroupMeeting.__new__(GroupMeeting)
    meeting._count = 3
    found = decide(1, {group: here(group, 0) for group in range(3) if group != absent}, first_roster(3))
    meeting._report(found)
    assert caplog.messages[0].endswith(f"; left out: group {absent}")


def test_groups_of_other_settings_are_refused_and_one_that_says_none_is_not() -> None:
    refuse_others(["a", "a", ""])
    with pytest.raises(LayoutError, match="groups that synchronise have different settings") as refused:
        refuse_others(["b", "a", ""])
    assert (refused.value.found, refused.value.expected) == ("a", "b")


def test_a_group_that_is_taken_in_gives_nothing_and_gets_a_share() -> None:
    before = decide(1, {0: here(0, 0), 2: here(2, 0)}, first_roster(3))
    found = decide(2, {0: here(0, 1, 8), 1: here(1, 0, 3), 2: here(2, 1, 8)}, before)
    assert (found.gave, found.groups, found.step) == ((0, 2), (0, 1, 2), 8)
    assert found.shares == (4, 5, 6)


def test_groups_that_all_lost_a_synchronisation_continue_behind_the_one_before() -> None:
    first = decide(1, {group: here(group, 0) for group in range(2)}, first_roster(2))
    found = decide(3, {0: here(0, 1, 6), 1: here(1, 0, 4)}, first)
    assert (found.again, found.base, found.step) == (True, 1, 4)
    assert (found.gave, found.shares, found.owed, found.unused) == ((0,), (2, 3), (), 4)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
def test_each_share_counts_once_whoever_is_lost(seed: int, count: int) -> None:
    """Groups come or do not, or all go back to older snapshots; what counted and what is to be trained are all shares given."""
    draw, rosters = random.Random(seed), [first_roster(count)]
    took, counted = {group: [0] for group in range(count)}, {0: list[int]()}
    for number in range(1, 20):
        if draw.random() < 0.2:
            took = {group: before[: draw.randint(1, len(before))] for group, before in took.items()}
        versions = {group: before[-1] for group, before in took.items()}
        newest = max(versions.values())
        come = {*range(count)}
        if newest == number - 1:
            able = [group for group in come if versions[group] == newest]
            come = {draw.choice(able), *(group for group in come if draw.random() < 0.6)}
        base = rosters[max(versions[group] for group in come)]
        found = decide(number, {group: here(group, versions[group]) for group in come}, base)
        gave = [] if found.again else found.gave
        counted[number] = counted[base.number] + [base.share_of(group) for group in gave]
        for group in found.groups:
            took[group].append(number)
        rosters.append(found)
        assert len(counted[number]) == len({*counted[number]})
        assert sorted([*counted[number], *found.shares, *found.owed]) == [*range(found.unused)]


def meetings(folder: Path, count: int, patience_s: float = 0.0) -> Synchronisations:
    return Synchronisations(PosixStore(folder), count, patience_s)


def test_a_synchronisation_waits_for_groups_and_no_longer_than_it_may(tmp_path: Path) -> None:
    patient, hasty = meetings(tmp_path, 2, 1e9), meetings(tmp_path, 2)
    folder = patient.open_attempt(1)
    patient.come(folder, here(0, 0))
    assert patient.decided(folder, 1) is None
    found = hasty.decided(folder, 1)
    assert found is not None
    assert found.groups == (0,)
    patient.come(folder, here(1, 0))
    assert patient.decided(folder, 1) == found, "decided once"


@pytest.mark.parametrize("is_back", [False, True])
def test_a_group_that_was_left_out_is_not_waited_for_and_taken_in_when_it_is_there(
    tmp_path: Path, is_back: bool
) -> None:
    patient, hasty = meetings(tmp_path, 3, 1e9), meetings(tmp_path, 3)
    folder = hasty.open_attempt(1)
    hasty.come(folder, here(0, 0))
    hasty.come(folder, here(1, 0))
    assert hasty.decided(folder, 1) is not None
    assert hasty.settle(folder, is_good=True)
    folder = patient.open_attempt(2)
    if is_back:
        patient.come(folder, here(2, 0))
    patient.come(folder, here(0, 1))
    assert patient.decided(folder, 2) is None, "the second took part in the one before"
    assert patient.missing(folder, 2) == [1]
    patient.come(folder, here(1, 1))
    found = patient.decided(folder, 2)
    assert found is not None
    assert found.groups == ((0, 1, 2) if is_back else (0, 1))
    assert found.gave == (0, 1)


def test_groups_that_are_behind_wait_for_one_that_is_not(tmp_path: Path) -> None:
    all_there = meetings(tmp_path, 3, 1e9)
    folder = all_there.open_attempt(1)
    for group in range(3):
        all_there.come(folder, here(group, 0))
    assert all_there.decided(folder, 1) is not None
    assert all_there.settle(folder, is_good=True)
    folder = all_there.open_attempt(2)
    all_there.come(folder, here(0, 0))
    all_there.come(folder, here(1, 0))
    assert all_there.decided(folder, 2) is None, "the third has what counted"
    all_there.come(folder, here(2, 1))
    found = all_there.decided(folder, 2)
    assert found is not None
    assert found.gave == (2,)


def test_a_synchronisation_took_place_when_its_outcome_is_written(tmp_path: Path) -> None:
    met = meetings(tmp_path, 1)
    folder = met.open_attempt(1)
    met.come(folder, here(0, 0))
    assert met.decided(folder, 1) is not None
    assert (met.newest(), met.roster(1), met.is_over(folder)) == (0, None, False)
    assert not met.settle(folder, is_good=False)
    assert not met.settle(folder, is_good=True), "the first word counts"
    assert met.newest() == 0
    again = met.open_attempt(1)
    assert again != folder
    met.come(again, here(0, 0))
    assert met.decided(again, 1) is not None
    assert met.settle(again, is_good=True)
    assert met.newest() == 1
    assert met.roster(1) == met.decided(again, 1)


def test_a_damaged_roster_is_named(tmp_path: Path) -> None:
    met = meetings(tmp_path, 1)
    folder = met.open_attempt(1)
    met.come(folder, here(0, 0))
    assert met.decided(folder, 1) is not None
    path = tmp_path / folder / "roster"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedError, match=r"0000001\.0/roster"):
        met.decided(folder, 1)


APART = {"sync_every": 10, "groups": 2, "group": 1}


def test_a_group_has_its_part_of_the_batch_and_its_own_folders() -> None:
    run = from_values({"parallel": APART, "checkpoint": {"root": "s3://b/run", "job": "j"}, "log": {"folder": "out"}})
    found = run_of_group(run)
    assert (found.train.global_batch, run.train.global_batch) == (8, 16)
    assert (found.checkpoint.root, found.checkpoint.job, found.log.folder) == (
        "s3://b/run/group1",
        "j-group1",
        "out/group1",
    )
    assert rosters_of(found) == "s3://b/run/synchronisations"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"parallel": {"group": 2}}, "number of one of the groups"),
        ({"parallel": {"dp_replicate": 2, "dp_shard": 1}}, "separate runs"),
        ({"checkpoint": {"root": ""}}, "objects on storage"),
        ({"train": {"steps": 95}}, "whole intervals"),
        ({"checkpoint": {"snapshot_every": 4}}, "a snapshot has to follow"),
        ({"guard": {"on_spike": "rollback"}}, "leave out samples"),
        ({"phase": {"each": [{"from_step": 6, "global_batch": 4}]}}, "one order"),
        ({"train": {"global_batch": 15}}, "as many samples"),
    ],
)
def test_what_does_not_go_with_separate_runs_is_refused(sections: dict[str, dict[str, object]], problem: str) -> None:
    values: dict[str, dict[str, object]] = {"parallel": {**APART}, "checkpoint": {"root": "out/run"}}
    for section, content in sections.items():
        values[section] = {**values.get(section, {}), **content}
    with pytest.raises(LayoutError, match=problem):
        resolve_layout(run_of_group(from_values(values)), 2 if "dp_replicate" in values["parallel"] else 1)


def test_a_roster_says_what_a_group_trains() -> None:
    assert isinstance(first_roster(2), Roster)
    assert [first_roster(2).share_of(group) for group in range(2)] == [0, 1]
