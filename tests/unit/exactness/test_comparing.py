"""What `flashckpt check` concludes from what two runs wrote down; the runs are in tests/integration/programs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt import Checkpointer
from flashckpt.exactness import comparing
from flashckpt.exactness.comparing import EXACT, NOT_DETERMINISTIC, NOT_EXACT, continued, deterministic, merged, noise
from flashckpt.exactness.leaves import Walk
from flashckpt.exactness.records import BEGINS, ENDS, RESTORED, Recorded, RunTrace, read_trace, record_file

KINDS = {"model": ("tracked", "model", "Linear"), "torch's generator": ("generator", "torch", ""),
         "own": ("generator", "", ""), "scheduler": ("object", "scheduler", "StepLR"), "ema": ("tensor", "", ""),
         "total": ("value", "", "")}  # fmt: skip


def trace(*, first: int = 1, last: int = 4, restored: int = 0, rng: bool = True, **changed: Any) -> RunTrace:
    """Return a trace of some steps in which everything changes with each; `changed`: path -> what it is instead, by step."""
    found = RunTrace(restored=restored, rng=rng)
    instants = [(RESTORED, restored), *((kind, n) for n in range(first, last + 1) for kind in (BEGINS, ENDS))]
    for kind, step in instants:
        done = step - (kind == BEGINS)
        others = {name.replace("_", " ").replace("torchs", "torch's"): value for name, value in changed.items()}
        found.leaves[kind, step] = {
            path: Recorded(
                *of, str(others[path](done) if callable(others.get(path)) else others.get(path, done)), str(done)
            )
            for path, of in KINDS.items()
        }
        if kind == ENDS:
            given = changed.get("data", lambda n: n)
            found.inputs[step] = [str(given(step) if callable(given) else given)]
    return found


def again(**changed: Any) -> RunTrace:
    return trace(first=3, restored=2, **changed)


def test_the_same_again_is_exact() -> None:
    found = continued(trace(), again())
    assert (found.verdict, found.restored, found.causes, found.hints) == (EXACT, 2, [], [])


@pytest.mark.parametrize(
    ("changed", "kind", "what"),
    [
        ({"scheduler": 0}, "object", "scheduler (StepLR) is not restored: scheduler differs"),
        ({"own": 0}, "generator", "the generator own is not restored"),
        ({"ema": 0}, "tensor", "the tensor ema (2) is not restored"),
        ({"torchs generator": 0}, "generator", "torch's generator differs at the first step after the restore"),
        ({"model": lambda done: done + 1}, "state", "'model' (Linear) is not what it was after step 2: model differs"),
        ({"data": lambda step: step - 2}, "data", "step 3 is given what step 1 is given a second time"),
        ({"data": 99}, "data", "step 3 is given other data than in the unbroken run"),
    ],
)
def test_what_moved_is_the_cause(changed: dict[str, Any], kind: str, what: str) -> None:
    found = continued(trace(), again(**changed))
    assert (found.verdict, found.causes[0].kind, found.causes[0].what) == (NOT_EXACT, kind, what)


def test_a_generator_of_the_scripts_own_is_named_with_the_state_that_its_kind_has(tmp_path: Path) -> None:
    """Numpy's has no get_state(), and Python's has another name for it."""
    for made, of in (
        (np.random.default_rng(1), "bit_generator.state"),
        (random.Random(1), "getstate() and setstate()"),
        (torch.Generator(), "get_state() and set_state()"),
    ):
        ckpt = Checkpointer(str(tmp_path / "root"))
        walk = Walk(ckpt._tracked, reads_sources=False)
        walk._visit("own", made, 0, is_foreign=False)
        leaf = Recorded(*walk.leaves["own"])
        assert comparing._of_generator("own", leaf, rng=True, others=()).remedy.endswith(f"its {of}")


def test_where_nothing_was_another_one_the_report_says_so_and_where_else_to_look() -> None:
    """A run that ends otherwise for no reason that shows is not left without a line."""
    unbroken, restarted = trace(), again(model=lambda done: done if done < 3 else done + 1)
    none = {"gradients of model": Recorded("gradient", "model", "", "", "")}
    for run in (unbroken, restarted):
        run.leaves = {at: {**leaves, **none} for at, leaves in run.leaves.items()}
    found = continued(unbroken, restarted)
    assert (found.verdict, found.first, [cause.name for cause in found.causes]) == (NOT_EXACT, 3, ["unseen"])
    assert "files" in found.causes[0].remedy


def test_a_generator_that_stands_still_may_have_any_state() -> None:
    assert continued(trace(own=5), again(own=7)).verdict == EXACT


def test_generators_that_nobody_tracks_are_told_from_those_that_are_drawn_from() -> None:
    found = continued(trace(rng=False), again(**{"torchs generator": 0}))
    assert found.causes[0].remedy == "track(..., rng=True)"


def test_a_number_alone_is_only_mentioned() -> None:
    found = continued(trace(), again(total=0))
    assert (found.verdict, found.causes, [hint.name for hint in found.hints]) == (EXACT, [], ["total"])


def test_what_is_not_there_yet_does_not_differ() -> None:
    """The loss of the step before, at the first step after a restart."""
    restarted = again(ema=0)
    del restarted.leaves[BEGINS, 3]["ema"]  # type: ignore[attr-defined]  # a dict
    assert continued(trace(), restarted).causes == []


def test_a_tensor_that_each_step_makes_is_a_consequence() -> None:
    made = trace()
    for step in range(1, 5):
        made.leaves[BEGINS, step] = {**made.leaves[BEGINS, step], "ema": Recorded("tensor", "", "", f"new{step}", "")}
    assert continued(made, again(ema=0)).causes == []
    moves = again(ema=0, model=lambda done: done if done < 3 else -done)
    assert [cause.name for cause in continued(made, moves).causes] == ["ema"], "where the training moves, it may be why"


def test_a_batch_that_was_fetched_ahead_is_the_cause_though_it_is_another_one_soon() -> None:
    restarted = again(ema=lambda done: 0 if done == 2 else done)
    assert continued(trace(), restarted).causes == []
    moves = again(ema=lambda done: 0 if done == 2 else done, model=lambda done: done if done < 3 else -done)
    assert [cause.name for cause in continued(trace(), moves).causes] == ["ema"]


def test_gradients_from_before_a_step_are_the_cause_where_nothing_else_is() -> None:
    def with_gradients(run: RunTrace, digest: str) -> RunTrace:
        for leaves in run.leaves.values():
            leaves["gradients of model"] = Recorded("gradient", "model", "", digest, "")  # type: ignore[index]
        return run

    whole = with_gradients(trace(), "some")
    assert continued(whole, with_gradients(again(), "")).verdict == EXACT, "the step drops them"
    moves = with_gradients(again(model=lambda done: done if done < 3 else -done), "")
    (cause,) = continued(whole, moves).causes
    assert (cause.kind, cause.name) == ("gradient", "model")
    moves = with_gradients(again(ema=0, model=lambda done: done if done < 3 else -done), "")
    assert [cause.kind for cause in continued(whole, moves).causes] == ["tensor"]


def with_leaf(run: RunTrace, path: str, leaf: Recorded) -> RunTrace:
    for leaves in run.leaves.values():
        leaves[path] = leaf  # type: ignore[index]  # a dict
    return run


def moves(**changed: Any) -> RunTrace:
    """Return the trace of a restart after which the model is another one from step 3 on."""
    return again(model=lambda done: done if done < 3 else -done, **changed)


def test_state_that_an_object_lacks_since_nobody_restored_it_is_the_cause() -> None:
    """An optimizer without moments is there, and its groups are equal."""
    group, moment = Recorded("object", "od", "Adam", "same", ""), Recorded("object", "od", "Adam", "moment", "")
    whole = with_leaf(with_leaf(trace(), "od group 0.lr", group), "od.0.exp_avg", moment)
    (cause,) = continued(whole, with_leaf(moves(), "od group 0.lr", group)).causes
    assert cause.what == "od (Adam) is not restored: od.0.exp_avg differs"
    assert [cause.name for cause in continued(whole, moves()).causes] == ["model"], (
        "the restarted script has no such object"
    )


def test_data_that_a_model_makes_which_had_moved_is_a_consequence() -> None:
    def data(step: int) -> int:
        return step if step < 4 else -step

    assert [cause.name for cause in continued(trace(), moves(ema=0, data=data)).causes] == ["ema"]
    assert [cause.kind for cause in continued(trace(), moves(data=data)).causes] == ["data"], "nothing else is"


def test_where_no_call_of_a_model_is_seen_the_cause_is_what_was_another_one_at_once() -> None:
    whole, restarted = trace(), moves(ema=0, total=lambda done: done if done == 2 else -done)
    for run in (whole, restarted):
        for at in [at for at in run.leaves if at[0] == BEGINS]:
            del run.leaves[at]
    found = continued(whole, restarted)
    assert ([cause.name for cause in found.causes], found.hints) == (["ema"], [])


def test_a_number_that_comes_back_to_what_it_was_is_mentioned_and_one_that_never_changes_is_not() -> None:
    """The best loss so far; the step that the loop began with."""
    healed = again(total=lambda done: 0 if done == 2 else done)
    assert [hint.name for hint in continued(trace(), healed).hints] == ["total"]
    begun = [Recorded("value", "", "", text, text) for text in "02"]
    assert continued(with_leaf(trace(), "start", begun[0]), with_leaf(again(), "start", begun[1])).hints == []


def test_a_generator_that_came_back_says_what_else_may_be_why() -> None:
    """Samples of a replay buffer that is empty are fewer draws."""
    drawn = again(total=0)
    drawn.leaves[BEGINS, 3] = {
        **drawn.leaves[BEGINS, 3],
        "torch's generator": Recorded("generator", "torch", "", "x", ""),
    }
    (cause,) = continued(trace(), drawn).causes
    assert cause.remedy.endswith("or draws otherwise because total is 2 and was 2")


def test_an_object_that_counts_otherwise_than_in_the_unbroken_run_is_named() -> None:
    """As torchdata's loader does, which counts twice what it reads again; gradients that the step drops are not the cause."""
    loader, gradient = Recorded("tracked", "loader", "Loader", "6", ""), Recorded("gradient", "model", "", "some", "")
    whole = with_leaf(with_leaf(trace(), "loader.at", loader), "gradients of model", gradient)
    restarted = with_leaf(with_leaf(again(), "loader.at", loader), "gradients of model", gradient._replace(digest=""))
    restarted.leaves[ENDS, 4] = {**restarted.leaves[ENDS, 4], "loader.at": loader._replace(digest="11")}
    (cause,) = continued(whole, restarted).causes
    assert cause.what == "'loader' (Loader) is another one after step 4 than in the unbroken run: loader.at differs"


