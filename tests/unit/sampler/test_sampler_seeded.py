"""Samples whose randomness depends on (seed, epoch, index) alone: any workers, any ranks, any restart."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flashckpt.errors import DataError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler, Mixture, SeededSamples

LENGTH, BATCH = 24, 4


class Noisy(Dataset[tuple[int, float, float, float]]):
    """A sample is its index and a draw of each default generator."""

    fingerprint = "noisy"

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002 -- as transforms do


class Together(Noisy):
    """The same, several at a time."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        raise AssertionError("a loader prefers __getitems__")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [Noisy.__getitem__(self, index) for index in indices]


def drawn(ranks: int, steps: int, *, data: Any = None, state: Any = None, **loader: Any) -> tuple[list[Any], Any]:
    """Return what each step trains, over all ranks in the order of the stream, through real loaders; and the state."""
    samples = SeededSamples(data if data is not None else Noisy(), seed=5)
    samplers = [ElasticSampler(samples, dp_rank=r, dp_size=ranks, global_batch_size=BATCH) for r in range(ranks)]
    loaders = [DataLoader(samples, batch_size=BATCH // ranks, sampler=s, collate_fn=list, **loader) for s in samplers]
    found: list[list[Any]] = []
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    while len(found) < steps:
        for parts in zip(*loaders, strict=True):
            found.append([parts[k % ranks][k // ranks] for k in range(BATCH)])
            for sampler in samplers:
                sampler.commit()
            if len(found) == steps:
                break
    return found, samplers[0].state_dict()


@pytest.mark.matrix
def test_the_same_samples_for_any_ranks_workers_and_restart() -> None:
    whole, _ = drawn(1, 15)  # two epochs and a half
    assert drawn(2, 15)[0] == whole
    assert drawn(1, 15, num_workers=2)[0] == whole
    assert drawn(1, 15, num_workers=2, persistent_workers=True)[0] == whole, "persistent workers learn of the epoch"
    assert drawn(1, 15, data=Together())[0] == whole
    first, state = drawn(4, 8)
    assert first + drawn(2, 7, state=state, num_workers=1)[0] == whole


def test_every_epoch_is_augmented_in_another_way_and_every_seed() -> None:
    by_index: dict[int, set[float]] = {}
    for batch in drawn(1, 18)[0]:
        for index, *values in batch:
            by_index.setdefault(index, set()).update(values)
    assert all(len(values) == 9 for values in by_index.values()), "three draws of each of three epochs, all different"
    assert SeededSamples(Noisy(), seed=1).sample(3) != SeededSamples(Noisy(), seed=2).sample(3)
    assert SeededSamples(Noisy(), seed=1).sample(3, epoch=1) == SeededSamples(Noisy(), seed=1).sample(3, epoch=1)


def test_the_default_generators_stay_where_they_were_even_if_a_sample_fails() -> None:
    class Failing(Noisy):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise OSError("unreadable")

    def state() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002 -- what is looked at

    before = state()
    SeededSamples(Noisy()).sample(1)
    assert SeededSamples(Together()).__getitems__([LENGTH + 1, 2 * LENGTH])
    with pytest.raises(OSError, match="unreadable"):
        SeededSamples(Failing()).sample(1)
    assert state() == before


def test_a_sampler_that_does_not_know_of_it_is_refused() -> None:
    samples = SeededSamples(Noisy())
    plain = ElasticSampler(Noisy(), dp_rank=0, dp_size=1, global_batch_size=BATCH)
    for loader in (DataLoader(samples, shuffle=True), DataLoader(samples, sampler=plain)):
        with pytest.raises(DataError, match="the epoch of a sample is unknown"):
            next(iter(loader))


def test_batch_samplers_mixtures_and_states_of_the_bare_data_set_fit() -> None:
    samples = SeededSamples(Mixture({"a": (Noisy(), 2), "b": (Noisy(), 1)}))
    sampler = ElasticSampler(samples, dp_rank=0, dp_size=1, global_batch_size=BATCH)
    loader = DataLoader(samples, batch_sampler=ElasticBatchSampler(sampler, BATCH), collate_fn=list)
    assert len([s for batch in loader for s in batch]) == 2 * LENGTH
    sampler.set_weights({"a": 1, "b": 1}, start=BATCH)
    bare = ElasticSampler(Noisy(), dp_rank=0, dp_size=1, global_batch_size=BATCH)
    wrapped = ElasticSampler(SeededSamples(Noisy()), dp_rank=0, dp_size=1, global_batch_size=BATCH)
    wrapped.load_state_dict(bare.state_dict())
    assert [k % LENGTH for k in wrapped.next_ids().tolist()] == bare.next_ids().tolist()
