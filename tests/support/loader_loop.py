"""A training program as users write it, for `test_engine_loaders.py`: prints a line per step, may kill itself.

Arguments: root, JSON options (see `Options`). Each line: step, loss (hex), digest of all default generators.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler, SeededSamples

BATCH, EPOCHS = 4, 3


@dataclass
class Options:
    """What a program of the test does."""

    workers: int = 0
    persistent: bool = False
    augment: bool = False
    seeded: bool = False
    own_generator: bool = False
    accumulation: int = 1
    evaluate: bool = False
    second: bool = False
    late_second: bool = False
    batch_sampler: bool = False
    stateful: str = ""
    loop: str = "epochs"
    length: int = 22
    kill_at: int = 0
    started_seed: int = 0
    kept: bool = False
    prepared: str = ""


class Augmented(Dataset[torch.Tensor]):
    """Numbers that change at random, by all three default generators."""

    def __init__(self, length: int, *, augment: bool, prepared: str = "") -> None:
        self.values = torch.linspace(-1, 1, length * 6).reshape(length, 6)
        self.augment, self.prepared = augment, prepared

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        value = self.values[index]
        if self.prepared:
            with Path(self.prepared).open("a") as file:
                file.write(f"{index}\n")
        if self.augment:
            value = value + torch.rand(6) * random.random() + float(np.random.rand())  # noqa: NPY002 -- as transforms do
        return value


def generators() -> str:
    state = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()]  # noqa: NPY002 -- what is looked at
    return hashlib.blake2b(repr(state).encode(), digest_size=6).hexdigest()


class Program:
    """Model, data, loop."""

    def __init__(self, root: str, options: Options) -> None:
        self.options, self.step = options, 0
        torch.manual_seed(options.started_seed)
        random.seed(options.started_seed), np.random.seed(options.started_seed)  # noqa: NPY002 -- what users do
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(0.1 + 0.05 * number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        self.ckpt = Checkpointer(root, snapshot_every=1, persist_every=10_000, job=Path(root).name)
        self.sampler, self.loader = self.data(options.length)
        tracked: dict[str, Any] = {} if options.stateful == "alone" else {"sampler": self.sampler}
        if options.second:
            self.other, self.others = self.data(10_000)
            tracked["other"] = self.other
        if options.stateful:
            tracked["loader"] = self.loader
        self.ckpt.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, rng=True, **tracked)
        report = self.ckpt.restore()
        self.step = report.step if report else 0

    def data(self, length: int) -> tuple[Any, DataLoader[Any]]:
        options = self.options
        dataset: Any = Augmented(length, augment=options.augment, prepared=options.prepared)
        if options.seeded:
            dataset = SeededSamples(dataset, seed=3)
        kind = DataLoader
        if options.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        size, alone = BATCH * options.accumulation, options.stateful == "alone"
        sampler: Any = ElasticSampler(dataset, 1, 0, seed=1, global_batch_size=size, auto_commit=alone)
        arguments: dict[str, Any] = {"batch_size": BATCH, "sampler": sampler}
        if options.batch_sampler:
            sampler = ElasticBatchSampler(sampler, BATCH, options.accumulation)
            arguments = {"batch_sampler": sampler}
        if options.own_generator:
            arguments["generator"] = torch.Generator()
        if options.workers:
            arguments |= {"num_workers": options.workers, "persistent_workers": options.persistent}
        return sampler, kind(self.ckpt.keep_samples(dataset) if options.kept else dataset, **arguments)

    def run(self) -> None:
        """Train to the end of the epochs."""
        if self.options.loop == "epochs":
            for _ in self.sampler.epochs(EPOCHS):
                self.train_epoch()
                self.scheduler.step()
                self.evaluate()
        elif self.options.loop == "range":
            for epoch in range(self.sampler.epoch, EPOCHS):
                self.sampler.set_epoch(epoch)
                self.train_epoch()
        else:
            batches = self.forever()
            steps = EPOCHS * self.options.length // BATCH
            ahead = next(batches) if self.options.loop == "ahead" else None
            while self.step < steps:
                batch = next(batches) if ahead is None else ahead
                loss = self.forward(batch)
                ahead = next(batches) if self.options.loop == "ahead" else None
                self.finish(loss)
        self.ckpt.wait()
        self.ckpt.close()

    def forever(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def train_epoch(self) -> None:
        others: Any = None
        if self.options.second and not self.options.late_second:
            others = self.other_batches()
        for micro, batch in enumerate(self.loader, start=1):
            if self.options.second:
                others = others or self.other_batches()
            loss = self.forward(batch + next(others)[: len(batch)] if others else batch)
            (loss / self.options.accumulation).backward()
            if micro % self.options.accumulation == 0:
                self.finish(loss, backward=False)

    def other_batches(self) -> Any:
        if not hasattr(self, "_others"):
            self._others = iter(self.others)
        return self._others

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.model(batch) - 1).square().mean()
        return loss

    def finish(self, loss: torch.Tensor, *, backward: bool = True) -> None:
        if backward:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        print(self.step, float(loss).hex(), generators(), flush=True)  # before step(): nothing is lost with the log
        self.ckpt.step(self.step)
        if self.step == self.options.kill_at:
            self.ckpt._session._stager.finish()  # type: ignore[union-attr]  # the snapshot of this step is whole
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(self) -> None:
        if self.options.evaluate:
            self.model.eval()
            data = TensorDataset(torch.linspace(-1, 1, 24).reshape(4, 6))
            total = sum(self.forward(x).item() for (x,) in DataLoader(data, batch_size=2, shuffle=True))
            self.model.train()
            print("eval", float(total).hex(), float(self.scheduler.get_last_lr()[0]).hex(), flush=True)


def program(root: Path, **options: Any) -> list[str]:
    """Run the program in a process of its own; return its lines. `kill_at` ends it by SIGKILL, started seeds differ."""
    output = root.with_name(f"{root.name}-{os.urandom(4).hex()}.txt")
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own time-out belongs to the parent
            os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY, 0o600), 1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 -- a descriptor
            warnings.simplefilter("ignore")  # torch's, of schedulers and of torchdata's age
            Program(str(root), Options(**options)).run()
            code = 0
        except BaseException:  # noqa: BLE001 -- nothing may unwind into the test runner
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == (-signal.SIGKILL if options.get("kill_at") else 0), f"ended with {ended}"
    return [line for line in output.read_text().splitlines() if line[:1].isdigit() or line.startswith("eval")]


if __name__ == "__main__":
    Program(sys.argv[1], Options(**json.loads(sys.argv[2]))).run()
