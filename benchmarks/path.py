"""How far the way of the data is: modules and calls of one `ckpt.step()` with a snapshot, and of a warm restore of 0.1 MB.

    python benchmarks/path.py                  # the two rows
    python benchmarks/path.py --by module      # and the calls of each module, or of each function

One rank, CPU. Counts of `sys.setprofile`, not times: only frames of the product's Python, in the training thread and the copy
thread, each turn of a generator included. Both are traced in a process that has done the same before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from flashckpt import Checkpointer
from flashckpt.daemon.machine.process import become_subreaper
from flashckpt.report import RestoreReport

_REPOSITORY = Path(__file__).resolve().parent.parent
_ROOMS = tuple(f"{_REPOSITORY / room}/" for room in ("flashckpt", "daemon", "sampler", "trainer"))


class Trace:
    """The calls of the product, in this thread and in those that begin while it exists.

    Attributes:
        modules: Calls by module.
        functions: Calls by module and function.
    """

    def __init__(self) -> None:
        self._codes: Counter[CodeType] = Counter()
        self._is_on = False
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call":
            self._codes[frame.f_code] += 1

    @contextlib.contextmanager
    def of(self) -> Iterator[None]:
        """Count what happens within, and forget what was counted before."""
        self._codes.clear()
        self._is_on = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._is_on = False

    def close(self) -> None:
        """Trace no further thread."""
        threading.setprofile(None)
        self.modules: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        for code, count in self._codes.items():
            if code.co_filename.startswith(_ROOMS):
                module = str(Path(code.co_filename).relative_to(_REPOSITORY))
                self.modules[module] += count
                self.functions[f"{module} {code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"] += count


class Run:
    """A job of one rank with a state of 0.1 MB."""

    def __init__(self, root: Path) -> None:
        model = torch.nn.Linear(96, 96)
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters())
        self.checkpointer = Checkpointer(root, job=root.name, snapshot_every=1, persist_every=None)
        self.checkpointer.track(model=self._model, optim=self._optimizer)

    def train(self) -> None:
        """Change the state by one step."""
        self._optimizer.zero_grad()
        self._model(torch.ones(1, 96)).sum().backward()
        self._optimizer.step()

    def snapshot(self, step: int) -> None:
        """`ckpt.step()`, and the copy to its end; what this thread does while it waits for that is not counted."""
        self.checkpointer.step(step)
        sys.setprofile(None)
        self.checkpointer._session._stager.finish()  # type: ignore[union-attr]

    def fail(self) -> None:
        """Close as a rank that fails does: what is in memory stays."""
        with contextlib.suppress(RuntimeError), self.checkpointer:
            raise RuntimeError


def step_path(root: Path) -> Trace:
    """Return the trace of a step with a snapshot, from `ckpt.step()` to COMPLETE."""
    trace = Trace()
    run = Run(root)
    run.checkpointer.restore()
    for step in range(1, 7):
        run.train()
        with trace.of():
            run.snapshot(step)
    run.checkpointer.close()
    trace.close()
    return trace


def restore_path(root: Path) -> Trace:
    """Return the trace from `Checkpointer()` to the end of `restore()`, where this node's memory has the snapshot."""
    run = Run(root)
    run.checkpointer.restore()
    run.train()
    run.snapshot(1)
    run.fail()
    trace = Trace()
    for _ in range(2):
        with trace.of():
            run, report = _restored(root)
        assert report is not None
        assert list(report.tier_bytes) == ["memory"]
        run.fail()
    _restored(root)[0].checkpointer.close()  # a clean end: the daemon removes what is in memory
    trace.close()
    return trace


def _restored(root: Path) -> tuple[Run, RestoreReport | None]:
    run = Run(root)
    return run, run.checkpointer.restore()


PATHS: dict[str, Callable[[Path], Trace]] = {
    "step with a snapshot": step_path,
    "warm restore of 0.1 MB": restore_path,
}


def await_persisters() -> None:
    """Wait, a minute at most, until the persisters have ended that were left to this process: they write to their roots to the last."""
    end = time.monotonic() + 60
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["module", "function"])
    options = parser.parse_args()
    become_subreaper()
    with tempfile.TemporaryDirectory() as folder:
        roots = (Path(folder, f"{Path(folder).name}-{number}") for number in range(len(PATHS)))
        found = {name: path(root) for (name, path), root in zip(PATHS.items(), roots, strict=True)}
        await_persisters()
    print(f"{'':24}{'modules':>8}{'calls':>8}")
    for name, trace in found.items():
        print(f"{name:24}{len(trace.modules):8}{trace.modules.total():8}")
        for key, count in (getattr(trace, f"{options.by}s") if options.by else Counter[str]()).most_common():
            print(f"    {count:6} {key}")


if __name__ == "__main__":
    main()
