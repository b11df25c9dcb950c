"""Training whose state is the number of its step everywhere, on the emulated device: what lies in a slot shows which step it is of."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import emulated_device
from torch import nn

from flashckpt import Checkpointer, accelerator
from flashckpt.native.descriptors import figures_of_rows
from flashckpt.restore import device_rows
from flashckpt.restore.destinations import memory_at
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.snapshot import device as device_module
from flashckpt.snapshot import staging
from flashckpt.snapshot.stager import Snapshot, Stager

LONGEST_US = 3_000
"""Of a pause of the emulated streams."""
STEPS = 4
TIMEOUT_S = 120.0
_jobs = itertools.count()


class Counting(torch.optim.Optimizer):
    """Adds one to every parameter, on the device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)


class Counted(nn.Module):
    """Fenced and unfenced tensors, large and small ones, one of them no run of memory."""

    def __init__(self, at: torch.device) -> None:
        super().__init__()
        shapes = {"large": (300, 300), "turned": (200, 160), "small": (50,), "tiny": (3,)}
        for name, shape in shapes.items():
            memory = torch.zeros(shape[::-1], device=at).t() if name == "turned" else torch.zeros(shape, device=at)
            self.register_parameter(name, nn.Parameter(memory))
        self.register_buffer("table", torch.zeros((250, 100), device=at))
        self.register_buffer("seen", torch.zeros((7,), device=at))


class Run:
    """One job of one rank, of a few steps.

    Args:
        seed: Of the schedule of the device's streams.
        is_locked: Whether its slots are page-locked.
        pace: How many times longer the streams' pauses are: than what a thread waits for the interpreter on a busy machine.
    """

    def __init__(self, seed: int, *, is_locked: bool, pace: int = 1) -> None:
        self.pace = pace
        self.knobs = emulated_device.install()
        self.at, self.is_locked, self.seed = torch.device("emu", 0), is_locked, seed
        self.wrong: list[str] = []
        self.sums: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self.freed = [threading.Event() for _ in range(STEPS + 1)]

    def look(self, snapshot: Snapshot) -> None:
        """Compare what lies in a slot that is about to be COMPLETE with the step it is of."""
        plan, step = snapshot.plan, float(snapshot.request.id.step)
        for item in [*plan.device, *plan.device_unfenced]:
            held = np.frombuffer(snapshot.buffer.array[item.offset : item.offset + item.nbytes].tobytes(), np.float32)
            if not (held == step).all():
                self.wrong.append(f"step {step:.0f}: {item.fqn} holds {sorted(set(held.tolist()))[:3]}")
        assert snapshot.figures is not None
        figures = figures_of_rows(plan.layout.table, snapshot.figures)  # the host digests what arrived, and notes them
        if not (figures.largest == step).all():
            self.wrong.append(f"step {step:.0f}: figures of {sorted(set(figures.largest.tolist()))[:3]}")

    def given_up(self, snapshot: Snapshot, data: Any) -> None:
        """Show that nothing is on its way into a slot that is given up, or into a block that is free."""
        ring = self.ckpt._alive()._stager._lanes._ring
        areas = [data, *(block.numpy() for block in ring._free)]
        before = [bytes(area) for area in areas]
        torch.accelerator.synchronize(self.at)
        if before != [bytes(area) for area in areas]:
            self.wrong.append(f"step {snapshot.request.id.step}: written to when it was given up")

    def train(self, between: Callable[[Run, int], None] | None = None, fails_at: int = 0) -> list[str]:
        """Train; return what is wrong in snapshots or in training.

        Args:
            between: Called behind each `ckpt.step(step)`, as a user's program would go on there.
            fails_at: The snapshot of that step fails once its copies are queued.
        """
        self.knobs.schedule(0, 0)
        torch.accelerator.synchronize(self.at)
        self.knobs.schedule(self.seed, LONGEST_US * self.pace)
        with tempfile.TemporaryDirectory() as folder, self._watched(fails_at):
            self.model = Counted(self.at)
            self.optimizer = Counting(self.model.parameters())
            self.failures: list[Exception] = []
            self.ckpt = Checkpointer(
                Path(folder) / "root", snapshot_every=1, persist_every=1000, job=f"device{next(_jobs)}"
            )
            self.ckpt.on_failure = self.failures.append
            self.ckpt.track(model=self.model, optimizer=self.optimizer)
            self.ckpt.restore()
            assert self.ckpt._alive().memory.wait_first(TIMEOUT_S)
            for step in range(1, STEPS + 1):
                self.optimizer.step()
                with torch.no_grad():
                    for buffer in self.model.buffers():
                        buffer.add_(1)
                if between is not None:  # which may wait for the copy
                    self.freed[step].set()
                self.ckpt.step(step)
                if between is not None:
                    between(self, step)
                self.forward(step)  # at once: what copies use of the memory that it frees, they use while it does
                with torch.no_grad():
                    for buffer in self.model.buffers():  # what is not fenced may change at once
                        buffer.add_(100).sub_(100)
            self.ckpt._alive()._stager.finish()
            self.knobs.schedule(0, 0)
            self.wrong += [f"a wrong sum in training, by {one.item():.0f}" for one in self.sums if one.item() != 0]
            self.wrong += [f"discarded: {error}" for error in self.failures if "on purpose" not in str(error)]
            life = self.ckpt._alive()
            life.close()
            shutil.rmtree(life.directory.path, ignore_errors=True)
        return self.wrong

    def forward(self, step: int) -> None:
        """Use memory and free it while what reads it is still queued, as activations are."""
        small = torch.full((300,), 3.0, device=self.at)
        for _ in range(6):
            small.add_(1)
        self.sums.append((small.sum() - 2_700).abs())
        large = torch.full((40_000,), 3.0, device=self.at)
        self.sums.append((large.sum() - 120_000).abs())
        del large, small  # the last one is the next to be handed out
        self.freed[step].set()

    @contextmanager
    def _watched(self, fails_at: int) -> Iterator[None]:
        real_commit, real_conclude, real_discard = Stager._commit, Stager._conclude, Stager._discard
        real_copy, late = Stager._copy, random.Random(self.seed)
        limit = staging.BLOCK_BYTES, device_module.BATCH_BYTES, staging.BLOCKS
        registers = accelerator.registers

        def copy(stager: Stager, snapshot: Snapshot) -> None:
            if late.random() < 0.5:  # when training has just freed memory that its queue still uses
                assert self.freed[snapshot.request.id.step].wait(TIMEOUT_S)
            time.sleep(late.choice([0, 0.5, 2, 4]) * LONGEST_US / 1e6)  # no wait: as late as a busy machine makes it
            real_copy(stager, snapshot)

        def commit(stager: Stager, snapshot: Snapshot, digests: Any) -> None:
            self.look(snapshot)
            real_commit(stager, snapshot, digests)

        def conclude(stager: Stager, snapshot: Snapshot) -> None:
            if snapshot.request.id.step == fails_at:
                # to free page-locked memory waits for its copies here, as it does not on every device
                self.kept.append(snapshot.marks)
                raise OSError("on purpose")
            real_conclude(stager, snapshot)

        def discard(snapshot: Snapshot) -> None:
            self.given_up(snapshot, snapshot.writer.data)
            real_discard(snapshot)

        watched: dict[str, Any] = {"_copy": copy, "_commit": commit, "_conclude": conclude}
        for name, function in watched.items():
            setattr(Stager, name, function)
        Stager._discard = staticmethod(discard)  # type: ignore[method-assign]  # watched
        staging.BLOCK_BYTES, device_module.BATCH_BYTES, staging.BLOCKS = 128 << 10, 128 << 10, 2
        accelerator.registers = lambda api=None: self.is_locked
        try:
            yield
        finally:
            watched = {"_copy": real_copy, "_commit": real_commit, "_conclude": real_conclude}
            for name, function in watched.items():
                setattr(Stager, name, function)
            Stager._discard = staticmethod(real_discard)  # type: ignore[method-assign]  # watched
            staging.BLOCK_BYTES, device_module.BATCH_BYTES, staging.BLOCKS = limit
            accelerator.registers = registers


