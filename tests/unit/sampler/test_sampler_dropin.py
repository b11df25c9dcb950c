"""Drop-in proof: what the tests of other samplers and stateful loaders ask for, asked of ours.

Each test states a behaviour that torchdata's stateful sampler and loader tests, DLRover's elastic sampler
and loader tests or torch's DistributedSampler hold theirs to. docs/data.md lists those that
deliberately differ; the last test here holds that list to this file.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.counting import Numbers
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.errors import LayoutError, SamplerStateError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler, Permutation

# torchdata 0.11 calls a function that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def loader(size: int = 40, batch: int = 4, workers: int = 0, *, batched: bool = False, **options: Any) -> Any:
    """A StatefulDataLoader over our sampler, as a loop without a Checkpointer uses it."""
    data = Numbers(size)
    every = options.pop("snapshot_every_n_steps", 1)
    sampler = ElasticSampler(data, auto_commit=True, **options)
    common = {"num_workers": workers, "snapshot_every_n_steps": every}
    if batched:
        return StatefulDataLoader(data, batch_sampler=ElasticBatchSampler(sampler, batch), **common)
    return StatefulDataLoader(data, batch_size=batch, sampler=sampler, **common)


def read(source: Any, count: int | None = None) -> list[list[int]]:
    batches = []
    for batch in source:
        batches.append(batch.tolist())
        if len(batches) == count:
            break
    return batches


# -- torchdata, test_sampler.py


def test_constructor_arguments_are_attributes() -> None:
    data = Numbers(100)
    sampler = ElasticSampler(data, num_replicas=10, rank=3, shuffle=False, seed=42, drop_last=True)
    assert sampler.dataset is data
    assert (sampler.num_replicas, sampler.rank, sampler.seed) == (10, 3, 42)
    assert (sampler.shuffle, sampler.drop_last, sampler.num_samples) == (False, True, 10)


def test_loader_state_resumes_mid_epoch() -> None:
    first = loader(100, 10, shuffle=False)
    head = read(first, 5)
    second = loader(100, 10, shuffle=False)
    second.load_state_dict(first.state_dict())
    assert head + read(second) == read(loader(100, 10, shuffle=False))


def test_state_counts_committed_samples_not_yielded_ones() -> None:
    """Different: a counter of yielded samples is wrong by the prefetch; theirs is even writable."""
    sampler = ElasticSampler(Numbers(100), num_replicas=10, rank=0, global_batch_size=10)
    iterator = iter(sampler)
    [next(iterator) for _ in range(5)]
    assert sampler.state_dict()["offset"] == 0
    sampler.commit()
    assert sampler.state_dict()["offset"] == 10
    assert "yielded" not in sampler.state_dict()


def test_negative_or_foreign_states_are_refused() -> None:
    """Different class: SamplerStateError, which names both sides, for ValueError."""
    sampler = ElasticSampler(Numbers(100))
    for state in ({"yielded": 3}, {}, sampler.state_dict() | {"offset": -1}):
        with pytest.raises(SamplerStateError):
            sampler.load_state_dict(state)


def test_loading_under_a_running_iterator_is_refused() -> None:
    """Different: theirs lets the old iterator go on, at the old place, with the new count."""
    sampler = ElasticSampler(Numbers(100), 2, 0, seed=42)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(SamplerStateError):
        sampler.load_state_dict(sampler.state_dict())


def test_drop_last_shortens_and_the_default_does_not() -> None:
    for drop, expected in ((True, 100 // 3), (False, math.ceil(100 / 3))):
        sampler = ElasticSampler(Numbers(100), num_replicas=3, rank=0, drop_last=drop, shuffle=False)
        assert len(sampler) == expected
        assert len([x for batch in StatefulDataLoader(sampler.dataset, sampler=sampler) for x in batch]) == expected


def test_shuffled_order_is_the_same_through_a_loader() -> None:
    order = list(ElasticSampler(Numbers(100)))
    assert order != list(range(100))
    assert sorted(order) == list(range(100))
    assert [x for batch in loader(100, 1) for x in batch.tolist()] == order


def test_a_second_pass_without_commit_is_refused() -> None:
    """Different: theirs hands the same epoch out again; ours cannot know whether it was trained."""
    sampler = ElasticSampler(Numbers(10))
    list(sampler)
    with pytest.raises(SamplerStateError, match="never committed"):
        list(sampler)


def test_unshuffled_order_and_partial_last_batch() -> None:
    assert [len(b) for b in read(loader(100, 32, shuffle=False))] == [32, 32, 32, 4]
    assert [x for b in read(loader(100, 32, shuffle=False)) for x in b] == list(range(100))


def test_replicas_share_the_data_without_overlap() -> None:
    parts = [list(ElasticSampler(Numbers(100), num_replicas=5, rank=rank, shuffle=False)) for rank in range(5)]
    assert sorted(x for part in parts for x in part) == list(range(100))


# -- torchdata, test_state_dict.py


@pytest.mark.matrix
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 3)])
def test_interrupt_anywhere_and_resume(batched: Any, workers: Any, every: Any) -> None:
    whole = read(loader(batched=batched))
    for interrupt in (1, 4, 9) if workers else range(1, 11):
        first = loader(workers=workers, batched=batched, snapshot_every_n_steps=every)
        head = read(first, interrupt)
        second = loader(workers=workers, batched=batched, snapshot_every_n_steps=every)
        second.load_state_dict(first.state_dict())
        assert head + read(second) == whole, interrupt


def test_state_before_the_first_batch() -> None:
    first = loader()
    second = loader()
    second.load_state_dict(first.state_dict())
    assert read(second) == read(first) == read(loader())


def test_initial_state_loaded_late_or_early() -> None:
    source = loader()
    read(source, 3)
    state = source.state_dict()
    asked = loader()
    asked.state_dict()  # makes its iterator
    asked.load_state_dict(state)
    assert read(asked) == read(loader())[3:]
    untouched = loader()
    untouched.load_state_dict(state)
    again = loader()
    again.load_state_dict(untouched.state_dict())  # loaded, then asked, before anything is read
    assert read(again) == read(loader())[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_state_of_the_last_batch_and_of_the_finished_epoch(workers: Any) -> None:
    first, inside = loader(workers=workers), None
    for _ in first:
        inside = first.state_dict()
    finished = first.state_dict()
    last = loader(workers=workers)
    last.load_state_dict(inside)
    assert read(last) == []
    following = loader(workers=workers)
    following.load_state_dict(finished)
    second_epoch = [Permutation(40, 0, 1)[i : i + 4].tolist() for i in range(0, 40, 4)]
    assert read(following) == second_epoch
    assert read(last) == second_epoch, "the loop's next pass"


@pytest.mark.parametrize("workers", [0, 2])
def test_several_epochs_before_and_behind_a_resume(workers: Any) -> None:
    whole_loader = loader(23, 4, workers)
    whole = [batch for _ in range(4) for batch in read(whole_loader)]
    first = loader(23, 4, workers)
    head = [batch for _ in range(2) for batch in read(first)]
    second = loader(23, 4, workers)
    second.load_state_dict(first.state_dict())
    assert head + [batch for _ in range(2) for batch in read(second)] == whole


def test_state_is_json_and_survives_it() -> None:
    first = loader(batched=True)
    head = read(first, 3)
    second = loader(batched=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + read(second) == read(loader(batched=True))


def test_loading_and_asking_again_gives_the_same_state() -> None:
    first = loader()
    read(first, 4)
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    iter(second)
    assert second.state_dict()["_sampler_iter_yielded"] == state["_sampler_iter_yielded"]
    third = loader()
    third.load_state_dict(second.state_dict())
    assert read(third) == read(loader())[4:]


def test_two_loaders_at_a_time_do_not_touch_each_other() -> None:
    one, two = iter(loader(seed=1)), iter(loader(seed=2))
    mixed = [(next(one).tolist(), next(two).tolist()) for _ in range(5)]
    assert [a for a, _ in mixed] == read(loader(seed=1), 5)
    assert [b for _, b in mixed] == read(loader(seed=2), 5)


def test_another_number_of_workers_resumes() -> None:
    """Different: theirs raises an AssertionError; our state knows nothing of workers."""
    whole, state, found = read(loader()), None, []
    for workers, steps in ((2, 4), (0, 3), (2, 3)):
        sampler = ElasticSampler(Numbers(40), global_batch_size=4)
        if state is not None:
            sampler.load_state_dict(state)
        for step, batch in enumerate(DataLoader(Numbers(40), 4, sampler=sampler, num_workers=workers), 1):
            found.append(batch.tolist())
            sampler.commit()
            if step == steps:
                break
        state = sampler.state_dict()
    assert found == whole


def test_commits_of_a_trainer_agree_with_the_loader_whichever_is_loaded_last() -> None:
    data = Numbers(40)

    def build() -> tuple[ElasticSampler, StatefulDataLoader]:
        sampler = ElasticSampler(data, global_batch_size=4)
        return sampler, StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=4)

    sampler, source = build()
    iterator = iter(source)
    for _ in range(3):
        next(iterator)
        sampler.commit()
    recorded, loaded = sampler.state_dict(), source.state_dict()
    assert recorded["offset"] == 12
    del iterator
    for both in (False, True):
        sampler, source = build()
        sampler.load_state_dict(recorded)
        if both:
            source.load_state_dict(loaded)
        assert next(iter(source)).tolist() == read(loader())[3]
        assert sampler.state_dict() == recorded


# -- DLRover, elastic_sampler_test.py and elastic_dataloader_test.py


def test_resume_on_three_ranks_starts_at_the_next_sample_exactly() -> None:
    sampler = ElasticSampler(60_001, num_replicas=2, rank=0, shuffle=False, global_batch_size=16)
    iterator = iter(sampler)
    for _ in range(4):
        [next(iterator) for _ in range(8)]
        sampler.commit()
    state = sampler.state_dict()
    assert state["offset"] == 64
    for drop in (False, True):
        resumed = [ElasticSampler(60_001, 3, rank, shuffle=False, drop_last=drop) for rank in range(3)]
        for each in resumed:
            each.load_state_dict(state)
        assert [next(iter(each)) for each in resumed] == [64, 65, 66]


def test_after_a_resumed_epoch_the_next_one_starts_at_its_beginning() -> None:
    sampler = ElasticSampler(60_000, num_replicas=3, rank=0, shuffle=False, auto_commit=True)
    sampler.load_state_dict(sampler.state_dict() | {"offset": 59_700})
    assert len(list(sampler)) == 100
    sampler.set_epoch(1)
    assert next(iter(sampler)) == 0


def test_batch_size_changes_between_steps() -> None:
    """Different: by a call on every rank (or `ramp_up`), not by a file that each loader polls for itself."""
    sampler = ElasticSampler(Numbers(100), global_batch_size=32, shuffle=False)
    batches = ElasticBatchSampler(sampler, 32)
    assert len(next(iter(batches))) == 32
    batches.commit()
    sampler.set_global_batch_size(8)
    assert next(iter(ElasticBatchSampler(sampler, 8))) == list(range(32, 40))


# -- torch.utils.data.DistributedSampler


def test_epochs_and_seeds_change_the_order() -> None:
    orders = []
    for seed in range(3):
        sampler = ElasticSampler(Numbers(50), seed=seed, auto_commit=True)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert all(left != right for left, right in pairwise(orders))
    assert len({tuple(order) for order in orders}) == 9


def test_every_replica_gets_equally_many_samples() -> None:
    """Different in what fills the last batch: the next epoch's first samples, not a repeat; tail="pad" repeats."""
    for tail in ("span", "pad", "drop"):
        sizes = {len(list(ElasticSampler(Numbers(103), 8, rank, tail=tail))) for rank in range(8)}
        assert sizes == {12 if tail == "drop" else 13}


def test_rank_outside_the_world_is_refused() -> None:
    for rank in (-1, 4):
        with pytest.raises(LayoutError):
            ElasticSampler(Numbers(10), num_replicas=4, rank=rank)


def test_replica_is_never_guessed_from_the_global_rank(monkeypatch: Any) -> None:
    """Different: theirs takes rank and world size of the default group, wrong as soon as TP or PP is used."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    sampler = ElasticSampler(Numbers(10), global_batch_size=4)
    for draw in (iter, ElasticSampler.next_ids):
        with pytest.raises(LayoutError, match="data-parallel rank"):
            draw(sampler)
