"""No intervention goes on for ever: walks over finite losses, spikes and losses that are not finite, under each policy."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flashckpt.errors import DivergedError
from flashckpt.trainer.config import GuardConfig
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.record import SpikeError
from flashckpt.trainer.train.step import Totals

WINDOW, EVERY, BUDGET = 8, 5, 3
POLICIES = ("warn", "skip", "rollback")
LOSSES = {"fine": 3.0, "spike": 9.0, "nan": math.nan}


class Run:
    """The part of a run that the guard decides: its real decision over losses that are given, snapshots and rollbacks."""

    def __init__(self, policy: str) -> None:
        settings = GuardConfig(on_spike=policy, window=WINDOW, max_interventions=BUDGET)
        self.guard, self.config = Guard(settings), SimpleNamespace(guard=settings)
        self.record = SimpleNamespace(settings_changed=False)
        self.parallel = SimpleNamespace(reporter=False)
        self.train_step = SimpleNamespace(own_losses=list)
        self.data = SimpleNamespace(position_after_next=int)
        self.done, self._rolled_back_to, self.since, self.visits = 0, -1, 0, 0
        self.saved = 0, self.guard.state_dict()

    def step(self, loss: float) -> bool:
        """Return whether a step with this loss was trained."""
        self.visits += 1
        totals = Totals(loss=loss, norm=1.0, group_norm=1.0, channels={})
        try:
            accepted = loop.Trainer._judge(self, totals, self.done + 1)  # type: ignore[arg-type]  # what it needs of one
        except SpikeError:
            budget = self.guard.budget()
            self.done = self._rolled_back_to = self.saved[0]
            self.guard.load_state_dict(self.saved[1])
            self.guard.keep_budget(budget)
            return False
        if accepted:
            self.guard.record(loss, 1.0)
        self.done += 1
        if accepted and self.done % EVERY == 0:
            self.saved = self.done, self.guard.state_dict()
        return accepted

    def train(self, losses: Iterable[float], steps: int) -> bool:
        """Return whether the steps were reached; else the guard has ended the run."""
        interventions = BUDGET + steps // WINDOW + 1
        at_most = self.visits + steps + interventions * (EVERY + BUDGET)
        for loss in losses:
            if self.done >= steps:
                return True
            try:
                self.since = 0 if self.step(loss) else self.since + 1
            except DivergedError:
                return False
            assert self.visits <= at_most, "the run trains the same steps again and again"
            assert self.since <= BUDGET, "steps in a row that change nothing"
        raise AssertionError("too few losses")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "report_nonfinite", lambda *_: None)


def walk_of(seed: int) -> Iterator[float]:
    """Yield losses in spells: of one kind, or of a mixture; the level of fine ones may change for good."""
    draw = random.Random(seed)
    level = 1.0
    while True:
        kinds = draw.choice([("fine",), ("fine",), ("spike",), ("nan",), tuple(LOSSES), ("fine", "spike")])
        level *= draw.choice([1.0] * 20 + [4.0, 0.25])
        for _ in range(3 * WINDOW if kinds == ("fine",) else draw.choice([1, 1, 1, 2, 3, 3 * WINDOW])):
            yield LOSSES[draw.choice(kinds)] * level * draw.uniform(0.99, 1.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_walk_goes_on_or_ends_within_the_budget(policy: str) -> None:
    ends = {Run(policy).train(walk_of(seed), 150) for seed in range(300)}
    assert ends == {True, False}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [8.0, 0.05])
def test_a_level_that_stays_is_trained_or_ends_the_run_and_can_be_continued(policy: str, factor: float) -> None:
    run = Run(policy)
    assert run.train(itertools.repeat(3.0), 20)
    went_on = run.train(itertools.repeat(3.0 * factor), 60)
    assert went_on == (policy == "warn")
    state, done = run.saved[1], run.saved[0]
    for settings_changed in (False, True):  # as it was; with a setting changed
        again = Run(policy)
        again.guard.load_state_dict(state)
        again.done, again.record.settings_changed, again.saved = done, settings_changed, (done, state)
        assert again.train(itertools.repeat(3.0 * factor), 90) == (settings_changed or went_on)
        if not settings_changed:
            cured = Run(policy)
            cured.guard.load_state_dict(state)
            cured.done, cured.saved = done, (done, state)
            assert cured.train(itertools.repeat(3.0), 90) or went_on


def test_every_second_step_of_another_level_is_trained_in_the_end() -> None:
    run = Run("skip")
    assert run.train(itertools.repeat(3.0), 20)
    losses = itertools.cycle([3.0, 9.0])
    assert run.train(losses, 60)
    assert all(run.step(loss) for loss in itertools.islice(losses, 1, 20))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_few_steps_without_a_finite_loss_end_the_run_and_one_now_and_then_does_not(policy: str) -> None:
    for gap, goes_on in ((1, False), (WINDOW // 2, False), (WINDOW, True)):
        losses = itertools.cycle([math.nan, *[3.0] * gap])
        assert Run(policy).train(losses, 40 * WINDOW) == goes_on


def test_interventions_are_earned_back_by_new_steps_alone() -> None:
    guard = Guard(GuardConfig(on_spike="rollback", window=4, max_interventions=1))

    def accept(steps: Iterable[int]) -> None:
        for step in steps:
            assert guard.admit(3.0, 1.0, step=step)
            guard.record(3.0, 1.0)

    def spike(step: int) -> None:
        assert guard.admit(9.0, 1.0, step=step)
        guard.count_rollback(9.0, 1.0, step=3)

    accept(range(1, 9))
    spike(9)
    guard.keep_budget(guard.budget())
    accept(range(5, 10))  # again
    assert guard.spent == 1
    with pytest.raises(DivergedError, match="1 steps skipped or rolled back"):
        spike(9)
    guard.spent = 1
    accept(range(10, 15))
    resumed = Guard(guard.config)
    resumed.load_state_dict(guard.state_dict())
    assert resumed.spent == 0
    assert resumed.state_dict() == guard.state_dict()


class Restores:
    """The part of a run that goes back: nothing is there to go back to."""

    def __init__(self) -> None:
        self.guard = Guard(GuardConfig())
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(snapshot_every=50))
        self.left_out: list[tuple[int, int]] = []
        self.ckpt = SimpleNamespace(close=lambda: None, leave_out=lambda *steps: self.left_out.append(steps))
        self.done = 0

    def _restore(self) -> None:
        return None

    def _open_outputs(self) -> None:
        pass


def test_a_bad_state_without_a_snapshot_ends_the_run_and_a_bad_batch_does_not() -> None:
    run: Any = Restores()
    with pytest.raises(DivergedError, match="parameters are not finite at step 7, and no snapshot") as ended:
        loop.Trainer._roll_back(run, SpikeError(7, blames_samples=False))
    assert ended.value.found == "checkpoint.snapshot_every = 50"
    assert not run.left_out
    loop.Trainer._roll_back(run, SpikeError(7))
    assert run.left_out == [(1, 7)]
