"""What is trained beside the model: schedulers, a gradient scaler, averages, loaders, objects of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from integration.frameworks.case import REGISTRY, Case, Program, Start, case, net
from integration.frameworks.modules import WIDTH
from integration.frameworks.optimizers import loss_of

GROUP = "schedulers"


def _scheduled(make: Callable[[torch.optim.Optimizer], Any], *, of_loss: bool = False) -> Program:
    model = net(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)

    def train(step: int) -> float:
        loss = loss_of(model, WIDTH, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item()) if of_loss else scheduler.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, "scheduler": scheduler})


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 10)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])  # type: ignore[arg-type]  # a list of two kinds


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10, 2.0),
    "LambdaLR with a function": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 10),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=3),
}
for scheduler, make in SCHEDULERS.items():

    def scheduled(start: Start, make: Callable[[torch.optim.Optimizer], Any] = make) -> Program:
        return _scheduled(make)

    REGISTRY[scheduler] = Case(group=GROUP, name=scheduler, build=scheduled, quick=scheduler == "SequentialLR")


@case(GROUP, "ReduceLROnPlateau")
def plateau(start: Start) -> Program:
    return _scheduled(lambda o: schedulers.ReduceLROnPlateau(o, patience=1), of_loss=True)


class Warmup:
    """A schedule with parameters of its own, as a callable object."""

    def __init__(self) -> None:
        self.warm = 3

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warm)


@case(GROUP, "LambdaLR with a callable object")
def lambda_object(start: Start) -> Program:
    return _scheduled(lambda o: schedulers.LambdaLR(o, Warmup()))


BESIDE = "scaler, averages, loaders"


def _with(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], None], **tracked: Any) -> Program:
    def train(step: int) -> float:
        loss = loss_of(model, WIDTH, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, **tracked})


@case(BESIDE, "GradScaler (CPU), with a step that it skips")
def grad_scaler(start: Start) -> Program:
    model = net(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)  # type: ignore[attr-defined]  # torch exports it without saying so

    def train(step: int) -> float:
        loss = loss_of(model, WIDTH, step)
        optimizer.zero_grad()
        scaler.scale(loss * float("inf") if step == 3 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item() * scaler.get_scale()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, "scaler": scaler})


@case(BESIDE, "AveragedModel: exponential average")
def ema(start: Start) -> Program:
    model = net(WIDTH)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _with(model, optimizer, lambda: average.update_parameters(model), average=average)


@case(BESIDE, "AveragedModel: stochastic weight averaging with its buffers")
def swa(start: Start) -> Program:
    model = nn.Sequential(net(WIDTH), nn.BatchNorm1d(WIDTH))
    average = AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _with(model, optimizer, lambda: average.update_parameters(model), average=average)


@case(BESIDE, "an average that is a copy of the model, declared as fenced")
def fenced_average(start: Start) -> Program:
    model = net(WIDTH)
    average = net(WIDTH)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update() -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    program = _with(model, optimizer, update, average=average)
    return Program(train=program.train, tracked=program.tracked, options={"fenced": ["average"]})


class Everything:
    """An object with all that may be held."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        count = self.count
        return {
            "count": count, "none": None, "bytes": b"\x00\xff" * count, "text": "é" * count, "float": count / 3, "inf": float("inf"),
            "tensor": torch.full((count, 3), float(count)), "array": np.arange(count), "scalar": np.float32(count / 3),
            "list": [count, [torch.tensor(count)]], "tuple": (count, (1, 2)), 3: "int key", "dtype": torch.bfloat16,  # type: ignore[dict-item]
            "device": torch.device("cpu"), "empty": {}, "bool": bool(count % 2), "large": 2**63 + count,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        differences = [key for key, value in self.state_dict().items() if repr(value) != repr(state[key])]
        assert not differences, (differences, state)


@case(BESIDE, "an object whose state holds every type there is, tensors of changing shape too", quick=True)
def everything(start: Start) -> Program:
    model, thing = net(WIDTH), Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _with(model, optimizer, thing.advance, thing=thing)


@case(BESIDE, "an object that holds an instance of another class", refused="cannot be held")
def foreign(start: Start) -> Program:
    class Holder(Everything):
        def state_dict(self) -> dict[str, Any]:
            return {"start": Start(restarted=False, rank=0)}

    model = net(WIDTH)
    return _with(model, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: None, thing=Holder())


@case(BESIDE, "an integer beyond 64 bits")
def large_integer(start: Start) -> Program:
    class Holder:
        def __init__(self) -> None:
            self.seed = 2**70

        def advance(self) -> None:
            self.seed += 1

        def state_dict(self) -> dict[str, Any]:
            return {"seed": self.seed}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seed = state["seed"]

    model, thing = net(WIDTH), Holder()
    return _with(model, torch.optim.AdamW(model.parameters(), lr=1e-3), thing.advance, thing=thing)


@case(BESIDE, "a Generator of one's own, as an object")
def generator(start: Start) -> Program:
    class Noise:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

        def state_dict(self) -> dict[str, Any]:
            return {"state": self.generator.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["state"])

    model, noise = net(WIDTH), Noise()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def add() -> None:
        with torch.no_grad():
            model[0].bias.add_(torch.randn(WIDTH, generator=noise.generator), alpha=1e-3)

    return _with(model, optimizer, add, noise=noise)


@case(BESIDE, "StatefulDataLoader of torchdata", needs=("torchdata",))
def stateful_loader(start: Start) -> Program:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
    loader: Any = StatefulDataLoader(torch.utils.data.TensorDataset(data), batch_size=8, shuffle=True)
    model = net(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches: list[Any] = []

    def train(step: int) -> float:
        if not batches:
            batches.append(iter(loader))
        (batch,) = next(batches[0])
        loss = (model(batch) - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, "loader": loader})
