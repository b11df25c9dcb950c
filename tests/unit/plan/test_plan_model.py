"""The model of `flashckpt plan` against a simulation of failures, the literature's formulas and the published rate."""

from __future__ import annotations

import math

import pytest
from support.simulate import simulate

from flashckpt.plan.model import (
    PUBLISHED_GPU_HOURS,
    Costs,
    Failures,
    best,
    daly,
    expected_s,
    forecast,
    running_share,
    wrong_intervals,
    young,
)

HOUR = 3600.0
FAST = Costs(
    stall_s=0.1, staged_s=2, persist_stall_s=1, persist_s=60, restart_memory_s=20, restart_storage_s=300
)  # fmt: skip
SLOW = Costs(stall_s=5, staged_s=5, persist_stall_s=5, persist_s=300, restart_memory_s=60, restart_storage_s=600)
STALLING = Costs(stall_s=60, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=600, restart_storage_s=600)


def published(gpus: int, **more: float) -> Failures:
    return Failures(gpus=gpus, gpu_mtbf_s=PUBLISHED_GPU_HOURS * HOUR, **more)


def test_published_base_rate_is_reproduced() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs."""
    assert pytest.approx(50_677, abs=1) == PUBLISHED_GPU_HOURS
    job = published(16_384)
    assert job.mtbf_s == pytest.approx(3.09 * HOUR, rel=0.01)
    assert 54 * 24 * HOUR / job.mtbf_s == pytest.approx(419)
    assert job.memory_rate + job.storage_rate == pytest.approx(1 / job.mtbf_s)


@pytest.mark.matrix
@pytest.mark.parametrize("costs", [FAST, SLOW, STALLING], ids=["fast", "slow", "stalling"])
@pytest.mark.parametrize("gpus", [1_024, 16_384, 100_000])
def test_forecast_agrees_with_the_simulation_within_one_percent(costs: Costs, gpus: int) -> None:
    """Goodput within 1 %; its parts within one point of the wall time."""
    job = published(gpus)
    chosen = best(job, costs)
    seen = simulate(
        job,
        costs,
        snapshot_s=chosen.snapshot_s,
        persist_every=chosen.persist_every,
        count=600 if gpus < 10_000 else 12_000,
        seed=gpus,
    )
    assert chosen.forecast.goodput == pytest.approx(seen.goodput, rel=0.01)
    for part in ("stall", "recompute", "restart"):
        assert getattr(chosen.forecast, part) == pytest.approx(getattr(seen, part), abs=0.01), part


@pytest.mark.parametrize(("snapshot_s", "every"), [(10, 40), (200, 3), (3_000, 1)])
def test_forecast_agrees_with_the_simulation_far_from_the_best_interval(snapshot_s: float, every: int) -> None:
    job = published(16_384)
    expected = forecast(job, FAST, snapshot_s=snapshot_s, persist_every=every)
    seen = simulate(job, FAST, snapshot_s=snapshot_s, persist_every=every, count=4_000, seed=3)
    assert expected.goodput == pytest.approx(seen.goodput, rel=0.01)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_tier_alone_agrees_with_the_simulation(share: float) -> None:
    job = published(16_384, storage_share=share)
    expected = forecast(job, SLOW, snapshot_s=300, persist_every=2)
    seen = simulate(job, SLOW, snapshot_s=300, persist_every=2, count=10_000, seed=5)
    assert expected.goodput == pytest.approx(seen.goodput, rel=0.01)


def test_parts_add_up() -> None:
    outcome = best(published(16_384), FAST).forecast
    assert outcome.goodput + outcome.stall + outcome.recompute + outcome.restart == pytest.approx(1)
    assert 0 < outcome.goodput < 1


@pytest.mark.parametrize(
    ("gpus", "stall_s", "restart_s", "interval_s", "goodput"),
    [
        (16_384, 0.5, 60, 106, 0.985),
        (16_384, 5, 600, 334, 0.922),
        (1_024, 0.5, 60, 422, 0.9973),
        (8, 60, 600, 52_312, 0.9977),
        (100_000, 0.5, 60, 43, 0.946),
    ],
)
def test_one_tier_agrees_with_the_first_order_formula_where_that_holds(
    gpus: int, stall_s: float, restart_s: float, interval_s: float, goodput: float
) -> None:
    """1 / ((1 + C/T) (1 + (R + (T + C)/2) / M)): optimistic where R or T is not far below M."""
    job = Failures(gpus=gpus, gpu_mtbf_s=50_677 * HOUR, storage_share=0)
    costs = Costs(
        stall_s=stall_s, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=restart_s, restart_storage_s=0
    )
    assert young(stall_s, job.mtbf_s) == pytest.approx(interval_s, rel=0.01)
    assert forecast(job, costs, snapshot_s=interval_s, persist_every=1).goodput == pytest.approx(goodput, abs=0.004)


@pytest.mark.parametrize("stall_s", [0.1, 5, 60, 600])
def test_best_interval_of_one_tier_is_dalys(stall_s: float) -> None:
    job = published(16_384, storage_share=0)
    costs = Costs(stall_s=stall_s, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=60, restart_storage_s=0)
    assert best(job, costs).snapshot_s == pytest.approx(daly(stall_s, job.mtbf_s), rel=0.01)
    assert daly(stall_s, job.mtbf_s) < young(stall_s, job.mtbf_s)


def test_daly_is_the_mtbf_where_a_capture_costs_more_than_a_life() -> None:
    assert daly(250, 100) == 100


def test_no_other_interval_nearby_is_better() -> None:
    for gpus in (1_024, 16_384, 100_000):
        for costs in (FAST, SLOW):
            job = published(gpus)
            chosen = best(job, costs)
            least = math.ceil(costs.persist_s / chosen.snapshot_s)
            for factor in (0.5, 0.8, 1.25, 2):
                for every in {max(least, chosen.persist_every + shift) for shift in (-2, -1, 0, 1, 2)}:
                    if chosen.snapshot_s * factor >= costs.staged_s and chosen.snapshot_s * factor * every >= 60:
                        other = forecast(job, costs, snapshot_s=chosen.snapshot_s * factor, persist_every=every)
                        reachable = chosen.snapshot_s * factor * every >= costs.persist_s
                        assert not reachable or other.goodput <= chosen.forecast.goodput + 1e-4


def test_intervals_never_fall_below_what_stage_and_persist_take() -> None:
    for gpus in (8, 16_384, 1_000_000):
        chosen = best(published(gpus), FAST, step_s=7.0, persist_floor_s=500)
        assert chosen.snapshot_s % 7.0 == pytest.approx(0, abs=1e-6)
        assert chosen.snapshot_s >= FAST.staged_s
        assert chosen.persist_s >= 500


def test_more_gpus_never_raise_the_goodput() -> None:
    goodput = [best(published(gpus), SLOW).forecast.goodput for gpus in (8, 1_024, 16_384, 100_000)]
    assert goodput == sorted(goodput, reverse=True)


def test_faster_restart_is_worth_more_than_a_shorter_stall_at_scale() -> None:
    """The reason for the memory tier and the warm launcher, in the model's own words."""
    job = published(16_384, storage_share=0)
    base = Costs(stall_s=5, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=600, restart_storage_s=0)
    quick = Costs(stall_s=5, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=60, restart_storage_s=0)
    short = Costs(stall_s=0.5, staged_s=0, persist_stall_s=0, persist_s=0, restart_memory_s=600, restart_storage_s=0)
    start = best(job, base).forecast.goodput
    assert best(job, quick).forecast.goodput - start > 2 * (best(job, short).forecast.goodput - start)


def test_wrong_interval_costs_on_both_sides() -> None:
    job, costs = published(16_384), FAST
    rows = {row[0]: row[1:] for row in wrong_intervals(job, costs, best(job, costs))}
    assert rows[0.1][0] < rows[1][0] > rows[10][0]
    assert rows[10][1] < rows[1][1]


def test_job_that_fails_faster_than_it_restarts_gets_nothing_done() -> None:
    job = Failures(gpus=10**9, gpu_mtbf_s=50_000 * HOUR)
    assert forecast(job, SLOW, snapshot_s=600, persist_every=1).goodput < 1e-9
    assert running_share(job, SLOW) < 1e-3
    assert expected_s(1e6, 1.0) == math.inf
    assert expected_s(10, 0) == 10
