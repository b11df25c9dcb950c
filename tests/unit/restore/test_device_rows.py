"""Restores into device memory: few blocks of the host, every byte in its place however late the device's stream runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda, LateCuda, OnDevice, install

from flashckpt import accelerator
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.pieces import Runs
from flashckpt.restore import device_rows, live_memory
from flashckpt.restore.destinations import memory_at, scatter
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.restore.requirements import LiveRows
from flashckpt.shm.segment_file import address_of
from flashckpt.state.placement import boxes_of, shard_of

SCHEDULES = ["", "main", "side"]


@pytest.fixture(params=SCHEDULES)
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    cuda = LateCuda(request.param)
    monkeypatch.setattr(device_rows, "cuda", cuda)
    monkeypatch.setattr(device_rows, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(device_rows, "BLOCKS", 3)
    return cuda


def noise(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextmanager
def filling(rows: DeviceRows, row: int, at: int, nbytes: int) -> Iterator[Any]:
    with rows.filling(np.array([row]), np.array([at]), np.array([nbytes])) as (address,):
        yield memory_at(int(address), nbytes, rows)


def fill(rows: DeviceRows, row: int, wanted: Any, step: int = 4000) -> None:
    for at in range(0, len(wanted), step):
        part = wanted[at : at + step]
        with filling(rows, row, at, len(part)) as memory:
            memory[:] = part


def test_blocks_are_used_again_only_once_their_bytes_have_arrived(late: LateCuda) -> None:
    live, wanted = torch.zeros(50_000, dtype=torch.uint8), noise(50_000)
    with late:
        rows = DeviceRows({0: live})
        fill(rows, 0, wanted)
        rows.wait()
    assert np.array_equal(live.numpy(), wanted)
    assert sum(map(len, rows._under_way.values())) + sum(map(len, rows._free.values())) == 3, (
        "13 parts went through 3 blocks"
    )


def test_a_block_that_is_filled_too_early_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is sharp."""
    cuda = LateCuda("main")
    monkeypatch.setattr(device_rows, "cuda", cuda)
    monkeypatch.setattr(device_rows, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(device_rows, "BLOCKS", 3)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    live, wanted = torch.zeros(50_000, dtype=torch.uint8), noise(50_000)
    with cuda:
        rows = DeviceRows({0: live})
        monkeypatch.setattr(cuda, "Event", lambda blocking=False: event)
        fill(rows, 0, wanted)
        rows.wait()
    assert not np.array_equal(live.numpy(), wanted)


def test_a_job_from_storage_takes_no_block_of_a_job_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "cuda", FakeCuda())
    monkeypatch.setattr(device_rows, "JOB_BYTES", 64)
    monkeypatch.setattr(device_rows, "BLOCK_BYTES", 256)
    live, wanted = torch.zeros(900, dtype=torch.uint8), noise(900)
    rows = DeviceRows({0: live})
    fill(rows, 0, wanted[:320], step=64)
    assert [len(rows._take(nbytes, torch.device("cuda", 0))) for nbytes in (64, 65, 256, 257)] == [64, 256, 256, 257]
    assert rows._under_way.keys() == {64}
    fill(rows, 0, wanted, step=300)
    assert np.array_equal(live.numpy(), wanted)


def test_what_used_the_memory_before_comes_first(late: LateCuda) -> None:
    live, wanted = torch.zeros(3000, dtype=torch.uint8), noise(3000)
    with late:
        live.fill_(7)  # queued by the training thread, as by what had this memory before
        rows = DeviceRows({0: live})
        fill(rows, 0, wanted)
        rows.wait()
        late.main.synchronize()
    assert np.array_equal(live.numpy(), wanted)


