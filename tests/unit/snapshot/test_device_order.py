"""Copies from a device beside training, on streams that keep to nothing but the order that events give them.

Every operation waits in its stream until somebody waits for it, or runs ahead as far as events allow: what lies in the slot is
then the state of the step only if every wait that is needed is there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine import train
from support.fake_cuda import FakeCuda, FakeEvent, LateCuda, tensors_as_on_a_device
from support.one_rank import agent_of_the_test, crash, finished, opened  # noqa: F401 -- a fixture
from torch import nn

from flashckpt import accelerator
from flashckpt.snapshot import device, stager
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError, source_of
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.device import DeviceCopier, SmallBatch, SmallBatches
from flashckpt.snapshot.runs import Offer
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout

STEPS = 3
SCHEDULES = ["", "main", "side"]
CPU = {torch.device("cpu")}


class Loop:
    """Training of one rank: parameters that an optimizer changes, buffers that change whenever they like."""

    def __init__(self, eager: str) -> None:
        self.model = nn.Sequential(nn.Linear(150, 150), nn.BatchNorm1d(150))
        self.model.register_buffer("table", torch.zeros(200, 100))  # large, not fenced: cloned on the device
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.zero_()
        tracked = StateRegistry(current_world())
        tracked.add("model", self.model)
        tracked.add("optimizer", torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.plan = CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))
        self.cuda = LateCuda(eager)
        self.lanes = DeviceCopier(self.cuda)
        self.data = bytearray(self.plan.layout.total)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def change_buffers(self) -> None:
        for held_back in self.model.buffers():
            held_back.add_(1)

    def snapshots(self, steps: int = STEPS) -> list[set[float]]:
        """Train and take a snapshot of each step; return the values found in it: {n} where it is of step n as a whole."""
        found: list[set[float]] = []
        buffer = Buffer(memoryview(self.data))
        with self.cuda:
            for _ in range(steps):
                self.update()
                self.change_buffers()
                marks = self.lanes.mark(CPU, self.plan.unfenced)
                self.change_buffers()  # what is not fenced may change as soon as step() has returned
                batches = self.lanes.enqueue(self.plan.fenced, buffer, marks)
                self.lanes.fence()
                self.update()
                arrived = [item for items in self.lanes.arrivals(batches, buffer) for item in items]
                assert len(arrived) == len(self.plan.fenced) + len(self.plan.unfenced)
                found.append(set().union(*map(self.values, arrived)))
        return found

    def values(self, item: Item) -> set[float]:
        raw = bytearray(self.data[item.offset : item.offset + item.nbytes])
        return set(torch.frombuffer(raw, dtype=item.dtype).tolist())


@pytest.mark.parametrize("eager", SCHEDULES)
def test_the_slot_holds_the_state_of_the_step_however_late_the_streams_run(eager: str) -> None:
    assert Loop(eager).snapshots() == [{1.0}, {3.0}, {5.0}]


def test_without_the_fence_the_next_step_is_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is sharp: each of the two waits, and each copy made in stream order, is needed for it."""
    monkeypatch.setattr(DeviceCopier, "fence", lambda self: None)
    assert Loop("main").snapshots(1) != [{1.0}]


def test_without_waiting_for_the_training_stream_the_step_before_is_in_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop("side")
    real = loop.cuda.Stream

    def deaf(device: Any) -> Any:
        stream = real(device)
        stream.wait_event = lambda event: None  # type: ignore[method-assign]  # on purpose
        return stream

    monkeypatch.setattr(loop.cuda, "Stream", deaf)
    assert loop.snapshots(1) != [{1.0}]


