"""Numbers of any type: numpy's, torch's and whole floats are taken as the ints they are, others refused where they enter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt.errors import ConfigError
from flashckpt.integrations.dlrover import ElasticDistributedSampler
from flashckpt.sampler import BlockPermutation, ElasticBatchSampler, ElasticSampler, Mixture, Order, SeededSamples

TYPES: dict[str, Callable[[int], Any]] = {
    "int64": np.int64,
    "uint8": np.uint8,
    "float": float,
    "float32": np.float32,
    "tensor": torch.tensor,
}


def one_run(of: Callable[[int], Any]) -> list[Any]:
    """Give numbers as `of` makes them wherever one is taken; return all that is recorded and dealt."""
    mixture = Mixture({"a": (range(30), of(2)), "b": (range(20), of(1))}, epoch_length=of(40))
    order: Any = Order(kind="block", block_size=of(4), window_blocks=of(2))
    sampler = ElasticSampler(
        SeededSamples(mixture, seed=of(3)),
        num_replicas=of(2),
        dp_rank=of(1),
        seed=of(5),
        order=order,
        fingerprint=int(of(9)),
        global_batch_size=of(6),
        ramp_up=[(of(24), of(8))],
    )
    batches = ElasticBatchSampler(sampler, of(2))
    dealt: list[Any] = [sampler.next_ids().tolist()]
    for epoch in batches.epochs(of(3)):
        batches.set_epoch(of(epoch))
        for number, batch in enumerate(batches, start=1):
            dealt.append(batch)
            if number % batches.accumulation == 0:
                batches.commit(None if number % 2 else of(sampler.global_batch_size or 0))
        dealt.append(sampler.state_dict())
    sampler.skip(of(sampler.position + 2), of(sampler.position + 4))
    sampler.set_weights({"a": of(1), "b": of(3)}, start=of(sampler.position + 8))
    sampler.set_global_batch_size(of(4))
    dealt += [sampler.next_ids().tolist(), sampler.state_dict(), sampler.source_counts()]
    again = ElasticSampler(
        SeededSamples(mixture, seed=of(3)), seed=of(5), order=order, fingerprint=9, dp_rank=0, dp_size=1
    )
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return [*dealt, again.position, BlockPermutation(9, block_size=of(2))[0:9].tolist()]


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_of_every_type_are_taken_and_what_is_recorded_can_be_loaded(kind: str) -> None:
    assert json.loads(json.dumps(one_run(TYPES[kind]))) == json.loads(json.dumps(one_run(int)))


@pytest.mark.parametrize("kind", TYPES)
def test_the_state_of_dlrovers_sampler_can_be_loaded_whatever_type_its_numbers_have(kind: str) -> None:
    of = TYPES[kind]
    sampler = ElasticDistributedSampler(range(96), num_replicas=of(2), rank=of(0), seed=of(1))
    sampler.set_epoch(of(0))
    state = sampler.state_dict(of(4), of(8))
    assert json.loads(json.dumps(state)) == {"completed_num": 64, "epoch": 0}
    assert sampler.state_dict(of(40), of(8)) == {"completed_num": 640, "epoch": 0}
    assert type(state["completed_num"]) is int
    sampler.load_state_dict(state)
    assert sampler.position == 64


def test_a_part_of_a_step_is_taken_where_it_is_whole_samples() -> None:
    """As DLRover's own test computes it: samples / batch size."""
    sampler = ElasticDistributedSampler(range(96), num_replicas=1, rank=0)
    assert sampler.state_dict(12 / 8, 8) == {"completed_num": 12, "epoch": 0}
    with pytest.raises(ConfigError, match="not a whole number"):
        sampler.state_dict(1 / 3, 8)


WRONG: dict[str, Callable[[Any], object]] = {
    "batch": lambda value: ElasticSampler(10, global_batch_size=value),
    "seed": lambda value: ElasticSampler(10, seed=value),
    "rank": lambda value: ElasticSampler(10, dp_rank=value, dp_size=2),
    "ramp": lambda value: ElasticSampler(10, global_batch_size=2, ramp_up=[(4, value)]),
    "micro": lambda value: ElasticBatchSampler(ElasticSampler(10), value),
    "commit": lambda value: ElasticSampler(10).commit(value),
    "epoch": lambda value: ElasticSampler(10).set_epoch(value),
    "weight": lambda value: Mixture({"a": (range(3), value)}),
    "seeded": lambda value: SeededSamples(range(3), value),
}


@pytest.mark.parametrize("call", WRONG)
@pytest.mark.parametrize("value", [1.5, np.float64(0.1), float("nan"), "4", torch.tensor(2.0), [3]], ids=repr)
def test_what_is_no_whole_number_is_refused_where_it_is_given(call: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not a whole number"):
        WRONG[call](value)
