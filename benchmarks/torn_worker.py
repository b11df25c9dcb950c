"""flashckpt's side of `torn.py`: trains and takes a snapshot of every step, saying what is complete, until killed.

    python torn_worker.py ROOT BYTES

Every element of the state is the number of its step: SGD with rate 1 and gradients of -1.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

from flashckpt import Checkpointer

TENSORS = 16


def model_of(nbytes: int) -> nn.Module:
    """The state: `TENSORS` equal float32 tensors."""
    return nn.ParameterList([torch.zeros(nbytes // TENSORS // 4) for _ in range(TENSORS)])


def main() -> None:
    """Train until killed."""
    root, nbytes = sys.argv[1], int(float(sys.argv[2]))
    torch.set_num_threads(1)
    model = model_of(nbytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=None, job="torn")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.on_snapshot = lambda step: say("complete", step)
    ckpt.restore()
    step = 0
    while True:
        step += 1
        optimizer.step()
        say("take", step)
        ckpt.step(step)


def say(event: str, step: int) -> None:
    """Write one line for the harness, in one write."""
    os.write(1, (json.dumps({"event": event, "step": step}) + "\n").encode())


if __name__ == "__main__":
    main()
