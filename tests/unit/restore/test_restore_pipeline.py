"""The steps of a restore as values: each planned once, none with an object per tensor, votes that say what they mean."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- fixtures
from torch import nn
from unit.planning.test_directory import box, manifest

from flashckpt import Checkpointer, collectives
from flashckpt.core.lineage import Generation
from flashckpt.core.records import mark_of
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, DisagreementError, RootError, TensorMismatchError, UnsupportedStateError
from flashckpt.native import LEVEL_VARIABLE, levels
from flashckpt.planning.box_match import has_same_regions
from flashckpt.planning.inventory import HeldSlot, Inventory, Member, left_out, memory_is_current
from flashckpt.planning.read_plan import SourceNames
from flashckpt.planning.selection import RootSummary, select, slot_locations, unreachable
from flashckpt.restore import candidate, candidate_restore, live_memory
from flashckpt.restore.absent_state import absent_state
from flashckpt.restore.destinations import copy_bytes
from flashckpt.restore.executor import collector_paused
from flashckpt.restore.requirements import LiveState, requirements
from flashckpt.restore.votes import Ballot, CandidateState, Rejection, Vote, attempted, hold
from flashckpt.shm.segment_file import address_of
from flashckpt.state.placement import World
from flashckpt.state.registry import StateRegistry


def model_of(parameters: int) -> nn.ParameterList:
    return nn.ParameterList([torch.full((3, 2), float(k)) for k in range(parameters)])


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def opened(root: Path, **things: Any) -> Checkpointer:
    ckpt = Checkpointer(str(root), snapshot_every=1, job=root.name)
    ckpt.track(**things)
    ckpt.restore()
    return ckpt


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Count the calls of a function; the list has one entry per call."""
    calls: list[int] = []
    function: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)
    return calls


