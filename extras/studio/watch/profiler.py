"""`--profile FROM:TO`: writes a trace of some steps and what memory held at their end; each rank its own files.

`--profile-phases N`: what takes the time of a step on each rank, and what of it compute does not hide.
"""

from __future__ import annotations

import gc
import gzip
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import is_fake
from torch.profiler import ProfilerActivity, profile

from flashckpt import collectives
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.nonfatal import Nonfatal
from flashckpt.trainer.train.profile_range import WARM_STEPS, ProfileRange
from flashckpt.trainer.train.step_phases import PHASES, PhaseTimer

COMPUTE = ("forward", "backward", "clip", "optimizer")
"""Phases that compute; what else a step takes is exposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPhases:
    """The mean step of one rank, in seconds.

    Attributes:
        plain: Of each phase in the steps as they are.
        synchronised: Of each phase where all ranks begin it together.
        waited: For the others, at the ends of the phases.
    """

    plain: Mapping[str, float]
    synchronised: Mapping[str, float]
    waited: float

    @property
    def step(self) -> float:
        """Of a step as it is."""
        return sum(self.plain.values())


class PhaseProfile:
    """Measures some steps as they are, then as many in which the device and all ranks meet at each mark.

    Nothing that is trained depends on it. What a phase sends beside its compute, as FSDP and DDP do, is in that phase.
    """

    def __init__(self, steps: int, timer: PhaseTimer, device: torch.device) -> None:
        self._steps, self._timer, self._device = steps, timer, device
        self._seen, self._waited = 0, 0.0
        self._each: list[Mapping[str, float]] = []
        self.is_done = False

    def settle(self) -> None:
        """See `Meeting`."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def meet(self) -> None:
        """See `Meeting`."""
        began = time.perf_counter()
        dist.barrier()
        self._waited += time.perf_counter() - began

    def before(self) -> None:
        """Begin to synchronise, if the next step is the first of those."""
        if len(self._each) == self._steps and not self.is_done:
            self._timer.meeting = self

    def finished(self, record: StepRecord) -> list[str]:
        """Take a step; return what there is to say behind the last one. Collective then."""
        self._seen += 1
        if self.is_done or self._seen <= WARM_STEPS:
            return []
        self._each.append(record.phases)
        if len(self._each) < 2 * self._steps:
            return []
        self.is_done, self._timer.meeting = True, None
        mine = [_mean(self._each[: self._steps]), _mean(self._each[self._steps :]), self._waited / self._steps]
        found = [RankPhases(plain=a, synchronised=b, waited=c) for a, b, c in collectives.all_gather(mine)]
        return phase_lines(found, self._steps)


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in each) for name in PHASES}


def exposed_s(ranks: Sequence[RankPhases]) -> float:
    """Return what a step takes beyond the compute of the slowest rank, seconds."""
    compute = max(sum(one.synchronised[name] for name in COMPUTE) for one in ranks)
    return max(0.0, median(one.step for one in ranks) - compute)


def phase_lines(ranks: Sequence[RankPhases], steps: int) -> list[str]:
    """Return a table of the phases, and what follows from it, in ms."""
    rows = [(name, [one.synchronised[name] for one in ranks], [one.plain[name] for one in ranks]) for name in PHASES]
    waits: list[Any] = [one.waited for one in ranks]
    lines = [
        f"phases of {len(ranks)} ranks, means of {steps} steps in ms: all ranks begin each phase together; and as they are",
        f"{'phase':20}{'min':>10}{'median':>10}{'max':>10}  {'rank':>5}{'as it is':>12}",
    ]
    for name, values, plain in [*rows, ("waiting for others", waits, [])]:
        slowest = max(range(len(values)), key=values.__getitem__)
        numbers = "".join(f"{1e3 * one:10.2f}" for one in (min(values), median(values), values[slowest]))
        lines.append(f"{name:20}{numbers}  {slowest:5d}" + (f"{1e3 * median(plain):12.2f}" if plain else ""))
    together, step = sum(max(values) for _, values, _ in rows), median(one.step for one in ranks)
    exposed = exposed_s(ranks)
    lines.append(
        f"a step takes {1e3 * step:.2f} ms; its phases one after another, each of its slowest rank, {1e3 * together:.2f} ms. "
        f"Not hidden behind {', '.join(COMPUTE)}: {1e3 * exposed:.2f} ms ({exposed / max(step, 1e-9):.1%})"
    )
    return lines


logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles some steps of a run. A disk that is full costs the files, not the run.

    Args:
        folder: The run's log folder; files are written to its "profile".
        device: Its device; on a GPU kernels and the history of its allocator are recorded as well.
    """

    def __init__(self, steps: ProfileRange, folder: str, rank: int, device: torch.device) -> None:
        self._steps, self._folder, self._rank = steps, Path(folder, "profile"), rank
        self._is_cuda = device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Begin, if a step is the first of those that are profiled (or the first of them after a restart)."""
        if self._profile is not None or not self._steps.first <= step < self._steps.end:
            return
        if self._is_cuda:
            torch.cuda.memory._record_memory_history()  # noqa: SLF001 -- as torch documents it
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()

    def after(self, step: int) -> None:
        """End and write, if a step is the last of them."""
        if self._profile is None or step + 1 < self._steps.end:
            return
        done, self._profile = self._profile, None
        done.stop()
        name = f"rank-{self._rank}-steps-{self._steps.first}-{self._steps.end - 1}"
        files: dict[str, Callable[[Path], Any]] = {
            f"{name}.trace.json.gz": lambda path: done.export_chrome_trace(str(path)),
            f"{name}.memory.json.gz": _write_memory,
        }
        if self._is_cuda:
            files[f"{name}.memory.html"] = _write_history
        for file, write in files.items():
            self._write(self._folder / file, write)

    def _write(self, path: Path, write: Callable[[Path], Any]) -> None:
        def both() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)

        if Nonfatal(str(path)).attempt(both):
            logger.info("profile written: %s", path)


def _write_memory(path: Path) -> None:
    """Write what tensors hold memory, by shape and type, largest first."""
    with gzip.open(path, "wt") as file:
        json.dump(live_tensors(), file, indent=1)


def live_tensors() -> dict[str, Any]:
    """Return the bytes of all tensors that Python holds, and of each kind; a storage counts once, at its first tensor."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    nbytes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    seen: set[int] = set()
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor) or one.is_meta:  # not isinstance: some objects answer with an import
            continue
        local = one.to_local() if hasattr(one, "to_local") else one
        if is_fake(local):  # shapes without memory, as torch.compile traces with
            continue
        address, size = _memory(local)
        if not size or address in seen:
            continue
        seen.add(address)
        kind = (str(local.device), str(local.dtype).removeprefix("torch."), tuple(local.shape))
        counts[kind] += 1
        nbytes[kind] += size
    return {
        "bytes": sum(nbytes.values()),
        "kinds": [
            {"device": kind[0], "dtype": kind[1], "shape": list(kind[2]), "count": counts[kind], "bytes": size}
            for kind, size in nbytes.most_common()
        ],
    }


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage; none of a layout without one (sparse: its parts count)."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return 0, 0


def _write_history(path: Path) -> None:
    """Write torch's page of the allocator's history; as HTML, since its other form is a pickle."""
    from torch.cuda._memory_viz import trace_plot

    path.write_text(trace_plot(torch.cuda.memory._snapshot()))  # type: ignore[no-untyped-call]  # noqa: SLF001 -- as above
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 -- as above
