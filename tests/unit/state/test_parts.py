"""Tensors that an object keeps flattened, padded and cut: named, placed as boxes, restored into other cuts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- a fixture
from torch import nn

from flashckpt.errors import ConfigError, ShardGapError, UnexpectedStateError
from flashckpt.state.parts import TensorPart, cut
from flashckpt.state.placement import World
from flashckpt.state.registry import StateRegistry

SHAPES = {"a": (5, 7), "b": (3,), "c": (2, 3, 4), "d": ()}


class Flat:
    """Parameters one behind the other, in pieces of one length, the last one padded: as ZeRO deals them to ranks."""

    def __init__(
        self, size: int, seed: int, *, shapes: dict[str, tuple[int, ...]] = SHAPES, pieces: Any = None
    ) -> None:
        total = sum(torch.Size(shape).numel() for shape in shapes.values())
        self.flat = torch.randn(-(-total // size) * size, generator=torch.Generator().manual_seed(seed))
        self.total, self.shapes = total, shapes
        self.parts: dict[str, Sequence[TensorPart]] = {}
        mine = range(0, total, size) if pieces is None else [piece * size for piece in pieces]
        at = 0
        for name, shape in shapes.items():
            stop = at + torch.Size(shape).numel()
            found: list[TensorPart] = []
            for first in mine:
                low, high = max(at, first), min(stop, first + size)
                if low < high:
                    found += cut(self.flat[low:high], low - at, shape)
            if found:
                self.parts[f"model.{name}"] = tuple(found)
            at = stop
        self.steps = seed

    def flashckpt_parts(self) -> dict[str, Sequence[TensorPart]]:
        return self.parts

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def rows(thing: object, *, rank: int = 0, size: int = 1) -> list[Any]:
    found = StateRegistry(World(rank=rank, size=size))
    found.add("thing", thing)
    return found.structure(found.capture()).shards


def test_flat_range_is_boxes_of_its_tensor() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    for start in range(24):
        for stop in range(start + 1, 25):
            parts = cut(whole.view(-1)[start:stop].clone(), start, (2, 3, 4))
            seen = torch.cat([part.tensor.reshape(-1) for part in parts])
            assert seen.tolist() == list(range(start, stop))
            for part in parts:
                box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.tensor.shape, strict=True))
                assert torch.equal(whole[box], part.tensor)
    assert cut(torch.empty(0), 3, (2, 3, 4)) == ()


def test_parts_are_rows_of_one_tensor_and_padding_is_none() -> None:
    thing = Flat(20, 1)
    found = rows(thing)
    assert {shard.fqn: shard.global_shape for shard in found} == {f"model.{n}": shape for n, shape in SHAPES.items()}
    assert sum(shard.nbytes for shard in found) == thing.total * 4 < thing.flat.nbytes
    assert [(s.offsets, s.lengths) for s in found if s.fqn == "model.a"] == [
        ((0, 0), (2, 7)), ((2, 0), (1, 6)), ((2, 6), (1, 1)), ((3, 0), (2, 7))
    ]  # fmt: skip
    assert all(shard.replica == 0 for shard in found)


@pytest.mark.parametrize("size", [1, 4, 11, 63, 100])
def test_parts_come_back_in_other_pieces_bit_for_bit(size: int, tmp_path: Path) -> None:
    before = Flat(20, 1)
    ckpt = opened(tmp_path, thing=before)
    ckpt.step(1)
    crash(ckpt)
    after = Flat(size, 2)
    padding = after.flat[after.total :].clone()
    crash(opened(tmp_path, thing=after))
    assert torch.equal(after.flat[: after.total], before.flat[: before.total])
    assert torch.equal(after.flat[after.total :], padding)
    assert after.steps == 1


def test_module_takes_over_tensors_that_were_in_parts(tmp_path: Path) -> None:
    before = Flat(20, 1)
    ckpt = opened(tmp_path, thing=before)
    ckpt.step(1)
    crash(ckpt)
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    crash(opened(tmp_path, model=model))
    whole = torch.cat([model[name].detach().reshape(-1) for name in SHAPES])
    assert torch.equal(whole, before.flat[: before.total])


def test_tensors_that_are_missing_or_unexpected_are_named(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, thing=Flat(20, 1))
    ckpt.step(1)
    crash(ckpt)
    with pytest.raises(UnexpectedStateError, match=r"model\.d"):
        opened(tmp_path, thing=Flat(20, 2, shapes={name: SHAPES[name] for name in "abc"}))
    with pytest.raises(ShardGapError, match=r"model\.e"):
        opened(tmp_path, thing=Flat(20, 2, shapes={**SHAPES, "e": (2,)}))


def test_new_members_of_the_dict_are_seen(tmp_path: Path) -> None:
    thing = Flat(20, 1)
    ckpt = opened(tmp_path, thing=thing)
    ckpt.step(1)
    other = Flat(20, 3)
    thing.flat = other.flat
    thing.parts.update(other.parts)
    ckpt.step(2)
    crash(ckpt)
    after = Flat(20, 2)
    crash(opened(tmp_path, thing=after))
    assert torch.equal(after.flat[: after.total], other.flat[: other.total])


def test_equal_copies_are_persisted_once_in_equal_shares_and_buffers_by_the_first_rank() -> None:
    ranks = (0, 1, 2)

    def of(rank: int) -> list[Any]:
        thing = Flat(20, 1)
        trained = {str(k): torch.ones(300, 200) for k in range(4)}
        thing.parts = {
            f"model.{name}": (
                TensorPart(tensor=t, global_shape=(300, 200), offsets=(0, 0), ranks=ranks, is_fenced=True),
            )
            for name, t in trained.items()
        }
        thing.parts["model.mean"] = (TensorPart(tensor=torch.ones(9), global_shape=(9,), offsets=(0,), ranks=ranks),)
        return rows(thing, rank=rank, size=3)

    written = [[shard for shard in of(rank) if not shard.replica] for rank in ranks]
    assert [any(s.fqn == "model.mean" for s in one) for one in written] == [True, False, False]
    sizes = [sum(s.nbytes for s in one if s.fqn != "model.mean") for one in written]
    assert sum(sizes) == 4 * 300 * 200 * 4
    assert max(sizes) - min(sizes) <= 512 << 10


def test_two_tensors_of_one_name_are_still_refused() -> None:
    stages = [nn.ModuleDict({"x": nn.Linear(2, 2)}) for _ in range(2)]
    found = StateRegistry(World())
    found.add("model", stages)
    found.add("thing", Flat(20, 1))
    with pytest.raises(ConfigError, match=r"model\.x\.weight"):
        found.structure(found.capture())
    found = StateRegistry(World())
    found.add("model", nn.ParameterDict({"b": torch.ones(3)}))
    found.add("thing", Flat(20, 1))
    with pytest.raises(ConfigError, match=r"model\.b"):
        found.structure(found.capture())
