"""Stand-ins for a device: streams that write down what is asked of them, streams that run late, tensors that say "cuda"."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashckpt.restore import device_rows, live_memory
from flashckpt.snapshot import copy_plan
from flashckpt.snapshot.device import DeviceCopier

QUEUED = ("copy_", "_foreach_copy_", "add_", "zero_", "fill_")
"""Operations that a stream runs; views and allocations happen at once, as on a device."""


class FakeEvent:
    def __init__(self, api: FakeCuda, *, blocking: bool) -> None:
        self.api, self.recorded_on, self.blocking = api, "", blocking

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream.name
        self.api.log.append(("record", stream.name))

    def synchronize(self) -> None:
        assert self.blocking, "the host would spin on a core"
        self.api.log.append(("host waits", self.recorded_on))


class FakeStream:
    def __init__(self, api: FakeCuda, name: str) -> None:
        self.api, self.name = api, name

    def wait_event(self, event: FakeEvent) -> None:
        self.api.log.append(("stream waits", self.name, event.recorded_on))

    def synchronize(self) -> None:
        self.api.log.append(("host waits for all", self.name))


class FakeCuda:
    """What is used of torch.cuda; work is done at once."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.main, self.count = FakeStream(self, "main"), 0
        self.on: list[torch.device] = []

    def Event(self, *, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, blocking=blocking)

    def Stream(self, _device: Any) -> FakeStream:
        self.count += 1
        return FakeStream(self, f"side{self.count}")

    def current_stream(self, _device: Any) -> FakeStream:
        return self.main

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.on.append(device)
        yield
        self.on.pop()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self.on, "leaving the stream would go back to device 0"
        self.log.append(("enter", stream.name))
        yield
        self.log.append(("leave", stream.name))


@contextlib.contextmanager
def tensors_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Let every tensor of this process's jobs take the path of device memory, with streams that do all at once."""
    with monkeypatch.context() as patch:
        yield install(patch.setattr)


def install(setattr_: Callable[[Any, str, Any], None]) -> FakeCuda:
    """Let all tensors of this process take the path of device memory from now on; `setattr_` sets what that takes."""
    api, real = FakeCuda(), DeviceCopier.__init__
    setattr_(copy_plan, "is_host", lambda device: False)
    setattr_(live_memory, "_is_host", lambda tensor: False)
    setattr_(device_rows, "cuda", api)
    setattr_(DeviceCopier, "__init__", lambda self, given=None: real(self, given or api))
    return api


class LateEvent:
    def __init__(self) -> None:
        self.stream: LateStream | None = None
        self.has_happened = False

    def record(self, stream: LateStream) -> None:
        self.stream, self.has_happened = stream, False
        stream.put(("record", self))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self)


class LateStream:
    """Runs what it was given when somebody waits for it; an eager one as soon as what it waits for lets it."""

    def __init__(self, *, eager: bool) -> None:
        self.eager, self.work = eager, deque[tuple[str, Any]]()

    def put(self, item: tuple[str, Any]) -> None:
        self.work.append(item)
        while self.eager and self.work and not self._is_blocked():
            self._one()

    def _is_blocked(self) -> bool:
        kind, what = self.work[0]
        return kind == "wait" and not what.has_happened

    def _one(self) -> None:
        kind, what = self.work.popleft()
        if kind == "wait":
            what.synchronize()
        elif kind == "record":
            what.has_happened = True
        else:
            with _disable_current_modes(), torch.no_grad():
                what()

    def run_until(self, event: LateEvent) -> None:
        while not event.has_happened:
            self._one()

    def wait_event(self, event: LateEvent) -> None:
        self.put(("wait", event))

    def synchronize(self) -> None:
        while self.work:
            self._one()


class LateCuda(TorchDispatchMode):
    """A device whose streams promise nothing but what events order: as a mode, it queues what changes tensors.

    Args:
        eager: "main" or "side": that stream runs ahead as far as it may, the other as late as it may; "": both late.
    """

    def __init__(self, eager: str) -> None:
        super().__init__()
        self.eager = eager
        self.main = self.current = LateStream(eager=eager == "main")
        self.sides: list[LateStream] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        if name == "clone":
            out = torch.empty_like(args[0])
            self.current.put(("run", _call(torch.ops.aten.copy_.default, (out, args[0]), {})))
            return out
        if name in QUEUED:
            self.current.put(("run", _call(func, args, options)))
            return None if name.startswith("_foreach") else args[0]
        return func(*args, **options)

    def Event(self, *, blocking: bool = False) -> LateEvent:
        return LateEvent()

    def Stream(self, _device: Any) -> LateStream:
        self.sides.append(LateStream(eager=self.eager == "side"))
        return self.sides[-1]

    def current_stream(self, _device: Any) -> LateStream:
        return self.current

    @contextlib.contextmanager
    def device(self, _device: torch.device) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def _call(func: Any, args: Any, options: Any) -> Callable[[], Any]:
    return lambda: func(*args, **options)


class OnDevice(torch.Tensor):
    """A tensor that says it is on "cuda:0" and does not give its bytes to numpy; made by `as_subclass`."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return torch.device("cuda", 0)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # torch's is an attribute
        return False

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
