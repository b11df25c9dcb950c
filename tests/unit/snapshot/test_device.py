"""The order of operations on an accelerator, shown with streams that only write down what is asked of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda
from support.ranks import wait_for
from torch import nn

from flashckpt.core.shard import Shard
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.snapshot.copy import Buffer
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.device import DeviceCopier, SmallBatch
from flashckpt.snapshot.segments import RankSegments
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout, need_of


def plan_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> CopyPlan:
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    return CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))


def test_copies_start_behind_the_step_and_the_fence_is_a_wait_of_the_stream_not_of_the_host() -> None:
    model = nn.Sequential(nn.Linear(150, 150), nn.BatchNorm1d(150))
    plan = plan_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    api = FakeCuda()
    lanes = DeviceCopier(api)
    data = memoryview(bytearray(plan.layout.total))
    marks = lanes.mark({torch.device("cpu")}, plan.unfenced)
    with torch.no_grad():
        for held_back in list(model.buffers()):
            held_back.zero_()  # what is not fenced may change as soon as step() has returned
    assert api.log == [("record", "main")], "the training thread queued one event and copied nothing to the host"
    buffer = Buffer(data)
    batches = lanes.enqueue(plan.fenced, buffer, marks)
    assert api.log[1:] == [
        ("enter", "side1"),
        ("stream waits", "side1", "main"),
        ("record", "side1"),  # small fenced tensors, gathered
        ("record", "side1"),  # small ones that are not fenced
        ("record", "side1"),  # large ones
        ("leave", "side1"),
    ]
    lanes.fence()
    assert api.log[7:] == [("stream waits", "main", "side1")]
    arrived = [item for items in lanes.arrivals(batches, buffer) for item in items]
    assert api.log[8:] == [("host waits", "side1")] * 3
    assert len(arrived) == len(plan.fenced) + len(plan.unfenced)
    rows = {item.fqn: item for item in arrived}
    held = np.frombuffer(data, np.float32, 150 * 150, rows["model.0.weight"].offset)
    weight = next(model.parameters()).detach().numpy()
    assert np.array_equal(held, weight.ravel())
    variance = np.frombuffer(data, np.float32, 150, rows["model.1.running_var"].offset)
    assert np.array_equal(variance, np.ones(150)), "as it was at the step"


def test_a_second_snapshot_uses_the_same_side_stream() -> None:
    model = nn.Linear(4, 4)
    plan = plan_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    api = FakeCuda()
    lanes = DeviceCopier(api)
    for _ in range(2):
        lanes.enqueue(
            plan.fenced, Buffer(memoryview(bytearray(plan.layout.total))), lanes.mark({torch.device("cpu")}, [])
        )
    assert api.count == 1


def test_small_tensors_of_every_kind_cross_the_bus_as_one_copy_and_lie_where_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Module()
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 30, generator=generator)
    kinds = {
        "brief": base.bfloat16(), "flag": base > 0, "count": torch.tensor(7), "turned": base.t(), "part": base[::2, ::3],
        "imaginary": torch.view_as_complex(base.reshape(-1, 2).contiguous()), "nothing": torch.empty(0, 3),
        "tiny": base.to(torch.float8_e4m3fn), "mirrored": torch.view_as_complex(base[:, :2].contiguous()).conj(),
    }  # fmt: skip
    for name, tensor in kinds.items():
        model.register_buffer(name, tensor)
    for i in range(200):
        model.register_buffer(f"many{i}", torch.full((5,), float(i)))
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    plan = CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))
    fetched: list[int] = []
    real = SmallBatch.fetch

    def fetch(pack: SmallBatch) -> None:
        fetched.append(len(pack.items))
        real(pack)

    monkeypatch.setattr(SmallBatch, "fetch", fetch)
    lanes, data = DeviceCopier(FakeCuda()), bytearray(plan.layout.total)
    buffer = Buffer(memoryview(data))
    for _ in range(2):
        marks = lanes.mark([], plan.unfenced)
        arrived = [i for items in lanes.arrivals(lanes.enqueue([], buffer, marks), buffer) for i in items]
    assert fetched == [208, 208], "one copy for all but the empty one, of the same buffer each time"
    for item in arrived:
        live = getattr(model, item.fqn.removeprefix("model."))
        wanted = live.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(data[item.offset : item.offset + item.nbytes]) == wanted, item.fqn


class FakeRuntime:
    """What is used of torch.cuda.cudart()."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []
        self.device = -1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", self.device, address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.device, address))
        return 0