def restored_again(root: Path, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    crash(opened(root, model=model, optimizer=optimizer))
    return optimizer


def test_a_candidate_is_planned_once_and_that_plan_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(5)
    ckpt = opened(tmp_path, model=model, optimizer=stepped(model))
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    plans = counting(monkeypatch, candidate, "plan_reads")
    required = counting(monkeypatch, candidate, "requirements")
    other = model_of(5)
    optimizer = restored_again(tmp_path, other)
    assert len(plans) == len(required) == 1
    assert all(torch.equal(a, b) for a, b in zip(model, other, strict=True))
    assert set(optimizer.state[other[4]]) == {"step", "exp_avg", "exp_avg_sq"}


def shards_made(root: Path, parameters: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many Shards the steps behind the reading of live state make."""
    model = model_of(parameters)
    ckpt = opened(root, model=model, optimizer=stepped(model))
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    made: list[int] = []
    check = Shard.__post_init__

    def noted(shard: Shard) -> None:
        made.append(1)
        check(shard)

    with monkeypatch.context() as patch:
        for step in ("prepare", "fill"):
            function = getattr(candidate, step)

            def counted(*arguments: Any, _function: Any = function, **named: Any) -> Any:
                with monkeypatch.context() as inner:
                    inner.setattr(Shard, "__post_init__", noted)
                    return _function(*arguments, **named)

            patch.setattr(f"flashckpt.restore.candidate_restore.{step}", counted)
        restored_again(root, model_of(parameters))
    return len(made)


def test_no_shard_is_made_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirements, plan, execution: what they make does not grow with the number of tensors."""
    few = shards_made(tmp_path / "few", 3, monkeypatch)
    assert shards_made(tmp_path / "many", 60, monkeypatch) == few


def test_memory_of_another_size_than_its_box_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are copied by address: a tensor that shrank since it was looked at must not be written beyond its end."""
    model = model_of(2)
    tracked = StateRegistry(World())
    tracked.add("model", model)
    held = [manifest(0, [box(f"model.{k}", (3, 2), (0, 0), (3, 2)) for k in range(2)])]
    required = requirements(LiveState.read(tracked), SourceNames(held), held)
    monkeypatch.setattr(live_memory, "local_of", lambda tensor: tensor.detach().reshape(-1)[:2])
    monkeypatch.setattr(torch.Tensor, "narrow", lambda self, *_: self)
    with pytest.raises(ValueError, match=r"memory of 'model\.0': 8 bytes, its box has 24"):
        live_memory.allocate(required)


def test_names_become_kinds_and_aliases_of_the_nearest_source() -> None:
    near = manifest(0, [box("a", (4, 2), (0, 0), (2, 2)), box("s@rank0", (), (), ())], {"aliases": {"tied": "a"}})
    far = manifest(1, [box("a", (4, 2), (2, 0), (2, 2)), box("b", (7,), (0,), (7,)), box("s@rank1", (), (), ())])
    names = SourceNames([near, far])
    assert [kind.global_shape for kind in names.kinds(["b", "a", "s@rank1"])] == [(7,), (4, 2), ()]
    assert (names.index["a"], names.index["b"]) == (0, 1)
    assert names.find("tied") == "a"
    assert names.find("b@rank3") == "b"
    assert names.find("s@rank2") == "s@rank0"
    assert names.find("s@rank2", exact=True) is None


def test_state_that_cannot_be_read_is_a_vote_and_not_the_end_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks would wait for ever: it is rejected as a candidate is, by all of them."""
    model = model_of(2)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    votes = counting(monkeypatch, candidate_restore, "hold")

    def unreadable(_: StateRegistry) -> LiveState:
        raise UnsupportedStateError("it changes")

    monkeypatch.setattr(LiveState, "read", unreadable)
    with pytest.raises(UnsupportedStateError, match="it changes"):
        opened(tmp_path, model=model_of(2))
    assert votes


def test_parameters_of_one_kind_lack_their_state_as_one_block() -> None:
    model = nn.ParameterList([torch.zeros(3, 2), torch.zeros(4), torch.zeros(3, 2), torch.zeros(3, 2)])
    tracked = StateRegistry(World())
    optimizer = torch.optim.AdamW(model.parameters())
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    optimizer.state[model[2]]["step"] = torch.zeros(())  # made already
    tracked.settled()
    shapes = {"exp_avg": ((3, 2), (4,), (3, 2), (3, 2)), "step": ((), (), (), ())}
    held = manifest(
        0,
        [
            box(f"optimizer.{k}.{key}", shape, (0,) * len(shape), shape)
            for key, of_key in shapes.items()
            for k, shape in enumerate(of_key)
        ],
    )
    state = absent_state(tracked, SourceNames([held]))
    lacking = [(len(block.params), [key.key for key in block.keys]) for block in state.blocks]
    assert sorted(lacking) == [(1, ["exp_avg"]), (1, ["step", "exp_avg"]), (2, ["step", "exp_avg"])]
    assert sorted(state.table.fqns) == sorted(fqn for fqn in held.table.fqns if fqn != "optimizer.2.step")
    for block in state.blocks:
        block.allocate()
    for parameter, shape in zip(model, shapes["exp_avg"], strict=True):
        made = optimizer.state[parameter]
        assert made["exp_avg"].shape == shape
        assert not made["exp_avg"].requires_grad
    assert len({made["exp_avg"].untyped_storage().data_ptr() for made in optimizer.state.values()}) == 4


@pytest.mark.parametrize("level", levels())
def test_small_rows_are_verified_and_copied_alike_with_and_without_the_c_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    model = model_of(5)
    ckpt = opened(tmp_path, model=model, optimizer=stepped(model))
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    other = model_of(5)
    restored_again(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(model, other, strict=True))


@pytest.mark.parametrize("level", levels())
def test_targets_that_share_memory_are_copied_one_after_another(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    source, target = np.arange(16, dtype=np.uint8), np.zeros(12, np.uint8)
    into, held = address_of(target), address_of(source)
    copy_bytes(np.array([into, into + 4, into]), np.array([held, held + 8, held]), np.array([8, 8, 0]))
    assert target.tolist() == [0, 1, 2, 3, *range(8, 16)]


# -- tables ---------------------------------------------------------------------------------------------


def test_rows_taken_stacked_and_renamed_are_the_rows_they_were() -> None:
    shards = [box("b", (4, 2), (2, 0), (2, 2)), box("a", (5,), (0,), (5,)), box("s", (), (), ()), box("b", (4, 2), (0, 0), (2, 2))]  # fmt: skip
    table = ShardTable.from_shards(shards, [0, 64, 128, 192])
    taken = table.take(np.array([3, 1]))
    assert [taken.shard(row) for row in range(2)] == [shards[3], shards[1]]
    assert taken.byte_offset.tolist() == [192, 64]
    assert taken.fqns == ["b", "a"]
    both = ShardTable.stacked([taken, table])
    assert [both.shard(row) for row in range(6)] == [shards[3], shards[1], *shards]
    assert both.first_chunk.tolist() == list(range(6))
    other = table.renamed(["x", "y", "x"])
    assert [other.fqn(row) for row in range(4)] == ["x", "y", "x", "x"]
    assert other.rows("x") == [0, 2, 3]


def test_the_same_region_in_other_rows_is_the_same_layout() -> None:
    def table(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> ShardTable:
        return ShardTable.from_shards([box("w", (6, 4), *one) for one in boxes], np.zeros(len(boxes)))

    whole, halves = table(((0, 0), (4, 4))), table(((2, 0), (2, 4)), ((0, 0), (2, 4)))
    assert has_same_regions(whole, halves)
    assert has_same_regions(halves, whole)
    assert not has_same_regions(whole, table(((2, 0), (4, 4))))
    assert not has_same_regions(whole, table(((0, 0), (2, 4))))
    scalar = ShardTable.from_shards([box("s", (), (), ())], [0])
    both = ShardTable.stacked([whole, scalar])
    assert has_same_regions(whole, both)
    assert not has_same_regions(both, whole)
    assert has_same_regions(both, whole, common_only=True)


# -- selection ------------------------------------------------------------------------------------------


def slot(rank: int, step: int, generation: int = 1, size: int = 2) -> HeldSlot:
    return HeldSlot(rank, generation, step, size, 7, None)


def node(name: str, *slots: HeldSlot, members: tuple[Member, ...] = ()) -> Inventory:
    return Inventory(node=name, host=name, slots=slots, members=members)


def test_what_is_suspect_on_one_rank_is_tried_behind_all_that_is_clean() -> None:
    bad = slot(1, 20)._replace(suspect=True)
    inventories = [node("a", slot(0, 10), slot(0, 20)), node("b", slot(1, 10), bad)]
    root = RootSummary(
        committed=(SnapshotId(1, 5), SnapshotId(1, 4)), prefixes=("step-5", "step-4"), suspects=(SnapshotId(1, 5),)
    )
    inventories = [Inventory.unpack(one.pack()) for one in inventories]
    found = select(inventories, RootSummary.unpack(root.pack())).found
    assert [(c.identity.step, c.is_suspect) for c in found] == [(10, False), (4, False), (20, True), (5, True)]


@pytest.mark.parametrize(
    ("back", "parent", "steps"),
    [
        (0, 20, [20, 10, 5]),
        (1, 20, [10, 5, 20]),
        (2, 20, [5, 10, 20]),
        (1, 10, [5, 10]),
        (1, 5, [5]),
        (1, None, [20, 10, 5]),
    ],
)
def test_one_state_further_back_is_older_than_what_the_last_generation_began_with(
    back: int, parent: int | None, steps: list[int]
) -> None:
    """What is not stays behind: where nothing older covers the state a job goes on, and does not begin again."""
    began = Generation(number=2, parent=None if parent is None else SnapshotId(1, parent))
    both = [slot(rank, step) for rank in (0, 1) for step in (10, 20)]
    inventory = replace(node("a", *both), back=back, generation=replace(began, parent=None))
    root = RootSummary(committed=(SnapshotId(1, 5),), prefixes=("step-5",), claims=(Generation(number=1), began))
    found = select([Inventory.unpack(inventory.pack())], root, step=None).found
    assert [c.identity.step for c in found] == steps


def test_without_an_older_checkpoint_an_older_snapshot_is_tried_again() -> None:
    began = Generation(number=2, parent=SnapshotId(1, 20))
    both = [slot(rank, step) for rank in (0, 1) for step in (10, 20)]
    inventory = replace(node("a", *both), back=2, generation=began)
    assert [c.identity.step for c in select([inventory], RootSummary()).found] == [10, 20]


@pytest.mark.parametrize(
    ("back", "before", "steps"), [(1, 12, [10, 5]), (1, 4, [12, 10, 5]), (2, 6, [5, 12, 10]), (2, 12, [5, 12, 10])]
)
def test_one_state_further_back_is_before_numbers_became_bad_where_there_is_one(
    back: int, before: int, steps: list[int]
) -> None:
    slots = [slot(rank, step) for rank in (0, 1) for step in (10, 12, 20)]
    one = replace(node("a", *slots), back=back, generation=Generation(number=2, parent=SnapshotId(1, 20)))
    other = replace(node("b"), bad=(before, before))  # its agent does not decide
    root = RootSummary(committed=(SnapshotId(1, 5),), prefixes=("step-5",))
    found = [c.identity.step for c in select([one, other], root).found]
    assert (found[: len(steps)], found[-1]) == (steps, 20)


@pytest.mark.parametrize(
    ("asked", "bad", "found"),
    [((0, 0), (5, 6), (0, 0)), ((9, 9), (0, 0), (9, 9)), ((9, 9), (5, 6), (5, 6)), ((0, 9), (5, 6), (0, 9))],
)
def test_samples_of_the_steps_in_which_numbers_became_bad_are_to_blame_before_those_of_the_step_that_failed(
    asked: tuple[int, int], bad: tuple[int, int], found: tuple[int, int]
) -> None:
    inventories = [replace(node("a"), leave_out=asked), replace(node("b"), bad=bad), node("c")]
    assert left_out([Inventory.unpack(one.pack()) for one in inventories]) == found


def test_the_newest_snapshot_that_every_rank_holds_is_selected_first() -> None:
    inventories = [node("a", slot(0, 10), slot(0, 20)), node("b", slot(1, 10), members=(Member(1, 1),))]
    found = select(inventories, RootSummary(committed=(SnapshotId(1, 5),), prefixes=("step-5",)))
    assert [c.identity.step for c in found.found] == [10, 20, 5]
    assert [c.is_unfinished for c in found.found] == [False, True, False]
    assert found.next_generation == 2
    assert [(one.rank, one.node, one.server) for one in slot_locations(found.found[0], inventories)] == [(0, 0, 0), (1, 1, 1)]  # fmt: skip
    assert [c.identity.step for c in select(inventories, RootSummary(), step=20).found] == [20]


def test_what_was_rolled_back_is_not_selected_unless_it_is_asked_for() -> None:
    inventories = [node("a", slot(0, 30), slot(1, 30))]
    root = RootSummary(
        claims=(Generation(number=2, parent=SnapshotId(1, 20)),), committed=(SnapshotId(1, 20),), prefixes=("step-20",)
    )
    assert [c.identity.step for c in select(inventories, root).found] == [20]
    assert [c.identity.step for c in select(inventories, root, step=30).found] == [30]
    assert select(inventories, root).next_generation == 3


# A number that was never claimed on the root is taken again where nobody who knew of it can be reached: two states of one id.


def marked(rank: int, step: int, token: str) -> HeldSlot:
    return slot(rank, step, generation=2)._replace(parent=SnapshotId(1, 4), mark=mark_of(token))


@pytest.mark.parametrize("claimed", ["late", ""])
def test_states_of_two_generations_with_one_number_do_not_mix(claimed: str) -> None:
    inventories = [
        node("a", marked(0, 9, "early"), marked(1, 10, "early"), marked(0, 10, "early")),
        node("b", marked(1, 9, "late"), marked(1, 11, "late"), marked(0, 8, "late"), marked(1, 8, "late")),
    ]
    inventories = [replace(Inventory.unpack(one.pack()), restart=int(one.node == "b")) for one in inventories]
    claims = (Generation(number=2, token=claimed, parent=SnapshotId(1, 4)),) if claimed else ()
    found = select(inventories, RootSummary(claims=claims))
    assert not memory_is_current(inventories), "the root is asked which one counts"
    assert [c.identity.step for c in found.found if c.is_common] == [8]
    assert {c.mark for c in found.found} == {mark_of("late")}
    assert found.lost == {(2, mark_of("early"))}


def test_the_claim_that_others_continued_from_counts_and_one_of_which_nothing_came_hides_nothing() -> None:
    both = node("a", marked(0, 9, "early"), marked(1, 9, "early"))
    for parent, steps in ((SnapshotId(1, 4), []), (None, [9])):
        root = RootSummary(claims=(Generation(number=2, token="late", parent=parent),))
        assert [c.identity.step for c in select([both], root).found] == steps
    root = RootSummary(claims=(Generation(number=2, token="late"),), committed=(SnapshotId(2, 7),), prefixes=("p",))
    assert [c.identity.step for c in select([both], root).found] == [7]


def test_what_others_went_on_without_is_lost_and_a_line_goes_back_to_what_is_known_to_be_claimed() -> None:
    third = Generation(number=3, token="third", parent=SnapshotId(2, 9), line=(mark_of("early"),))
    held = [slot(rank, 12, generation=3)._replace(parent=SnapshotId(2, 9), mark=mark_of("third")) for rank in (0, 1)]
    both = Inventory.unpack(replace(node("a", *held), generation=third).pack())
    claims = [Generation(number=2, token="late", parent=SnapshotId(1, 4))]
    root = RootSummary(claims=tuple(claims), committed=(SnapshotId(2, 7),), prefixes=("p",))
    found = select([both], root)
    assert [c.identity for c in found.found] == [(2, 7)]
    assert found.lost == {(3, mark_of("third"))}
    found = select([both], replace(root, claims=(replace(claims[0], token="early"),)))
    assert [c.identity.step for c in found.found] == [12, 7], "it was claimed late, by the same run"
    assert found.line == (mark_of("third"), mark_of("early"))
    assert select([replace(both, generation=replace(third, claimed=True))], RootSummary()).line == ()


def test_slots_without_a_token_are_of_whichever_generation_counts() -> None:
    old = node("a", slot(0, 9, generation=2), marked(1, 9, "early"))
    assert [c.is_common for c in select([old], RootSummary()).found] == [True]
    assert memory_is_current([replace(old, restart=1)])


def test_an_inventory_is_what_was_packed() -> None:
    mine = Inventory(
        node="a",
        slots=(slot(0, 10), HeldSlot(1, 2, 11, 2, 9, SnapshotId(1, 10))),
        generation=Generation(number=2, parent=SnapshotId(1, 10)),
        members=(Member(2, 0),),
        committed=SnapshotId(1, 5),
        back=2,
        bad=(8, 9),
        leave_out=(9, 11),
        restore_step=7,
    )
    assert Inventory.unpack(mine.pack()) == mine


# -- votes ----------------------------------------------------------------------------------------------


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Vote]:
    """Votes of other ranks, which every exchange has behind this rank's."""
    votes: list[Vote] = []
    monkeypatch.setattr(collectives, "all_gather", lambda mine: [mine, *(vote.pack() for vote in votes)])
    monkeypatch.setattr(collectives, "is_alone", lambda: False)
    return votes


def vote(state: CandidateState = CandidateState.READY, step: int = 10, **more: Any) -> Vote:
    return Vote(id=SnapshotId(1, step), state=state, **more)


def test_a_vote_is_what_was_packed() -> None:
    one = vote(CandidateState.LACKING, reason="r", foreign_names=2, own_names=3, tier_bytes={"memory": 5})
    assert Vote.unpack(one.pack()) == one


def test_one_rank_that_rejects_a_candidate_rejects_it_for_all(others: list[Vote]) -> None:
    others += [vote(CandidateState.LACKING), vote(CandidateState.REJECTED, reason="no memory")]
    ballot = hold(vote())
    assert ballot.rejecting_rank == 2
    assert not ballot.is_lacking, "nobody exchanges anything for a candidate that is given up"
    assert Ballot([vote(), vote(CandidateState.LACKING)]).is_lacking
    assert Ballot([vote()]).rejecting_rank is None


def test_ranks_that_try_different_candidates_all_end(others: list[Vote]) -> None:
    others.append(vote(step=11))
    with pytest.raises(DisagreementError, match="rank 1: step 11 of generation 1"):
        hold(vote())


def test_another_program_ends_every_rank_each_with_its_own_error(others: list[Vote]) -> None:
    own = Rejection(TensorMismatchError("mine"))
    others.append(vote(CandidateState.MISMATCH, reason="theirs"))
    with pytest.raises(TensorMismatchError, match="see rank 1"):
        hold(vote())
    with pytest.raises(TensorMismatchError, match="mine"):
        hold(vote(own.state, reason=own.reason), own)


def test_an_error_of_a_step_becomes_a_value_and_a_bug_does_not() -> None:
    def damaged() -> None:
        raise DamagedError("a", found="b")

    found = attempted(damaged)
    assert isinstance(found, Rejection)
    assert found.state is CandidateState.REJECTED
    assert "\n" not in found.reason
    with pytest.raises(ZeroDivisionError):
        attempted(lambda: 1 / 0)


def test_the_collector_runs_again_after_a_restore() -> None:
    was_enabled = collector_paused()(gc.isenabled)()
    assert not was_enabled
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled(), "a program that turned it off keeps it off"
    finally:
        gc.enable()


def test_root_that_cannot_be_asked_is_refused_with_the_remedy_of_its_cause() -> None:
    cause = RootError(
        "the credentials for s3://b/run were refused", found="ExpiredToken", remedy="renew the credentials"
    )
    error = unreachable("s3://b/run", RootSummary(error=str(cause)), "and memory holds none")
    assert (error.found, error.remedy) == (
        "the credentials for s3://b/run were refused; found: ExpiredToken",
        "renew the credentials; or start with another root",
    )
    error = unreachable("s3://b/run", RootSummary(error="no answer"), "and memory holds none")
    assert error.remedy == "make the root reachable; or start with another root"
