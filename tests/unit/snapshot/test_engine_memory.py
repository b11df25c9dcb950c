"""Memory of the engine: slots, reserving, who holds a job id, what a clean end and a crash leave behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.engine import segments
from support.one_rank import Gate, agent_of_the_test, crash, finished, opened, opened_as  # noqa: F401 -- fixtures
from support.ranks import wait_for
from torch import nn

from flashckpt import Checkpointer
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import ConfigError


def reserved(ckpt: Checkpointer) -> None:
    """Wait for the memory of all slots."""
    memory = ckpt._alive().memory
    wait_for(lambda: memory.is_ready, what="the reservation")


def test_memory_for_three_slots_is_missing_and_two_are_taken_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flashckpt.snapshot import segments as memory

    need = 2 * 4 * 250_000
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(need * 2.9))
    with caplog.at_level(logging.INFO, logger="flashckpt"):
        ckpt = opened(tmp_path, model=nn.Linear(500, 500, bias=False), other=nn.Linear(500, 500, bias=False))
    crash(ckpt)
    lines = [r.message for r in caplog.records if "slots" in r.message]
    assert len(lines) == 1
    assert "2 slots (3 did not fit)" in lines[0]


@pytest.mark.parametrize("size", [0, 5000])
def test_memory_that_is_cut_short_under_a_running_job_is_made_again_and_said(
    tmp_path: Path, shm_dir: Path, caplog: pytest.LogCaptureFixture, copied_by: str, size: int
) -> None:
    model = nn.Linear(20, 20)
    ckpt = opened(tmp_path, model=model)
    for step in (1, 2):
        ckpt.step(step)
        finished(ckpt)
    (path,) = shm_dir.rglob("*.seg")
    os.truncate(path, size)
    ckpt.step(3)
    assert [record.message for record in caplog.records if "truncated by another process" in record.message]
    memory = ckpt._alive().memory
    assert memory.wait_first(60)
    ckpt.step(4)
    finished(ckpt)
    assert memory.complete() == [SnapshotId(1, 4)]
    assert "discarded" not in ckpt.stats
    kept = model.weight.detach().clone()
    crash(ckpt)
    with torch.no_grad():
        model.weight.zero_()
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.track(model=model)
    report = again.restore()
    crash(again)
    assert report is not None
    assert report.step == 4
    assert torch.equal(model.weight, kept)


def test_a_clean_end_asks_for_removal_and_a_crash_does_not(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(2, 2))
    ckpt.step(1)
    crash(ckpt)
    assert segments(shm_dir)
    assert not list(shm_dir.rglob("ended"))
    again = opened(tmp_path, model=nn.Linear(2, 2))
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR")
    again.close()
    assert list(shm_dir.rglob("ended"))


def test_another_root_under_the_same_job_id_is_refused_and_its_snapshots_stay(tmp_path: Path, shm_dir: Path) -> None:
    model = nn.Linear(3, 3)
    ckpt = opened(tmp_path / "a", model=model)
    ckpt.step(1)
    crash(ckpt)
    with pytest.raises(ConfigError, match="another root"):
        opened(tmp_path / "b", model=model)
    assert opened_as(tmp_path / "a", "t", model=model) == 1


def test_a_damaged_segment_is_left_and_another_one_takes_its_place(tmp_path: Path, shm_dir: Path) -> None:
    model = nn.Linear(3, 3)
    crash(opened(tmp_path, model=model))
    (name,) = segments(shm_dir)
    next(shm_dir.rglob(name)).write_bytes(b"not a segment")
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    assert len(segments(shm_dir)) == 2
    assert opened_as(tmp_path, "t", model=model) == 1


RIVAL = """
import sys, torch
from flashckpt import Checkpointer
from flashckpt.errors import JobInUseError
ckpt = Checkpointer(sys.argv[1], snapshot_every=1, job="t")
ckpt.track(model=torch.nn.Linear(int(sys.argv[2]), 3))
try:
    ckpt.restore()
except JobInUseError as error:
    print(error)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("width", [3, 7])
def test_the_same_job_id_twice_is_refused_naming_the_holder_whatever_the_layout(
    width: int, tmp_path: Path, shm_dir: Path
) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(3, 3))
    ckpt.step(1)
    before = segments(shm_dir)
    command = [sys.executable, "-c", RIVAL, str(tmp_path), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    assert f"process {os.getpid()}" in done.stdout
    assert "already running" in done.stdout
    assert segments(shm_dir) == before, "nothing was made or changed"
    ckpt.step(2)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(3, 3)) == 2


LARGE_BYTES = (4 << 30) + (1 << 20) + 12_345


