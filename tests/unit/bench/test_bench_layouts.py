"""Shard tables of real models: parameters, bytes, coverage, and what scaling keeps."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from flashckpt.bench.layouts import (
    BYTES_PER_PARAMETER,
    DEFAULTS,
    MODELS,
    PUBLISHED,
    ModelLayout,
    held_bytes,
    persisted_bytes,
    rank_shards,
    scaled,
)
from flashckpt.core.shard import ITEMSIZE, Box, layout_hash
from flashckpt.errors import LayoutError

TINY = {"llama3-8b": 1 / 16384, "llama3-70b": 1 / 65536, "llama3-405b": 1 / 262144, "llama-1t": 1 / 1048576}


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama3-8b", 8.03e9), ("llama3-70b", 70.6e9), ("llama3-405b", 405e9), ("llama-1t", 1.18e12)],
)
def test_parameters_are_within_one_percent_of_the_published_ones(name: str, published: float) -> None:
    assert MODELS[name].parameters == pytest.approx(published, rel=0.01)


def test_published_sizes_are_ours_in_other_units_or_of_another_form_of_the_model() -> None:
    """Every difference to the published table is one that the row's explanation names."""
    rows = {row.layout: row for row in PUBLISHED}
    gib = {name: layout.total_bytes / 2**30 for name, layout in DEFAULTS.items()}
    assert gib["llama3-8b"] == pytest.approx(105, rel=0.005)
    assert gib["llama3-405b"] == pytest.approx(5290, rel=0.001)
    narrow = MODELS["llama3-70b"].parameters - 80 * 2 * 8192 * 512
    assert narrow * BYTES_PER_PARAMETER / 2**30 == pytest.approx(912, rel=0.002)
    wide = MODELS["llama-1t"].parameters + 128 * 2 * 25872 * (25872 - 4312)
    assert wide == pytest.approx(1.326e12, rel=0.001)
    assert wide * BYTES_PER_PARAMETER == pytest.approx(18.56e12, rel=0.001)
    assert set(rows) == set(DEFAULTS)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_shards_of_all_ranks_cover_every_tensor_exactly_once(name: str) -> None:
    layout = scaled(DEFAULTS[name], TINY[name])
    covered: defaultdict[str, int] = defaultdict(int)
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(layout.ranks):
        for shard in rank_shards(layout, rank):
            shapes[shard.fqn] = shard.global_shape
            if shard.replica == 0:
                box = Box(shard.offsets, shard.lengths)
                assert all(box.intersection(other) is None for other in boxes[shard.fqn]), shard.fqn
                boxes[shard.fqn].append(box)
                covered[shard.fqn] += math.prod(shard.lengths)
    assert {fqn: math.prod(shape) for fqn, shape in shapes.items()} == dict(covered)
    assert len(shapes) == 4 * (3 + 9 * layout.model.layers)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_persisted_bytes_of_all_ranks_are_the_checkpoint(name: str) -> None:
    layout = scaled(DEFAULTS[name], TINY[name])
    parts = [persisted_bytes(rank_shards(layout, rank)) for rank in range(layout.ranks)]
    assert sum(parts) == layout.total_bytes == layout.model.parameters * 14


def test_replicas_are_dealt_out_evenly_at_the_real_size() -> None:
    layout = DEFAULTS["llama3-405b"]
    middle = [persisted_bytes(rank_shards(layout, rank)) for rank in range(16, 32)]  # stage 1: both DP replicas
    assert max(middle) / min(middle) < 1.35
    assert sum(middle) == 4 * sum(math.prod(weight.shape) for weight in layout.model.weights(0)) * 14


def test_first_ranks_alone_persist_all_they_hold() -> None:
    """A run of the first node only must not wait for replicas that do not take part."""
    layout = scaled(DEFAULTS["llama3-405b"], 1 / 4096)
    present = range(8)  # all TP ranks of the first DP replica of the first stage
    shards = [rank_shards(layout, rank, present) for rank in present]
    norms = [s for part in shards for s in part if s.fqn == "model.layers.0.ffn_norm.weight"]
    assert sorted(shard.replica for shard in norms) == list(range(8))
    cut = [s for part in shards for s in part if s.fqn == "model.layers.0.attention.wq.weight"]
    assert {shard.replica for shard in cut} == {0}


def test_scaling_keeps_the_kinds_of_shards_and_the_bytes_it_promises() -> None:
    for name, layout in DEFAULTS.items():
        for factor in (1 / 4, 1 / 64, 1 / 1024):
            small = scaled(layout, factor)
            assert small.total_bytes / layout.total_bytes == pytest.approx(factor, rel=0.2), (name, factor)
            kinds = {shard.fqn.split(".")[-2:][0] for shard in rank_shards(small, 0)}
            assert kinds == {shard.fqn.split(".")[-2:][0] for shard in rank_shards(layout, 0)}
    assert scaled(DEFAULTS["llama3-8b"], 1) is DEFAULTS["llama3-8b"]


def test_table_is_the_same_in_every_process() -> None:
    layout = scaled(DEFAULTS["llama3-8b"], 1 / 4096)
    assert layout_hash(rank_shards(layout, 3)) == layout_hash(rank_shards(layout, 3))
    assert held_bytes(rank_shards(layout, 3)) == sum(
        math.prod(s.lengths) * ITEMSIZE[s.dtype] for s in rank_shards(layout, 3)
    )


@pytest.mark.parametrize("arguments", [{"tp": 0}, {"dp": -1}, {"pp": 33}, {"zero": 2}, {"tp": 4096}], ids=str)
def test_layout_that_does_not_divide_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        ModelLayout(**{"model": MODELS["llama3-8b"], "tp": 1, "pp": 1, "dp": 8, "zero": 3, **arguments})  # type: ignore[arg-type]  # a mixed dictionary


@pytest.mark.parametrize("factor", [0, -1, 2, 1e-12, math.nan, math.inf])
def test_absurd_scale_is_refused(factor: float) -> None:
    with pytest.raises(LayoutError):
        scaled(DEFAULTS["llama3-70b"], factor)
