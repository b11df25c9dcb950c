"""One saver for `torn_savers.py`: every element of the state is the number of its step. Runs in the Python that has the saver.

`python torn_saver.py SAVER serve` imports what is slow, and then forks a process for each line of its input, which does:

    FOLDER BYTES steps MS [MS ...]   a save per delay, an optimizer step so long after its call; for "-" after its end
    FOLDER BYTES saves               one save after the other, until killed
    FOLDER BYTES load [STEP]         what a new process restores, and what is in it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

TENSORS = 16


class Saver:
    """What all have: a model whose optimizer adds 1 to every element.

    Args:
        folder: Where it saves.
        nbytes: Of the state.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        self.model = nn.ParameterList([torch.zeros(nbytes // TENSORS // 4) for _ in range(TENSORS)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)

    def lock(self) -> Any:
        """Return what the user has to hold around a step of the optimizer."""
        return contextlib.nullcontext()

    def save(self, step: int) -> None:
        """Begin to save."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the save is through."""

    def load(self, step: int | None) -> int:
        """Load a step, or the newest; return which one that claims to be."""
        raise NotImplementedError

    def close(self) -> None:
        """End."""

    def newest(self, pattern: str, complete: str = "") -> Path:
        """Return the newest of what is there."""
        found = [path for path in self.folder.glob(pattern) if not complete or (path / complete).exists()]
        return max(found, key=lambda path: int(path.stem.rpartition("_")[2]))


class TorchSave(Saver):
    """Blocking, into a file that is then renamed."""

    def save(self, step: int) -> None:
        """Write and rename."""
        torch.save({"model": self.model.state_dict(), "step": step}, self.folder / "part")
        (self.folder / "part").rename(self.folder / f"step_{step}.pt")

    def load(self, step: int | None) -> int:
        """Load the newest file."""
        state = torch.load(self.folder / f"step_{step}.pt" if step else self.newest("step_*.pt"), weights_only=True)
        self.model.load_state_dict(state["model"])
        return int(state["step"])


class Dcp(Saver):
    """dcp.async_save."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        self.dist: Any = importlib.import_module("torch.distributed")
        self.dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self.dist.init_process_group("gloo", store=self.dist.HashStore(), rank=0, world_size=1)
        self.future: Any = None

    def save(self, step: int) -> None:
        """Begin."""
        state = {"model": self.model.state_dict(), "step": step}
        self.future = self.dcp.async_save(state, checkpoint_id=self.folder / f"step_{step}")

    def wait(self) -> None:
        """Wait for its future."""
        self.future.result()

    def load(self, step: int | None) -> int:
        """Load the newest folder that has the file it writes last."""
        state: dict[str, Any] = {"model": self.model.state_dict(), "step": 0}
        path = self.folder / f"step_{step}" if step else self.newest("step_*", ".metadata")
        self.dcp.load(state, checkpoint_id=path)
        self.model.load_state_dict(state["model"])
        return int(state["step"])


class TorchCheckpointing(Saver):
    """torch_checkpointing 0.1.1 on a CPU."""

    def __init__(self, folder: Path, nbytes: int, *, locked: bool = False) -> None:
        super().__init__(folder, nbytes)
        top = importlib.import_module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.locked = locked
        self.manager = top.CheckpointManager(
            top.CheckpointManager.Config(
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
                save=config.AsyncCheckpointSaverConfig(staging_config=stager),
            )
        )
        self.future: Any = None

    def lock(self) -> Any:
        """Return its lock, if the user took it."""
        return self.manager.lock() if self.locked else super().lock()

    def save(self, step: int) -> None:
        """Begin."""
        self.future = self.manager.save(
            str(self.folder / f"step_{step}"), {"model": self.model.state_dict(), "step": step}
        )

    def wait(self) -> None:
        """Wait for its future."""
        self.future.result()

    def load(self, step: int | None) -> int:
        """Load the folder with the highest number."""
        path = self.folder / f"step_{step}" if step else self.newest("step_*")
        state = self.manager.load(str(path), into={"model": self.model.state_dict(), "step": 0})
        self.model.load_state_dict(state["model"])
        return int(state["step"])

    def close(self) -> None:
        """End its process."""
        self.manager.close()


class Lightning(Saver):
    """Lightning's AsyncCheckpointIO."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        plugins: Any = importlib.import_module("lightning.pytorch.plugins.io")
        self.io = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())
        self.path = folder

    def save(self, step: int) -> None:
        """Begin."""
        self.path = self.folder / f"step_{step}.ckpt"
        self.io.save_checkpoint({"model": self.model.state_dict(), "step": step}, self.path)

    def wait(self) -> None:
        """It has no future that one save could be waited for by: until the file has its length."""
        size = -1
        while not self.path.exists() or size != (size := self.path.stat().st_size) or not size:
            time.sleep(0.3)

    def load(self, step: int | None) -> int:
        """Load the newest file."""
        path = self.folder / f"step_{step}.ckpt" if step else self.newest("step_*.ckpt")
        state = self.io.load_checkpoint(path)
        self.model.load_state_dict(state["model"])
        return int(state["step"])

    def close(self) -> None:
        """End its thread."""
        self.io.teardown()


class Dlrover(Saver):
    """DLRover's Flash Checkpoint for DDP, to disk; an agent beside it writes (`torn_dlrover.py agent`)."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        dist: Any = importlib.import_module("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.kinds: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType
        self.checkpointer = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp").DdpCheckpointer(
            str(folder)
        )
        self.step = 0

    def save(self, step: int) -> None:
        """Copy into memory; the agent writes."""
        self.step = step
        state = {"model": self.model.state_dict(), "step": step}
        self.checkpointer.save_checkpoint(step, state, storage_type=self.kinds.DISK)

    def wait(self) -> None:
        """Wait until its tracker names the step."""
        tracker = self.folder / "dlrover_latest.txt"
        while not tracker.exists() or tracker.read_text().strip() != str(self.step):
            time.sleep(0.005)

    def load(self, step: int | None) -> int:
        """Load what it says is newest: from memory if it is there, else the file that the tracker names."""
        path = str(self.folder / f"{step}/rank_0.pt") if step else ""
        state = torch.load(path, weights_only=True) if path else self.checkpointer.load_checkpoint()
        state = state.get("model_states", state)
        self.model.load_state_dict(state["model"])  # copies
        return int(state["step"])


class Flashckpt(Saver):
    """flashckpt: nothing to hold, for the optimizer's own hook waits."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        self.made = importlib.import_module("flashckpt").Checkpointer
        self.ckpt: Any = None

    def save(self, step: int) -> None:
        """Take a snapshot that is persisted."""
        if self.ckpt is None:
            self.ckpt = self.made(self.folder / "root", snapshot_every=1, persist_every=1, keep_last=None, job="torn")
            self.ckpt.track(model=self.model, optimizer=self.optimizer)
            self.ckpt.restore()
            while not self.ckpt._alive().memory.is_ready:  # the first steps have no snapshot: memory is being reserved
                time.sleep(0.01)
        self.ckpt.step(step)

    def wait(self) -> None:
        """Wait until it is committed."""
        self.ckpt.wait()

    def load(self, step: int | None) -> int:
        """Restore a step, or the newest that storage has."""
        reader = self.made.readonly(str(self.folder / "root"))
        reader.track(model=self.model)
        return int(reader.restore(step=step).step)

    def close(self) -> None:
        """Close."""
        if self.ckpt is not None:
            self.ckpt.close()


SAVERS: dict[str, Any] = {
    "flashckpt": Flashckpt, "dcp.async_save": Dcp, "torch_checkpointing": TorchCheckpointing,
    "torch_checkpointing, its lock held": lambda *words: TorchCheckpointing(*words, locked=True),
    "Lightning AsyncCheckpointIO": Lightning, "DLRover": Dlrover, "torch.save": TorchSave,
}  # fmt: skip

SLOW = {
    "flashckpt": ("flashckpt.session.checkpointer",), "dcp.async_save": ("torch.distributed.checkpoint",),
    "torch_checkpointing": ("torch_checkpointing",), "torch_checkpointing, its lock held": ("torch_checkpointing",),
    "Lightning AsyncCheckpointIO": ("lightning.pytorch.plugins.io",), "DLRover": ("torch.distributed",),
}  # fmt: skip
"""What takes long to import and reads nothing of its environment then: DLRover's modules do."""


def values_of(model: nn.Module) -> list[float]:
    """Return the values that are in the state, each once."""
    found: set[float] = set()
    for parameter in model.parameters():
        found.update(torch.unique(parameter.detach()).tolist())
    return sorted(found)[:8]


def run(name: str, folder: str, nbytes: str, mode: str, *words: str) -> None:
    """Do one of the three."""
    saver = SAVERS[name](Path(folder), int(float(nbytes)))
    if mode == "load":
        step = saver.load(int(words[0]) if words else None)
        say({"event": "loaded", "step": step, "values": values_of(saver.model)})
    else:
        save(saver, [None if word == "-" else float(word) / 1e3 for word in words] if mode == "steps" else None)
    saver.close()


def save(saver: Saver, delays: list[float | None] | None) -> None:
    """Save once for each delay, with a step of the optimizer so long after the call; without delays for ever."""
    step = 0
    saver.optimizer.step()
    while delays is None or step < len(delays):
        step += 1
        began = time.perf_counter()
        say({"event": "call", "step": step})
        saver.save(step)
        called = time.perf_counter() - began
        delay = None if delays is None else delays[step - 1]
        if delay is not None:
            time.sleep(max(0.0, delay - called))
            with saver.lock():
                saver.optimizer.step()
        saver.wait()
        say({"event": "saved", "step": step, "call_s": called, "s": time.perf_counter() - began})
        if delay is None:
            saver.optimizer.step()


def serve(name: str) -> None:
    """Fork for each line of input, and say the process id of the fork."""
    torch.set_num_threads(1)
    for module in SLOW.get(name, ()):
        importlib.import_module(module)
    Saver(Path(), 1 << 10).optimizer.step()  # the first step of torch imports the most
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        asked = json.loads(line)
        if not (pid := os.fork()):
            become(name, asked)
        say({"event": "forked", "pid": pid})


def become(name: str, asked: dict[str, Any]) -> None:
    """Be what was asked for, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked["env"])
    status = 1
    try:  # whatever it is: a fork must not read the input of its parent
        os.dup2(os.open(asked["pipe"], os.O_WRONLY), _out.fileno(), inheritable=False)
        run(name, *asked["words"])
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(status)  # some have threads that never end


_out = os.fdopen(os.dup(1), "w")


def say(what: dict[str, Any]) -> None:
    """Write one line for the harness; what libraries print goes to stderr."""
    _out.write(json.dumps(what) + "\n")
    _out.flush()


if __name__ == "__main__":
    os.dup2(2, 1)
    serve(sys.argv[1])