def free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get("FLASHCKPT_TEST_LARGE") or free_memory_bytes() < 3.5 * LARGE_BYTES,
    reason="a minute and 13 GB of memory: run once per release with FLASHCKPT_TEST_LARGE=1",
)
def test_a_single_tensor_larger_than_four_gigabytes_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("huge", torch.empty(LARGE_BYTES, dtype=torch.uint8))
    huge: Any = model.huge
    pattern = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
    for i, part in enumerate(huge.split(len(pattern))):
        part.copy_(pattern[: len(part)]).add_(i)  # no two parts are equal
    before = xxhash.xxh3_64_hexdigest(huge.numpy())
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t", slots=2)
    ckpt.track(model=model, fenced=["model"])
    ckpt.restore()
    assert ckpt._session is not None
    reserved(ckpt)
    ckpt.step(1)
    began = time.perf_counter()
    crash(ckpt)
    print("copy and digests", time.perf_counter() - began, "s")
    huge.zero_()
    began = time.perf_counter()
    again = opened(tmp_path, model=model)
    print("restore", time.perf_counter() - began, "s")
    crash(again)
    assert xxhash.xxh3_64_hexdigest(huge.numpy()) == before


def resident_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def extra_bytes(root: Path, side: int) -> tuple[int, int]:
    """Return (peak of Python's and numpy's memory, peak of the process's) of the fourth snapshot, above what was there."""
    model = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(4)], nn.BatchNorm1d(side))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(str(root), snapshot_every=1, job=f"side{side}")
    ckpt.track(model=model, optimizer=optimizer, rng=True)
    ckpt.restore()
    life = ckpt._session
    assert life is not None
    reserved(ckpt)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in (1, 2, 3, 4):
        optimizer.step()
        if step == 4:  # all three slots were written once; what the optimizer's own step takes is not counted
            tracemalloc.start()
            before = resident_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        ckpt.step(step)
        life._stager.finish()
    python, process = tracemalloc.get_traced_memory()[1], resident_bytes("VmHWM") - before
    tracemalloc.stop()
    crash(ckpt)
    return python, process


def test_from_the_second_snapshot_on_no_memory_is_taken_that_grows_with_the_state(tmp_path: Path) -> None:
    small, large = extra_bytes(tmp_path / "a", 256), extra_bytes(tmp_path / "b", 1024)
    assert large[0] - small[0] < 20_000, "Python and numpy: digests are 8 bytes per MiB, there and nowhere else"
    assert large[1] < 1 << 20, "the process: the state has 50 MB"


def test_the_first_slot_is_used_while_the_others_are_still_being_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, below=900_000)
    model = nn.Linear(300, 300)
    ckpt = opened(tmp_path, model=model)
    life = ckpt._session
    assert life is not None
    assert life.memory.segment is not None
    spec = life.memory.segment.spec
    assert spec.header_at(1) < 900_000 < spec.header_at(2)
    life.memory.wait_first(30)
    ckpt.step(1)
    ckpt.step(2)
    assert (ckpt.stats.get("snapshots"), ckpt.stats.get("skipped")) == (1, 1), "no second slot yet, and nobody waited"
    gate.open.set()
    reserved(ckpt)
    ckpt.step(3)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=model) == 3


@pytest.mark.parametrize("due", [2, 3])
def test_memory_of_an_earlier_generation_is_mapped_behind_the_first_step_unless_that_takes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: int
) -> None:
    from flashckpt.snapshot import segments as memory_of

    model = nn.Linear(500, 500)
    ckpt = opened(tmp_path, model=model)
    reserved(ckpt)
    ckpt.step(1)
    finished(ckpt)
    kept = model.weight.detach().clone()
    crash(ckpt)
    with torch.no_grad():
        model.weight.zero_()
    monkeypatch.setattr(memory_of, "SMALL_SLOT_BYTES", 0)
    again = Checkpointer(str(tmp_path), snapshot_every=due, job="t")
    again.track(model=model)
    assert again.restore() is not None
    assert torch.equal(model.weight, kept)
    memory = again._alive().memory
    assert memory._waits == (due == 3)
    again.step(2)
    assert not memory._waits
    assert memory.wait_first(60)
    reserved(again)
    again.step(3)
    finished(again)
    assert memory.complete()[0].step in (2, 3)
    crash(again)


def test_two_jobs_on_one_machine_keep_their_snapshots_apart(tmp_path: Path, shm_dir: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    kept = [p.detach().clone() for p in (*first.parameters(), *second.parameters())]
    opened_jobs = []
    for job, model in (("one", first), ("two", second)):
        ckpt = Checkpointer(str(tmp_path / job), snapshot_every=1, job=job)
        ckpt.track(model=model)
        ckpt.restore()
        opened_jobs.append(ckpt)
    for step in (1, 2, 3):
        for ckpt in opened_jobs:
            ckpt.step(step)
    for ckpt in opened_jobs:
        crash(ckpt)
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.zero_()
    assert opened_as(tmp_path / "one", "one", model=first) == 3
    assert opened_as(tmp_path / "two", "two", model=second) == 3
    now = [*first.parameters(), *second.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
