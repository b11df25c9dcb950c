"""Replicated state is persisted once, in equal parts, by a rule that every rank computes alike."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine import agent_dir
from support.ranks import run_ranks, values
from torch.distributed.tensor import DTensor

from flashckpt.core.shard import joined, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.packs import PACK_BYTES, plan_packs
from flashckpt.planning.write_partition import (
    CUT_BYTES,
    LEAST_PIECE_BYTES,
    WritePart,
    cut_dimension,
    partition_writes,
    split_rows,
)
from flashckpt.state.placement import LocalBox, Replication, shard_of, split_among_replicas

PARTS = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(1, 1 << 20), st.integers(1, 5)), min_size=1, max_size=30
).map(
    lambda sizes: [
        WritePart(name=f"t{i:03d}", rows=rows, nbytes=rows * row, weight=rows * row * factor)
        for i, (rows, row, factor) in enumerate(sizes)
    ]
)


@given(parts=PARTS, writers=st.integers(1, 130), order=st.randoms())
@example(parts=[WritePart(name="a", rows=1, nbytes=1 << 30, weight=1 << 30)], writers=4, order=None)
@example(parts=[WritePart(name="a", rows=0, nbytes=0, weight=0)], writers=2, order=None)
def test_every_row_has_one_writer_and_loads_are_equal_up_to_one_cut(
    parts: list[WritePart], writers: int, order: Any
) -> None:
    dealt = partition_writes(parts, writers)
    if order is not None:
        order.shuffle(parts)
    assert partition_writes(parts, writers) == dealt
    load = Counter[int]()
    for part in parts:
        shares = dealt[part.name]
        assert (shares[0].start, shares[-1].stop) == (0, part.rows)
        assert all(a.stop == b.start and a.writer < b.writer for a, b in pairwise(shares))
        assert len(shares) == 1 or part.nbytes >= CUT_BYTES
        for share in shares:
            load[share.writer] += part.weight * (share.stop - share.start) // max(part.rows, 1)
            assert 0 <= share.writer < writers
            assert len(shares) == 1 or part.nbytes * (share.stop - share.start) >= LEAST_PIECE_BYTES * part.rows
    granule = max(  # of a tensor that is assigned whole, or of two cuts that moved to a row and away from an end
        part.weight if part.nbytes < CUT_BYTES else 2 * part.weight * (1 / part.rows + LEAST_PIECE_BYTES / part.nbytes)
        for part in parts
    )
    assert max(load.values()) <= sum(p.weight for p in parts) / writers + granule + len(parts)


def llama(*, width: int, layers: int, kv: int, inner: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, width), "norm": (width,), "head": (vocab, width)}
    for layer in range(layers):
        matrices = {"wq": (width, width), "wk": (kv, width), "wv": (kv, width), "wo": (width, width)}
        matrices |= {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in matrices.items()}
        shapes |= {f"layers.{layer}.{name}": (width,) for name in ("norm1", "norm2")}
    return shapes


@pytest.mark.parametrize("writers", [2, 4, 8, 64])
@pytest.mark.parametrize(
    "shapes",
    [
        llama(width=4096, layers=32, kv=1024, inner=14336, vocab=128256),
        llama(width=2048, layers=16, kv=512, inner=8192, vocab=128256),  # a fifth of it is the embedding
        llama(width=256, layers=4, kv=64, inner=896, vocab=128256),  # nearly all of it is
    ],
    ids=["8b", "1b", "tiny with a large vocabulary"],
)
def test_largest_writer_of_llama_state_is_within_5_percent_of_the_mean(
    shapes: dict[str, tuple[int, ...]], writers: int
) -> None:
    """float32 parameters and two moments; as rows of the table each rank would persist."""
    parts = [
        WritePart(name=name, rows=shape[0], nbytes=4 * math.prod(shape), weight=12 * math.prod(shape))
        for name, shape in shapes.items()
    ]
    dealt, load = partition_writes(parts, writers), [0] * writers
    for name, shape in shapes.items():
        for share in dealt[name]:
            load[share.writer] += 12 * math.prod(shape[1:]) * (share.stop - share.start)
    assert sum(load) == sum(part.weight for part in parts)
    assert max(load) < 1.05 * sum(load) / writers
    assert sum(map(len, dealt.values())) < len(shapes) + writers, "more cuts than writers"


BOXES = st.lists(st.integers(0, 9), min_size=0, max_size=4).flatmap(
    lambda lengths: st.tuples(st.just(tuple(lengths)), st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
)  # fmt: skip


@given(box=BOXES, replicas=st.integers(1, 5), limit=st.integers(4, 4000))
def test_pieces_of_a_box_are_the_box_contiguous_and_no_larger_than_asked(
    box: tuple[tuple[int, ...], list[int]], replicas: int, limit: int
) -> None:
    lengths, starts = box
    offsets = tuple(starts)
    whole = LocalBox(global_shape=tuple(o + n for o, n in zip(offsets, lengths, strict=True)), offsets=offsets,
                lengths=lengths, starts=(0,) * len(lengths))  # fmt: skip
    dim = cut_dimension(lengths)
    rows = lengths[dim] if lengths else 1
    part = WritePart(
        name="t", rows=rows, nbytes=max(CUT_BYTES, 4 * math.prod(lengths)) if lengths else 4, weight=1 << 40
    )
    shares = partition_writes([part], replicas)["t"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashckpt.state.placement.ROW_BYTES", limit)
        patch.setattr("flashckpt.state.placement.split_rows", lambda rows, n: split_rows(rows, n, limit))
        views = [
            split_among_replicas([whole], "float32", Replication(replicas=replicas, index=k), shares)
            for k in range(replicas)
        ]
    for view in views:
        boxes = [(piece.offsets, piece.lengths) for piece in view]
        assert boxes == [(piece.offsets, piece.lengths) for piece in views[0]], "cut alike on every replica"
        assert sum(math.prod(n) for _, n in boxes) == math.prod(lengths)
        if math.prod(lengths):
            assert joined(boxes) == [(offsets, lengths)]
        assert all(4 * math.prod(n) <= max(limit, 4) for _, n in boxes)
        assert all(tuple(o - s for o, s in zip(p.offsets, p.starts, strict=True)) == offsets for p in view)
        for piece in view:  # row-major and without gaps: whole behind the first dimension longer than one
            first = next((dim for dim, n in enumerate(piece.lengths) if n > 1), len(lengths))
            assert piece.lengths[first + 1 :] == lengths[first + 1 :]
    for copies in zip(*views, strict=True):
        assert sorted(one.replica for one in copies) == list(range(replicas)), "one writer each"


def test_no_pack_is_larger_than_its_limit_whatever_the_tensors_are() -> None:
    """Boxes of 2 GiB, one of them a single row: only their shapes are needed."""
    shards = []
    for i, lengths in enumerate([(3 << 15, 1 << 13), (1, 700 << 20), (5, 150 << 20)]):
        whole = LocalBox(global_shape=lengths, offsets=(0, 0), lengths=lengths, starts=(0, 0))
        shards += [shard_of(f"t{i}", "uint8", piece) for piece in split_among_replicas([whole], "uint8", Replication())]
    placement = place(shards)
    packs = plan_packs(ShardTable.from_shards(shards, placement.offsets), placement.total)
    assert max(pack.nbytes for pack in packs) <= PACK_BYTES
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(shards)))


WIDE, VOCABULARY = 256, 12_000  # more than 8 MiB for each of four ranks: packs of their own
KEYS = ("exp_avg", "exp_avg_sq", "step")


def language_model() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDE), *blocks, torch.nn.LayerNorm(WIDE))


def persists(rank: int, root: str, kind: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from flashckpt import Checkpointer

    model, mesh = language_model(), None
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:  # each half of a tensor on two ranks
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=2, job="t", keep_last=None)
    ckpt.track(model=model, optimizer=optimizer, mesh=mesh)
    report = ckpt.restore()
    restored = None if report is None else (report.step, report.is_same_layout, set(report.tier_bytes))
    for step in range(1 if report is None else report.step + 1, 3):
        optimizer.zero_grad()
        model(torch.arange(8) + step).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.wait(60)
    digests = sums(model, optimizer)
    ckpt.close()
    return {"restored": None if restored is None else [restored[0], restored[1], sorted(restored[2])], "sums": digests}


def sums(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return one number per tensor, the whole of it where it is sharded."""
    tensors = [t for p in model.parameters() for t in (p, *(optimizer.state[p][key] for key in KEYS))]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [float(t.detach().double().sum()).hex() for t in whole]


