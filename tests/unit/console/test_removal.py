"""`flashckpt rm`: one checkpoint goes, and only one that nobody needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.daemons import two_checkpoints
from support.memory import killed_at
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints, read_contents
from flashckpt.checkpoint.retention import ReadLease, delete, keep
from flashckpt.checkpoint.root_records import MANIFEST, claim_generation, prefix_of
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.cli import main as cli
from flashckpt.cli.common import jobs_on_this_machine
from flashckpt.console import removal
from flashckpt.core.lineage import Generation
from flashckpt.core.schema import TensorFigures
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def make(store: Store, *steps: int, generation: int = 1, suspect: bool = False) -> None:
    for step in steps:
        pin, prefix = make_pin([shard("w", (40_000,))], step=step, generation=generation), prefix_of(generation, step)
        if suspect:
            figures = TensorFigures.unknown(1)
            figures.suspect[0] = True
            pin.manifest_ = replace(pin.manifest_, figures=figures)
        persist_slot(pin, store, prefix)
        commit(store, prefix, [0])


def steps_of(store: Store) -> list[int]:
    return sorted(info.step for info in list_checkpoints(store, damaged=True))


def rm(store: Store, step: str, *more: str, capsys: Captured) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as done:
        cli.main(["rm", store.url, step, *more, "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def test_it_is_shown_first_and_its_data_goes_with_apply(store: Store, tmp_path: Path, capsys: Captured) -> None:
    make(store, 10, 20, 30)
    code, found = rm(store, "10", capsys=capsys)
    assert (code, found["applied"], found["nbytes"] > 160_000, steps_of(store)) == (0, False, True, [10, 20, 30])
    code, found = rm(store, "10", "--apply", capsys=capsys)
    assert (code, found["applied"], found["nbytes"] > 160_000, steps_of(store)) == (0, True, True, [20, 30])
    assert [path.name for path in (tmp_path / "root" / prefix_of(1, 10)).iterdir()] == [MANIFEST]
    assert rm(store, "10", capsys=capsys)[0] == 30


def test_of_two_with_one_step_the_generation_is_asked_for(store: Store, capsys: Captured) -> None:
    make(store, 10)
    assert claim_generation(store, Generation(number=1, token="a"))
    assert claim_generation(store, Generation(number=2, token="b", parent=SnapshotId(1, 5)))
    make(store, 10, 20, generation=2)
    code, found = rm(store, "10", "--apply", capsys=capsys)
    assert (code, found["error"]["found"]) == (10, "10.g2, 10.g1")
    assert rm(store, "10.g1", "--apply", capsys=capsys)[0] == 0
    assert [one.identity for one in list_checkpoints(store)] == [(2, 20), (2, 10)]


def test_the_kept_the_newest_good_and_one_that_is_read_stay(store: Store, tmp_path: Path, capsys: Captured) -> None:
    make(store, 10, 20, 30, 40)
    make(store, 50, 60, suspect=True)
    keep(store, prefix_of(1, 10))
    lease = ReadLease(store, prefix_of(1, 20))
    for step, code, words in ((10, 10, "--remove"), (20, 15, "ten minutes"), (40, 10, "whole root")):
        found = rm(store, str(step), "--apply", capsys=capsys)
        assert (found[0], words in found[1]["error"]["remedy"]) == (code, True), found
    path = tmp_path / "root" / prefix_of(1, 40) / MANIFEST
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # its summary holds, the whole does not: 30 is the newest that is intact
    path.write_bytes(raw)
    assert rm(store, "30", "--apply", capsys=capsys)[0] == 10
    assert rm(store, "40", "--apply", capsys=capsys)[0] == 0
    assert rm(store, "60", "--apply", capsys=capsys)[0] == 0
    lease.close()
    assert rm(store, "20", "--apply", capsys=capsys)[0] == 0
    assert steps_of(store) == [10, 30, 50]


def test_where_all_are_suspect_the_newest_of_them_stays(store: Store, capsys: Captured) -> None:
    make(store, 10, 20, suspect=True)
    assert rm(store, "20", "--apply", capsys=capsys)[0] == 10
    assert rm(store, "10", "--apply", capsys=capsys)[0] == 0


def test_what_a_job_here_would_continue_from_stays(tmp_path: Path, capsys: Captured) -> None:
    with two_checkpoints(tmp_path / "root", {"w": (10,)}) as root:
        store = open_store(root)
        make(store, 30)
        (directory,) = jobs_on_this_machine(root)
        lock = directory.hold_daemon()
        code, found = rm(store, "20", "--apply", capsys=capsys)
        assert (code, found["error"]["remedy"]) == (15, "flashckpt persist fake, then again")
        assert lock is not None
        lock.close()
        assert rm(store, "20", "--apply", capsys=capsys)[0] == 0


def test_a_mark_that_comes_meanwhile_wins(store: Store, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    make(store, 10, 20)

    def marked(*arguments: Any, **more: Any) -> Any:
        keep(store, prefix_of(1, 10))
        return delete(*arguments, **more)

    monkeypatch.setattr(removal, "delete", marked)
    code, found = rm(store, "10", "--apply", capsys=capsys)
    assert (code, found["error"]["problem"]) == (15, f"{prefix_of(1, 10)} was not removed")
    assert steps_of(store) == [10, 20]


@pytest.mark.parametrize(
    "point", ["persist.after-claim", "persist.before-tombstone", "persist.during-prune", "persist.after-prune"]
)
def test_killed_on_the_way_it_is_there_whole_or_gone_and_rm_or_gc_ends_it(store: Store, point: str) -> None:
    make(store, 10, 20)
    names = read_contents(store).names
    killed_at(point, lambda: delete(store, names, [prefix_of(1, 10)]))
    if 10 in steps_of(store):
        delete(store, read_contents(store).names, [prefix_of(1, 10)])
    sweep(store, older_than_s=0.0)
    assert steps_of(store) == [20]
    assert not [one for one in store.list(f"{prefix_of(1, 10)}/") if not one.key.endswith(MANIFEST)]
