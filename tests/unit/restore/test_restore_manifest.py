"""MANIFEST in a restore: read once for all ranks under one lease, and what happens where it cannot be read."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir, digest, net
from support.ranks import run_ranks, values, wait_for
from support.slots import make_pin, shard

from flashckpt import Checkpointer
from flashckpt.checkpoint import catalog, indexes, merging
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.root_records import MANIFEST
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.manifest import encode_manifest, merge
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import is_spread
from flashckpt.core.values import concatenate, cut
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.restore import candidate_sources
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


def trained(rank: int, root: str, steps: int) -> dict[str, Any]:
    """Train `steps` steps of replicated state from the newest restore point; count what this rank reads of the root."""
    read: list[str] = []
    kept, real = PosixStore.get, PosixStore.put

    def get(self: PosixStore, key: str) -> bytes:
        read.append(key)
        return kept(self, key)

    def put(self: PosixStore, key: str, data: bytes) -> None:
        if key.startswith("leases/"):
            read.append(key)
        real(self, key, data)

    model = net().eval()  # no dropout: a step gives the same state each time
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, snapshot_every=1, job="t", slots=3)
    ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
    PosixStore.get, PosixStore.put = get, put  # type: ignore[method-assign]  # in this forked rank only
    report = ckpt.restore()
    found = None
    if report is not None:
        found = {"step": report.step, "tiers": sorted(report.tier_bytes), "manifest_bytes": report.manifest_bytes,
                 "same": report.is_same_layout, "passed": list(report.passed_over), "digest": digest(model, optimizer)}  # fmt: skip
    for step in range(1 if report is None else report.step + 1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 24) * step).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(step)
        torch.distributed.barrier()
    ckpt.fence()
    ckpt.close()
    mine = digest(model, optimizer)
    return {"found": found, "digest": mine, "manifests": [k for k in read if k.endswith(MANIFEST)],
            "leases": [k for k in read if k.startswith("leases/")]}  # fmt: skip


def commit_all(root: Path, world: int) -> list[int]:
    """Persist every snapshot that all ranks hold, as daemons would; return the steps."""
    store, steps = open_store(root), set[int]()
    segments = [Segment.attach(path) for path in JobDirectory.open("t", create=False).segments()]
    for segment in segments:
        for slot, header in enumerate(segment.headers()):
            if (pin := segment.pin(slot)) is not None:
                persist_slot(pin, store, f"step-{header.step:09d}.g{header.generation}")
                pin.close()
                steps.add(header.step)
    for segment in segments:
        segment.close()
    for folder in root.glob("step-*"):
        if len(list(folder.glob("*.idx"))) == world:
            commit(store, folder.name, range(world))
    return sorted(steps)


@pytest.mark.parametrize("shared_from", [1, 4 << 20], ids=["mapped", "sent"])
def test_one_rank_reads_manifest_and_takes_the_lease_for_all(
    tmp_path: Path, shm_dir: Path, shared_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_sources, "SHARED_FROM", shared_from)  # the ranks are forked from here
    root = tmp_path / "root"
    first = values(run_ranks(trained, 3, str(root), 3))
    assert commit_all(root, 3)[-1] == 3
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    resumed = values(run_ranks(trained, 3, str(root), 3))
    newest = min(root.glob("step-000000003.*"))
    for one, before in zip(resumed, first, strict=True):
        assert one["found"]["digest"] == before["digest"]
        assert (one["found"]["step"], one["found"]["tiers"]) == (3, ["storage"])
        assert one["found"]["manifest_bytes"] == (newest / MANIFEST).stat().st_size
    assert [len(one["manifests"]) for one in resumed] == [1, 0, 0]
    assert [len(one["leases"]) for one in resumed] == [1, 0, 0]
    wait_for(lambda: not [p for p in (root / "leases").rglob("*") if p.is_file()], what="the lease to be given back")


def attached(rank: int, root: str, how: str) -> dict[str, Any]:
    """Restore, where another process may not be looked into, or the first rank of the node cannot read MANIFEST."""
    candidate_sources.SHARED_FROM = 1
    decoded: list[int] = []
    real = catalog.manifest_from

    def manifest_from(*words: Any) -> Any:
        decoded.append(rank)
        if how == "unreadable" and rank == 0:
            raise DamagedError("the MANIFEST is damaged here")
        return real(*words)

    vars(candidate_sources)["manifest_from"] = manifest_from  # in this forked rank only
    if how == "hidden":
        candidate_sources.path_of = lambda fd: "/proc/1/fd/none"
    fds = len(list(Path("/proc/self/fd").iterdir()))
    model = net().eval()
    ckpt = Checkpointer(root, snapshot_every=1, job="t", slots=3)
    ckpt.track(model=model, replicated_over="world")
    error = ""
    try:
        report = ckpt.restore()
    except FlashckptError as failed:
        report, error = None, str(failed)
    found = None if report is None else report.step
    ckpt.close()
    left = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {"step": found, "decoded": len(decoded), "error": error, "fds": fds,
            "left": [name for name in left if "flashckpt-manifest" in name]}  # fmt: skip


@pytest.mark.parametrize("how", ["mapped", "hidden", "unreadable"])
def test_manifest_is_decoded_by_the_first_rank_of_a_node_and_by_others_only_where_they_must(
    tmp_path: Path, shm_dir: Path, how: str
) -> None:
    root = tmp_path / "root"
    values(run_ranks(trained, 2, str(root), 1))
    assert commit_all(root, 2) == [1]
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    found = values(run_ranks(attached, 2, str(root), how))
    assert [one["left"] for one in found] == [[], []], "no descriptor is left open"
    if how == "unreadable":
        assert all("is damaged here" in one["error"] or "could not read MANIFEST" in one["error"] for one in found)
        return
    assert [one["step"] for one in found] == [1, 1]
    assert [one["decoded"] for one in found] == ([1, 0] if how == "mapped" else [2, 1])


def test_manifest_that_is_shared_comes_back_as_it_was() -> None:
    pins = [make_pin([shard(f"w{r}", (9, 5)), shard("empty", (0,))], rank=r, world_size=3) for r in range(3)]
    parts = [replace(pin.manifest(), objects=[f"r{r:05d}.p0.fck"]) for r, pin in enumerate(pins)]
    stays, ranges, _ = cut({"step": 1, "tuple": (1, 2**90), "rng@rank0": b"x"}, 0)
    first = replace(parts[0], values=stays, objects=["r00000.p0.fck", "v"], ranged=concatenate([(ranges, 1)]))
    for manifest in (merge([first, *parts[1:]]), merge(parts), replace(parts[0], parent=SnapshotId(1, 2))):
        fd = candidate_sources.share(manifest)
        try:
            again = candidate_sources.attach(candidate_sources.path_of(fd))
        finally:
            os.close(fd)
        assert encode_manifest(again) == encode_manifest(manifest)
        assert not again.table.nbytes.flags.owndata
        assert not again.digests.flags.owndata
        assert again.table.byte_offset.flags.aligned


@pytest.fixture
def _spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MANIFEST name its indexes, as in a large job; the ranks are forked from here."""
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    monkeypatch.setattr(merging, "SPREAD_BYTES", 0)
    monkeypatch.setattr(merging, "ROWS_PER_PATTERN_ROW", 1)


