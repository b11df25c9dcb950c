"""Figures gathered by the copy: the same at every level, and those that torch finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.native_rows import at, every_level, rows

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.native import copy_and_digest
from flashckpt.native.descriptors import FIGURES, KINDS, DescriptorError, largest

FLOATS = [name for name in KINDS if not name.startswith("complex")]
every_kind = pytest.mark.parametrize("kind", FLOATS)


def figures(level: str, kind: str, data: np.ndarray) -> np.ndarray:
    """Return what is noted while `data` is copied."""
    copied = np.zeros(len(data), np.uint8)
    found = np.full(-(-len(data) // CHUNK_BYTES), 7, FIGURES)  # what was there before does not count
    kinds = np.array([KINDS[kind]], np.uint8)
    digests = np.zeros(len(found), np.uint64)
    copy_and_digest(rows((at(data), at(copied), len(data))), digests=digests, level=level, kinds=kinds, figures=found)
    assert (copied == data).all()
    return found


def magnitudes(kind: str, found: np.ndarray) -> list[float]:
    return [float(one) for one in largest(np.full(len(found), KINDS[kind], np.uint8), found["top"])]


def numbers(kind: str, count: int) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return made.clamp(-8, 8).to(getattr(torch, kind))


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().copy()


@every_level
@every_kind
def test_each_pattern_of_a_small_type_is_read_as_torch_reads_it(level: str, kind: str) -> None:
    dtype = getattr(torch, kind)
    if dtype.itemsize > 2:
        pytest.skip("2^32 patterns")
    size = dtype.itemsize
    patterns = np.arange(1 << 8 * size, dtype=f"<u{size}")[:: 1 if size == 1 else 61].copy()
    values = torch.from_numpy(patterns.view(np.uint8)).view(dtype).double().abs().numpy()
    each = np.array([(at(patterns) + place * size, 0, size) for place in range(len(patterns))], np.int64)
    found, kinds = np.zeros(len(each), FIGURES), np.full(len(each), KINDS[kind], np.uint8)
    copy_and_digest(each, digests=np.zeros(len(each), np.uint64), level=level, kinds=kinds, figures=found)
    finite = np.isfinite(values)
    assert magnitudes(kind, found) == np.where(finite, values, np.inf).tolist()
    assert found["squares"][finite] == pytest.approx(values[finite] ** 2, rel=1e-6)


@every_level
@every_kind
@pytest.mark.parametrize("count", [1, 129, 4000])
def test_magnitude_and_norm_are_those_of_torch(level: str, kind: str, count: int) -> None:
    values = numbers(kind, count)
    found = figures(level, kind, bytes_of(values))
    assert magnitudes(kind, found) == [float(values.double().abs().max())]
    if values.nbytes <= 4096:
        assert found["squares"][0] == pytest.approx(float(values.double().square().sum()), rel=1e-5)


@every_level
@every_kind
def test_the_norm_of_a_long_tensor_is_that_of_the_same_few_numbers_at_every_level(level: str, kind: str) -> None:
    values = numbers(kind, (2 * CHUNK_BYTES + 4096) // getattr(torch, kind).itemsize)
    found = figures(level, kind, bytes_of(values))
    assert float(found["squares"].sum()) == pytest.approx(float(values.double().square().sum()), rel=0.2)
    assert found["squares"] == pytest.approx(figures("python", kind, bytes_of(values))["squares"], rel=1e-6)


@every_level
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-18, 1e20, 1e37])
def test_squares_that_no_single_number_can_be_are_summed_up_too(level: str, kind: str, scale: float) -> None:
    values = numbers(kind, CHUNK_BYTES // getattr(torch, kind).itemsize).mul(scale)
    found = figures(level, kind, bytes_of(values))
    assert float(found["squares"].sum()) / float(values.double().square().sum()) == pytest.approx(1, rel=0.2)


@every_level
@every_kind
@pytest.mark.parametrize("where", [0, 40_000, CHUNK_BYTES, -1])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(level: str, kind: str, where: int) -> None:
    size = getattr(torch, kind).itemsize
    data = bytes_of(numbers(kind, (CHUNK_BYTES + 5000) // size))
    place = where % len(data) // size * size
    data[place : place + size] = bytes_of(torch.full((1,), float("nan")).to(getattr(torch, kind)))
    found = magnitudes(kind, figures(level, kind, data))
    assert [np.isinf(one) for one in found] == [place < CHUNK_BYTES, place >= CHUNK_BYTES]


@every_level
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 1e300, 1e-300])
def test_double_numbers_are_not_taken_for_infinity(level: str, value: float) -> None:
    found = magnitudes("float64", figures(level, "float64", np.array([0.0, value]).view(np.uint8)))
    assert found == [abs(value)]


@every_level
def test_rows_without_numbers_have_no_figures(level: str) -> None:
    data, found = np.full(3000, 0xFF, np.uint8), np.zeros(2, FIGURES)
    two = rows((at(data), 0, 1000), (at(data) + 1000, 0, 2000))
    kinds = np.array([0, KINDS["float32"]], np.uint8)
    copy_and_digest(two, digests=np.zeros(2, np.uint64), level=level, kinds=kinds, figures=found)
    assert found["top"].tolist() == [0, 0x7FFFFFFF]


def test_figures_of_another_length_than_the_digests_are_refused() -> None:
    data = np.zeros(64, np.uint8)
    with pytest.raises(DescriptorError, match="the array of figures"):
        copy_and_digest(
            rows((at(data), 0, 64)),
            kinds=np.zeros(1, np.uint8),
            figures=np.zeros(9, FIGURES),
            digests=np.zeros(1, np.uint64),
        )
