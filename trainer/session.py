"""What surrounds a run: its process group and device, the check of its root, the record of its restores."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from flashckpt.errors import RootError
from flashckpt.memory.roots import local_path, root_url
from flashckpt.report import RestoreReport
from flashckpt.trainer.config import RunConfig


def check_root(root: str) -> None:
    """Refuse a checkpoint folder that cannot be written, before anything is trained.

    A restarted group is not checked again: storage that fails later never stops training.

    Raises:
        RootError: the folder cannot be made or written.
    """
    url = root_url(root)
    if not url.startswith("file://") or os.environ.get("FLASHCKPT_RESTART", "0") != "0":
        return
    path = Path(local_path(url))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise RootError(
            f"the checkpoint root {path} cannot be written",
            found=error.strerror or str(error),
            expected="a folder in which files can be made",
            state="Nothing was started.",
            remedy="set checkpoint.root to another place, or make this one writable",
        ) from error


def note_restore(folder: str, report: RestoreReport) -> None:
    """Append this rank's restore to `restores.jsonl`; each line is one write, so ranks may share the file."""
    line = {
        "launch": os.environ.get("TORCHELASTIC_RUN_ID", str(os.getppid())),
        "generation": report.life,
        "rank": int(os.environ.get("RANK", "0")),
        "step": report.step,
        "bytes": dict(report.tier_bytes),
        "seconds": round(float(report.seconds.get("total", 0.0)), 4),
        "exact": report.is_same_layout,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    fd = os.open(Path(folder) / "restores.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, (json.dumps(line) + "\n").encode())
    finally:
        os.close(fd)


@contextmanager
def process_group(config: RunConfig, *, alone: bool = False) -> Iterator[torch.device]:
    """Join the process group (or make one of a single rank) and yield this rank's device."""
    wanted = config.train.device
    device = torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(config.train.deterministic)
    if dist.is_initialized() and not alone:
        yield device
        return
    timeout = timedelta(seconds=config.parallel.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and not alone:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()