@pytest.mark.usefixtures("_spread")
@pytest.mark.parametrize("world", [3, 2], ids=["the same world", "a smaller one"])
def test_state_comes_back_from_the_indexes_that_manifest_names(tmp_path: Path, world: int) -> None:
    root = tmp_path / "root"
    first = values(run_ranks(trained, 3, str(root), 3))
    assert commit_all(root, 3)[-1] == 3
    assert is_spread((min(root.glob("step-000000003.*")) / MANIFEST).read_bytes())
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    resumed = values(run_ranks(trained, world, str(root), 3))
    for one, before in zip(resumed, first, strict=False):
        assert one["found"]["digest"] == before["digest"]
        assert (one["found"]["step"], one["found"]["tiers"]) == (3, ["storage"])
        assert one["found"]["same"] == (world == 3)
    assert [len(one["manifests"]) for one in resumed] == [1, 0, 0][:world]


@pytest.mark.usefixtures("_spread")
@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
def test_where_an_index_that_manifest_names_is_gone_memory_or_the_older_checkpoint_takes_its_place(
    tmp_path: Path, memory: bool
) -> None:
    root = tmp_path / "root"
    values(run_ranks(trained, 2, str(root), 3))
    assert commit_all(root, 2)[-2:] == [2, 3]
    (min(root.glob("step-000000003.*")) / "r00001.idx").unlink()
    if not memory:
        shutil.rmtree(JobDirectory.open("t", create=False).path)
    for one in values(run_ranks(trained, 2, str(root), 0)):
        assert one["found"]["step"] == (3 if memory else 2)
        assert one["found"]["tiers"] == (["memory"] if memory else ["storage"])
        assert memory or "r00001.idx" in one["found"]["passed"][0]


