"""`flashckpt keep`: checkpoints under a name, and the best one of any loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.memory import killed_at
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.history import SessionRecord, write_series, write_session
from flashckpt.checkpoint.marks import keep_as, names_of
from flashckpt.checkpoint.retention import KEEP, Policy, kept_prefixes, prune, tombstone
from flashckpt.checkpoint.root_records import claim_generation, prefix_of
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.cli import main as cli
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, NoCheckpointError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path / "root")
    make(made, 10, 20, 30, 40)
    return made


def make(store: Store, *steps: int, generation: int = 1) -> None:
    for step in steps:
        prefix = prefix_of(generation, step)
        persist_slot(make_pin([shard("w", (4_000,))], step=step, generation=generation), store, prefix)
        commit(store, prefix, [0])


def logged(store: Store, generation: int = 1, **curves: dict[int, float]) -> None:
    record = SessionRecord(generation=generation, token="a", job="run7")
    write_session(store, record)
    write_series(store, record.key, {name: list(points.items()) for name, points in curves.items()})


def run(command: str, *words: str, capsys: Captured) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as done:
        cli.main([command, *words, "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def steps_of(store: Store) -> list[int]:
    return sorted(info.step for info in list_checkpoints(store))


def test_a_name_keeps_moves_and_is_a_step(store: Store, capsys: Captured) -> None:
    assert run("keep", store.url, "10", "--name", "before-cooldown", capsys=capsys)[0] == 0
    assert run("inspect", store.url, "--step", "before-cooldown", capsys=capsys)[1]["step"] == 10
    rows = run("ls", store.url, capsys=capsys)[1]["checkpoints"]
    assert [(row["step"], row["kept"], row["name"]) for row in rows if row["kept"]] == [(10, True, "before-cooldown")]
    prune(store, Policy(keep_last=2))
    assert steps_of(store) == [10, 30, 40]
    keep_as(store, prefix_of(1, 30), "before-cooldown")
    assert kept_prefixes(store) == {prefix_of(1, 30)}
    assert run("keep", store.url, "30", "--remove", capsys=capsys)[0] == 0
    assert names_of(store) == {}
    assert run("inspect", store.url, "--step", "before-cooldown", capsys=capsys)[0] == 10


@pytest.mark.parametrize("name", ["", "1200", "step-10", "a b", "a\nb", "x" * 65, "../x"])
def test_what_cannot_be_a_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        keep_as(store, prefix_of(1, 10), name)
    assert not store.list(KEEP)


def test_a_mark_without_a_name_and_a_deletion_that_has_begun_are_not_taken_over(store: Store, capsys: Captured) -> None:
    assert run("keep", store.url, "10", capsys=capsys)[0] == 0
    with pytest.raises(ConfigError, match="without a name"):
        keep_as(store, prefix_of(1, 10), "x")
    store.put(KEEP + prefix_of(1, 20), tombstone("pruned", 1.0))
    with pytest.raises(NoCheckpointError, match="cannot be kept"):
        keep_as(store, prefix_of(1, 20), "x")
    assert kept_prefixes(store) == {prefix_of(1, 10)}
    assert names_of(store) == {}


def test_a_name_is_in_the_first_write_of_a_mark(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind an empty mark, the same command would be refused for ever."""
    monkeypatch.setattr(store, "put", lambda *_: pytest.fail("a second write"))
    keep_as(store, prefix_of(1, 10), "best", 0.5)
    assert names_of(store) == {"best": (prefix_of(1, 10), 0.5)}


def test_killed_while_a_name_moves_the_newer_one_has_it_and_the_next_move_cleans_up(store: Store) -> None:
    keep_as(store, prefix_of(1, 10), "best", 0.5)
    killed_at("mark.after-name", lambda: keep_as(store, prefix_of(1, 30), "best", 0.4))
    assert names_of(store)["best"] == (prefix_of(1, 30), 0.4)
    assert kept_prefixes(store) == {prefix_of(1, 10), prefix_of(1, 30)}
    keep_as(store, prefix_of(1, 40), "best", 0.3)
    assert kept_prefixes(store) == {prefix_of(1, 40)}


def test_the_best_one_of_a_loop_stays_and_gives_way_to_a_better_one(store: Store, capsys: Captured) -> None:
    assert run("keep", store.url, "--best", "val", capsys=capsys)[0] == 30
    logged(store, val={8: 0.9, 18: 0.5, 28: 0.7}, acc={18: 0.2, 38: 0.9})
    code, found = run("keep", store.url, "--best", "val", capsys=capsys)
    assert (code, found) == (0, {"prefix": prefix_of(1, 20), "kept": True, "name": "best", "value": 0.5})
    code, found = run("keep", store.url, "--best", "acc", "--highest", "--name", "sharpest", capsys=capsys)
    assert (code, found["prefix"]) == (0, prefix_of(1, 40))
    prune(store, Policy(keep_last=1))
    assert steps_of(store) == [20, 40]
    logged(store, val={38: 0.8})  # its own curve was thinned: the mark still knows the value
    assert run("keep", store.url, "--best", "val", capsys=capsys)[1]["prefix"] == prefix_of(1, 20)
    make(store, 50)
    logged(store, val={48: 0.3})
    assert run("keep", store.url, "--best", "val", capsys=capsys)[1]["prefix"] == prefix_of(1, 50)
    assert {mark.prefix for mark in names_of(store).values()} == {prefix_of(1, 50), prefix_of(1, 40)}


def test_what_was_rolled_back_is_never_the_best(store: Store, capsys: Captured) -> None:
    logged(store, val={10: 0.9, 20: 0.8, 30: 0.1})
    assert run("keep", store.url, "--best", "val", capsys=capsys)[1]["prefix"] == prefix_of(1, 30)
    assert claim_generation(store, Generation(number=1, token="a"))
    assert claim_generation(store, Generation(number=2, token="b", parent=SnapshotId(1, 20)))
    assert run("keep", store.url, "--best", "val", capsys=capsys)[1]["prefix"] == prefix_of(1, 20)
    make(store, 25, generation=2)
    logged(store, generation=2, val={24: 0.7})
    assert run("keep", store.url, "--best", "val", capsys=capsys)[1]["prefix"] == prefix_of(2, 25)
    assert kept_prefixes(store) == {prefix_of(2, 25)}


@pytest.mark.parametrize(
    "words", [[], ["10", "--best", "x"], ["10", "--remove", "--name", "x"], ["--best", "x", "--remove"]]
)
def test_what_contradicts_itself_is_refused(store: Store, words: list[str], capsys: Captured) -> None:
    assert run("keep", store.url, *words, capsys=capsys)[0] == 10


def test_gc_prunes_by_time_too(store: Store, capsys: Captured) -> None:
    def gone(*words: str) -> Any:
        return run("gc", store.url, *words, capsys=capsys)[1]["storage"]["checkpoints"]

    assert gone("--keep-last", "7d") == []
    assert len(gone("--keep-last", "1")) == 3
    assert gone("--keep-last", "1", "--keep-every", "20") == [prefix_of(1, 10), prefix_of(1, 30)]
    assert len(gone("--keep-last", "1", "--keep-every", "1000d")) == 2  # the first of these days, and the newest
    for words in (["soon"], ["0"], ["-1"], ["1.5"]):
        assert run("gc", store.url, "--keep-last", *words, capsys=capsys)[0] == 2
