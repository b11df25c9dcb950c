"""Kinds of devices that are not here, as modules of their documented calls and no others: torch.xpu, torch.npu."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda, FakeEvent
from torch import nn

from flashckpt import accelerator
from flashckpt.session.opening import locked
from flashckpt.snapshot import staging
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.device import DeviceCopier
from flashckpt.snapshot.segments import locks_slots
from flashckpt.state import rng
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout

XPU = "Event(enable_timing) Stream stream device current_stream current_device device_count is_available is_initialized get_rng_state set_rng_state"
NPU = XPU.replace("Event(enable_timing)", "Event(enable_timing, blocking)")
OLD_NPU = NPU.replace(" get_rng_state set_rng_state", "")
"""Releases of torch_npu differ in what they have."""


class Kind(types.SimpleNamespace):
    """A module of device functions: what is in `calls`, and nothing else."""

    def __init__(self, calls: str, *, is_started: bool = True) -> None:
        self.fake, self.state = (
            FakeCuda(),
            {0: torch.arange(16, dtype=torch.uint8), 1: torch.zeros(16, dtype=torch.uint8)},
        )
        has_blocking = "blocking" in calls

        def event(enable_timing: bool = False, **more: bool) -> FakeEvent:
            if more and not has_blocking:
                raise TypeError("Event.__new__() got an unexpected keyword argument 'blocking'")
            return FakeEvent(self.fake, blocking=True)

        known: dict[str, Any] = {
            "Stream": self.fake.Stream, "stream": self.fake.stream, "device": self.fake.device,
            "current_stream": self.fake.current_stream, "current_device": lambda: 0, "device_count": lambda: 2,
            "is_available": lambda: True, "is_initialized": lambda: is_started,
            "get_rng_state": lambda device=None: self.state[getattr(device, "index", None) or 0],
            "set_rng_state": lambda state, device=None: self.state.update({getattr(device, "index", None) or 0: state}),
        }  # fmt: skip
        super().__init__(Event=event, **{name: known[name] for name in calls.split() if name in known})


@contextlib.contextmanager
def machine_of(kind: str, module: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device = types.SimpleNamespace(type=kind, index=None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    yield


KINDS = pytest.mark.parametrize("calls", [XPU, NPU], ids=["xpu", "npu"])


def plan_of(model: nn.Module) -> CopyPlan:
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))


@KINDS
def test_a_device_that_registers_no_memory_is_staged_through_blocks_that_do_not_grow(
    calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.BatchNorm1d(300), nn.Linear(300, 200))
    model.register_parameter("turned", nn.Parameter(torch.rand(300, 200).t()))
    for number in range(40):
        model.register_buffer(f"small{number}", torch.full((60,), float(number)))
    plan, module, made = plan_of(model), Kind(calls), list[int]()
    monkeypatch.setattr(accelerator, "is_direct", lambda address, device: False)
    monkeypatch.setattr(staging, "BLOCK_BYTES", 64 << 10)

    def host_buffer(nbytes: int, device: torch.device, api: Any) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staging, "host_buffer", host_buffer)
    lanes, digested = DeviceCopier(module), list[str]()

    def note(items: Sequence[Item]) -> None:
        digested.extend(item.fqn for item in items)

    for _ in range(2):
        data = bytearray(plan.layout.total)
        buffer = Buffer(memoryview(data))
        marks = lanes.mark({torch.device("cpu")}, plan.unfenced)
        digested.clear()
        batches = lanes.enqueue(plan.fenced, buffer, marks, arrived=note)
        early = len(digested)
        for items in lanes.arrivals(batches, buffer):
            note(items)
        assert 0 < early < len(digested), "blocks were used again before all was queued"
        assert sorted(digested) == sorted(item.fqn for item in [*plan.fenced, *plan.unfenced]), "each once"
        for item in [*plan.fenced, *plan.unfenced]:
            wanted = item.local.detach().contiguous().numpy().tobytes()
            assert bytes(data[item.offset : item.offset + item.nbytes]) == wanted, item.fqn
    assert made == [64 << 10] * staging.BLOCKS, "for both snapshots, of 800 KB each"


@pytest.mark.parametrize("calls", [XPU, NPU, OLD_NPU], ids=["xpu", "npu", "npu without generators"])
def test_generators_are_kept_where_the_kind_has_them(calls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Kind(calls)
    with machine_of("npu", module, monkeypatch):
        state = rng.capture()
        assert state.get("npu") == (bytes(range(16)) if "get_rng_state" in calls else None)
        if "npu" in state:
            module.state[0] = torch.zeros(16, dtype=torch.uint8)
            rng.restore(state)
            assert module.state[0].tolist() == list(range(16))


def test_a_device_that_nobody_started_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Kind(XPU, is_started=False)
    module.is_available = lambda: pytest.fail("counting devices spoils the forks of this process")
    with machine_of("xpu", module, monkeypatch):
        assert accelerator.in_use() == ("", None)
        assert accelerator.index_of([]) is None
        assert not accelerator.is_capturing()
        assert "xpu" not in rng.capture()


@KINDS
def test_memory_that_is_there_already_is_registered_nowhere_else_than_where_torch_can(
    calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine_of("npu", Kind(calls), monkeypatch):
        assert not accelerator.register(4096, 4096, index=0)
        assert not locks_slots(1)
        assert locked(300_000_000_000) == "at most 67.1 MB of staging buffers"


def test_slots_are_locked_up_to_the_bound_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    assert (locks_slots(quarter), locks_slots(quarter + 1)) == (True, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (locks_slots(quarter // 8), locks_slots(quarter // 8 + 1)) == (True, False)
    assert locked(30_000_000) == "its slots, 30.0 MB"
    monkeypatch.setenv("FLASHCKPT_LOCKED_MB", "30")
    assert (locks_slots(30_000_000), locks_slots(30_000_001)) == (True, False)
    monkeypatch.setenv("FLASHCKPT_LOCKED_MB", "0")
    assert locked(30_000_000) == "at most 67.1 MB of staging buffers"


def test_a_step_that_is_captured_in_a_graph_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Kind(NPU)
    with machine_of("npu", module, monkeypatch):
        assert not accelerator.is_capturing(), "a kind without graphs"
        module.is_current_stream_capturing = lambda: True
        assert accelerator.is_capturing()


def test_a_tensor_whose_memory_is_replaced_while_it_is_copied_is_copied_as_it_was() -> None:
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    plan, lanes = plan_of(model), DeviceCopier(FakeCuda())
    data = bytearray(plan.layout.total)
    buffer = Buffer(memoryview(data))
    old = model.weight.data.untyped_storage()
    batches = lanes.enqueue(plan.fenced, buffer, lanes.mark({torch.device("cpu")}, []))
    address = old.data_ptr()
    del old
    model.weight.data = torch.zeros(300, 300)
    others = [torch.empty(300, 300) for _ in range(20)]
    assert address not in {other.data_ptr() for other in others}, "its memory is not given out again meanwhile"
    list(lanes.arrivals(batches, buffer))
    (row,) = [item for item in plan.fenced if item.fqn == "model.weight"]
    assert np.array_equal(np.frombuffer(data, np.float32, 90_000, row.offset), before.numpy().ravel())


def test_a_storage_that_is_resized_while_it_is_copied_discards_the_snapshot() -> None:
    model = nn.Linear(300, 300)
    plan, lanes = plan_of(model), DeviceCopier(FakeCuda())
    buffer = Buffer(memoryview(bytearray(plan.layout.total)))
    batches = lanes.enqueue(plan.fenced, buffer, lanes.mark({torch.device("cpu")}, []))
    model.weight.data.untyped_storage().resize_(0)
    with pytest.raises(StalePlanError, match=r"'model.weight' was replaced or resized"):
        list(lanes.arrivals(batches, buffer))
