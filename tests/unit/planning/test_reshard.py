"""Plans cover every wanted element exactly once and move the right bytes, whatever both layouts are."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard import ITEMSIZE, Box, Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ShardGapError
from flashckpt.planning import box_match
from flashckpt.planning.box_match import Gap, SourceRow
from flashckpt.planning.pieces import JOB_BYTES, WIDE_JOB_BYTES, cut_pieces, join_jobs, merge_pieces, runs, split_runs
from flashckpt.planning.read_plan import as_table, coverage, plan_gaps, plan_reads

DTYPES = ("uint8", "int16", "float32", "complex128")


def table_of(shards: list[Shard]) -> ShardTable:
    sizes = [shard.nbytes for shard in shards]
    return ShardTable.from_shards(shards, np.concatenate(([0], np.cumsum(sizes)[:-1])) if sizes else [])


def shard_of(box: Box, shape: tuple[int, ...], *, fqn: str = "w", dtype: str = "float32") -> Shard:
    return Shard(fqn=fqn, dtype=dtype, global_shape=shape, offsets=box[0], lengths=box[1])


def whole(shape: tuple[int, ...]) -> Box:
    return Box(tuple(0 for _ in shape), shape)


@st.composite
def partitions(draw: st.DrawFn, box: Box, cuts: int = 6) -> list[Box]:
    """Cut a box at random: recursive guillotine cuts, uneven and also empty parts, in random order."""
    parts = [box]
    for _ in range(draw(st.integers(0, cuts))):
        at, lengths = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if not lengths:
            parts.append(Box(at, lengths))
            continue
        dim = draw(st.integers(0, len(lengths) - 1))
        head = draw(st.integers(0, lengths[dim]))
        for skip, n in ((0, head), (head, lengths[dim] - head)):
            parts.append(Box(at, lengths).cut(dim, at[dim] + skip, n))
    return draw(st.permutations(parts))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cut every dimension: what FSDP x TP does, with uneven and strided pieces."""
    boxes = [Box((), ())]
    for n in shape:
        edges = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=4))})
        spans = list(itertools.pairwise(edges)) or [(0, 0)]
        boxes = [Box((*at, a), (*lengths, b - a)) for at, lengths in boxes for a, b in spans]
    return draw(st.permutations(boxes))


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def fill(shards: list[Shard], tables: list[ShardTable], data: list[list[bytes]]) -> list[bytearray]:
    """Execute a plan by its runs alone."""
    out = [bytearray(shard.nbytes) for shard in shards]
    plan = plan_reads(shards, tables)
    for read, nbytes in zip(plan.reads, plan.nbytes.tolist(), strict=True):
        held, wanted = tables[read.source].shard(read.row), shards[read.target]
        sides = Box(held.offsets, held.lengths), Box(wanted.offsets, wanted.lengths)
        found = runs(*sides, read.box, ITEMSIZE[wanted.dtype])
        assert len(found) * found.nbytes == nbytes
        for a, b in zip(found.source_starts.tolist(), found.target_starts.tolist(), strict=True):
            out[read.target][b : b + found.nbytes] = data[read.source][read.row][a : a + found.nbytes]
    return out


def cut_bytes(array: np.ndarray, box: Box) -> bytes:
    return array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].tobytes()


