"""A record of the generation that cannot be read on one node: every rank says so, none waits for another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- fixtures
from support.ranks import run_ranks, values
from torch import nn

from flashckpt import Checkpointer
from flashckpt.checkpoint.root_records import claim_generation
from flashckpt.cli.main import main
from flashckpt.core.lineage import Generation
from flashckpt.errors import DamagedError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.storage.factory import open_store


def _on_a_node_of_its_own(rank: int, root: str, shm: str) -> Any:
    """Restore twice, each rank with a memory of its own; between them the record of rank 1's node is damaged."""
    agent_dir()
    folder = Path(shm) / f"node{rank}"
    folder.mkdir(exist_ok=True)
    os.environ["FLASHCKPT_SHM_DIR"] = str(folder)
    crash(opened(Path(root), model=nn.Linear(2, 2)))
    if rank == 1:
        path = JobDirectory.open("t", create=False).path / "generation.msgpack"
        path.write_bytes(path.read_bytes()[:-1])
        shutil.rmtree(Path(root) / "generations")
    try:
        opened(Path(root), model=nn.Linear(2, 2))
    except DamagedError as error:
        return str(error)
    return None


def test_every_rank_names_the_node_whose_record_is_damaged(tmp_path: Path, shm_dir: Path) -> None:
    told = values(run_ranks(_on_a_node_of_its_own, 2, str(tmp_path), str(shm_dir)))
    assert told[0] == told[1]
    assert "of rank 1: " in told[0]
    assert "generation.msgpack" in told[0]
    assert "flashckpt forget --job t --apply" in told[0]


def test_the_way_out_that_the_error_names_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ckpt = opened(tmp_path, model=(model := nn.Linear(2, 2)))
    ckpt.step(1)
    crash(ckpt)
    path = JobDirectory.open("t", create=False).path / "generation.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "generations")
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.track(model=model)
    with pytest.raises(DamagedError) as refused:
        again.restore()
    words = refused.value.remedy.partition("flashckpt ")[2].partition(";")[0].split()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    capsys.readouterr()
    assert again.restore() is None
    crash(again)


@pytest.mark.parametrize("at", range(0, 90, 11))
def test_a_bit_that_flipped_is_replaced_from_the_root(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = opened(tmp_path, model=(model := nn.Linear(2, 2)))
    ckpt.step(1)
    crash(ckpt)
    path = JobDirectory.open("t", create=False).path / "generation.msgpack"
    raw = bytearray(good := path.read_bytes())
    raw[at % len(raw)] ^= 1
    path.write_bytes(raw)
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.track(model=model)
    report = again.restore()
    crash(again)
    assert report is not None
    assert report.step == 1
    record = JobDirectory.open("t", create=False).read_generation()
    assert record is not None
    assert record.number == 2
    assert good != bytes(raw)
    assert caplog.text.count("replaced by what the root says of generation 1") == 1


def test_a_claim_that_is_not_of_the_run_in_memory_replaces_nothing(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=(model := nn.Linear(2, 2)))
    ckpt.step(1)
    crash(ckpt)
    path = JobDirectory.open("t", create=False).path / "generation.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    assert claim_generation(open_store(tmp_path), Generation(number=2, token="of another"))
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.track(model=model)
    with pytest.raises(DamagedError, match="which run the snapshots in memory belong to"):
        again.restore()
