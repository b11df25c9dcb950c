"""Epochs of equally many optimizer steps over the endless stream of an elastic sampler."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from support.counting import Numbers
from torch.utils.data import DataLoader

from flashckpt.errors import SamplerStateError
from flashckpt.integrations.step_batches import StepBatches, same_but_order
from flashckpt.sampler import ElasticSampler

LENGTH, GLOBAL = 50, 8
STEPS = 7  # 50 samples in steps of 8


def batches(*, rank: int = 0, world: int = 1, micro: int = 2) -> StepBatches:
    sampler = ElasticSampler(LENGTH, dp_rank=rank, dp_size=world, global_batch_size=GLOBAL, seed=3)
    return StepBatches(sampler, batch_size=micro, steps=STEPS)


def trained(data: StepBatches, steps: int, micro_batches: int = 4) -> list[list[int]]:
    """Train so many steps, over as many epochs as they take; return the samples of each."""
    found: list[list[int]] = []
    while len(found) < steps:
        dealt = iter(data)
        while len(found) < steps and (first := next(dealt, None)) is not None:
            found.append(first + [i for _ in range(micro_batches - 1) for i in next(dealt)])
            data.commit()
    return found


def test_three_epochs_are_the_stream_without_a_gap_or_a_repeat() -> None:
    data = batches()
    assert len(data) == STEPS * 4
    samples = [number for step in trained(data, 3 * STEPS) for number in step]
    for epoch in range(3):
        assert sorted(samples[epoch * LENGTH : (epoch + 1) * LENGTH]) == list(range(LENGTH))
    assert data.epochs_done == 3


@pytest.mark.parametrize("stop", [1, 6, STEPS, 8, 13, 2 * STEPS])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_continues_with_the_same_steps_on_any_number_of_ranks(stop: int, world: int) -> None:
    whole = trained(batches(), 3 * STEPS)
    first = batches()
    trained(first, stop)
    ranks = [batches(rank=rank, world=world) for rank in range(world)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    rest = [trained(rank, 3 * STEPS - stop, micro_batches=4 // world) for rank in ranks]
    for step, parts in zip(whole[stop:], zip(*rest, strict=True), strict=True):
        assert sorted(step) == sorted(number for part in parts for number in part)


def test_an_epoch_that_is_fetched_whole_before_its_first_step_continues() -> None:
    loader: Any = DataLoader(range(LENGTH), batch_sampler=(data := batches()))  # type: ignore[arg-type]
    epochs = []
    for _ in range(2):
        fetched = list(loader)
        assert len(fetched) == len(loader)
        epochs += [number for batch in fetched for number in batch.tolist()]
        for _ in range(STEPS):
            data.commit()
    assert epochs == [number for step in trained(batches(), 2 * STEPS) for number in step]


def test_stages_of_an_epoch_and_its_end() -> None:
    data = batches()
    assert data.restored_stage == "unused"
    trained(data, 1)
    assert data.restored_stage == "running"
    trained(data, STEPS - 1)
    assert data.restored_stage == "between"
    data.finish()
    assert list(data) == []


def test_other_global_batch_continues_in_the_same_part_of_the_epoch() -> None:
    first = batches()
    trained(first, STEPS + 4)
    sampler = ElasticSampler(LENGTH, dp_rank=0, dp_size=1, global_batch_size=16, seed=3)
    data = StepBatches(sampler, batch_size=2, steps=4)
    data.load_state_dict(first.state_dict())
    assert data.done == 4 + 2
    assert sampler.position == (STEPS + 4) * GLOBAL


def test_the_place_in_an_epoch_is_counted_in_micro_batches() -> None:
    data = batches()
    assert data.batches_dealt == 0
    trained(data, STEPS - 1)
    assert (data.ends_epoch, data.batches_dealt) == (True, 4 * (STEPS - 1))
    trained(data, 1)
    assert (data.ends_epoch, data.batches_dealt) == (False, 0)
    assert data.epochs_done == 1


def test_a_loader_of_another_order_is_alike_in_everything_else() -> None:
    made: Any = DataLoader(range(LENGTH), batch_size=2, collate_fn=sum, timeout=0)  # type: ignore[arg-type]
    other: Any = DataLoader(range(LENGTH), batch_sampler=batches(), **same_but_order(made))  # type: ignore[arg-type]
    assert other.collate_fn is sum
    assert len(list(other)) == STEPS * 4


def test_state_of_something_else_is_refused() -> None:
    with pytest.raises(SamplerStateError, match="not one of this callback"):
        batches().load_state_dict({"position": 3})


def prefetched(loader: Any) -> Iterator[Any]:
    """As Lightning does: one batch ahead."""
    batches = iter(loader)
    ahead = next(batches)
    for batch in batches:
        yield ahead
        ahead = batch
    yield ahead


def every_second(loader: Any) -> Iterator[Any]:
    """As a user's wrapper may: it leaves batches out."""
    return itertools.islice(iter(loader), 0, None, 2)


