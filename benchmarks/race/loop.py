"""One training loop for all entrants that are libraries: `loop.py ENGINE`, under the launcher of the entrant."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from race import problem


def main() -> None:
    """Train to the last step, from wherever the engine says."""
    problem.prepare()
    dist.init_process_group("gloo", timeout=problem.TIMEOUT)
    model = DistributedDataParallel(problem.Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine: Any = importlib.import_module(f"race.engine_{sys.argv[1]}").Engine(
        model.module, optimizer, problem.Numbers(), problem.BATCH // dist.get_world_size()
    )
    step = engine.restore()
    log = problem.Log()
    for _ in engine.epochs():
        for batch in engine.loader:
            model(batch["x"], batch["y"])["loss"].backward()
            time.sleep(problem.SLEEP_S)
            with engine.update():
                optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.step(step, batch["number"].tolist())
            engine.save(step)
    engine.finish()
    log.end(model.module)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
