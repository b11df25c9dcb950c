"""The comparison of two checkpoints reads tensors in batches, and a table of many rows is what a small one is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemons import two_checkpoints

from flashckpt.cli import main as cli
from flashckpt.cli import output
from flashckpt.cli.output import FittingTable, OutputConsole
from flashckpt.console import diff
from flashckpt.core.shard import Shard
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.factory import open_store

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 30), "row": (7,), "flat": (1, 1)} | {
    f"small.{number}": (3, number % 5 + 1) for number in range(30)
}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[StorageSource, StorageSource]]:
    """Steps 10 and 20 of one job; all elements of all tensors differ."""
    with two_checkpoints(tmp_path / "root", SHAPES) as root:
        store = open_store(root)
        yield diff._source(store, "10"), diff._source(store, "20")


@pytest.mark.parametrize("block_bytes", [1, 64, 1000, diff.BLOCK_BYTES])
def test_every_size_of_a_batch_finds_the_same(
    block_bytes: int, sides: tuple[StorageSource, StorageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "BLOCK_BYTES", block_bytes)
    found = {one["fqn"]: one for one in diff.compare(*sides)["tensors"]}
    for name, shape in SHAPES.items():
        whole = [one for one in found if one == name or one.endswith(f".{name}")]
        assert found[whole[0]]["elements"] == np.prod(shape, dtype=int)
        assert 0 < found[whole[0]]["differing"] <= found[whole[0]]["elements"]
        assert found[whole[0]]["max_abs"] > 0


def test_a_number_that_became_nan_is_no_small_difference() -> None:
    found = diff._Difference("float32 [3]")
    before, after = (np.array(numbers, "<f4").view(np.uint8) for numbers in ([1, 2, 3], [1.5, np.nan, 3]))
    found.add(before, after, "float32")
    assert (found.differing, diff._document("one", found)["max_abs"]) == (2, None)


@pytest.mark.parametrize(("shape", "blocks"), [((), 1), ((0, 3), 0), ((3, 0), 1), ((5,), 1), ((100, 3), 4)])
def test_blocks_cover_a_tensor_once(shape: tuple[int, ...], blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "BLOCK_BYTES", 300)
    ndim = len(shape)
    whole = Shard(fqn="one", dtype="float32", global_shape=shape, offsets=(0,) * ndim, lengths=shape)
    found = list(diff._blocks(whole))
    assert len(found) == blocks
    assert sum(block.nbytes for block in found) == whole.nbytes


def test_few_calls_read_many_tensors(
    sides: tuple[StorageSource, StorageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counting(targets: list[Target], sources: list[StorageSource]) -> None:
        calls.append(len(targets))
        execute_reads(targets, sources)

    monkeypatch.setattr(diff, "execute_reads", counting)
    diff.compare(*sides)
    assert len(calls) == 2, "one for each side"


def test_shards_that_do_not_lie_alike_are_compared_name_by_name(
    sides: tuple[StorageSource, StorageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = diff.compare(*sides)
    monkeypatch.setattr(diff, "_same_rows", lambda *_: False)
    assert diff.compare(*sides) == at_once
    assert diff.compare(sides[0], sides[0])["tensors"] == []


@pytest.mark.parametrize("title", ["", "a title"])
@pytest.mark.parametrize("last", ["TEXT", ">NUMBER", ""])
def test_a_table_of_many_rows_is_written_as_a_small_one(title: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rendered(many: int) -> str:
        monkeypatch.setattr(output, "_MANY_ROWS", many)
        table = FittingTable("TENSOR", ">N", "", last, title=title)
        for i in range(50):
            table.add_row(f"a.{i}", str(i * 7), "", "ü" * (i % 5) + "日本"[: i % 3])
        console = OutputConsole()
        console.file = io.StringIO()
        console.print(table)
        return console.file.getvalue()

    assert rendered(10) == rendered(1000)


def test_a_summary_by_group_comes_first_and_the_tensors_that_differ_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"model.{k}": (2 + k,) for k in range(12)}
    with two_checkpoints(tmp_path / "root", shapes | {"optimizer.m": (3,)}) as root:
        with pytest.raises(SystemExit):
            cli.main(["diff", root, "10", "20"])
        lines = capsys.readouterr().out.splitlines()
        with pytest.raises(SystemExit):
            cli.main(["diff", root, "10", "20", "--all"])
        everything = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  model: 12 of 12 tensors differ, most model.")
    assert lines[2].startswith("  optimizer: 1 of 1 tensor differ, most optimizer.m by 0.")
    assert lines[3] == "  the 10 that differ most are shown, 3 more with --all"
    rows = [line.split() for line in everything if line.startswith(("model.", "optimizer."))]
    assert [float(row[3]) for row in rows] == sorted((float(row[3]) for row in rows), reverse=True)
    assert [row[0] for row in rows[:10]] == [line.split()[0] for line in lines if line.startswith(("model.", "opt"))]
    assert len(rows) == 13


def test_lists_are_compared_item_by_item() -> None:
    x, y = [[{"lr": 0.1, "eps": 1e-8}]], [[{"lr": 0.2, "eps": 1e-8}]]
    assert list(diff.differences("groups", x, y)) == [("groups[0][0].lr", "0.1", "0.2")]
    assert list(diff.differences("v", [1], [1, 2])) == [("v", "[1]", "[1, 2]")]
    assert list(diff.differences("v", [0] * 11, [1] * 11)) == [("v", str([0] * 11), str([1] * 11))]
