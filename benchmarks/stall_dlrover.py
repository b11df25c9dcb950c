"""DLRover's FlashCheckpoint as cases of `training_loop`, and the process that plays its agent. Runs in DLRover's own Python.

    python stall_dlrover.py --agent     # hosts the saver, as dlrover-run's agent does, until stdin ends

Written for and tried with dlrover 0.6.1 (torch 2.13, which it was not made for).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from training_loop import Blocking, Loop


class Dlrover(Blocking):
    """`save_checkpoint` into memory, or to disk: it copies, then the agent writes.

    Every rank is a separate shard, as with sharded models.
    """

    def __init__(self, loop: Loop, folder: Path, ranks: int, *, disk: bool) -> None:
        super().__init__()
        self.loop, self.disk, self.folder = loop, disk, folder
        self.checkpointer = _checkpointer(folder, ranks)
        self.storage: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType
        self.step = 0
        self.tracker = folder / "dlrover_latest.txt"

    def call(self) -> None:
        """Save; a save that DLRover skips is an error here."""
        step = self.step = int(_counter(1))
        kind = self.storage.DISK if self.disk else self.storage.MEMORY
        self.checkpointer.save_checkpoint(step, self.loop.state(), storage_type=kind)
        self.called = time.perf_counter()
        if self.checkpointer._engine._cached_step != step:
            raise RuntimeError(f"DLRover skipped the save of step {step}")

    def is_done(self) -> bool:
        """Whether the tracker names this step."""
        return not self.disk or (self.tracker.exists() and self.tracker.read_text().strip() == str(self.step))

    def finish(self) -> float:
        """When the call returned, or when the tracker was written; the files are not synced."""
        if not self.disk:
            return self.called
        end = time.monotonic() + 300
        while not self.is_done():
            if time.monotonic() > end:
                raise RuntimeError(f"DLRover did not commit step {self.step} in 300 s")
            time.sleep(0.001)
        return time.perf_counter() - max(0.0, time.time() - self.tracker.stat().st_mtime)

    def clean(self) -> None:
        """Remove the files of this step."""
        if self.loop.rank == 0:
            shutil.rmtree(self.folder / str(self.step), ignore_errors=True)

    def pids(self) -> list[int]:
        """The agent."""
        return [int(os.environ["STALL_AGENT_PID"])]


_state: dict[str, Any] = {}


def _counter(by: int) -> int:
    _state["step"] = _state.get("step", 0) + by
    return int(_state["step"])


def _checkpointer(folder: Path, ranks: int) -> Any:
    if "checkpointer" not in _state:
        ddp = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        _state["checkpointer"] = ddp.DdpCheckpointer(str(folder), local_shard_num=ranks, global_shard_num=ranks)
    return _state["checkpointer"]


def agent() -> None:
    """Host the saver until stdin ends, then remove what it made."""
    saver = importlib.import_module("dlrover.python.elastic_agent.torch.ckpt_saver").AsyncCheckpointSaver
    saver.start_async_saving_ckpt()
    print("ready", flush=True)
    sys.stdin.read()
    if saver._saver_instance is not None:
        saver._saver_instance.close()
    os._exit(0)  # its threads never end


if __name__ == "__main__":
    agent()
