"""torchft's example of fault tolerant DDP (train_ddp.py of its repository), with the checkpoints that it leaves to the user.

As its comments ask, a group's position in the data is saved after every step, and model, optimizer and manager, which all
groups share, now and then by one of them.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from race import engine_none, problem

GROUP, GROUPS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
POSITION = problem.FOLDER / f"position_{GROUP}"


class Training:
    """Model, optimizer, data and manager of one replica group."""

    def __init__(self) -> None:
        torchft: Any = importlib.import_module("torchft")
        transport: Any = importlib.import_module("torchft.checkpointing.pg_transport")
        data = problem.Numbers()
        self.sampler = torchft.DistributedSampler(
            data, replica_rank=GROUP, num_replica_groups=GROUPS, group_rank=0, num_replicas=1, shuffle=True
        )
        self.loader = StatefulDataLoader(data, batch_size=problem.BATCH // GROUPS, sampler=self.sampler)
        group = torchft.ProcessGroupGloo(timeout=problem.TIMEOUT)
        self.manager = torchft.Manager(
            pg=group,
            min_replica_size=1,
            load_state_dict=self.load,
            state_dict=self.state,
            replica_id=f"race_{GROUP}",
            timeout=timedelta(seconds=30),
            checkpoint_transport=transport.PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
        )
        self.model = torchft.DistributedDataParallel(self.manager, problem.Net())
        self.optimizer = torchft.Optimizer(self.manager, torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.launched = int(os.environ["RACE_ATTEMPT"])
        self.log = problem.Log(GROUP, GROUPS, self.launched)
        self.first = self.epoch = 0

    def state(self) -> dict[str, Any]:
        """Return what the groups share."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Set it: from the disk, or from another group."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def restore(self) -> None:
        """Load the newest checkpoint, and where this group was in the data."""
        if found := engine_none.folders("state_*"):
            state = torch.load(found[-1], weights_only=True)
            self.load(state)
            self.manager.load_state_dict(state["torchft"])
        if POSITION.exists():
            position = json.loads(POSITION.read_text())
            self.first = position["epoch"]
            self.loader.load_state_dict(position["loader"])

    def save(self, step: int) -> None:
        """Save the group's position; where it is due, and by the first group that trains, what all share."""
        write(POSITION, json.dumps({"epoch": self.epoch, "loader": self.loader.state_dict()}).encode())
        if engine_none.due(step) and not self.manager.participating_rank():
            whole = io.BytesIO()
            torch.save({**self.state(), "torchft": self.manager.state_dict()}, whole)
            write(problem.FOLDER / f"state_{step}", whole.getvalue())
            engine_none.keep_two("state_*")

    def epochs(self) -> Any:
        """Return the epochs that are left; lost steps need more than there are."""
        while True:
            self.epoch = self.first
            self.sampler.set_epoch(self.epoch)
            yield self.epoch
            self.first += 1

    def train(self) -> None:
        """Train to the last step, as the example does: a step that an error spoiled is not repeated."""
        for _ in self.epochs():
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.model(batch["x"], batch["y"])["loss"].backward()
                time.sleep(problem.SLEEP_S)
                before, takes_part = self.manager.current_step(), self.manager.is_participating()
                self.optimizer.step()
                step = self.manager.current_step()
                if step > before and takes_part:
                    self.log.attempt = (
                        self.launched + self.manager._quorum_id
                    )  # counts who takes part: all of a step have the same
                    self.log.step(step, batch["number"].tolist())
                self.save(step)
                if step >= problem.STEPS:
                    return

    def finish(self) -> None:
        """Log the weights, once."""
        self.log.end(self.model.module, first=not self.manager.participating_rank())
        self.manager.shutdown(wait=False)


def write(path: Path, content: bytes) -> None:
    """Replace a file, synced."""
    part = problem.FOLDER / f"part_{GROUP}"
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def main() -> None:
    """Train."""
    problem.prepare()
    training = Training()
    training.restore()
    training.train()
    training.finish()


if __name__ == "__main__":
    main()
