"""Run a function in N forked ranks joined by gloo: 0.2 s to start, since torch is imported once.

`run_ranks` forks from the test process, which must have one thread; a rank that is killed on
purpose is reported with its signal, never as a hang.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankResult:
    """What one rank returned (JSON-able), or its traceback, or the signal that ended it."""

    rank: int
    value: Any = None
    error: str = ""
    signal: int = 0

    @property
    def ok(self) -> bool:
        return not self.error and not self.signal


def wait_for(condition: Callable[[], Any], *, deadline_s: float = 30.0, what: str = "condition") -> Any:
    """Poll until `condition()` is truthy and return it; fail with what was waited for."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"waited {deadline_s} s in vain for {what}")


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0, env: dict[str, str] | None = None
) -> list[RankResult]:
    """Fork `world` ranks, run `fn(rank, *args)` in each with a gloo group, and collect the results.

    Returns one RankResult per rank, in rank order. When a rank ends badly the others get 5 s more.
    Ranks that do not end in `timeout_s` seconds are killed and reported with signal 9.
    """
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush(), sys.stderr.flush()
        pids: dict[int, int] = {}
        for rank in range(world):
            pids[rank] = os.fork()
            if pids[rank] == 0:
                _child(fn, rank, world, folder, args, timeout_s, env or {})
        signals = _reap(pids, folder, time.monotonic() + timeout_s)
        return [_result(rank, folder, signals[rank]) for rank in range(world)]


def _child(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    folder: str,
    args: tuple[Any, ...],
    timeout_s: float,
    env: dict[str, str],
) -> None:
    report: dict[str, Any] = {}
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time-out belongs to the parent
        import torch
        import torch.distributed as dist

        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), **env
        )
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]  # torch exports it without saying so
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        report = {"value": fn(rank, *args)}
        Path(f"{folder}/r{rank}").write_text(json.dumps(report))
        dist.barrier()
    except BaseException:  # noqa: BLE001 -- everything a rank raises is the test's business
        if "value" not in report:
            Path(f"{folder}/r{rank}").write_text(json.dumps({"error": traceback.format_exc()}))
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _reap(pids: dict[int, int], folder: str, end: float) -> dict[int, int]:
    signals = dict.fromkeys(pids, 0)
    left = dict(pids)
    while left and time.monotonic() < end:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                signals[rank] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                del left[rank]
                if signals[rank] or _failed(folder, rank):
                    end = min(end, time.monotonic() + 5)
        time.sleep(0.005)
    for rank, pid in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        signals[rank] = signal.SIGKILL
    return signals


def _failed(folder: str, rank: int) -> bool:
    path = Path(f"{folder}/r{rank}")
    return not path.exists() or "error" in json.loads(path.read_text() or '{"error": ""}')


def _result(rank: int, folder: str, sig: int) -> RankResult:
    path = Path(f"{folder}/r{rank}")
    if not path.exists():
        return RankResult(rank, signal=sig or signal.SIGKILL)
    report = json.loads(path.read_text())
    return RankResult(rank, value=report.get("value"), error=report.get("error", ""))


def values(results: list[RankResult]) -> list[Any]:
    """Return every rank's value; fail with the first rank's traceback if one ended badly."""
    for result in results:
        assert not result.error, f"rank {result.rank}:\n{result.error}"
        assert not result.signal, f"rank {result.rank} was ended by signal {result.signal}"
    return [result.value for result in results]