def numbered(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    size = ITEMSIZE[dtype]
    raw = np.random.default_rng(0).integers(0, 256, prod(shape) * size, dtype=np.uint8)
    return raw.view(np.dtype(f"V{size}")).reshape(shape)


@pytest.mark.matrix
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
    assert plan_reads(shards, tables).reads == plan_reads(shards, tables).reads
    plan_reads(shards, tables).require_complete()


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
        at = tuple(slice(a, a + n) for a, n in zip(*read.box, strict=True))
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
    held = table_of([shard_of(box, shape, fqn="model.w") for box in kept])
    plan = plan_reads([shard_of(whole(shape), shape, fqn="model.w")], [held])
    with pytest.raises(ShardGapError) as error:
        plan.require_complete(["rank 3"])
    assert "'model.w'" in str(error.value)
    assert f"first index {list(lost[0])}" in str(error.value)
    assert f"{prod(lost[1])} of {prod(shape)} elements" in str(error.value)
    assert "rank 3" in str(error.value)


def test_exact_box_of_a_replica_is_one_read_from_the_lowest_row() -> None:
    shape = (64, 8)
    boxes = [Box((k, 0), (1, 8)) for k in range(64)] + [whole(shape)] * 2
    plan = plan_reads([shard_of(whole(shape), shape)], [table_of([shard_of(box, shape) for box in boxes])])
    assert [read.row for read in plan.reads] == [64]
    assert plan.nbytes.tolist() == [2048]


def test_grid_of_many_shards_is_covered_once_and_replicas_are_dropped() -> None:
    shape = (48, 24)
    boxes = [Box((r, c), (3, 4)) for _ in range(2) for r in range(0, 48, 3) for c in range(0, 24, 4)]
    plan = plan_reads([shard_of(whole(shape), shape)], [table_of([shard_of(box, shape) for box in boxes])])
    assert [read.row for read in plan.reads] == list(range(96))
    assert plan.nbytes.sum() == plan.needed_bytes == plan.nbytes_of(0)


@pytest.mark.parametrize(("dtype", "shape"), [("int64", (4, 4)), ("float32", (4, 5))])
def test_other_dtype_or_shape_is_refused_by_name(dtype: str, shape: tuple[int, ...]) -> None:
    held = table_of([shard_of(whole(shape), shape, dtype=dtype)])
    with pytest.raises(ShardGapError, match=r"'w' with another (dtype|shape)"):
        plan_reads([shard_of(whole((4, 4)), (4, 4))], [held])


def test_damaged_row_is_left_out_and_the_next_source_is_used() -> None:
    shard = shard_of(whole((8,)), (8,))
    tables = [table_of([shard]), table_of([shard])]
    lost = [Gap(0, Box((2,), (3,)))]
    first, second = SourceRow(0, 0), SourceRow(1, 0)
    assert [read.source for read in plan_gaps(as_table([shard]), lost, tables).reads] == [0]
    assert [read.source for read in plan_gaps(as_table([shard]), lost, tables, without={first}).reads] == [1]
    assert list(plan_gaps(as_table([shard]), lost, tables, without={first, second}).gaps) == lost


@pytest.mark.matrix
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_many_tensors_plan_as_each_of_them_alone(data: st.DataObject) -> None:
    """Blocks of pairs, names that only some sources have, several dtypes: the same reads as one tensor at a time."""
    tables: list[list[Shard]] = [[], []]
    shards: list[Shard] = []
    for k in range(data.draw(st.integers(1, 6))):
        shape, dtype = data.draw(shapes), data.draw(st.sampled_from(DTYPES))
        for held in tables:
            boxes = data.draw(data.draw(st.sampled_from((partitions(whole(shape)), grids(shape)))))
            kept = boxes[: data.draw(st.integers(0, len(boxes)))]
            held += [shard_of(box, shape, fqn=f"t{k}", dtype=dtype) for box in kept]
        shards += [shard_of(box, shape, fqn=f"t{k}", dtype=dtype) for box in data.draw(partitions(whole(shape)))]
    sources = [table_of(data.draw(st.permutations(held))) for held in tables]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_match, "MOST_PAIRS", data.draw(st.sampled_from((1, 3, 1 << 18))))
        together = plan_reads(shards, sources)
    alone = [plan_reads([shard], sources) for shard in shards]
    assert together.reads == [read._replace(target=k) for k, plan in enumerate(alone) for read in plan.reads]
    assert together.gaps == tuple(gap._replace(target=k) for k, plan in enumerate(alone) for gap in plan.gaps)
    given, missing = coverage(shards, sources)
    assert sum(given) + missing == sum(shard.nbytes for shard in shards)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_bring_every_byte_once_whatever_their_runs(data: st.DataObject) -> None:
    """Contiguous reads are cut all at once and strided ones one by one: both say the same of every byte."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    shape = (*shape[:-1], shape[-1] * data.draw(st.sampled_from((1, 1 << 17, 1 << 20))))
    held = [shard_of(box, shape, dtype="uint8") for box in data.draw(partitions(whole(shape)))]
    wanted = [shard_of(box, shape, dtype="uint8") for box in data.draw(partitions(whole(shape)))]
    pieces = cut_pieces(plan_reads(wanted, [table_of(held)]), max_runs=data.draw(st.sampled_from((1, 5, 1 << 16))))
    count = [np.zeros(shard.nbytes, np.uint8) for shard in wanted]
    for k in range(len(pieces)):
        start, stop = int(pieces.start[k]), int(pieces.stop[k])
        assert start % CHUNK_BYTES == 0
        assert stop % CHUNK_BYTES == 0 or stop == held[int(pieces.row[k])].nbytes
        part, size = int(pieces.part[k]), int(pieces.nbytes[k])
        pairs = [(int(pieces.source_start[k]), int(pieces.target_start[k]))]
        if part >= 0:
            found = pieces.parts[part].runs
            pairs = list(zip(found.source_starts.tolist(), found.target_starts.tolist(), strict=True))
        for a, b in pairs:
            low, high = max(a, start), min(a + size, stop)
            assert low < high, "a piece without a byte"
            count[int(pieces.target[k])][b + low - a : b + high - a] += 1
    assert all((one == 1).all() for one in count)
    jobs = merge_pieces(pieces)
    assert sum(map(len, jobs)) == len(pieces)
    for job in jobs:
        p, at = job.pieces, job.rows
        assert len({*zip(p.source[at].tolist(), p.object_id[at].tolist(), strict=True)}) == 1
        assert int((p.place[at] + p.stop[at] - p.start[at]).max() - p.place[at].min()) <= JOB_BYTES
    joined = join_jobs(jobs, {0})
    assert [row for job in joined for row in range(job.first, job.last)] == list(range(len(pieces)))
    for job in joined:
        p, at = job.pieces, job.rows
        assert len({*zip(p.source[at].tolist(), p.object_id[at].tolist(), strict=True)}) == 1
        nbytes = int((p.place[at] + p.stop[at] - p.start[at]).max() - p.place[at].min())
        assert job in jobs or (job.source == 0 and nbytes <= WIDE_JOB_BYTES)


def test_joined_jobs_fit_a_block_where_another_piece_reaches_further_than_the_last_one() -> None:
    shape = (4, 9, 9 << 17)
    boxes = Box((0, 0, 0), (4, 1, shape[2])), Box((0, 1, 0), (4, 8, shape[2]))
    wanted = [shard_of(box, shape, dtype="uint8") for box in boxes]
    held = table_of([shard_of(whole(shape), shape, dtype="uint8")])
    joined = join_jobs(merge_pieces(cut_pieces(plan_reads(wanted, [held]), max_runs=5)), {0})
    reach = [(job.pieces.place + job.pieces.stop - job.pieces.start)[job.rows].max() for job in joined]
    assert max(end - job.pieces.place[job.first] for end, job in zip(reach, joined, strict=True)) <= WIDE_JOB_BYTES


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flat_range_of_a_shard_is_a_few_disjoint_boxes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    start = data.draw(st.integers(0, prod(lengths)))
    stop = data.draw(st.integers(start, prod(lengths)))
    origin = tuple(data.draw(st.integers(0, 5)) for _ in lengths)
    found = np.zeros(lengths, int)
    boxes = Box(origin, lengths).flat(start, stop)
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
    path = ROOT / "benchmarks/reshard.py"
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
            plan.require_complete()
            assert plan.nbytes.sum() == plan.needed_bytes == sum(shard.nbytes for shard in shards)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_look_at_the_rows_near_a_box_alone_gives_the_plan_of_a_look_at_all(data: st.DataObject) -> None:
    """Rows that follow each other, overlap, are empty, lie in another order, or are cut along another dimension."""
    sizes, flips = st.lists(st.integers(1, 12), max_size=2), st.booleans()
    tensors = {f"t{k}": tuple(data.draw(sizes)) for k in range(3)}
    held, wanted = [], []
    for fqn, shape in tensors.items():
        boxes = data.draw(partitions(whole(shape)))
        is_cut = data.draw(flips)
        if shape and is_cut:  # along the first dimension, as FSDP cuts it
            step = data.draw(st.integers(1, 4))
            starts = range(0, shape[0], step)
            boxes = [Box((at, *[0] * (len(shape) - 1)), (min(step, shape[0] - at), *shape[1:])) for at in starts]
        if data.draw(flips):
            boxes = data.draw(st.permutations(boxes))
        boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=2))
        held += [shard_of(box, shape, fqn=fqn) for box in boxes]
        wanted += [shard_of(box, shape, fqn=fqn) for box in data.draw(partitions(whole(shape)))]
    table = table_of(held)
    plans = []
    for few in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(box_match, "FEW_ROWS", few)
            plans.append(plan_reads(wanted, [table]))
    near, every = plans
    assert near.reads == every.reads
    assert near.gaps == every.gaps


def test_a_tensor_cut_into_many_rows_is_planned_from_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4096, 2)
    table = table_of([shard_of(Box((at, 0), (1, 2)), shape) for at in range(4096)])
    looked: list[int] = []
    real = box_match._pairs

    def pairs(wanted: ShardTable, rows: Any, held: ShardTable, near: Any, width: int) -> Any:
        looked.append(int((near[1] - near[0]).sum()))
        return real(wanted, rows, held, near, width)

    monkeypatch.setattr(box_match, "_pairs", pairs)
    plan = plan_reads([shard_of(Box((700, 0), (3, 2)), shape)], [table])
    plan.require_complete()
    assert [read.row for read in plan.reads] == [700, 701, 702]
    assert looked == [3]
