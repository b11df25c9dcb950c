"""DLRover's sampler by its call shape: what was saved is not dealt again, the rest is, on any number of replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils.data import DataLoader

from flashckpt.errors import SamplerStateError
from flashckpt.integrations.dlrover import ElasticDistributedSampler

LENGTH = 48


def samplers(world: int, **options: bool) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(range(LENGTH), world, rank, seed=5, **options) for rank in range(world)]


def batches(sampler: ElasticDistributedSampler, size: int) -> list[list[int]]:
    loader: DataLoader[int] = DataLoader(range(LENGTH), batch_size=size, sampler=sampler)  # type: ignore[arg-type]  # a range is a data set
    return [batch.tolist() for batch in loader]


def test_an_epoch_saved_in_its_middle_deals_the_rest_once_on_another_number_of_replicas() -> None:
    whole = [batches(sampler, 4) for sampler in samplers(2)]
    for sampler in (two := samplers(2)):
        sampler.set_epoch(0)
    assert [batches(sampler, 4) for sampler in two] == whole
    state = two[0].state_dict(3, 4)
    assert state == {"completed_num": 24, "epoch": 0}
    assert two[1].state_dict(3, 4) == state
    trained = [number for one in whole for batch in one[:3] for number in batch]
    four = samplers(4)
    rest = []
    for sampler in four:
        sampler.load_state_dict(state)
        sampler.set_epoch(0)
        rest += [number for batch in batches(sampler, 2) for number in batch]
    assert Counter(trained + rest) == Counter(range(LENGTH))
    assert four[0].state_dict(3 + 3, 2) == {"completed_num": 48, "epoch": 0}
    for sampler in four:
        sampler.set_epoch(1)
    second = [number for sampler in four for batch in batches(sampler, 2) for number in batch]
    assert sorted(second) == list(range(LENGTH))
    assert four[0].state_dict(1, 2) == {"completed_num": 8, "epoch": 1}


def test_an_epoch_saved_at_its_end_deals_nothing_and_the_next_one_everything() -> None:
    (sampler,) = samplers(1)
    sampler.load_state_dict({"completed_num": LENGTH, "epoch": 2})
    found = {}
    for epoch in range(2, 4):
        sampler.set_epoch(epoch)
        found[epoch] = sorted(sampler)
    assert found == {2: [], 3: list(range(LENGTH))}


@pytest.mark.parametrize(("drop_last", "each"), [(True, 9), (False, 10)])
def test_what_does_not_divide_is_dropped_or_repeated(drop_last: bool, each: int) -> None:
    assert [len(list(sampler)) for sampler in samplers(5, drop_last=drop_last)] == [each] * 5


def test_the_state_without_arguments_is_that_of_the_elastic_sampler() -> None:
    one, other = *samplers(1), *samplers(1)
    one.load_state_dict({"completed_num": 7, "epoch": 1})
    other.load_state_dict(one.state_dict())
    assert (other.epoch, other.offset) == (1, 7)
    assert list(other) == list(one)


@pytest.mark.parametrize("state", [{"completed_num": -1}, {"completed_num": "3"}, {"completed_num": 3, "epoch": None}])
def test_a_state_that_is_no_place_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(SamplerStateError, match="not one of this sampler"):
        samplers(1)[0].load_state_dict(state)