def test_buffers_gathered_behind_the_step_instead_of_in_it_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceCopier.mark

    def mark(self: DeviceCopier, items: Any, unfenced: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(SmallBatch, "gather", lambda pack: None)
            marks = real(self, items, unfenced)
        fetch = SmallBatch.fetch
        monkeypatch.setattr(SmallBatch, "fetch", lambda pack: (pack.gather(), fetch(pack))[1])
        return marks

    monkeypatch.setattr(DeviceCopier, "mark", mark)
    assert Loop("main").snapshots(1) != [{1.0}]


@pytest.mark.parametrize("eager", SCHEDULES)
def test_a_plan_that_does_not_fit_ends_with_no_copy_under_way(eager: str) -> None:
    """Its slot is EMPTY then and may be given to the next snapshot: a copy that is still queued would write into that."""
    loop = Loop(eager)
    buffer = Buffer(memoryview(loop.data))
    loop.model.register_buffer("other", torch.zeros(300, 300))
    large = max(loop.plan.fenced, key=lambda item: item.nbytes)
    with loop.cuda:
        marks = loop.lanes.mark(CPU, [])
        other = large._replace(local=loop.model.get_buffer("other"))  # of another shape, found behind the small ones
        items = [other if item is large else item for item in loop.plan.fenced]
        with pytest.raises(StalePlanError):
            loop.lanes.enqueue(items, buffer, marks)
    assert not any(stream.work for stream in loop.cuda.sides)


@pytest.mark.parametrize("name", ["table", "1.running_var"])
def test_a_buffer_of_another_shape_discards_the_snapshot_and_step_does_not_raise(name: str) -> None:
    loop = Loop("")
    assert any(item.fqn == f"model.{name}" for item in loop.plan.unfenced)
    unfenced = [
        item._replace(local=torch.zeros(7)) if item.fqn == f"model.{name}" else item for item in loop.plan.unfenced
    ]
    with loop.cuda:
        marks = loop.lanes.mark(CPU, unfenced)  # within step(), in the training thread
        with pytest.raises(StalePlanError):  # in the copy thread
            loop.lanes.enqueue(loop.plan.fenced, Buffer(memoryview(loop.data)), marks)


@pytest.mark.parametrize("eager", SCHEDULES)
def test_what_an_owner_returns_for_a_snapshot_is_copied_behind_the_step_and_may_be_changed(eager: str) -> None:
    loop, found = Loop(eager), torch.full((150, 150), 4.0)
    (item,) = [item for item in loop.plan.fenced if item.shape == found.shape]
    buffer = Buffer(memoryview(loop.data))
    with loop.cuda:
        marks = loop.lanes.mark([], [], [(item, found)])
        assert not any(loop.data), "nothing was copied to the host in step()"
        found.fill_(9)
        batches = loop.lanes.enqueue([], buffer, marks)
        assert [one for items in loop.lanes.arrivals(batches, buffer) for one in items] == [item]
    assert loop.values(item) == {4.0}


def test_one_tensor_of_other_strides_leaves_the_others_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    for number in range(6):
        model.register_buffer(f"many{number}", torch.full((3, 4), float(number)))
    model.register_buffer("turned", torch.arange(12.0).reshape(4, 3).t())
    model.register_buffer(
        "flat", torch.arange(4.0).as_strided((4, 1), (1, 9))
    )  # contiguous; a kernel asks for its strides
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    plan = CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))
    calls: list[list[tuple[Any, Any]]] = []
    real: Any = torch._foreach_copy_

    def copy(targets: Any, sources: Any, **more: Any) -> Any:
        calls.append([(t.stride(), s.stride()) for t, s in zip(targets, sources, strict=True)])
        return real(targets, sources, **more)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    (batch,) = SmallBatches().of(plan.unfenced)[1]
    batch.gather()
    assert [len(call) for call in calls if all(a == b for a, b in call)] == [6]
    batch.fetch()
    buffer = Buffer(memoryview(data := bytearray(plan.layout.total)))
    batch.deal(buffer)
    for item in plan.unfenced:
        wanted = model.get_buffer(item.fqn.removeprefix("model.")).reshape(-1).tolist()
        assert torch.frombuffer(data, dtype=torch.float32, count=len(wanted), offset=item.offset).tolist() == wanted