def test_what_differs_between_unbroken_runs_is_noise_or_the_answer() -> None:
    first, second = trace(), trace(total=lambda done: done + 0.5, own=0)
    assert deterministic(first, second).verdict == EXACT
    assert noise(first, second) == {"total", "own"}
    assert continued(first, again(total=9, own=9), ignored=[*noise(first, second)]).hints == []
    assert continued(first, again(scheduler=9), ignored=["sched*"]).verdict == EXACT
    moved: dict[str, Any] = {"model": 0, "torchs generator": 0}
    found = deterministic(trace(), trace(**moved))
    assert (found.verdict, found.first) == (NOT_DETERMINISTIC, 1)
    assert found.causes[0].what == "torch's generator differs between two unbroken runs"
    found = deterministic(trace(), trace(model=lambda done: done + (done > 2)))
    assert (found.first, found.causes[0].what[:40]) == (3, "model differs between two unbroken runs,")


def test_ranks_are_one_answer() -> None:
    found = merged(
        [continued(trace(), again()), continued(trace(), again(scheduler=0)), continued(trace(), again(ema=0))]
    )
    assert (found.verdict, [cause.kind for cause in found.causes]) == (NOT_EXACT, ["object", "tensor"])
    assert comparing.as_json(found)["restored_step"] == 2


