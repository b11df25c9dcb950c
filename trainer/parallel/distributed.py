"""What surrounds a run: its process group and device, the check of its root, the record of its restores."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from flashckpt.environment import env
from flashckpt.errors import ConfigError, RootError, StoreError
from flashckpt.nonfatal import Nonfatal, write_all
from flashckpt.report import RestoreReport
from flashckpt.storage.factory import open_in_rank, root_url
from flashckpt.trainer.config import RunConfig


def check_root(root: str, storage_options: Mapping[str, Any]) -> None:
    """Refuse a checkpoint root that cannot be written, before anything is trained.

    A folder is tried by every rank: each node may see another. An object store is asked by rank 0 alone. A restarted
    group is not checked again: storage that fails later never stops training.

    Raises:
        RootError: the root cannot be made or written.
        ConfigError: a storage option is wrong.
    """
    if env.FLASHCKPT_RESTART:
        return
    url = root_url(root)
    if not url.startswith("file://") and env.RANK:
        return
    try:
        open_in_rank(url, storage_options).check(write=True)
    except StoreError as error:
        raise RootError(
            f"the checkpoint root {url} cannot be written: {error.problem}",
            found=error.found,
            expected=error.expected,
            state="Nothing was started.",
            remedy=error.remedy or "check checkpoint.root and checkpoint.storage_options (endpoint_url)",
        ) from error


def is_first_start(device: torch.device) -> bool:
    """Return whether no rank of the group was started before: a node that joins a running job finds others that were. Collective."""
    restarted = torch.tensor([float(env.FLASHCKPT_RESTART > 0)], device=device)
    dist.all_reduce(restarted, dist.ReduceOp.MAX)
    return not restarted.item()


def from_first(data: bytes, device: torch.device) -> bytes:
    """Return the bytes that rank 0 has, on every rank. Collective."""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if env.RANK == 0 and data:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes()


def note_restore(folder: str, report: RestoreReport) -> None:
    """Append this rank's restore to `restores.jsonl`; each line is one write, so ranks may share the file."""
    line = {
        "launch": env.TORCHELASTIC_RUN_ID or str(os.getppid()),
        "generation": report.life,
        "rank": env.RANK,
        "step": report.step,
        "bytes": dict(report.tier_bytes),
        "seconds": round(float(report.seconds.get("total", 0.0)), 4),
        "exact": report.is_same_layout,
    }
    path = Path(folder) / "restores.jsonl"
    Nonfatal(str(path)).attempt(lambda: _append(path, (json.dumps(line) + "\n").encode()))


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees: the next step needs it again, and new pages have to be zeroed."""
    trim_threshold, mmap_threshold = -1, -3  # numbers of glibc's mallopt; other C libraries have none
    with contextlib.suppress(AttributeError, OSError):
        change = ctypes.CDLL(None).mallopt
        change(mmap_threshold, 32 << 20)
        change(trim_threshold, 1 << 30)


def _refuse_on_cpu(config: RunConfig) -> None:
    if config.train.tf32:
        raise ConfigError(
            "train.tf32 needs a GPU: only its products have that type",
            found="a CPU",
            expected="train.tf32 = false",
            state="Nothing was started.",
        )
    if config.train.attention == "flex":
        raise ConfigError(
            "train.attention = flex needs a GPU: FlexAttention has no backward on a CPU",
            found="a CPU",
            expected='train.attention = "sdpa"',
            state="Nothing was started.",
        )


@contextmanager
def process_group(config: RunConfig, *, alone: bool = False) -> Iterator[torch.device]:
    """Join the process group (or make one of a single rank) and yield this rank's device."""
    wanted = config.train.device
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if found is None else found.type
    if wanted not in ("auto", "cpu", kind):
        raise ConfigError(
            f'train.device = "{wanted}", but no {wanted.upper()} device is available',
            found="torch sees no accelerator" if found is None else f"torch sees devices of type {kind}",
            expected="a device, and a torch that was built for it",
            state="Nothing was started.",
            remedy='set train.device = "auto" or "cpu"',
        )
    device = torch.device("cpu")
    if kind != "cpu" and wanted != "cpu":
        device = torch.device(kind, env.LOCAL_RANK % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    else:
        _refuse_on_cpu(config)
        torch.set_num_threads(1)
        _keep_freed_memory()
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    torch.use_deterministic_algorithms(config.train.deterministic)
    if dist.is_initialized() and not alone:
        yield device
        return
    timeout = timedelta(seconds=config.parallel.timeout_s)
    backend = dist.get_default_backend_for_device(device)
    if env.is_set("RANK") and not alone:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device, "" for a processor."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if device.type == "cpu" or name is None else str(name(device))
