"""A training loop on a device, and the ways to take a snapshot of it that `gpu_snapshots.py` compares.

Blocks of attention and SwiGLU in bfloat16 by autocast, float32 parameters, fused AdamW; forward and backward are repeated until
a step is as long as asked for. Only public parts of flashckpt are used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_time import take_the_devices_path
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it

from flashckpt import Checkpointer
from flashckpt.shm.agent_folder import LOCK
from flashckpt.shm.lease import Lease

LAYERS, HEAD, ROWS, LENGTH = 28, 128, 4, 1024


class Block(nn.Module):
    """Attention and SwiGLU, nine parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before, self.behind = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, 8 * dim // 3, bias=False), nn.Linear(dim, 8 * dim // 3, bias=False)
        self.down = nn.Linear(8 * dim // 3, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block is given."""
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.behind(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class DeviceLoop:
    """Forward, backward and optimizer step.

    Args:
        nbytes: Bytes of parameters and two moments.
        device: Where they lie.
        step_s: How long a step is to take at least.
    """

    def __init__(self, nbytes: float, *, device: torch.device, step_s: float) -> None:
        self.device = device
        if device.type == "cpu":
            torch.set_num_threads(1)
        dim = max(HEAD, round((nbytes / 12 / (12 * LAYERS)) ** 0.5 / HEAD) * HEAD)
        torch.manual_seed(0)
        with device:
            self.model = nn.Sequential(*(Block(dim) for _ in range(LAYERS)))
            self.input = torch.randn(ROWS, LENGTH if device.type == "cuda" else 4, dim)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device.type == "cuda")
        self.micro = 1
        self.step()
        once = min(self.step() for _ in range(2))
        self.micro = max(1, round(step_s / once))
        self.nbytes = sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by name."""
        found = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for number, parameter in enumerate(self.model.parameters()):
            found |= {f"optimizer.{number}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def compute(self) -> None:
        """Queue forward and backward."""
        for _ in range(self.micro):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.model(self.input).float().square().mean() / self.micro
            loss.backward()

    def update(self) -> None:
        """Queue the optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Seconds of one step, its work on the device included."""
        started = time.perf_counter()
        self.compute()
        self.update()
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Flashckpt:
    """`ckpt.step()`, into memory."""

    def __init__(self, loop: DeviceLoop, folder: Path, slots: int | None) -> None:
        self.number, self.completed, self.ended = 0, threading.Event(), 0.0
        started = time.perf_counter()
        self.ckpt = Checkpointer(
            str(folder / "root"), snapshot_every=1, persist_every=None, job="gpu", slots=slots or "auto"
        )
        self.ckpt.track(model=loop.model, optimizer=loop.optimizer)
        self.ckpt.restore()
        self.ckpt.on_snapshot = self._stamp
        while not self.ckpt.stats.get("snapshots"):  # skipped while the memory is being reserved and page-locked
            self.call()
            self.completed.wait(0.2)
        self.ready_s = time.perf_counter() - started
        beside = []
        while self._reserves():  # holds up the device's calls: measured apart
            beside.append(loop.step())
        self.reserving_lost_s = sum(beside) - len(beside) * min([loop.step() for _ in range(2)])

    def _reserves(self) -> bool:
        """Whether slots are still being reserved and page-locked; nothing public says so."""
        session = self.ckpt._session
        return session is not None and not session.memory.is_ready

    def _stamp(self, *_: object) -> None:
        self.ended = time.perf_counter()
        self.completed.set()

    def call(self) -> None:
        """Take one."""
        self.number += 1
        self.completed.clear()
        self.ckpt.step(self.number)

    def fence(self) -> None:
        """As the hook of the optimizer does."""
        self.ckpt.fence()

    def is_done(self) -> bool:
        """Whether it is COMPLETE, digests included."""
        return self.completed.is_set()

    def finish(self) -> float:
        """When it was COMPLETE."""
        if not self.completed.wait(120):
            raise RuntimeError(f"no snapshot was COMPLETE within 120 s: {self.ckpt.stats}")
        return self.ended


class PinnedCopy:
    """A copy of every tensor into page-locked memory, waited for: what a synchronous design costs at least."""

    def __init__(self, loop: DeviceLoop) -> None:
        self.loop, self.ended = loop, 0.0
        pin = loop.device.type == "cuda"
        self.targets = {name: torch.empty_like(t, device="cpu", pin_memory=pin) for name, t in loop.state().items()}

    def call(self) -> None:
        """Copy and wait."""
        for name, tensor in self.loop.state().items():
            self.targets[name].copy_(tensor, non_blocking=True)
        self.loop.synchronize()
        self.ended = time.perf_counter()

    def fence(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        """Always."""
        return True

    def finish(self) -> float:
        """When the call returned."""
        return self.ended


class TorchSave(PinnedCopy):
    """torch.save by the training thread; the file is not synced."""

    def __init__(self, loop: DeviceLoop, folder: Path) -> None:
        self.loop, self.path, self.ended = loop, folder / "save.pt", 0.0

    def call(self) -> None:
        """Write the file, and remove it."""
        torch.save(self.loop.state(), self.path)
        self.ended = time.perf_counter()
        self.path.unlink()


class AsyncSave:
    """dcp.async_save with a kept stager: page-locked, staged off the caller, as its documentation recommends.

    That of torch 2.11 raises KeyError when it is used again: there each call has a new one, which allocates.
    """

    def __init__(self, loop: DeviceLoop, folder: Path) -> None:
        self.loop, self.folder, self.count, self.ended = loop, folder / "dcp", 0, 0.0
        self.keeps, self.stager = not torch.__version__.startswith("2.11."), self.new_stager()
        self.response: Any = None

    def new_stager(self) -> Any:
        """Return a stager with its thread."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_device = self.loop.device.type == "cuda"
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=on_device,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=on_device,
            )
        )

    def call(self) -> None:
        """Hand it over."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self.count += 1
        if not self.keeps and self.count > 1:
            self.stager.close()
            self.stager = self.new_stager()
        self.response = async_save(
            self.loop.state(),
            storage_writer=FileSystemWriter(self.folder / str(self.count), sync_files=False),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )

    def fence(self) -> None:
        """Wait for the staging."""
        self.response.staging_completion.result()

    def is_done(self) -> bool:
        """Whether the files are written."""
        return bool(self.response.upload_completion.done())

    def finish(self) -> float:
        """When the files were written."""
        self.response.upload_completion.result()
        self.ended = time.perf_counter()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.ended


METHODS = ("flashckpt", "blocking pinned copy", "torch.save", "dcp.async_save pinned")


def make(name: str, loop: DeviceLoop, folder: Path, slots: int | None) -> Any:
    """Return the case of a name in METHODS, set up."""
    if name == "flashckpt":
        return Flashckpt(loop, folder, slots)
    if name == "torch.save":
        return TorchSave(loop, folder)
    return AsyncSave(loop, folder) if name.startswith("dcp") else PinnedCopy(loop)


@contextmanager
def places(device: str) -> Iterator[Path]:
    """A folder for files, and one in memory for snapshots without a daemon; both are removed.

    Args:
        device: "cpu": from now on this process's tensors take the path of device memory.
    """
    if device == "cpu":
        take_the_devices_path()
    base = os.environ.get("FLASHCKPT_SHM_DIR", "/dev/shm")
    Path(base).mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="flashckpt-gpu-", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(prefix="flashckpt-gpu-", dir=base, ignore_cleanup_errors=True) as shm,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = shm
        os.environ["FLASHCKPT_AGENT_DIR"] = disk  # as under an agent: no daemon is started, nothing is persisted
        agent = Lease(Path(disk) / LOCK, create=True)
        agent.exclusive(0)
        yield Path(disk)
        agent.close()