@contextlib.contextmanager
def runtime_of(code: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """Let page-locking end with a code of the driver."""
    runtime = FakeRuntime(code)

    @contextlib.contextmanager
    def on(index: int) -> Iterator[None]:
        before, runtime.device = runtime.device, index
        yield
        runtime.device = before

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on)
    yield runtime


def reserving(slots: int = 2) -> RankSegments:
    memory = RankSegments(JobDirectory.open("t"), root_digest=1, rank=0, pin_for=3)
    shard = Shard(fqn="x", dtype="uint8", global_shape=(90_000,), offsets=(0,), lengths=(90_000,))
    memory.open(need_of([shard]), slots=slots, job="t")
    return memory


@pytest.mark.parametrize(("cores", "begins_at_once"), [(2, False), (3, True)])
def test_nothing_is_reserved_while_a_restore_needs_all_cores(
    cores: int, begins_at_once: bool, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[bool] = []  # for each time: whether the restore was over
    is_over = False
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Segment, "reserve", lambda *_, **__: reserved.append(is_over))
    memory = RankSegments(JobDirectory.open("t"), root_digest=1, rank=0)
    large = Shard(fqn="x", dtype="uint8", global_shape=(20 << 20,), offsets=(0,), lengths=(20 << 20,))
    memory.open(need_of([large]), slots=2, job="t", is_opening=True)
    if begins_at_once:
        wait_for(lambda: memory.is_ready, what="the reservation")
    is_over = True
    memory.use_new()
    wait_for(lambda: memory.is_ready, what="the reservation")
    assert reserved == [not begins_at_once]
    memory.release()


@pytest.mark.parametrize("code", [0, 2])
def test_the_slots_are_page_locked_for_this_ranks_device_and_given_back_before_they_are_unmapped(
    code: int, shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with runtime_of(code, monkeypatch) as runtime:
        memory = reserving()
        wait_for(lambda: memory.is_ready, what="the reservation")
        assert memory.segment is not None
        spec = memory.segment.spec
        unmapped: list[int] = []
        real = memory.segment.close

        def close() -> None:
            unmapped.append(len(runtime.calls))
            real()

        monkeypatch.setattr(memory.segment, "close", close)
        memory.release()
    tried = [call for call in runtime.calls if call[0] == "register"]
    assert [(index, nbytes) for _, index, _, nbytes, _ in tried] == [(3, spec.data_capacity)] * (1 if code else 2)
    addresses = [address for _, _, address, _, _ in tried]
    assert addresses[-1] - addresses[0] == (0 if code else spec.data_at(1) - spec.data_at(0))
    assert sorted(runtime.calls[len(tried) :]) == ([] if code else [("unregister", 3, one) for one in addresses])
    assert unmapped == [len(runtime.calls)]
    assert caplog.text.count("page-locked") == (code != 0)


def test_the_first_slot_is_there_while_the_second_is_still_being_page_locked(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime_of(0, monkeypatch) as runtime:
        goes_on, real = threading.Event(), runtime.cudaHostRegister

        def register(*words: Any) -> int:
            assert not runtime.calls or goes_on.wait(60)
            return real(*words)

        monkeypatch.setattr(runtime, "cudaHostRegister", register)
        memory = reserving()
        assert memory.wait_first(60)
        assert not memory.is_ready
        assert memory._reservation.unreserved() == {1}
        goes_on.set()
        wait_for(lambda: memory.is_ready, what="the second slot")
        assert memory._reservation.unreserved() == set()
        memory.release()
