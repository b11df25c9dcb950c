"""Plans cover every wanted element exactly once and move the right bytes, whatever both layouts are."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ShardGapError
from flashckpt.planning.read_plan import Box, flat_boxes, plan_box, plan_reads, runs, split_runs

DTYPES = ("uint8", "int16", "float32", "complex128")


def table_of(shards: list[Shard]) -> ShardTable:
    sizes = [shard.nbytes for shard in shards]
    return ShardTable.from_shards(shards, np.concatenate(([0], np.cumsum(sizes)[:-1])) if sizes else [])


def shard_of(box: Box, shape: tuple[int, ...], *, fqn: str = "w", dtype: str = "float32") -> Shard:
    return Shard(fqn=fqn, dtype=dtype, global_shape=shape, offsets=box[0], lengths=box[1])


def whole(shape: tuple[int, ...]) -> Box:
    return tuple(0 for _ in shape), shape


@st.composite
def partitions(draw: st.DrawFn, box: Box, cuts: int = 6) -> list[Box]:
    """Cut a box at random: recursive guillotine cuts, uneven and also empty parts, in random order."""
    parts = [box]
    for _ in range(draw(st.integers(0, cuts))):
        at, lengths = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if not lengths:
            parts.append((at, lengths))
            continue
        dim = draw(st.integers(0, len(lengths) - 1))
        head = draw(st.integers(0, lengths[dim]))
        for skip, n in ((0, head), (head, lengths[dim] - head)):
            part = (*at[:dim], at[dim] + skip, *at[dim + 1 :]), (*lengths[:dim], n, *lengths[dim + 1 :])
            parts.append(part)
    return draw(st.permutations(parts))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cut every dimension: what FSDP x TP does, with uneven and strided pieces."""
    boxes: list[Box] = [((), ())]
    for n in shape:
        edges = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=4))})
        spans = list(itertools.pairwise(edges)) or [(0, 0)]
        boxes = [((*at, a), (*lengths, b - a)) for at, lengths in boxes for a, b in spans]
    return draw(st.permutations(boxes))


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def fill(shards: list[Shard], tables: list[ShardTable], data: list[list[bytes]]) -> list[bytearray]:
    """Execute a plan by its runs alone."""
    out = [bytearray(shard.nbytes) for shard in shards]
    for read in plan_reads(shards, tables).reads:
        held, wanted = tables[read.source].shard(read.row), shards[read.target]
        sides = (held.offsets, held.lengths), (wanted.offsets, wanted.lengths), (read.offsets, read.lengths)
        found = runs(*sides, ITEMSIZE[wanted.dtype])
        assert len(found) * found.nbytes == read.nbytes
        for a, b in zip(found.source_starts.tolist(), found.target_starts.tolist(), strict=True):
            out[read.target][b : b + found.nbytes] = data[read.source][read.row][a : a + found.nbytes]
    return out


def cut_bytes(array: np.ndarray, box: Box) -> bytes:
    return array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].tobytes()


