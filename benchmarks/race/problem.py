"""The training that every entrant runs: model, data, steps, and the log of what was trained. Nothing of flashckpt.

The log is a file outside of the run that ranks only append to, one write per line. A step is logged before it is saved,
so the last attempt that logged a step is the one whose weights continued.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

STEPS = int(os.environ.get("RACE_STEPS", "120"))
EPOCHS, BATCH, FEATURES, WIDTH = 2, 32, 256, 1024  # BATCH: of all ranks, for one optimizer step
SAMPLES = BATCH * STEPS // EPOCHS
SLEEP_S = float(os.environ.get("RACE_SLEEP_S", "0"))  # what a step waits for a device that needs no core
HANG_S = float(os.environ.get("RACE_HANG_S", "5"))
EVERY = int(os.environ.get("RACE_EVERY", "10"))  # steps between snapshots; 0: none are taken
PERSIST = int(os.environ.get("RACE_PERSIST", "40"))  # of entrants with a memory tier: steps between files
SKIP = int(
    os.environ.get("RACE_SKIP", "0")
)  # newest checkpoints that somebody removed by hand, for they cannot be read
FOLDER = Path(os.environ.get("RACE_FOLDER", "."))  # the run's own, on its disk
TIMEOUT = timedelta(seconds=HANG_S)


class Numbers(Dataset[Any]):
    """Samples that name themselves."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.y = self.x[:, :16].sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "number": index}


class Net(nn.Module):
    """Some 30 MB with AdamW's moments; returns what Hugging Face's Trainer wants as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), *wide, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: Any = None) -> dict[str, torch.Tensor]:
        """Return the loss; the samples' numbers are for those who log them."""
        del number
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


class Log:
    """What one rank writes. All ranks of an attempt share its number, which rank 0 takes from the clock.

    Args:
        member: Rank, ranks and number, where no process group of all ranks says them.
    """

    def __init__(self, *member: int) -> None:
        self._file = os.open(os.environ["RACE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.rank, self.world, self.attempt = member or _member()
        self._write(event="start", pid=os.getpid())

    def step(self, step: int, ids: Sequence[int]) -> None:
        """Note that this rank trained these samples in this step."""
        self._write(event="step", s=step, ids=list(ids))

    def end(self, model: nn.Module, *, first: bool | None = None) -> None:
        """Note the end with the bits of the weights: by the first rank, whichever that is by now."""
        whole = b"".join(value.detach().contiguous().numpy().tobytes() for _, value in sorted(model.named_parameters()))
        if self.rank == 0 if first is None else first:
            Path(f"{os.environ['RACE_LOG']}.weights").write_bytes(whole)
            self._write(event="end", sha256=hashlib.sha256(whole).hexdigest())

    def _write(self, **what: Any) -> None:
        line = {"t": time.time(), "a": self.attempt, "r": self.rank, "w": self.world, **what}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def _member() -> tuple[int, int, int]:
    number = torch.tensor([time.time_ns()])
    dist.broadcast(number, 0)
    return dist.get_rank(), dist.get_world_size(), int(number)


def prepare() -> None:
    """One thread per rank, and arithmetic that repeats itself."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)


def drop_newest(folders: Sequence[Path]) -> Sequence[Path]:
    """Return checkpoints, oldest first, without those that were given up by hand."""
    return folders[: len(folders) - SKIP] if SKIP else folders