def restored(seed: int, *, is_direct: bool = False) -> list[str]:
    """Bring bytes into device memory that training has just used; return what is wrong in it afterwards.

    Args:
        seed: As of `Run`.
        is_direct: The device reads the host's memory itself, page-locked or not.
    """
    knobs, at = emulated_device.install(), torch.device("emu", 0)
    torch.accelerator.synchronize(at)
    sizes = device_rows.BLOCK_BYTES, device_rows.BLOCKS
    device_rows.BLOCK_BYTES, device_rows.BLOCKS = 64 << 10, 2
    knobs.schedule(seed, LONGEST_US)
    knobs.pageable_is_direct(is_direct)
    try:
        parts = [torch.full((200_000,), 7, dtype=torch.uint8, device=at) for _ in range(2)]
        for part in parts:
            part.fill_(9)  # still queued when the restore begins
        rows = DeviceRows(dict(enumerate(parts)))
        wanted = np.random.default_rng(seed).integers(0, 256, 200_000, np.uint8)
        for row, size in ((1, 200_000), (0, 50_000)):  # the first is larger than a block
            for at_byte in range(0, 200_000, size):
                with rows.filling(*np.array([[row], [at_byte], [size]])) as (address,):
                    memory_at(int(address), size, rows)[:] = wanted[at_byte : at_byte + size]
        scribbled = [np.full(200_000, 5, np.uint8) for _ in range(20)]
        rows.wait()
        found = [part.clone() for part in parts]
        del scribbled
        return [f"row {n}" for n, part in enumerate(found) if not np.array_equal(part.cpu().numpy(), wanted)]
    finally:
        knobs.schedule(0, 0)
        knobs.pageable_is_direct(False)  # noqa: FBT003 -- of an extension module
        torch.accelerator.synchronize(at)
        device_rows.BLOCK_BYTES, device_rows.BLOCKS = sizes
