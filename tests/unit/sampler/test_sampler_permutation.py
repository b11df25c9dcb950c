"""The permutation: a bijection for every length, the same numbers everywhere, and no visible pattern."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from flashckpt.errors import SamplerStateError
from flashckpt.sampler import Permutation
from flashckpt.sampler.order.permutation import ROUNDS, TABLE_BELOW, Bijection, Network, Table, derive_keys

EDGES = sorted(
    {2**k + d for k in range(12, 23) for d in (-1, 0, 1)} | {4**k + 1 for k in range(6, 12)} | {TABLE_BELOW - 1, 65537}
)

# n, seed, epoch, first eight values, last value. Frozen: an order that checkpoints rely on never changes.
GOLDEN: list[tuple[int, int, int, list[int], int]] = [
    (1, 0, 0, [0], 0),
    (2, 7, 0, [1, 0], 0),
    (10, 0, 0, [0, 6, 1, 3, 2, 8, 5, 9], 4),
    (1000, 42, 3, [725, 893, 603, 277, 517, 596, 774, 734], 376),
    (65535, 1, 0, [51165, 42939, 44227, 5911, 52645, 18745, 13195, 29055], 22063),
    (65536, 1, 0, [53164, 57846, 37198, 42802, 56236, 56884, 24491, 58023], 42733),
    (65537, -3, 1, [49131, 17978, 51514, 39465, 24933, 53134, 4116, 48132], 38998),
    (1000000, 0, 0, [321478, 615876, 156555, 249088, 412736, 996704, 295986, 146612], 333582),
    (1000000, 0, 1, [723473, 750254, 603153, 636318, 781668, 400777, 22573, 97102], 908866),
    (
        1000000000000,
        1234567890123456789012,
        5,
        [90199328043, 220713446782, 601032582135, 33075388272, 393850973845, 738905939965, 34938912960, 264713716208],
        955958451839,
    ),
    (
        1099511627777,
        5,
        0,
        [
            549133690518,
            896081352708,
            302819351596,
            448333923102,
            295924833624,
            367356531027,
            861206243181,
            498889806655,
        ],
        274677100980,
    ),
    (
        4611686018427387904,
        9,
        9,
        [
            3467390984397823458,
            1421288343918912513,
            1222400224790678008,
            2261169816549000328,
            3726713672801782032,
            2508584630500076735,
            1112058948002852233,
            4230391511121495030,
        ],
        3080015230846573233,
    ),
]


def assert_bijection(core: Bijection, n: int) -> None:
    everything = np.arange(n, dtype=np.int64)
    values = core.forward_array(everything)
    assert np.array_equal(np.bincount(values, minlength=n), np.ones(n, np.int64)), n
    assert np.array_equal(core.backward_array(values), everything), n


@pytest.mark.matrix
def test_every_length_up_to_4096_is_visited_exactly_once() -> None:
    """Both the table that ships for small n and the network, which ships from 65536 on."""
    for n in range(1, 4097):
        assert_bijection(Table(n, derive_keys(n)), n)
        if n >= 2:
            assert_bijection(Network(n, derive_keys(n)[:ROUNDS]), n)


@pytest.mark.matrix
@pytest.mark.parametrize("n", [n for n in EDGES if n >= 4096])
def test_lengths_around_powers_of_two_are_visited_exactly_once(n: Any) -> None:
    for core in ([Table(n, derive_keys(n))] if n < TABLE_BELOW else []) + [Network(n, derive_keys(n)[:ROUNDS])]:
        assert_bijection(core, n)


@pytest.mark.parametrize("n", [2**16, 10**6, 10**12, 2**40 + 1, 2**61 - 1, 2**61 + 1, 2**62 - 1, 2**62])
def test_huge_lengths_go_both_ways_and_scalar_agrees_with_array(n: Any) -> None:
    permutation = Permutation(n, seed=-5, epoch=2)
    generator = random.Random(n)
    indices = np.array([0, 1, n // 2, n - 2, n - 1, *(generator.randrange(n) for _ in range(200))], np.int64)
    values = permutation.take(indices)
    assert values.min() >= 0
    assert values.max() < n
    assert np.array_equal(permutation.index_of(values), indices)
    assert [permutation[int(i)] for i in indices] == values.tolist()
    assert [permutation.index(int(v)) for v in values] == indices.tolist()


@pytest.mark.parametrize(("n", "seed", "epoch", "first", "last"), GOLDEN)
def test_golden_vectors_hold_on_this_platform_and_numpy(n: Any, seed: Any, epoch: Any, first: Any, last: Any) -> None:
    permutation = Permutation(n, seed, epoch)
    assert permutation[: len(first)].tolist() == first
    assert [permutation[i] for i in range(len(first))] == first
    assert permutation[-1] == last


def test_it_reads_like_a_sequence() -> None:
    permutation = Permutation(1000, 1)
    everything = list(permutation)
    assert sorted(everything) == list(range(1000))
    assert len(permutation) == 1000
    assert permutation[10:20:3].tolist() == everything[10:20:3]
    assert permutation[::-1].tolist() == everything[::-1]
    assert permutation[-1] == everything[-1]
    assert permutation.take([[0, 1], [2, 3]]).shape == (2, 2)
    assert permutation.take([]).tolist() == []
    assert list(Permutation(1)) == [0]
    assert everything != list(Permutation(1000, 2))
    assert everything != list(Permutation(1000, 1, epoch=1))


def test_what_lies_outside_is_refused() -> None:
    permutation = Permutation(70_000)
    for index in (70_000, -70_001):
        with pytest.raises(IndexError):
            permutation[index]
    with pytest.raises(IndexError):
        permutation.index(-1)
    with pytest.raises(IndexError):
        permutation.take([0, 70_000])
    with pytest.raises(TypeError):
        permutation.take([0.5])
    for n in (0, -1, 2**62 + 1):
        with pytest.raises(SamplerStateError):
            Permutation(n)


def test_the_permutation_needs_no_torch() -> None:
    code = "import sys, flashckpt.sampler as s; s.Permutation(10**9)[5]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_index_of_a_trillion_needs_no_memory_to_speak_of() -> None:
    tracemalloc.start()
    Permutation(10**12, 3)[10**11]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18


# -- quality: every statistic is a z-score, about N(0, 1) for a random permutation


def chi_square_z(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Wilson-Hilferty: a chi-square value as a normal deviate."""
    freedom = counts.size - 1
    ratio = float((((counts - expected) ** 2) / expected).sum()) / freedom
    return float(ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def correlation(unit: np.ndarray, lag: int) -> float:
    return float(((unit[:-lag] - 0.5) * (unit[lag:] - 0.5)).sum()) * 12 / math.sqrt(len(unit) - lag)


def walk_scores(core: Bijection, n: int) -> list[float]:
    """Serial correlation, neighbour distance and pair uniformity along walks through one permutation."""
    scores = []
    size = min(n, 1 << 15)
    for stride in {1, n // size, 1 << ((n - 1).bit_length() // 2)}:
        indices = np.arange(min(size, n // stride), dtype=np.int64) * stride
        if len(indices) < 256:
            continue
        values = core.forward_array(indices)
        unit = (values + 0.5) / n
        scores += [correlation(unit, lag) for lag in (1, 2, 16, 64)]
        edges = np.linspace(0, 1, 17)
        counts, _ = np.histogram(np.abs(np.diff(unit)), bins=edges)
        scores.append(chi_square_z(counts, np.diff(2 * edges - edges**2) * (len(unit) - 1)))
        pairs = np.bincount((values[:-1] % 8) * 8 + values[1:] % 8, minlength=64)
        scores.append(chi_square_z(pairs, (len(values) - 1) / 64))
    return scores


def key_scores(make: Callable[[int], Bijection], n: int, keys: int) -> list[float]:
    """Over many keys: where an index lands, how far neighbours land apart, and how many stay in place."""
    bins = min(n, 32)
    probes = np.array(sorted({0, 1, 2, n // 3, n // 2, n - 1}), np.int64)
    landed = np.array([make(key).forward_array(probes) for key in range(keys)])
    share = np.bincount(np.arange(n) * bins // n, minlength=bins) / n if n < 1 << 22 else np.full(bins, 1 / bins)
    scores = [chi_square_z(np.bincount(v * bins // n, minlength=bins), share * keys) for v in landed.T]
    for left, right in zip(range(len(probes)), range(1, len(probes)), strict=False):
        ring = (landed[:, right] - landed[:, left]) % n  # 1 to n - 1, each equally often
        group = min(n - 1, bins)
        weights = (
            np.bincount((np.arange(n - 1) * group) // (n - 1)) / (n - 1) if n < 1 << 22 else np.full(group, 1 / group)
        )
        scores.append(chi_square_z(np.bincount((ring - 1) * group // (n - 1), minlength=group), weights * keys))
    fixed = int((landed == probes).sum())
    expected = keys * len(probes) / n
    if expected > 10:
        scores.append((fixed - expected) / math.sqrt(expected))
    return scores


def cycle_scores(make: Callable[[int], Bijection], n: int, keys: int) -> list[float]:
    """Cycles (mean H_n) and fixed points (mean 1) of whole permutations, summed over the keys."""
    cycles = fixed = 0
    for key in range(keys):
        values = make(key).forward_array(np.arange(n, dtype=np.int64))
        fixed += int((values == np.arange(n)).sum())
        following, seen = values.tolist(), bytearray(n)
        for start in range(n):
            if not seen[start]:
                cycles += 1
                while not seen[start]:
                    seen[start] = 1
                    start = following[start]  # noqa: PLW2901 - the walk along the cycle
    mean = sum(1 / k for k in range(1, n + 1))
    spread = math.sqrt(keys * (mean - math.pi**2 / 6))
    return [(cycles - keys * mean) / spread, (fixed - keys) / math.sqrt(keys)]


def battery(make: Callable[[int, int], Bijection], *, small: tuple[int, ...], large: tuple[int, ...]) -> list[float]:
    scores: list[float] = []
    for n in small:
        scores += key_scores(partial(make, n), n, 3000)
        scores += cycle_scores(partial(make, n), n, 200)
    for n in large:
        scores += key_scores(partial(make, n), n, 1500)
        for key in range(6):
            scores += walk_scores(make(n, key), n)
    scores += cycle_scores(partial(make, large[0]), large[0], 8)
    return scores


LARGE = (65_537, 100_000, 10**6, 2**20, 10**12, 2**40 + 1)


def as_shipped(n: int, key: int) -> Bijection:
    return Permutation(n, key).core


@pytest.mark.matrix
def test_battery_finds_no_pattern_in_what_ships() -> None:
    scores = np.array(battery(as_shipped, small=(5, 16, 37, 256), large=LARGE))
    assert np.abs(scores).max() < 4.5, np.sort(np.abs(scores))[-5:]
    assert 0.8 < np.sqrt(np.mean(scores**2)) < 1.2


@pytest.mark.parametrize("n", [16, 256, *LARGE])
def test_battery_bites_two_rounds_fail_at_every_length(n: Any) -> None:
    def weak(length: int, key: int) -> Bijection:
        return Network(length, derive_keys(length, key)[:2])

    scores = np.abs(key_scores(lambda key: weak(n, key), n, 1500) + walk_scores(weak(n, 0), n))
    assert scores.max() > 9  # what ships stays under 4.5
