"""`python observed.py PLAN SCRIPT ARGS`: what `python SCRIPT ARGS` does, with a line for every step of every optimizer.

It knows nothing of flashckpt: the lines are digests of what an optimizer has just updated, and the kills are its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer:
    """Writes lines, and kills this process where its life is to end.

    Args:
        folder: For the records: `RANK.LIFE`.
        kills: After how many optimizer steps each life of rank `victim` ends; by turns after a step and before one.
        victim: The rank that is killed.
    """

    def __init__(self, folder: str, kills: list[int], victim: int) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._life = len(list(Path(folder).glob(f"{rank}.*")))
        self._record = Path(folder, f"{rank}.{self._life}").open("w", buffering=1, encoding="utf-8")  # noqa: SIM115 -- as long as the process
        self._due = kills[self._life] if rank == victim and self._life < len(kills) else 0
        self._steps = 0

    def before(self, *_: object) -> None:
        """Die before the step, while a snapshot may still be copied."""
        if self._due and self._life % 2 and self._steps + 1 == self._due:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Write the line; die before the program says that the step is done."""
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(bytes_of(parameter))
        self._record.write(digest.hexdigest() + "\n")
        self._steps += 1
        if self._due and not self._life % 2 and self._steps == self._due:
            os.kill(os.getpid(), signal.SIGKILL)


def bytes_of(parameter: torch.Tensor) -> Any:
    """Return the values of a parameter as something that can be digested."""
    local = getattr(parameter, "_local_tensor", parameter)
    return local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def main() -> None:
    plan, script = json.loads(sys.argv[1]), sys.argv[2]
    observer = Observer(**plan)
    register_optimizer_step_pre_hook(observer.before)
    register_optimizer_step_post_hook(observer.after)
    torch.manual_seed(0)  # what a program does not seed is in its checkpoints all the same
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the global one is what is meant
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
