"""How a global batch is cut: any number of replicas, any schedule, and nothing new where it divides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.trainer.config import from_values
from flashckpt.trainer.parallel.batch_split import Rounds, split_batch
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE, Layout, resolve_layout

SCHEDULES = st.sampled_from([*SINGLE_STAGE, *MULTI_STAGE])


@given(
    batch=st.integers(1, 300),
    replicas=st.integers(1, 120),
    micro=st.integers(1, 17),
    pp=st.integers(1, 5),
    schedule=SCHEDULES,
)
def test_every_split_holds_the_batch_in_rows_that_the_schedule_takes(
    batch: int, replicas: int, micro: int, pp: int, schedule: str
) -> None:
    rounds = Rounds(schedule=schedule, pp=pp, stages=pp if schedule in SINGLE_STAGE else 2 * pp)
    count, rows = split_batch(batch, replicas, micro, rounds)
    assert rounds.take(count)
    assert 1 <= rows <= micro
    assert count * rows * replicas >= batch
    local = -(-batch // replicas)
    assert (count - 1) * rows < local or not rounds.take(-(-local // micro))  # no micro-batch too many
    if batch % (replicas * micro) == 0 and rounds.take(batch // replicas // micro):
        assert (count, rows) == (batch // replicas // micro, micro)


def layout(batch: int, world: int, **parallel: Any) -> Layout:
    return resolve_layout(
        from_values({"train": {"global_batch": batch, "micro_batch": 2}, "parallel": parallel}), world
    )


@pytest.mark.parametrize(
    ("batch", "world", "parallel", "micro_batches", "rows", "padding"),
    [
        (100, 100, {}, 1, 1, 0),
        (100, 99, {}, 1, 2, 98),
        (15, 2, {}, 4, 2, 1),
        (7, 1, {}, 4, 2, 1),
        (3, 5, {}, 1, 1, 2),
        (4, 2, {"pp": 2}, 2, 2, 0),
        (3, 4, {"pp": 4}, 4, 1, 1),
        (10, 2, {"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2}, 6, 2, 2),
    ],
)
def test_rows_of_a_layout(batch: int, world: int, parallel: Any, micro_batches: int, rows: int, padding: int) -> None:
    found = layout(batch, world, **parallel)
    assert (found.micro_batches, found.local_batch, found.padding) == (micro_batches, micro_batches * rows, padding)
    assert found.divisor == pytest.approx(batch / found.dp / rows)


@pytest.mark.matrix
def test_where_the_batch_divides_means_are_divided_by_the_number_of_micro_batches_to_the_bit() -> None:
    for dp in range(1, 40):
        for micro_batches in range(1, 40):
            found = layout(2 * dp * micro_batches, dp)
            assert (found.divisor, found.padding) == (micro_batches, 0)
            assert "padding" not in found.describe()


def test_padding_is_described() -> None:
    assert layout(100, 99).describe() == "DP 99 x TP 1 x PP 1, 1 micro-batches (98 of 198 rows are padding)"
