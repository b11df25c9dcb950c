"""The training program of node_loss.py and replication.py: one rank per node, a sharded state, one reduced tensor per step.

    python node_training.py CONFIG     # JSON, see `Config`

The state is that of FSDP2 (`fully_shard`, AdamW), so that no two nodes hold the same row. A step updates every rank's shard and reduces
`reduced_bytes` over the nodes; forward and backward are matrix products, or a wait that stands for an accelerator. Every element of a tensor
has one value, which depends on the step alone: a restore of wrong or mixed bytes shows itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from flashckpt import Checkpointer

LAYERS, FEATURES = 16, 1024
PRODUCT = 256
"""Rows and columns of the matrices whose products stand for forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is trained, and how it is kept.

    Attributes:
        folder: For marks and checkpoints.
        way: "flashckpt" or "dcp".
        nbytes: State per node: parameters and both moments.
        step_s: A step without a snapshot takes about as long.
        busy: Share of it in which a core multiplies; it waits for the rest.
        reduced_bytes: Reduced over the nodes in every step.
        snapshot_every: Steps.
        persist_every: Steps; of dcp between its checkpoints.
        replicate: Partners.
    """

    folder: str
    way: str
    nbytes: int
    step_s: float = 0.25
    busy: float = 0.2
    reduced_bytes: int = 4
    snapshot_every: int = 2
    persist_every: int = 20
    replicate: int = 0


class Trained:
    """Model, optimizer and one step of them.

    Args:
        config: What to train.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        rows = (
            max(1, config.nbytes // 12 // LAYERS // FEATURES) * dist.get_world_size()
        )  # each node has nbytes / 12 parameters
        with torch.device("meta"):
            self.model = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, rows, bias=False) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.model.to_empty(device="cpu")
        self.shards = [one.to_local() for one in self.model.parameters()]  # type: ignore[attr-defined]  # a DTensor
        for shard in self.shards:
            shard.data.fill_(1.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self._reduced = torch.zeros(max(1, config.reduced_bytes // 4))
        self._matrix = torch.ones(PRODUCT, PRODUCT)
        self._products = max(1, round(config.busy * config.step_s / self._product_s()))

    def _product_s(self) -> float:
        times = []
        for _ in range(30):
            began = time.perf_counter()
            torch.mm(self._matrix, self._matrix)
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    def compute(self, step: int) -> None:
        """Forward, backward, reduction and update of one step, the same in every way of keeping its result."""
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        time.sleep(self.config.step_s * (1 - self.config.busy))  # an accelerator computes
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.to_local().fill_(1.0 / (1 + step % 7))  # type: ignore[attr-defined]  # a DTensor
        dist.all_reduce(self._reduced)

    def value(self) -> str:
        """The one value that all elements of the parameters have; how they differ where they do."""
        found = {bound for shard in self.shards for bound in (shard.min().item(), shard.max().item())}
        moments = [set(map(float, torch.aminmax(one.to_local()))) for one in self._moments()]
        if len(found) != 1 or any(len(one) != 1 for one in moments):
            return f"torn: {sorted(found)}"
        return float(found.pop()).hex()

    def _moments(self) -> list[Any]:
        return [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


class OursKept:
    """Keeps the state with flashckpt."""

    def __init__(self, trained: Trained) -> None:
        config = trained.config
        self._ckpt = Checkpointer(
            f"{config.folder}/root",
            snapshot_every=config.snapshot_every,
            persist_every=config.persist_every,
            replicate=config.replicate,
            slots=3,
        )
        self._ckpt.track(model=trained.model, optimizer=trained.optimizer)
        self.seconds: dict[str, float] = {}

    def restore(self) -> tuple[int, dict[str, int]]:
        """Restore the newest state; return its step (0: none) and bytes by tier."""
        report = self._ckpt.restore()
        self.seconds = {} if report is None else dict(report.seconds)
        return (report.step, dict(report.tier_bytes)) if report else (0, {})

    def keep(self, step: int) -> None:
        """Keep the state after a step, if it is one to keep."""
        self._ckpt.step(step)


class DcpKept:
    """Keeps the state with torch.distributed.checkpoint, one asynchronous save at a time."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._group = dist.new_group(backend="gloo")
        self._saving: Any = None
        self.seconds: dict[str, float] = {}

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._trained.model, self._trained.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> tuple[int, dict[str, int]]:
        """Restore the newest state; return its step (0: none) and bytes by tier."""
        whole = [int(path.parent.name) for path in Path(self._trained.config.folder, "dcp").glob("*/.metadata")]
        chosen = [max(whole, default=0)]
        dist.broadcast_object_list(chosen, 0)
        if not chosen[0]:
            return 0, {}
        state = self._state()
        load(state, checkpoint_id=self._path(chosen[0]))
        set_state_dict(
            self._trained.model,
            self._trained.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return chosen[0], {"storage": 3 * sum(shard.nbytes for shard in self._trained.shards)}

    def keep(self, step: int) -> None:
        """Keep the state after a step, if it is one to keep."""
        if step % self._trained.config.persist_every == 0:
            if self._saving is not None:
                self._saving.result()
            self._saving = async_save(self._state(), checkpoint_id=self._path(step), process_group=self._group)

    def _path(self, step: int) -> str:
        return f"{self._trained.config.folder}/dcp/{step}"


class Marks:
    """Lines of JSON that the program leaves for who measures, with the clock of the machine, which all namespaces share."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, f"marks-{os.uname().nodename}").open("a", buffering=1)  # noqa: SIM115 -- open to the end

    def add(self, event: str, **what: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps({"event": event, "t": time.monotonic(), **what}) + "\n")


def began_s() -> float:
    """Return when this process was forked, by the clock of the marks (to a hundredth of a second)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def main() -> None:
    """Restore and train until the process is ended."""
    entered = time.monotonic()
    config = Config(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    marks = Marks(config.folder)
    dist.init_process_group("gloo")
    joined = time.monotonic()
    trained = Trained(config)
    kept = DcpKept(trained) if config.way == "dcp" else OursKept(trained)
    built = time.monotonic()
    step, tiers = kept.restore()
    first = step
    times = {"began": began_s(), "entered": entered, "joined": joined, "built": built}
    marks.add("restored", rank=dist.get_rank(), step=step, tiers=tiers, seconds=kept.seconds, **times)
    while True:
        step += 1
        began = time.monotonic()
        trained.compute(step)
        trained.optimizer.step()
        kept.keep(step)
        marks.add("step", step=step, seconds=time.monotonic() - began)
        if step == first + 1:
            marks.add("value", step=step, value=trained.value())
        else:
            marks.add("value", step=step, value=trained.shards[0].detach().flatten()[0].item().hex())


if __name__ == "__main__":
    main()