@pytest.mark.parametrize("nbytes", [4_000, 80_000])
def test_no_view_of_a_plain_tensor_is_made_for_its_copy(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tensors are queued in a millisecond or two of Python: views alone took several times that."""
    model = nn.ParameterList([torch.full((nbytes // 4,), float(number)) for number in range(5)])
    tracked = StateRegistry(current_world())
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    plan = CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))
    lanes, data = DeviceCopier(FakeCuda()), bytearray(plan.layout.total)
    buffer = Buffer(memoryview(data))

    def snapshot() -> None:
        batches = lanes.enqueue(plan.fenced, buffer, lanes.mark(CPU, plan.unfenced))
        assert sum(len(items) for items in lanes.arrivals(batches, buffer)) == 5

    snapshot()  # makes the batches
    monkeypatch.setattr(device, "source_of", lambda item: pytest.fail("a view was made"))
    snapshot()
    for number, item in enumerate(plan.fenced):
        assert data[item.offset : item.offset + nbytes] == np.full(nbytes // 4, number, np.float32).tobytes()


def test_the_devices_of_a_plan_are_looked_up_once() -> None:
    loop, looked = Loop(""), []

    class Counted:
        device = torch.device("cpu")

        def __getattribute__(self, name: str) -> Any:
            looked.append(name)
            return object.__getattribute__(self, name)

    items: Any = [type("Item", (), {"local": Counted(), "nbytes": 0})() for _ in range(50)]
    nothing: list[torch.device] = []
    for _ in range(3):
        loop.lanes.mark(nothing, items)
    assert looked == ["device"] * 50


def test_a_job_whose_state_lies_on_a_device_restores_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine over the device's path: every tensor goes by side streams, packs and events."""
    with tensors_as_on_a_device(monkeypatch) as cuda:
        first = train(0, "plain", str(tmp_path / "root"), 4, {"persist_every": 100})
    assert ("host waits", "side1") in cuda.log
    assert ("stream waits", "main", "side1") in cuda.log, "the optimizer's step was fenced by the stream"
    second = train(0, "plain", str(tmp_path / "root"), 4, {"persist_every": 100})
    assert second["first"] == 4
    assert second["restored"] == first["digests"]["4"]


def test_a_write_between_step_and_fence_discards_the_snapshot_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copied = nn.Linear(8, 8), threading.Event()
    real = FakeEvent.synchronize
    with tensors_as_on_a_device(monkeypatch):
        monkeypatch.setattr(FakeEvent, "synchronize", lambda event: (copied.wait(30), real(event))[1])
        copied.set()
        ckpt = opened(tmp_path / "root", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        ckpt.step(1)
        finished(ckpt)
        copied.clear()
        ckpt.step(2)
        with torch.no_grad():
            model.weight.add_(1)  # a write past the fence, while the copy is under way
        copied.set()
        finished(ckpt)
        assert ckpt.stats["discarded"] == 1
        ckpt.step(3)
        finished(ckpt)
        assert ckpt.stats["snapshots"] == 2
        crash(ckpt)


def test_a_fence_that_comes_before_the_copies_are_queued_does_not_wait_until_they_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fence_is_there, arrive = nn.Linear(8, 8), threading.Event(), threading.Event()
    join, enqueue, happen = Offer.join, DeviceCopier.enqueue, FakeEvent.synchronize
    with tensors_as_on_a_device(monkeypatch):
        ckpt = opened(tmp_path / "root", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

        def join_late(offer: Offer) -> None:
            fence_is_there.set()
            join(offer)

        def enqueue_later(*given: Any, **more: Any) -> Any:
            fence_is_there.wait(30)
            return enqueue(*given, **more)

        monkeypatch.setattr(Offer, "join", join_late)
        monkeypatch.setattr(DeviceCopier, "enqueue", enqueue_later)
        monkeypatch.setattr(FakeEvent, "synchronize", lambda event: (arrive.wait(60), happen(event))[1])
        ckpt.step(1)
        fencing = threading.Thread(target=ckpt.fence)
        fencing.start()
        fencing.join(30)
        waits = fencing.is_alive()
        arrive.set()
        fencing.join()
        finished(ckpt)
        crash(ckpt)
    assert not waits, "the fence waited for the device"


class Returns:
    """An object that makes other tensors for each snapshot, and uses their memory afterwards."""

    def __init__(self) -> None:
        self.scale = torch.tensor(3.0)
        self.given = torch.zeros(40_000)

    def state_dict(self) -> dict[str, Any]:
        self.given = torch.full((40_000,), float(self.scale))
        return {"large": self.given, "small": self.scale.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.given = state["small"], state["large"]


def test_tensors_that_an_object_makes_on_a_device_are_not_copied_to_the_host_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Returns()
    with tensors_as_on_a_device(monkeypatch):
        ckpt = opened(tmp_path / "root", owner=owner)
        monkeypatch.setattr(stager, "copy_item", lambda *_: pytest.fail("copied by the training thread"))
        ckpt.step(1)
        owner.given.zero_()
        finished(ckpt)
        assert ckpt.stats["snapshots"] == 1
        crash(ckpt)
        owner.scale = torch.tensor(8.0)
        crash(opened(tmp_path / "root", owner=owner))
    assert owner.scale.item() == 3.0
    assert set(owner.given.tolist()) == {3.0}


def test_a_snapshot_that_fails_while_copies_are_under_way_waits_for_them_before_its_slot_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrivals(*_: Any) -> Any:
        raise OSError("the digest of a batch failed")

    discard = stager.Stager._discard
    with tensors_as_on_a_device(monkeypatch) as cuda:
        ckpt = opened(
            tmp_path / "root", model=(model := nn.Linear(8, 8)), optimizer=torch.optim.SGD(model.parameters())
        )
        monkeypatch.setattr(DeviceCopier, "arrivals", arrivals)

        def given_up(snapshot: stager.Snapshot) -> None:
            cuda.log.append(("given up",))
            discard(snapshot)

        monkeypatch.setattr(stager.Stager, "_discard", staticmethod(given_up))
        ckpt.step(1)
        finished(ckpt)
        crash(ckpt)
    assert ckpt.stats["discarded"] == 1
    assert cuda.log.index(("host waits for all", "side1")) < cuda.log.index(("given up",))


@pytest.mark.parametrize("eager", SCHEDULES)
def test_memory_of_a_device_is_made_on_the_stream_that_writes_it(eager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of another stream may be what training has just freed there, and still reads."""
    loop, made = Loop(eager), list[tuple[Any, Any]]()
    real_empty, real_gather = torch.empty, SmallBatch.gather

    def empty(*shape: Any, **kinds: Any) -> torch.Tensor:
        if "device" in kinds and kinds["dtype"] is torch.uint8:
            made.append(("made", loop.cuda.current))
        return real_empty(*shape, **kinds)

    def gather(pack: SmallBatch) -> None:
        real_gather(pack)
        made.append(("written", loop.cuda.current))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(SmallBatch, "gather", gather)
    loop.snapshots(2)
    kinds = [kind for kind, _ in made]
    assert kinds[:4] == ["made", "written", "made", "written"], "each pack once, when it is gathered the first time"
    assert kinds[4:] == ["written", "written"]
    assert [stream is loop.cuda.main for _, stream in made[:4]] == [True, True, False, False]


@pytest.mark.parametrize("where", ["clone", "empty"])
def test_out_of_memory_on_a_device_discards_that_snapshot_and_training_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, failures = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), list[Exception]()
    model.register_buffer("table", torch.zeros(200, 100))
    full, real = threading.Event(), device.SmallBatch._made
    with tensors_as_on_a_device(monkeypatch):
        ckpt = opened(tmp_path / "root", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        ckpt.on_failure = failures.append

        def refused(*given: Any, **kinds: Any) -> Any:
            if full.is_set():
                raise torch.OutOfMemoryError("tried to allocate")
            return made(*given, **kinds)

        made: Any = real if where == "empty" else source_of
        owner, name = (device.SmallBatch, "_made") if where == "empty" else (device, "source_of")
        monkeypatch.setattr(owner, name, refused)
        full.set()
        ckpt.step(1)
        finished(ckpt)
        full.clear()
        ckpt.step(2)
        finished(ckpt)
        assert (ckpt.stats["discarded"], ckpt.stats["snapshots"]) == (1, 1)
        crash(ckpt)
    assert isinstance(failures[0], torch.OutOfMemoryError)


def test_refused_page_locking_costs_speed_and_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **kinds: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*shape, **kinds)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(accelerator, "_refused", set())
    there = torch.device("cuda", 1)
    buffers = [accelerator.host_buffer(100, there, api=FakeCuda()) for _ in range(3)]
    assert [len(one) for one in buffers] == [100] * 3
    assert caplog.text.count("no page-locked memory for copies of cuda:1") == 1


def test_no_core_free_is_not_said_of_copies_that_are_never_made_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    with tensors_as_on_a_device(monkeypatch):
        ckpt = opened(tmp_path / "root", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        monkeypatch.setattr(
            ckpt._alive()._stager._crowding, "saw", lambda *_: pytest.fail("asked for a copy by a device")
        )
        ckpt.step(1)
        finished(ckpt)
        assert ckpt.stats["snapshots"] == 1
        crash(ckpt)