def twice(loader: Any) -> Iterator[Any]:
    """As a user's wrapper may: it gives batches again."""
    return (batch for batch in loader for _ in range(2))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrapped", [iter, prefetched])
def test_steps_as_they_were_planned_are_taken_over_epochs_and_a_restore(workers: int, wrapped: Any) -> None:
    data, rows = batches(), list[int]()
    for life in range(2):
        loader: Any = DataLoader(Numbers(LENGTH), batch_sampler=data, num_workers=workers)
        for _ in range(2):
            for number, batch in enumerate(wrapped(loader), start=1):
                rows += batch.tolist()
                if number % 4 == 0:
                    data.commit()
        state, data = data.state_dict(), batches()
        data.load_state_dict(state)
        assert data.done == 2 * STEPS * (life + 1)
    assert rows == [number for step in trained(batches(), 4 * STEPS) for number in step]


def test_an_epoch_of_which_batches_were_left_out_is_an_error_where_the_next_begins() -> None:
    sampler = ElasticSampler(LENGTH, dp_rank=0, dp_size=1, global_batch_size=GLOBAL)
    data = StepBatches(sampler, batch_size=2, steps=2)
    loader: Any = DataLoader(Numbers(LENGTH), batch_sampler=data)
    dealt = every_second(loader)
    for _ in range(4):
        next(dealt)
    data.commit()
    assert next(dealt, None) is None
    with pytest.raises(SamplerStateError, match="other samples in a step") as told:
        next(iter(loader))
    assert "16 samples taken in an epoch, over all ranks, and 8 counted" in told.value.found


def test_an_epoch_that_is_left_before_its_end_continues_and_a_look_at_all_of_it_does_not_count() -> None:
    data = batches()
    loader: Any = DataLoader(Numbers(LENGTH), batch_sampler=data)
    assert len(list(loader)) == len(loader)
    rows = list[int]()
    for _ in range(STEPS):
        steps = iter(loader)
        for _ in range(4):
            rows += next(steps).tolist()
        data.commit()
        next(steps, None)  # one batch more
    assert rows == [number for step in trained(batches(), STEPS) for number in step]


@pytest.mark.parametrize(
    ("accumulation", "wrapped", "taken"),
    [(2, iter, 4), (1, iter, 2), (8, iter, 16), (4, twice, 4), (4, every_second, 16)],
)
@pytest.mark.parametrize(("workers", "ahead"), [(0, iter), (0, prefetched), (1, iter)])
def test_steps_of_other_batches_than_planned_are_an_error_by_the_third(
    accumulation: int, wrapped: Any, taken: int, workers: int, ahead: Any
) -> None:
    """Steps of 8 samples are planned, in 4 micro-batches."""
    data = batches()
    steps = iter(ahead(wrapped(DataLoader(Numbers(LENGTH), batch_sampler=data, num_workers=workers))))

    def train() -> None:
        for _ in range(3):
            for _ in range(accumulation):
                next(steps)
            data.commit()

    with pytest.raises(SamplerStateError, match="other samples in a step") as told:
        train()
    deque(steps, maxlen=0)  # workers end in peace
    assert "and 8 counted as trained" in told.value.found
    if ahead is iter:
        assert f"{taken} samples taken" in told.value.found
        assert f"global_batch_size={taken}" in told.value.remedy
    assert data.order.position == data.done * GLOBAL, "what was wrong is not counted"