def test_many_runs_cross_the_bus_together(late: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.array([1, 40, 300, 4000, 17, 9000, 5], np.int64)
    held = noise(int(sizes.sum()))
    starts = np.cumsum(sizes) - sizes
    live = {row: torch.zeros(size + 10, dtype=torch.uint8) for row, size in enumerate(sizes.tolist())}
    taken: Any = []
    real = DeviceRows._take
    monkeypatch.setattr(DeviceRows, "_take", lambda self, n, device: (taken.append(n), real(self, n, device))[1])
    with late:
        rows = DeviceRows(live)
        rows.write(np.arange(len(sizes)), np.full(len(sizes), 10), address_of(held) + starts, sizes)
        held_before, held[:] = held.copy(), 0  # read before write() returned
        rows.wait()
    for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        assert np.array_equal(live[row][10:].numpy(), held_before[start : start + size]), row
        assert not live[row][:10].any()
    assert taken == [16 + 48 + 304, 4000 + 32, 9008, 16], (
        "as many as a block holds, and one that is larger than a block"
    )


@pytest.mark.parametrize("alone", [1, 1 << 20], ids=["one by one", "together"])
def test_only_runs_that_go_on_become_one_copy(alone: int, late: LateCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "_ALONE_BYTES", alone)
    live = {row: torch.zeros(400, dtype=torch.uint8) for row in range(2)}
    rows, at, sizes = np.array([0, 0, 0, 1, 1]), np.array([0, 64, 200, 264, 10]), np.array([64, 64, 64, 7, 9])
    held = noise(int(sizes.sum()))
    starts = np.cumsum(sizes) - sizes
    with late:
        writer = DeviceRows(live)
        writer.write(rows, at, address_of(held) + starts, sizes)
        writer.wait()
    wanted = np.zeros((2, 400), np.uint8)
    for row, to, start, n in zip(rows, at, starts, sizes, strict=True):
        wanted[row, to : to + n] = held[start : start + n]
    assert np.array_equal(torch.stack([live[0], live[1]]).numpy(), wanted)


@pytest.mark.parametrize("start", [0, 100])
def test_runs_are_distributed_as_on_the_host(start: int, late: LateCuda) -> None:
    found = Runs(source_starts=np.arange(47) * 64 + 40, target_starts=np.arange(47) * 24 + 8, nbytes=24)
    held = noise(3000)
    wanted, live = np.zeros(1500, np.uint8), torch.zeros(1500, dtype=torch.uint8)
    copied = scatter(held, start, found, wanted)
    with late:
        rows = DeviceRows({5: live})
        assert rows.scatter(5, held, start, found) == copied
        rows.wait()
    assert copied
    assert np.array_equal(live.numpy(), wanted)


def test_what_could_not_be_verified_does_not_reach_the_device(late: LateCuda) -> None:
    live = torch.zeros(100, dtype=torch.uint8)
    with late:
        rows = DeviceRows({0: live})
        with suppress(OSError), filling(rows, 0, 0, 100) as memory:
            memory[:] = 120
            raise OSError
        rows.wait()
    assert not live.any()
    assert [len(free) for free in rows._free.values()] == [1], "its block is free again"


def test_without_page_locked_memory_the_restore_takes_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []
    real = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **kinds: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return real(*shape, **kinds)

    monkeypatch.setattr(device_rows, "cuda", FakeCuda())
    monkeypatch.setattr(accelerator, "_refused", set())
    live, wanted = torch.zeros(900, dtype=torch.uint8), noise(900)
    rows = DeviceRows({0: live})
    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        rows._take(900, torch.device("cuda", 0))
    assert asked == [True, False, False], "asked for once"
    assert caplog.text.count("no page-locked memory") == 1
    fill(rows, 0, wanted)
    assert np.array_equal(live.numpy(), wanted)


def required_of(live: torch.Tensor, found: torch.Tensor) -> Any:
    (box,) = boxes_of("x", live)
    table = ShardTable.from_shards([shard_of("x", "float32", box, 0)], np.zeros(1, np.int64))
    rows = LiveRows(fqns=["x"], tensors=[found], boxes=[box])
    return SimpleNamespace(live=rows, absent=SimpleNamespace(blocks=[]), in_values=[], wanted=table)


def test_a_tensor_on_a_device_has_no_buffer_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch.setattr)
    live = torch.zeros(600, 400)
    made: Any = []
    real: Callable[..., torch.Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kinds: (made.append(1), real(*shape, **kinds))[1])
    memory = live_memory.allocate(required_of(live, live.as_subclass(OnDevice)))
    assert not made
    assert memory.destinations.addresses.tolist() == [0]
    assert memory.destinations.writer is memory.device_rows is not None


def test_a_device_tensor_of_other_strides_goes_by_a_buffer_of_the_host() -> None:
    live = torch.zeros(4, 6).t()
    memory = live_memory.allocate(required_of(live, live.as_subclass(OnDevice)))
    wanted = torch.arange(24.0).reshape(6, 4)
    memory.destinations.view(0)[:] = wanted.reshape(-1).view(torch.uint8).numpy()
    memory.settle()
    assert not live.any(), "it is copied as a whole"
    memory.finish()
    assert torch.equal(live, wanted)