@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
def test_manifest_damaged_behind_its_summary_memory_or_the_older_checkpoint_takes_its_place(
    tmp_path: Path, memory: bool
) -> None:
    root = tmp_path / "root"
    values(run_ranks(trained, 2, str(root), 3))
    assert commit_all(root, 2)[-2:] == [2, 3]
    path = min(root.glob("step-000000003.*")) / MANIFEST
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    if not memory:
        shutil.rmtree(JobDirectory.open("t", create=False).path)
    resumed = values(run_ranks(trained, 2, str(root), 0))
    for one in resumed:
        assert one["found"]["step"] == (3 if memory else 2)
        assert one["found"]["tiers"] == (["memory"] if memory else ["storage"])
        assert memory or "is damaged" in one["found"]["passed"][0]
    assert read_manifest(open_store(root), min(root.glob("step-000000002.*")).name).step == 2


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_pack_damaged_on_storage_is_named_and_the_newest_intact_checkpoint_is_restored(
    tmp_path: Path, fault: str
) -> None:
    root = tmp_path / "root"
    first = values(run_ranks(trained, 2, str(root), 2))
    assert commit_all(root, 2) == [1, 2]
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    pack = min(min(root.glob("step-000000002.*")).glob("*.fck"))
    raw = bytearray(pack.read_bytes())
    raw[5] ^= 1
    pack.unlink()
    if fault != "missing":
        pack.write_bytes(raw)
    resumed = values(run_ranks(trained, 2, str(root), 2))
    for one, before in zip(resumed, first, strict=True):
        assert one["found"]["step"] == 1, "the older one, on every rank"
        assert "step 2 of generation 1 is not restored" in one["found"]["passed"][0]
        assert pack.name in one["found"]["passed"][0]
        assert one["digest"] == before["digest"], "step 2 was trained again to the same state"


def drawn(rank: int, root: str, steps: int) -> dict[str, Any]:
    """Train with generators: what each rank draws, and which values it read of the root."""
    read: list[str] = []
    kept = PosixStore.get_range

    def get_range(self: PosixStore, key: str, start: int, out: memoryview) -> None:
        read.append(key.rpartition("/")[2])
        kept(self, key, start, out)

    PosixStore.get_range = get_range  # type: ignore[method-assign]  # in this forked rank only
    indexes.RANGED_FROM = 1
    model = net().eval()
    torch.manual_seed(rank)
    ckpt = Checkpointer(root, snapshot_every=1, job="t", slots=3)
    ckpt.track(model=model, replicated_over="world", rng=True)
    report = ckpt.restore()
    drawn = []
    for step in range(1 if report is None else report.step + 1, steps + 1):
        drawn.append((str(step), torch.rand(1).item()))
        ckpt.step(step)
        torch.distributed.barrier()
    ckpt.fence()
    ckpt.close()
    return {"drawn": dict(drawn), "step": report and report.step, "values": [k for k in read if ".values." in k]}


@pytest.mark.matrix
@pytest.mark.parametrize("world", [3, 2], ids=["the same world", "a smaller one"])
def test_generators_come_back_from_their_ranges_and_each_rank_reads_its_own(
    tmp_path: Path, shm_dir: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    unbroken = values(run_ranks(drawn, 3, str(tmp_path / "unbroken"), 6))
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    values(run_ranks(drawn, 3, str(root), 3))
    assert commit_all(root, 3)[-1] == 3
    shutil.rmtree(JobDirectory.open("t", create=False).path)
    resumed = values(run_ranks(drawn, world, str(root), 6))
    for rank, (one, before) in enumerate(zip(resumed, unbroken, strict=False)):
        assert one["step"] == 3
        assert one["values"] == [f"r{rank:05d}.values.fck"]
        assert one["drawn"] == {step: before["drawn"][step] for step in "456"}
