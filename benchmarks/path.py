"""How far the way of the data is: modules and calls of one `ckpt.step()` with a snapshot, and of a warm restore of 0.1 MB.

    python benchmarks/path.py                # the two rows
    python benchmarks/path.py --by-module    # and the calls of each module

One rank, CPU. Counts of `sys.setprofile`, not times: only frames of the product's Python, in the training thread and the copy
thread, each start of a generator's turn included. Both are traced in a process that has done the same once before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from flashckpt import Checkpointer

_REPOSITORY = Path(__file__).resolve().parent.parent
_ROOMS = tuple(f"{_REPOSITORY / room}/" for room in ("flashckpt", "daemon", "sampler", "trainer"))
Calls = Counter[str]


def traced(action: Callable[[], Any]) -> Calls:
    """Return the calls of `action` by module, in this thread and in those that begin within it."""
    found: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    modules: Calls = Counter()
    for code, count in found.items():
        if code.co_filename.startswith(_ROOMS):
            modules[str(Path(code.co_filename).relative_to(_REPOSITORY))] += count
    return modules


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of about 0.03 MB, 0.1 MB with its optimizer; two parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 96)
    return model, torch.optim.AdamW(model.parameters())


class Run:
    """A job of one rank."""

    def __init__(self, root: Path, job: str) -> None:
        self.model, self.optimizer = model_and_optimizer()
        self.checkpointer = Checkpointer(root, job=job, snapshot_every=1, persist_every=None)
        self.checkpointer.track(model=self.model, optim=self.optimizer)
        self._copying: list[Any] = []

    def train(self) -> None:
        """One step up to where the state has changed."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 96)).sum().backward()
        self.optimizer.step()

    def snapshot(self, step: int) -> None:
        """`ckpt.step()`, and the copy to its end."""
        self.checkpointer.step(step)
        session = self.checkpointer._session
        assert session is not None
        session._stager.finish()


def step_path(root: Path, job: str) -> Calls:
    """Return the calls of a step with a snapshot, to COMPLETE."""
    run = Run(root, job)
    run.checkpointer.restore()
    for step in range(1, 6):
        run.train()
        run.snapshot(step)
    run.train()
    stager = run.checkpointer._session._stager  # type: ignore[union-attr]
    stager._queue.put(None)  # its thread ends; the next one begins within the trace
    stager._thread.join()  # type: ignore[union-attr]
    stager._thread = None
    calls = traced(lambda: run.snapshot(6))
    run.checkpointer.close()
    return calls


def restore_path(root: Path, job: str) -> Calls:
    """Return the calls from `Checkpointer()` to the end of `restore()`, where this node's memory has the snapshot."""
    first = Run(root, job)
    first.checkpointer.restore()
    first.train()
    first.snapshot(1)
    _leave(first)
    for _ in range(2):
        found: list[Any] = []
        calls = traced(lambda: found.append(_restored(root, job)))  # noqa: B023 -- called at once
        run, report = found[0]
        assert report is not None and report.step == 1
        _leave(run)
    return calls


def _restored(root: Path, job: str) -> Any:
    run = Run(root, job)
    return run, run.checkpointer.restore()


def _leave(run: Run) -> None:
    """Close as a rank that fails does: what is in memory stays."""
    try:
        raise RuntimeError
    except RuntimeError:
        run.checkpointer.close()


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by-module", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"step with a snapshot": step_path(Path(folder, "a"), "path-step")}
        rows["warm restore of 0.1 MB"] = restore_path(Path(folder, "b"), "path-restore")
    print(f"{'':24}{'modules':>8}{'calls':>8}")
    for name, calls in rows.items():
        print(f"{name:24}{len(calls):8}{calls.total():8}")
        if options.by_module:
            for module, count in calls.most_common():
                print(f"    {count:6} {module}")


if __name__ == "__main__":
    main()
