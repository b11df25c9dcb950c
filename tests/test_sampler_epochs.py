"""The outer loop, and loops that fetch their batches ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.sampling import unbroken
from torch.utils.data import DataLoader

from flashckpt.sampler import ElasticBatchSampler, ElasticSampler

N, BATCH = 22, 4


def sampler_at(state: Any = None, **options: Any) -> ElasticSampler:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=BATCH, **options)
    if state is not None:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return sampler


def trained(sampler: ElasticSampler, stop: int, steps: int = 10**6) -> tuple[list[Any], dict[str, Any]]:
    """Run a loop with something to do behind each epoch; return its log, and the state of the last step."""
    log: list[Any] = []
    state = sampler.state_dict()
    batches = ElasticBatchSampler(sampler, BATCH)
    for epoch in batches.epochs(stop):
        for batch in batches:
            log.append(batch)
            sampler.commit()
            state = sampler.state_dict()
            steps -= 1
            if not steps:
                return log, state
        log.append(("behind epoch", epoch))
    return log, state


@pytest.mark.parametrize("tail", ["span", "short", "pad", "drop"])
def test_whatever_step_is_restored_the_loop_does_what_follows_an_epoch_once(tail: str) -> None:
    whole, _ = trained(sampler_at(tail=tail), 3)
    for steps in range(1, sum(isinstance(entry, list) for entry in whole) + 1):
        first, state = trained(sampler_at(tail=tail), 3, steps)
        assert len(json.dumps(state)) < 200
        resumed = sampler_at(state, tail=tail)
        assert resumed.state_dict() == state
        assert first + trained(resumed, 3)[0] == whole, f"restored behind step {steps}"


def test_a_second_loop_in_the_same_process_goes_on_without_doing_it_again() -> None:
    sampler = sampler_at()
    first, _ = trained(sampler, 1)
    assert first[-1] == ("behind epoch", 0)
    assert trained(sampler, 2)[0][0] != ("behind epoch", 0)


def test_states_written_before_the_end_of_an_epoch_was_recorded_are_read() -> None:
    state = sampler_at().state_dict() | {"epoch": 1, "offset": 2, "segments": []}
    assert trained(sampler_at(state), 2)[0][0] == unbroken(N, 0, 28)[24:28]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_fetches_ahead_over_the_end_of_an_epoch_repeats_nothing(workers: int) -> None:
    sampler = sampler_at()
    loader = DataLoader(range(N), batch_size=BATCH, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]  # indexable

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches, seen = forever(), []
    ahead = next(batches)
    for _ in range(17):
        batch, ahead = ahead, next(batches)
        seen += batch.tolist()
        sampler.commit()
    assert seen == unbroken(N, 0, len(seen))
    assert sampler.position == len(seen)
    assert workers or sampler.ahead == BATCH
