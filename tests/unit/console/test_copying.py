"""`flashckpt cp`: the same checkpoint on another root, whole or not at all, whoever is killed and whatever is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.memory import killed_at
from support.memory_tier import FakeJob
from support.s3_stub import s3_stub
from support.slots import make_pin, shard

from flashckpt.checkpoint import indexes, merging
from flashckpt.checkpoint.catalog import list_checkpoints, newest_checkpoint, read_manifest
from flashckpt.checkpoint.marks import keep_as
from flashckpt.checkpoint.retention import Policy, leased_prefixes, prune
from flashckpt.checkpoint.root_records import LATEST, MANIFEST, claim_generation, prefix_of, read_generations
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.cli import main as cli
from flashckpt.commands.verify import verify_checkpoint
from flashckpt.console import copying
from flashckpt.console.copying import copy_checkpoint
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError, DamagedError, FencedError
from flashckpt.faults import CRASH_POINTS
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

Captured = pytest.CaptureFixture[str]
SHARDS = [
    shard("big", (700, 1500)),
    shard("half", (130_001,), dtype="bfloat16"),
    shard("tiny", (3,)),
    shard("no", (0, 4)),
]


def make(store: Store, step: int, *, generation: int = 1, compression: str = "off") -> str:
    prefix = prefix_of(generation, step)
    values = {"step": step, "rng@rank0": os.urandom(100)}
    options = PersistOptions(compression=compression, pack_bytes=1 << 20)
    persist_slot(make_pin(SHARDS, step=step, generation=generation, values=values), store, prefix, options=options)
    commit(store, prefix, [0])
    return prefix


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "source")
    assert claim_generation(store, Generation(number=1, token="first", world_size=1))
    return store


def assert_same(source: Store, target: Store, prefix: str) -> None:
    """It is committed, every byte of it matches its digest, and MANIFEST is the same."""
    (info,) = [one for one in list_checkpoints(target, whole=True) if one.prefix == prefix]
    assert verify_checkpoint(target, info, lambda _: None)["damaged"] == []
    assert target.get(f"{prefix}/{MANIFEST}") == source.get(f"{prefix}/{MANIFEST}")
    assert read_manifest(target, prefix).values == read_manifest(source, prefix).values


@pytest.mark.parametrize("compression", ["off", "zstd"])
@pytest.mark.parametrize(
    ("ranged_from", "spread_from"), [(64, 1), (1, 1 << 30), (1, 0)], ids=["values", "values in ranges", "indexes"]
)
def test_a_copy_is_the_same_checkpoint_and_the_newest_there(
    source: Store, compression: str, ranged_from: int, spread_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", ranged_from)
    monkeypatch.setattr(merging, "SPREAD_BYTES", spread_from)
    monkeypatch.setattr(merging, "ROWS_PER_PATTERN_ROW", 1)
    told: list[int] = []
    prefix, target = make(source, 20, compression=compression), open_store(tmp_path / "target")
    held: set[str] = set()

    def advance(nbytes: int) -> None:
        told.append(nbytes)
        held.update(leased_prefixes(source))

    done = copy_checkpoint(source, prefix, target, advance)
    assert held == {prefix}, "retention is kept away meanwhile"
    assert_same(source, target, prefix)
    assert (done.kept_bytes, done.was_there) == (0, False)
    assert sum(told) <= done.nbytes < sum(told) + 3 * 4096
    assert target.get(LATEST) == f"{prefix}\n".encode()
    assert not leased_prefixes(source)
    assert copy_checkpoint(source, prefix, target).was_there


def test_copies_go_to_s3_and_back(source: Store, tmp_path: Path) -> None:
    prefix = make(source, 20)
    with s3_stub() as stub:
        remote = open_store("s3://bucket/mirror", **stub.options())
        copy_checkpoint(source, prefix, remote)
        back = open_store(tmp_path / "back")
        copy_checkpoint(remote, prefix, back)
        assert_same(remote, back, prefix)
        remote.close()


def test_an_older_one_joins_those_of_its_run_and_what_was_rolled_back_stays_so(source: Store, tmp_path: Path) -> None:
    older, gone = make(source, 10), make(source, 30)
    assert claim_generation(source, Generation(number=2, token="second", parent=SnapshotId(1, 10), world_size=1))
    newer, target = make(source, 20, generation=2), open_store(tmp_path / "target")
    for prefix in (newer, gone, older):
        copy_checkpoint(source, prefix, target)
    assert read_generations(target) == read_generations(source)
    newest = newest_checkpoint(target)
    assert newest is not None
    assert newest.prefix == newer
    assert target.get(LATEST) == f"{newer}\n".encode()


POINTS = [p for p in CRASH_POINTS if p.startswith("copy.")]


@pytest.mark.parametrize(
    "point",
    [*POINTS, "copy.during-pack:2", "generation.before-claim", "generation.after-claim"]
    + [f"{point}:{count}" for point in ("store.before-publish", "store.after-publish") for count in (1, 2, 3, 4, 5)],
)
def test_killed_anywhere_nothing_or_all_of_it_is_there_and_the_next_copy_ends_it(
    source: Store, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if point == "copy.after-index":  # of a checkpoint whose MANIFEST names them
        monkeypatch.setattr(indexes, "RANGED_FROM", 1)
        monkeypatch.setattr(merging, "SPREAD_BYTES", 0)
        monkeypatch.setattr(merging, "ROWS_PER_PATTERN_ROW", 1)
    prefix = make(source, 20)
    target = open_store(tmp_path / "target")
    killed_at(point, lambda: copy_checkpoint(source, prefix, target))
    for info in list_checkpoints(target, damaged=True):
        assert verify_checkpoint(target, info, lambda _: None)["damaged"] == []
    assert bool(list_checkpoints(target)) == (target.head(f"{prefix}/{MANIFEST}") is not None)
    copy_checkpoint(source, prefix, target)
    assert_same(source, target, prefix)
    sweep(target, older_than_s=0.0)
    assert_same(source, target, prefix)


def test_a_pack_that_is_there_whole_is_kept_and_a_damaged_one_is_copied_again(source: Store, tmp_path: Path) -> None:
    prefix, target = make(source, 20), open_store(tmp_path / "target")
    killed_at("copy.before-manifest", lambda: copy_checkpoint(source, prefix, target))
    first = tmp_path / "target" / prefix / read_manifest(source, prefix).objects[0]
    raw = bytearray(first.read_bytes())
    raw[100] ^= 1
    first.write_bytes(raw)
    done = copy_checkpoint(source, prefix, target)
    assert_same(source, target, prefix)
    assert 0 < done.kept_bytes == done.nbytes - len(raw)


@pytest.mark.parametrize("compression", ["off", "zstd"])
def test_a_damaged_source_is_named_and_nothing_is_committed(source: Store, compression: str, tmp_path: Path) -> None:
    prefix, target = make(source, 20, compression=compression), open_store(tmp_path / "target")
    path = tmp_path / "source" / prefix / read_manifest(source, prefix).objects[0]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedError):
        copy_checkpoint(source, prefix, target)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        copy_checkpoint(source, prefix, target)
    assert list_checkpoints(target, damaged=True) == []


def test_a_root_of_another_run_and_a_name_that_was_deleted_are_refused(source: Store, tmp_path: Path) -> None:
    prefix, other = make(source, 20), open_store(tmp_path / "other")
    assert claim_generation(other, Generation(number=1, token="another", world_size=1))
    before = other.list()
    with pytest.raises(ConfigError, match="another run"):
        copy_checkpoint(source, prefix, other)
    assert [one.key for one in other.list()] == [one.key for one in before]
    without_claims = open_store(tmp_path / "without")
    make(without_claims, 20)
    with pytest.raises(ConfigError, match="another run"):
        copy_checkpoint(source, prefix, without_claims)
    target = open_store(tmp_path / "target")
    newer = make(source, 30)
    for one in (prefix, newer):
        copy_checkpoint(source, one, target)
    prune(target, Policy(keep_last=1))
    with pytest.raises(FencedError, match="was deleted"):
        copy_checkpoint(source, prefix, target)


def test_a_commit_that_comes_between_is_not_overwritten(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, target = make(source, 20), open_store(tmp_path / "target")

    def other_commit(point: str) -> None:
        if point == "copy.before-manifest":
            target.put(f"{prefix}/{MANIFEST}", b"another")

    monkeypatch.setattr(copying, "crash_point", other_commit)
    with pytest.raises(ConfigError, match="another run"):
        copy_checkpoint(source, prefix, target)
    assert target.get(f"{prefix}/{MANIFEST}") == b"another"


def run(*words: str, capsys: Captured) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        cli.main(["cp", *words])
    out = capsys.readouterr()
    return int(done.value.code or 0), out.out, out.err


def test_the_command_takes_a_step_with_the_root_or_as_an_option(
    source: Store, tmp_path: Path, capsys: Captured
) -> None:
    make(source, 20), make(source, 30)
    root, target = str(tmp_path / "source"), str(tmp_path / "target")
    code, out, _ = run(f"{root}@20", target, "--json", capsys=capsys)
    found = json.loads(out)
    assert (code, found["prefix"], found["was_there"]) == (0, prefix_of(1, 20), False)
    assert json.loads(run(root, target, "--step", "20.g1", "--json", capsys=capsys)[1])["was_there"]
    code, out, _ = run(root, target, capsys=capsys)
    assert (code, out.splitlines()[1].split()[:2]) == (0, [prefix_of(1, 30), "4.5"])
    (tmp_path / "a@20").mkdir()
    code, _, err = run(str(tmp_path / "a@20"), target, capsys=capsys)
    assert (code, "is empty" in err) == (30, True)


def test_the_command_takes_the_name_of_a_kept_checkpoint_with_the_root(tmp_path: Path, capsys: Captured) -> None:
    with s3_stub() as stub:
        for number, url in enumerate((str(tmp_path / "source"), "s3://bucket/of@host/run")):
            options = stub.options() if number else {}
            words = [
                word for key in ("endpoint_url", "key", "secret") if options for word in ("-o", f"{key}={options[key]}")
            ]
            store = open_store(url, **options)
            make(store, 20), make(store, 30)
            keep_as(store, prefix_of(1, 20), "before-surgery")
            target = str(tmp_path / f"target{number}")
            code, out, err = run(f"{url}@before-surgery", target, "--json", *words, capsys=capsys)
            assert (code, json.loads(out)["prefix"] if not code else err) == (0, prefix_of(1, 20))
            code, out, err = run(url, target, "--json", *words, capsys=capsys)
            assert (code, json.loads(out)["prefix"] if not code else err) == (0, prefix_of(1, 30))
    code, _, err = run(f"{tmp_path / 'source'}@before-surgry", str(tmp_path / "other"), capsys=capsys)
    assert (code, "before-surgry" in err, "a name that `flashckpt keep` gave" in err) == (10, True, True)


def test_a_root_that_is_the_same_or_that_a_job_writes_to_is_refused(
    source: Store, tmp_path: Path, capsys: Captured
) -> None:
    make(source, 20)
    root = str(tmp_path / "source")
    assert run(root, f"file://{root}", capsys=capsys)[0] == 10
    assert run(root, "memory://x", capsys=capsys)[0] == 10
    job = FakeJob(str(tmp_path / "target"))
    lock = job.directory.hold_daemon()
    assert lock is not None
    assert run(root, job.root, capsys=capsys)[0] == 15
    lock.close()
    job.die()
