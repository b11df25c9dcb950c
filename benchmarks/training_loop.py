"""A training loop to take snapshots of, and what one snapshot costs it. Needs torch and numpy only (peers bring their own Python).

A Llama-shaped model with AdamW moments takes real optimizer steps; forward and backward are stood in for by matrix
products that last `compute` times as long as one memcpy of the state (beside a copy they feel the loss of memory
bandwidth and cores as a real model would).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import statistics
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from processes import descendants
from torch import nn

QUIET_STEPS = 2


def model_of(nbytes: float, tensors: int | None) -> nn.Module:
    """A ParameterList of Llama-like shapes whose parameters and two moments take about `nbytes` in float32."""
    if tensors is not None:
        size = max(1, int(nbytes / 12 / (tensors / 4)))
        return nn.ParameterList([torch.randn(size) for _ in range(tensors // 4)])
    hidden = max(64, int((nbytes / 12 / (8 * 12.5)) ** 0.5) // 64 * 64)
    shapes: list[tuple[int, ...]] = []
    while sum(math.prod(s) for s in shapes) * 12 < nbytes * 0.97:
        shapes += [(hidden, hidden)] * 4 + [(hidden, int(2.75 * hidden))] * 3 + [(hidden,)] * 2
    return nn.ParameterList([torch.randn(s) * 0.02 for s in shapes])


class Loop:
    """The loop: compute, optimizer step.

    Args:
        nbytes: Bytes of parameters and moments of this rank.
        tensors: This many equal tensors instead of Llama shapes.
        compute: Length of forward and backward, in memcpys of the state.
        rank: Part of every name: ranks hold different shards, not copies of one.
    """

    def __init__(self, nbytes: float, *, tensors: int | None, compute: float, rank: int) -> None:
        torch.manual_seed(rank)
        self.rank = rank
        self.model = model_of(nbytes, tensors)
        # one tensor after the other, as by default on CPU: foreach takes a third of the state for temporaries
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=tensors is not None)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.nbytes = sum(t.nbytes for t in self.state().values())
        self.left, self.right = torch.randn(512, 512), torch.randn(512, 512)
        self.target = mmap.mmap(-1, self.nbytes + (1 << 20), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        compute_s = compute * statistics.median(self.memcpy()[0] for _ in range(3))
        one = statistics.median(self.products(20) for _ in range(3)) / 20
        self.count = max(1, int(compute_s / one))

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by name."""
        found = {}
        for i, p in enumerate(self.model.parameters()):
            found[f"rank{self.rank}.model.{i}"] = p.detach()
            found |= {f"rank{self.rank}.optimizer.{i}.{k}": v for k, v in self.optimizer.state[p].items()}
        return found

    def memcpy(self) -> tuple[float, float]:
        """Wall and CPU seconds of one memcpy of the state into warm shared memory, tensor by tensor, one thread."""
        address = int(np.frombuffer(self.target, np.uint8).ctypes.data)
        started, cpu, at = time.perf_counter(), time.thread_time(), 0
        for tensor in self.state().values():
            ctypes.memmove(address + at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return time.perf_counter() - started, time.thread_time() - cpu

    def products(self, count: int) -> float:
        """Seconds of `count` matrix products."""
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(self.left, self.right)
        return time.perf_counter() - started

    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.products(self.count)

    def update(self) -> float:
        """Seconds of the optimizer step."""
        started = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - started


class Case(Protocol):
    """One way to take a snapshot."""

    def call(self) -> None:
        """Take it; everything in here is lost to training."""

    def fence(self) -> None:
        """Wait until the optimizer may change the state."""

    def is_done(self) -> bool:
        """Whether nothing of this snapshot runs beside training any more; cheap."""

    def finish(self) -> float:
        """Wait for the end; return when it could be restored, on the clock of time.perf_counter."""

    def clean(self) -> None:
        """Remove what the snapshot left on disk."""

    def pids(self) -> list[int]:
        """Processes that are not descendants of this one and work for it."""

    def close(self) -> None:
        """Give everything back."""


class Blocking:
    """What a case that does everything in `call` need not say."""

    def __init__(self) -> None:
        self.called = 0.0

    def fence(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def finish(self) -> float:
        """When the call returned."""
        return self.called

    def clean(self) -> None:
        """Nothing to remove."""

    def pids(self) -> list[int]:
        """Nobody else."""
        return []

    def close(self) -> None:
        """Nothing to give back."""


class WarmCopy(Blocking):
    """A copy into warm shared memory by the training thread: the floor of designs that copy synchronously."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop

    def call(self) -> None:
        """Copy."""
        self.loop.memcpy()
        self.called = time.perf_counter()


def measured(loop: Loop, case: Case) -> dict[str, float | None]:
    """Run quiet steps, one snapshot, the step beside its copy, and steps until nothing runs any more.

    Uplifts are shares of a quiet step. `persisting_uplift` is what all steps behind the first one took longer,
    over the quiet time they would have needed until the work beside them ended; None where it ended before them.
    """
    own = time.process_time()
    quiet_s = [loop.compute() + loop.update() for _ in range(QUIET_STEPS)]
    quiet, quiet_cpu = sum(quiet_s) / len(quiet_s), (time.process_time() - own) / len(quiet_s)
    cpu = family_cpu_seconds(case.pids())
    started, call_cpu = time.perf_counter(), time.thread_time()
    case.call()
    called, call_cpu = time.perf_counter() - started, time.thread_time() - call_cpu
    beside = loop.compute()
    fence = time.perf_counter()
    case.fence()
    fenced = time.perf_counter() - fence
    beside += loop.update()
    behind, behind_s = time.perf_counter(), []
    while not case.is_done():
        behind_s.append(loop.compute() + loop.update())
    restorable = case.finish()
    extra_cpu = family_cpu_seconds(case.pids()) - cpu - quiet_cpu * (1 + len(behind_s))
    case.clean()
    lost_behind, overlap = sum(behind_s) - quiet * len(behind_s), restorable - behind
    return {
        "call_s": called,
        "call_cpu_s": call_cpu,
        "fence_s": fenced,
        "blocked_s": called + fenced,
        "lost_s": called + fenced + beside - quiet,
        "copying_uplift": beside / quiet - 1,
        "persisting_uplift": lost_behind / max(overlap - lost_behind, quiet / 2) if overlap > quiet else None,
        "restorable_s": restorable - started,
        "extra_cpu_s": extra_cpu,
        "step_s": quiet,
    }


def family_cpu_seconds(others: list[int]) -> float:
    """CPU seconds of this process (exact) and of its living descendants and `others` (in ticks of 10 ms)."""
    pids = {*descendants(os.getpid()), *others} - {os.getpid()}
    return time.process_time() + sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