def reads_alone(rank: int, root: str) -> list[str]:
    """One rank, another layout: the parts of four writers come together."""
    from flashckpt import Checkpointer

    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reader = Checkpointer.readonly(root)
    reader.track(model=model, optimizer=optimizer)
    reader.restore()
    return sums(model, optimizer)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_four_ranks_persist_equal_parts_once_and_any_layout_reads_them(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The embedding is nine tenths of the state: assigned whole, its writer would write almost four times the mean."""
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR", raising=False)
    first = values(run_ranks(persists, 4, str(tmp_path), kind))
    assert len({str(one["sums"]) for one in first}) == 1
    (folder,) = tmp_path.glob("step-000000002.g*")
    written = [sum(p.stat().st_size for p in folder.glob(f"r{rank:05d}.p*")) for rank in range(4)]
    state = 12 * (VOCABULARY * WIDE + 3 * WIDE * WIDE + 2 * WIDE)
    assert state <= sum(written) < 1.01 * state, "every byte once, and a little padding"
    assert max(written) < 1.05 * sum(written) / 4, written
    if kind == "ddp":
        again = values(run_ranks(persists, 4, str(tmp_path), kind))
        assert {str(one["sums"]) for one in again} == {str(first[0]["sums"])}
        assert again[0]["restored"][:2] == [2, True]
    assert values(run_ranks(reads_alone, 1, str(tmp_path)))[0] == first[0]["sums"]


def built_differently(rank: int, root: str) -> str:
    from flashckpt import Checkpointer
    from flashckpt.errors import ReplicaMismatchError

    model = language_model()
    for parameter in list(model.parameters())[: rank + 1]:
        parameter.requires_grad = False
    ckpt = Checkpointer(root, job="t")
    ckpt.track(model=model, optimizer=torch.optim.AdamW(model.parameters()), replicated_over="world")
    try:
        ckpt.restore()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def test_replicas_that_would_cut_their_state_differently_are_told_at_the_start(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")
    agent_dir()
    for text in values(run_ranks(built_differently, 2, str(tmp_path))):
        assert "do not agree who persists which part" in text
