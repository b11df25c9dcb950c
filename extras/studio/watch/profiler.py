"""`--profile FROM:TO`: writes a trace of some steps and what memory held at their end; each rank its own files."""

from __future__ import annotations

import gc
import gzip
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.profiler import ProfilerActivity, profile

from flashckpt.trainer.train.nonfatal import Nonfatal
from flashckpt.trainer.train.profile_range import ProfileRange

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
