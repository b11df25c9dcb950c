"""The outer loop, and loops that fetch their batches ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
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


@pytest.mark.matrix
@pytest.mark.parametrize(("tail", "workers"), [("span", 0), ("span", 2), ("short", 0), ("pad", 0), ("drop", 0)])
@pytest.mark.parametrize("has_epochs", [True, False])
def test_a_loop_that_fetches_ahead_over_the_end_of_an_epoch_repeats_nothing(
    tail: str, workers: int, has_epochs: bool
) -> None:
    sampler = sampler_at(tail=tail)
    loader: DataLoader[Any] = DataLoader(range(N), batch_size=BATCH, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]  # indexable
    whole = [entry for entry in trained(sampler_at(tail=tail), 3)[0] if isinstance(entry, list)]

    def forever() -> Iterator[Any]:
        for _ in sampler.epochs(100) if has_epochs else count():
            yield from loader

    batches, seen, states = forever(), [], []
    ahead = next(batches)
    for _ in whole:
        batch, ahead = ahead, next(batches)
        seen.append(batch.tolist())
        sampler.commit()
        states.append(sampler.state_dict())
        assert sampler.ahead == BATCH or workers or tail != "span"
    assert seen == whole
    for done, state in enumerate(states[:-1], start=1):
        rest = [entry for entry in trained(sampler_at(state, tail=tail), 3)[0] if isinstance(entry, list)]
        assert rest == whole[done:]


def test_set_epoch_says_so_where_samples_were_handed_out_and_not_committed(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_at()
    for number, _ in enumerate(ElasticBatchSampler(sampler, BATCH)):
        if number:
            sampler.commit()
    sampler.set_epoch(1)
    assert [r.getMessage() for r in caplog.records] == [
        "set_epoch(1): 4 samples handed out before and not committed count as trained"
    ]
