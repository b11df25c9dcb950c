"""The script of a job whose state is made bad, as its plan says: `poisoned_job.py FOLDER PLAN`, under dlrun; see support.poisoned.

It looks at its loss and weights every third step, as loops do that log every few steps: bad states are snapshotted meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment

BATCH, SAMPLES = 8, 4096
LATE = ("slot", "replica", "pack")
"""Faults of what is held: behind the snapshot of their step, and the rank dies with them."""


def flip(numbers: torch.Tensor, place: int, bit: int | None) -> None:
    """Flip a bit of one number: without `bit` the highest one of the exponent."""
    width = 8 * numbers.element_size()
    with torch.no_grad():
        bits = numbers.view(-1).view(getattr(torch, f"int{width}"))
        sign = 1 << width - 1
        mask = 1 << (width - 2 if bit is None else bit % width)
        bits[place % len(bits)] ^= mask - 2 * sign if mask == sign else mask


def damage(path: Path, at: int, bit: int) -> None:
    """Flip a bit of a byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(at)
        file.write(bytes([byte]))


def damage_slots(paths: list[Path], fault: dict[str, Any], *, step: int = -1) -> None:
    """Damage what these segments hold of a step, or of every one."""
    for path in paths:
        with contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                if header.is_complete and step in {-1, header.step}:
                    damage(path, segment.spec.data_at(slot) + fault["place"] % header.data_bytes, fault["bit"])


class Job:
    """One rank of the job."""

    def __init__(self, folder: str, plan: dict[str, Any]) -> None:
        self.folder, self.plan = Path(folder), plan
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.dtype = getattr(torch, plan["dtype"])
        layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
        self.model = torch.nn.Sequential(*layers).to(self.dtype)
        eps = 1e-4 if self.dtype is torch.float16 else 1e-8
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=eps)
        self.table = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        self.sampler = ElasticSampler(
            SAMPLES, dp_rank=self.rank, dp_size=self.world, shuffle=False, global_batch_size=BATCH
        )
        count = int(plan["nodes"] > 1)
        self.ckpt = Checkpointer(f"{folder}/root", snapshot_every=1, persist_every=10, keep_last=3, replicate=count)
        over = "world" if self.world > 1 else None
        self.ckpt.track(model=self.model, optimizer=self.optimizer, data=self.sampler, rng=True, replicated_over=over)
        report = self.ckpt.restore()
        self.step = 0 if report is None else report.step
        if self.rank == 0:
            print("began at", self.step, flush=True)

    def train(self) -> None:
        """Train to the end of the plan."""
        faults = {fault["step"]: fault for fault in self.plan["faults"]}
        with (self.folder / f"trace-{self.rank}").open("a", buffering=1) as trace:
            while self.step < self.plan["steps"]:
                fault = faults.get(self.step + 1)
                loss, ids = self.one_step(fault)
                total = math.fsum(one.double().sum().item() for one in self.model.parameters())
                print(self.step, loss.hex(), total.hex(), ",".join(map(str, ids)), file=trace)
                if self.step % 10 == 0:
                    self.ckpt.wait()  # raises where memory was damaged before it was persisted: it is not taken again
                if fault is not None and fault["kind"] in LATE and self.is_struck(fault):
                    self.strike_held(fault)
        self.ckpt.wait()
        print("finished", flush=True)

    def one_step(self, fault: dict[str, Any] | None) -> tuple[float, list[int]]:
        """Train a step; return its loss and samples."""
        batch, ids = self.batch(fault)
        loss = (self.model(batch) - batch).pow(2).mean()
        largest = max(one.detach().abs().max().item() for one in self.model.parameters())
        while self.step + 1 == self.plan.get("hangs"):
            time.sleep(0.001)
        ends = self.plan["ends"] and self.step >= self.plan["ends"]
        if ends or (self.step % 3 == 0 and not (loss.item() < 1e3 and largest < 1e3)):
            raise FloatingPointError("the loss is bad")
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters() if self.world > 1 else ():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.step += 1
        if fault is not None and fault["kind"] not in LATE and fault["where"] != "batch" and self.is_struck(fault):
            self.strike(fault)
        self.ckpt.step(self.step)
        return loss.item(), ids

    def batch(self, fault: dict[str, Any] | None) -> tuple[torch.Tensor, list[int]]:
        """Return the samples of this rank; one that is always bad fails here, or makes the state bad."""
        ids = self.sampler.next_ids().tolist()
        batch = self.table[ids].clone()
        if fault is not None and fault["where"] == "batch" and self.is_struck(fault):
            if fault["kind"] == "nan":
                batch[fault["place"] % len(batch)] = math.nan
            else:
                flip(batch, fault["place"], fault["bit"])
            self.struck(fault)
        if self.plan["sample"] in ids:
            how = self.plan["how"]
            if how == "raise":
                raise ValueError("a sample that nobody can read")
            if how == "crash":
                signal.raise_signal(signal.SIGSEGV)
            while how == "spin":
                time.sleep(0.001)
            batch[0] = math.nan
        return batch, ids

    def is_struck(self, fault: dict[str, Any]) -> bool:
        """Return whether a fault is to strike here and now: once."""
        mark = self.folder / f"mark-{fault['step']}"
        if self.rank != fault["place"] % self.world or mark.exists():
            return False
        mark.touch()
        return True

    def struck(self, fault: dict[str, Any]) -> None:
        """Note that the damage is done."""
        (self.folder / f"struck-{fault['step']}").touch()

    def strike(self, fault: dict[str, Any]) -> None:
        """Make live state bad, or hang."""
        kind, where, place = fault["kind"], fault["where"], fault["place"]
        parameter = list(self.model.parameters())[place % 4]
        while kind in {"stop", "spin"}:
            self.struck(fault)
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else 0)
            time.sleep(0.001)  # spins, and leaves the CPU to other jobs
        target = parameter if where == "parameter" else self.optimizer.state[parameter][where]
        if kind == "nan":
            with torch.no_grad():
                target.view(-1)[place % target.numel()] = math.nan
        else:
            flip(target.detach(), place, fault["bit"] if kind == "bit" else None)
        self.struck(fault)

    def strike_held(self, fault: dict[str, Any]) -> None:
        """Damage what memory or storage holds, and die."""
        self.ckpt.fence()
        session = self.ckpt._alive()
        session._stager.finish()
        directory, kind = session.directory, fault["kind"]
        held = [slot.header.step for slot in scan(directory).slots if slot.header.is_complete]
        damage_slots(directory.segments(), fault, step=-1 if kind == "pack" else max(held))
        if kind == "replica":
            for memory in self.plan["memories"]:
                damage_slots(JobDirectory(Path(memory, directory.path.name)).replica_segments(), fault)
        if kind == "pack":
            packs = sorted((self.folder / "root").glob("step-*/*"), key=lambda path: path.parent.name)
            newest = [path for path in packs if path.parent == packs[-1].parent and path.suffix != ".idx"]
            largest = max(newest, key=lambda path: path.stat().st_size)
            damage(largest, fault["place"] % max(1, largest.stat().st_size), fault["bit"])
        self.struck(fault)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Job(sys.argv[1], json.loads(sys.argv[2])).train()
