"""The training loop beside which `persist.py` writes: takes steps for a while on command and says how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from training_loop import Loop

from flashckpt.bench.worker import serve


def commands(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make a loop over `bytes` of state; return what the parent may order."""
    torch.set_num_threads(1)
    loop = Loop(config["bytes"], tensors=None, compute=2.0, rank=0)

    def steps(seconds: float) -> list[float]:
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < 3 or time.monotonic() < end:
            found.append(loop.compute() + loop.update())
        return found

    return {"steps": steps}


if __name__ == "__main__":
    serve(commands)