def numbered(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    size = ITEMSIZE[dtype]
    raw = np.random.default_rng(0).integers(0, 256, prod(shape) * size, dtype=np.uint8)
    return raw.view(np.dtype(f"V{size}")).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_to_any_other_split_is_bit_for_bit(data: st.DataObject) -> None:
    shape, dtype = data.draw(shapes), data.draw(st.sampled_from(DTYPES))
    array = numbered(shape, dtype)
    cut = data.draw(st.sampled_from((partitions(whole(shape)), grids(shape))))
    held = [data.draw(cut) for _ in range(data.draw(st.integers(1, 2)))]
    wanted = data.draw(data.draw(st.sampled_from((partitions(whole(shape)), grids(shape)))))
    tables = [table_of([shard_of(box, shape, dtype=dtype) for box in boxes]) for boxes in held]
    stored = [[cut_bytes(array, box) for box in boxes] for boxes in held]
    shards = [shard_of(box, shape, dtype=dtype) for box in wanted]
    assert [bytes(x) for x in fill(shards, tables, stored)] == [cut_bytes(array, box) for box in wanted]
    assert plan_reads(shards, tables) == plan_reads(shards, tables)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlapping_sources_cover_each_element_once_nearest_first(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple))
    near = data.draw(partitions(whole(shape)))
    near = near[: data.draw(st.integers(0, len(near)))]
    far = [whole(shape)] * 2 + data.draw(partitions(whole(shape)))
    plan = plan_reads([shard_of(whole(shape), shape)], [table_of([shard_of(b, shape) for b in x]) for x in (near, far)])
    count, owner = np.zeros(shape, int), np.ones(shape, int)
    for box in near:
        owner[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] = 0
    for read in plan.reads:
        at = tuple(slice(a, a + n) for a, n in zip(read.offsets, read.lengths, strict=True))
        count[at] += 1
        assert (owner[at] == read.source).all()
    assert (count == 1).all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gap_names_tensor_first_missing_index_and_sources(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [box for box in data.draw(partitions(whole(shape))) if prod(box[1])]
    lost = data.draw(st.sampled_from(boxes))
    kept = [box for box in boxes if box != lost]
    with pytest.raises(ShardGapError) as error:
        plan_reads(
            [shard_of(whole(shape), shape, fqn="model.w")],
            [table_of([])] * 0 + [table_of([shard_of(box, shape, fqn="model.w") for box in kept])],
            names=["rank 3"],
        )
    assert "'model.w'" in str(error.value)
    assert f"first index {list(lost[0])}" in str(error.value)
    assert f"{prod(lost[1])} of {prod(shape)} elements" in str(error.value)
    assert "rank 3" in str(error.value)


def test_exact_box_of_a_replica_is_one_read_from_the_lowest_row() -> None:
    shape = (64, 8)
    boxes = [((k, 0), (1, 8)) for k in range(64)] + [whole(shape)] * 2
    plan = plan_reads([shard_of(whole(shape), shape)], [table_of([shard_of(box, shape) for box in boxes])])
    assert [(read.row, read.nbytes) for read in plan.reads] == [(64, 2048)]


def test_grid_of_many_shards_is_covered_once_and_replicas_are_dropped() -> None:
    shape = (48, 24)
    boxes = [((r, c), (3, 4)) for _ in range(2) for r in range(0, 48, 3) for c in range(0, 24, 4)]
    plan = plan_reads([shard_of(whole(shape), shape)], [table_of([shard_of(box, shape) for box in boxes])])
    assert [read.row for read in plan.reads] == list(range(96))
    assert sum(read.nbytes for read in plan.reads) == plan.nbytes == plan.nbytes_of(0)


@pytest.mark.parametrize(("dtype", "shape"), [("int64", (4, 4)), ("float32", (4, 5))])
def test_other_dtype_or_shape_is_refused_by_name(dtype: str, shape: tuple[int, ...]) -> None:
    held = table_of([shard_of(whole(shape), shape, dtype=dtype)])
    with pytest.raises(ShardGapError, match=r"'w' with another (dtype|global shape)"):
        plan_reads([shard_of(whole((4, 4)), (4, 4))], [held])


def test_damaged_row_is_left_out_and_the_next_source_is_used() -> None:
    shard = shard_of(whole((8,)), (8,))
    tables = [table_of([shard]), table_of([shard])]
    box = ((2,), (3,))
    assert [read.source for read in plan_box(0, shard, box, tables)] == [0]
    assert [read.source for read in plan_box(0, shard, box, tables, without={(0, 0)})] == [1]
    with pytest.raises(ShardGapError):
        plan_box(0, shard, box, tables, without={(0, 0), (1, 0)})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flat_range_of_a_shard_is_a_few_disjoint_boxes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    start = data.draw(st.integers(0, prod(lengths)))
    stop = data.draw(st.integers(start, prod(lengths)))
    origin = tuple(data.draw(st.integers(0, 5)) for _ in lengths)
    found = np.zeros(lengths, int)
    boxes = flat_boxes((origin, lengths), start, stop)
    for at, n in boxes:
        found[tuple(slice(a - o, a - o + k) for a, o, k in zip(at, origin, n, strict=True))] += 1
    expected = np.zeros(prod(lengths), int)
    expected[start:stop] = 1
    assert np.array_equal(found.ravel(), expected)
    assert len(boxes) <= max(2 * len(lengths) - 1, 1)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_split_runs_partitions_the_box_under_the_limit(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    limit = data.draw(st.integers(1, 8))
    source, target = whole(shape), whole(tuple(n + 1 for n in shape))
    count = np.zeros(shape, int)
    for box in split_runs(whole(shape), source, target, limit):
        assert len(runs(source, target, box, 4)) <= limit
        count[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] += 1
    assert (count == 1).all()


def test_simulated_70_layer_model_plans_at_64_ranks() -> None:
    """The benchmark's own check: what a rank plans covers all it wants. Times are for the benchmark to judge."""
    path = Path(__file__).parent.parent / "benchmarks/reshard.py"
    spec = importlib.util.spec_from_file_location("benchmark_reshard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        table = module.saved_manifest(2, 4, 4).table
        for rank in (0, 17, 31):
            shards = module.wanted_shards(4, 2, 4, rank)
            plan = plan_reads(shards, [table])
            assert sum(read.nbytes for read in plan.reads) == plan.nbytes == sum(shard.nbytes for shard in shards)
