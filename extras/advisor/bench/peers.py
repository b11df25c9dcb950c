"""The peers of `bench job --peers`: other libraries write the same tensors in the same rounds.

Each writes one file or folder per rank, without collectives, which flatters them: a real run of
torch.distributed.checkpoint plans across ranks. What a peer leaves to the page cache is synced here, and
counted apart, so that "durable" means the same for everybody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashckpt.bench import PEERS


def write(
    state: dict[str, torch.Tensor],
    *,
    rank: int,
    name: str,
    directory: str,
    beside: Callable[[Callable[[], bool]], float],
) -> Mapping[str, Any]:
    """Write `state` below `directory`; return seconds blocked, lost beside, until written, and until it is synced.

    Args:
        state: Tensors by name.
        rank: Of the writer; names its file.
        name: One of PEERS.
        directory: Exists.
        beside: Computes until what it is given returns True, and returns by how many seconds that took too long.
    """
    folder = Path(directory) / f"{name}.{rank}"
    folder.mkdir()
    _process_group()
    started = time.perf_counter()
    future = _WRITERS[name](state, folder)
    blocked = time.perf_counter()
    beside_s = 0.0
    if future is not None:
        beside_s = beside(future.done)
        future.result()
    written = time.perf_counter()
    sync(folder)
    now = time.perf_counter()
    return {
        "blocked_s": blocked - started,
        "beside_s": beside_s,
        "written_s": written - started,
        "durable_s": now - started,
    }


def sync(folder: Path) -> None:
    """Make every file below a folder durable, and the folder itself."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _process_group() -> None:
    """Make a group of one: dcp.async_save asks for a CPU backend even where nobody else takes part."""
    distributed: Any = torch.distributed  # HashStore is public, but not in its type stubs
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def _torch_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save(state, folder / "state.pt")


def _dcp_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=folder / "dcp", no_dist=True)


def _dcp_async_save(state: dict[str, torch.Tensor], folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    return async_save(state, checkpoint_id=folder / "dcp")


def _safetensors(state: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "state.safetensors")


_WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], Any]] = dict(
    zip(PEERS, (_torch_save, _dcp_save, _dcp_async_save, _safetensors), strict=True)
)
