"""Every wait that orders copies is needed, and found where it is missing: the product with one of them left out, seed by seed.

The sources of the product are rewritten in this process: a line of a function is left out, which must be there exactly once.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import emulated_device
from support.one_rank import agent_of_the_test  # noqa: F401 -- a fixture

from flashckpt import accelerator
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.session.checkpointer import Checkpointer
from flashckpt.snapshot.device import DeviceCopier
from flashckpt.snapshot.stager import Stager
from flashckpt.snapshot.staging import Ring
from integration.device.harness import Run, restored

SEEDS = 200
RIGHT = 6
"""Seeds with which the product as it is must show nothing, of each way."""

pytestmark = pytest.mark.skipif(bool(emulated_device.why_not()), reason=emulated_device.why_not())


@contextmanager
def without(owner: type, name: str, line: str, instead: str = "pass") -> Iterator[None]:
    """Run with a function of which one line is another."""
    real = owner.__dict__[name]
    lines = textwrap.dedent(inspect.getsource(real)).split("\n")
    (place,) = [number for number, text in enumerate(lines) if text.strip() == line]
    lines[place] = lines[place].replace(line, instead)
    scope: dict[str, Any] = {}
    module = sys.modules[owner.__module__].__dict__
    exec(
        compile("from __future__ import annotations\n" + "\n".join(lines), f"<{name} without {line}>", "exec"),
        module,
        scope,
    )
    setattr(owner, name, scope[name])
    try:
        yield
    finally:
        setattr(owner, name, real)


def replaces_a_parameter(run: Run, step: int) -> None:
    """Give a parameter other memory while its snapshot is taken, and use the memory it had."""
    if step == 2:
        ready = run.ckpt._alive()._stager.current
        assert ready is None or ready.copied.wait(60)
        large = run.model.get_parameter("large")
        large.data = large.data.clone()
        torch.full((300, 300), -1.0, device=run.at)


def replays(run: Run, step: int) -> None:
    """Step once more as a graph is replayed: no hook is called, and no version moves."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.data.add_(50).sub_(50)


def snapshots(
    *, is_locked: bool, between: Any = None, fails_at: int = 0, is_captured: bool = False, pace: int = 1
) -> Callable[[int], list[str]]:
    def run(seed: int) -> list[str]:
        made = Run(seed, is_locked=is_locked, pace=pace)
        real = Checkpointer._begin
        if is_captured:

            def begin(self: Checkpointer, *given: Any, **more: Any) -> Any:
                self._is_captured = True
                return real(self, *given, **more)

            Checkpointer._begin = begin  # type: ignore[method-assign]  # as if it had seen the capture
        try:
            return made.train(between, fails_at=fails_at)
        finally:
            Checkpointer._begin = real  # type: ignore[method-assign]  # as it was

    return run


def direct_restore(seed: int) -> list[str]:
    return restored(seed, is_direct=True)


@dataclass(frozen=True)
class Control:
    """One wait that is left out, and the run that shows it."""

    name: str
    owner: type
    function: str
    line: str
    run: Callable[[int], list[str]]
    instead: str = "pass"


