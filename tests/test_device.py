"""The order of operations on an accelerator, shown with streams that only write down what is asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from flashckpt.staging.copying import Buffer
from flashckpt.staging.device import CudaLanes
from flashckpt.staging.staging import Plan
from flashckpt.tracking.placement import current_world
from flashckpt.tracking.tracked import Tracked


class FakeEvent:
    def __init__(self, api: FakeCuda) -> None:
        self.api, self.recorded_on = api, ""

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream.name
        self.api.log.append(("record", stream.name))

    def synchronize(self) -> None:
        self.api.log.append(("host waits", self.recorded_on))


class FakeStream:
    def __init__(self, api: FakeCuda, name: str) -> None:
        self.api, self.name = api, name

    def wait_event(self, event: FakeEvent) -> None:
        self.api.log.append(("stream waits", self.name, event.recorded_on))


class FakeCuda:
    """What is used of torch.cuda."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.main, self.count = FakeStream(self, "main"), 0

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, _device: Any) -> FakeStream:
        self.count += 1
        return FakeStream(self, f"side{self.count}")

    def current_stream(self, _device: Any) -> FakeStream:
        return self.main

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(("enter", stream.name))
        yield
        self.log.append(("leave", stream.name))


def plan_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    tracked = Tracked(current_world())
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    return Plan(tracked.structure(tracked.capture()))


def test_copies_start_behind_the_step_and_the_fence_is_a_wait_of_the_stream_not_of_the_host() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
    plan = plan_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    api = FakeCuda()
    lanes = CudaLanes(api)
    data = memoryview(bytearray(plan.total))
    marks = lanes.mark(plan.fenced, plan.unfenced)
    with torch.no_grad():
        for buffer in list(model.buffers()):
            buffer.zero_()  # what is not fenced may change as soon as step() has returned
    assert api.log == [("record", "main")], "the training thread queued one event and copied nothing to the host"
    batches = lanes.enqueue(plan.fenced, Buffer(data), marks)
    assert api.log[1:] == [
        ("enter", "side1"),
        ("stream waits", "side1", "main"),
        ("record", "side1"),
        ("leave", "side1"),
    ]
    lanes.fence()
    assert api.log[5:] == [("stream waits", "main", "side1")]
    arrived = [item for items in lanes.arrivals(batches) for item in items]
    assert api.log[6:] == [("host waits", "side1")]
    assert len(arrived) == len(plan.fenced) + len(plan.unfenced)
    rows = {item.row.entry.fqn: item for item in arrived}
    held = np.frombuffer(data, np.float32, 900, rows["model.0.weight"].offset)
    weight = next(model.parameters()).detach().numpy()
    assert np.array_equal(held, weight.ravel())
    variance = np.frombuffer(data, np.float32, 30, rows["model.1.running_var"].offset)
    assert np.array_equal(variance, np.ones(30)), "as it was at the step"


def test_a_second_snapshot_uses_the_same_side_stream() -> None:
    model = nn.Linear(4, 4)
    plan = plan_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    api = FakeCuda()
    lanes = CudaLanes(api)
    for _ in range(2):
        lanes.enqueue(plan.fenced, Buffer(memoryview(bytearray(plan.total))), lanes.mark(plan.fenced, []))
    assert api.count == 1
