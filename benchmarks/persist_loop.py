"""The training loop beside which `persist.py` writes: takes steps for a while on command and says how long each took."""

from __future__ import annotations

import sys
import time

import torch
from ranks import serve
from training_loop import Loop


def main() -> None:
    """Serve until the parent closes stdin: `persist_loop.py BYTES`."""
    torch.set_num_threads(1)
    loop = Loop(float(sys.argv[1]), tensors=None, compute=2.0, rank=0)

    def steps(seconds: float) -> list[float]:
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < 3 or time.monotonic() < end:
            found.append(loop.compute() + loop.update())
        return found

    serve({"steps": steps})


if __name__ == "__main__":
    main()
