"""Epochs of equally many optimizer steps over the endless stream of an elastic sampler."""

from __future__ import annotations

from typing import Any

import pytest
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