@pytest.mark.parametrize(
    ("added", "causes"), [({3: ["model"]}, ["gradient"]), ({3: ["other"]}, []), ({4: ["model"]}, [])]
)
def test_gradients_that_a_step_adds_to_are_the_cause_beside_a_number(
    added: dict[int, list[str]], causes: list[str]
) -> None:
    """Those that a step sets to zero first are none, though they were other ones."""

    def lost(run: RunTrace, digest: str) -> RunTrace:
        run.added = {**added}
        for leaves in run.leaves.values():
            leaves["gradients of model"] = Recorded("gradient", "model", "", digest, "")  # type: ignore[index]
        return run

    found = continued(lost(trace(), "7"), lost(again(total=0, model=lambda done: done + (done > 2)), ""))
    assert (found.verdict, [cause.kind for cause in found.causes]) == (NOT_EXACT, causes)
    assert [hint.name for hint in found.hints] == ["total"]


def test_a_number_is_before_the_data_that_may_follow_from_it_and_behind_data_that_came_before() -> None:
    def first(data: Any) -> str:
        return continued(trace(), again(total=0, model=lambda done: done + (done > 2), data=data)).likely[0].kind

    assert (first(99), first(lambda step: step - 2)) == ("value", "data")


def test_a_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    line = '{"at": ["ends", 1], "inputs": ["a"], "added": [], "leaves": {}}'
    record_file(tmp_path, 0, 0).write_text(f'{{"at": ["made", 0]}}\n{line}\n{line[:20]}')
    found = read_trace(tmp_path, 0, 0)
    assert (found.is_made, found.steps, read_trace(tmp_path, 1, 0).steps) == (True, [1], [])