LOCKED, STAGED = snapshots(is_locked=True), snapshots(is_locked=False)
CONTROLS = [
    *(
        control
        for way, run in (("page-locked", LOCKED), ("staged", STAGED))
        for control in (
            Control(f"the fence ({way})", DeviceCopier, "fence", "self._api.current_stream(device).wait_event(event)", run),
            Control(f"the wait for the step ({way})", DeviceCopier, "enqueue", "stream.wait_event(mark)", run),
            Control(f"the event of the step ({way})", DeviceCopier, "mark", "event.record(self._api.current_stream(device))", run),
            Control(f"the wait for arrival ({way})", DeviceCopier, "arrivals", "event.synchronize()", run),
            Control(f"the event of a copy ({way})", DeviceCopier, "_recorded", "event.record(self._stream(device))", run),
            Control(f"the fence's wait for the copy thread ({way})", Stager, "fence", "if not snapshot.copied.is_set():", run, "if False:"),
            Control(
                f"clones in step() ({way})", DeviceCopier, "mark",
                "clones += [(item, source_of(item).clone()) for item in large]", run,
                "clones += [(item, source_of(item)) for item in large]",
            ),
            Control(
                f"the side stream of what the copy thread makes ({way})", DeviceCopier, "enqueue",
                "large, packs = self._fenced.of(items)", run,
                "large, packs = self._fenced.of(items); [setattr(p, '_on_device', p._made()) for p in packs if p._on_device is None]",
            ),
            Control(
                f"storages held while they are copied ({way})", DeviceCopier, "enqueue", "self._held = HeldStorages(items)",
                snapshots(is_locked=way == "page-locked", between=replaces_a_parameter),
            ),
            Control(
                f"the fence of a captured optimizer ({way})", Checkpointer, "step", "self.fence()",
                snapshots(is_locked=way == "page-locked", between=replays, is_captured=True),
            ),
        )
    ),
    Control("the wait before a slot is given up", Stager, "_run",
            "self._lanes.wait()  # nothing may still be on its way into a slot that is given up",
            snapshots(is_locked=True, fails_at=2, pace=10)),
    Control("the wait for a staging block", Ring, "_take", "oldest.event.synchronize()", STAGED),
    Control("restore: the wait for what used the memory", DeviceRows, "__init__",
            "self._streams[device].wait_event(queued)  # new memory may still be read by what used it before", restored),
    Control("restore: the event of that", DeviceRows, "__init__", "queued.record(self._api.current_stream(device))", restored),
    Control("restore: the wait for a block", DeviceRows, "_take", "event.synchronize()", restored),
    Control("restore: the event of a block", DeviceRows, "_queueing", "event.record(stream)", restored),
    Control("restore: the wait for what is no block", DeviceRows, "_queueing", "event.synchronize()", direct_restore),
    Control("restore: the wait for all", DeviceRows, "wait", "stream.synchronize()", restored),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulated_device.install()
    logging.disable(logging.ERROR)
    monkeypatch.setattr(accelerator, "_refused", set())
    yield
    logging.disable(logging.NOTSET)
    gc.collect()


@pytest.mark.parametrize("run", [
    pytest.param(LOCKED, id="page-locked"),
    pytest.param(STAGED, id="staged"),
    pytest.param(snapshots(is_locked=True, fails_at=2, pace=10), id="a snapshot fails, page-locked"),
    pytest.param(snapshots(is_locked=False, fails_at=2, pace=10), id="a snapshot fails, staged"),
    pytest.param(snapshots(is_locked=True, between=replaces_a_parameter), id="memory replaced, page-locked"),
    pytest.param(snapshots(is_locked=False, between=replaces_a_parameter), id="memory replaced, staged"),
    pytest.param(snapshots(is_locked=True, between=replays, is_captured=True), id="captured, page-locked"),
    pytest.param(snapshots(is_locked=False, between=replays, is_captured=True), id="captured, staged"),
    pytest.param(restored, id="restore"),
    pytest.param(direct_restore, id="restore, host memory read by the device"),
])  # fmt: skip
def test_the_product_as_it_is_shows_nothing_under_any_schedule(run: Callable[[int], list[str]]) -> None:
    assert {seed: wrong for seed in range(RIGHT) if (wrong := run(seed))} == {}


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_wait_that_is_left_out_is_found(control: Control, record_property: Callable[[str, object], None]) -> None:
    with without(control.owner, control.function, control.line, control.instead):
        for seed in range(SEEDS):
            if wrong := control.run(seed):
                FOUND[control.name] = (seed + 1, wrong[0])
                return
    pytest.fail(f"{control.name} was left out, and {SEEDS} seeds show nothing")


FOUND: dict[str, tuple[int, str]] = {}


def test_the_table() -> None:
    """Printed with -s, or -rP."""
    print(f"{'left out':<70} {'seeds':>5}  first seen as")
    for name, (seeds, wrong) in FOUND.items():
        print(f"{name:<70} {seeds:>5}  {wrong[:90]}")
