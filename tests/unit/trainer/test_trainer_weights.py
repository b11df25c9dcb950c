"""Initial weights: normal numbers by counter, the same to the bit in every layout, and only what a rank holds."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from flashckpt.trainer.model import counter_normal
from flashckpt.trainer.model.counter_normal import BLOCK, fill_normal, stream_keys

COUNT = 1 << 20


def stream(name: str, count: int = COUNT, seed: int = 1, start: int = 0) -> torch.Tensor:
    out = torch.empty(count)
    fill_normal(out, stream_keys(seed, name), (start + count,), (start,), 1.0)
    return out


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    return stream("layers.0.attention.wq.weight").double()


def test_mean_variance_and_higher_moments_are_those_of_a_normal(numbers: torch.Tensor) -> None:
    bound = 5 / math.sqrt(COUNT)  # five standard errors of each moment, whose own variance is the factor
    assert abs(numbers.mean()) < bound
    assert abs(numbers.var() - 1) < bound * math.sqrt(2)
    assert abs((numbers**3).mean()) < bound * math.sqrt(15)
    assert abs((numbers**4).mean() - 3) < bound * math.sqrt(96)


@pytest.mark.parametrize("edge", [0.1, 0.5, 1.0, 1.4395, 2.0, 3.0, 4.0])
def test_as_many_lie_beyond_each_edge_as_should(numbers: torch.Tensor, edge: float) -> None:
    share = statistics.NormalDist().cdf(-edge)
    bound = 5 * math.sqrt(share * (1 - share) / COUNT)
    assert abs((numbers > edge).double().mean() - share) < bound
    assert abs((numbers < -edge).double().mean() - share) < bound


def test_the_distribution_function_is_uniform_in_every_bin(numbers: torch.Tensor) -> None:
    bins = 1024
    uniform = torch.special.ndtr(numbers)
    counts = torch.histc(uniform, bins, 0.0, 1.0)
    chi_square = float(((counts - COUNT / bins) ** 2).sum() / (COUNT / bins))
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).mean())


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 4096, 1 << 15])
def test_neighbours_and_rows_do_not_correlate(numbers: torch.Tensor, distance: int) -> None:
    count = COUNT - distance
    assert abs(correlation(numbers[distance:], numbers[:count])) < 5 / math.sqrt(count)
    squares = numbers**2 - 1
    assert abs(correlation(squares[distance:], squares[:count])) < 5 * 2 / math.sqrt(count)


def test_names_and_seeds_do_not_correlate(numbers: torch.Tensor) -> None:
    others = [stream(f"layers.{n}.attention.wq.weight") for n in (1, 2)]
    others += [stream("layers.0.attention.wk.weight"), stream("layers.0.attention.wq.weight", seed=2)]
    for a, b in itertools.combinations([numbers.float(), *others], 2):
        assert abs(correlation(a, b)) < 5 / math.sqrt(COUNT)


def test_indices_beyond_32_bits_are_other_numbers() -> None:
    far = stream("w", 4096, start=1 << 33)
    assert abs(correlation(far, stream("w", 4096))) < 5 / 64
    assert abs(far.mean()) < 5 / 64


def test_each_number_is_the_inverse_normal_of_its_bits() -> None:
    wanted = statistics.NormalDist()
    edge = int(0.425 * 2**32)
    bits = [-(2**31), -(2**31) + 1, -edge - 1, -edge, -1, 0, 1, 12345, edge - 1, edge, 2**31 - 2, 2**31 - 1]
    found = counter_normal._normal(torch.tensor(bits, dtype=torch.int64)).tolist()
    assert found == pytest.approx([wanted.inv_cdf((bit + 2**31 + 0.5) / 2**32) for bit in bits], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("shape", [(7,), (40, 24), (3, 2 * BLOCK + 5), (BLOCK + 3, 2), (5, 6, 7), (2, 3, 4, 5)])
def test_any_box_is_the_slice_of_the_whole_to_the_bit(shape: tuple[int, ...]) -> None:
    keys = stream_keys(3, "w")
    whole = torch.empty(shape)
    fill_normal(whole, keys, shape, (0,) * len(shape), 0.02)
    generator = torch.Generator().manual_seed(sum(shape))
    for _ in range(20):
        ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in shape]
        part = torch.empty([stop - start for start, stop in ends])
        fill_normal(part, keys, shape, [start for start, _ in ends], 0.02)
        assert torch.equal(part, whole[tuple(slice(start, stop) for start, stop in ends)])


def test_the_numbers_stay_those_of_earlier_releases() -> None:
    found = [value.hex() for value in stream("layers.0.attention.wq.weight", 4).tolist()]
    assert found == ["0x1.b28ee00000000p-1", "-0x1.261d920000000p-4", "-0x1.f96c880000000p+0", "-0x1.15546e0000000p-1"]


def test_a_box_costs_itself_and_one_block() -> None:
    """Bytes that torch allocates while a box is filled, of which only a block's worth may live at a time."""
    out, most = torch.empty(64 * BLOCK), 0
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fill_normal(out, stream_keys(1, "w"), out.shape, (0,), 1.0)
    live = 0
    for event in memory_events(profile):
        live += event
        most = max(most, live)
    assert 0 < most <= 100 * BLOCK


def memory_events(profile: Any) -> list[int]:
    """Return the bytes that each allocation took (positive) or gave back (negative), in order of time."""
    events = profile.profiler.kineto_results.events()
    found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return [nbytes for _, nbytes in sorted(found)]
