"""The optimizers of torch.optim, in their variants, each with a large and with a tiny state; and optimizers of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from integration.frameworks.case import REGISTRY, Case, Program, Start, case, net

Make = Callable[[list[nn.Parameter]], Optimizer]
LARGE, TINY, MUON = 700, 12, 200
"""Widths; Muon multiplies matrices in bfloat16, which takes minutes where a processor has no instruction for it."""


def supervised(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    **tracked: Any,
) -> Program:
    """Return the usual program: a batch by step number, loss, backward, step of each optimizer."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

    def train(step: int) -> float:
        loss = loss_of(model, width, step, dtype)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, **tracked})


def loss_of(model: nn.Module, width: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    batch = torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(batch) - batch).abs().pow(2).mean()


def enter(
    name: str, make: Make, *, group: str = "torch.optim", width: int = LARGE, bias: bool = True, **facts: Any
) -> None:
    """Enter an optimizer twice: over two layers of `width`, and over tiny ones, whose state fits where a slot has room to spare."""
    quick = facts.pop("quick", False)
    for kind, size in (("", width), (", tiny", TINY)):

        def build(start: Start, size: int = size) -> Program:
            model = net(size, bias=bias)
            return supervised(model, make(list(model.parameters())), size)

        REGISTRY[name + kind] = Case(group=group, name=name + kind, build=build, quick=quick and not kind, **facts)


enter("Adadelta", torch.optim.Adadelta)
enter("Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2))
enter("Adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-2))
enter("Adagrad, fused", lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True))
enter("Adam", lambda p: torch.optim.Adam(p, lr=1e-3))
enter("Adam, amsgrad", lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True))
enter("Adam, maximize", lambda p: torch.optim.Adam(p, lr=1e-3, maximize=True))
enter("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-3), quick=True)
enter("AdamW, amsgrad", lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True))
enter("AdamW, foreach", lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True))
enter("AdamW, for loop", lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False))
enter("AdamW, fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
enter("AdamW, fused, amsgrad", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, amsgrad=True))
enter("AdamW, tensor lr", lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)))
enter("AdamW, fused, tensor lr", lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True))
enter(
    "AdamW, tensor betas",
    lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
)
enter("AdamW, two groups", lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 1e-3}, {"params": p[2:], "lr": 1e-4}]))
enter("Adamax", lambda p: torch.optim.Adamax(p, lr=1e-3))
enter("ASGD", lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2))
enter("NAdam", lambda p: torch.optim.NAdam(p, lr=1e-3))
enter("NAdam, decoupled", lambda p: torch.optim.NAdam(p, lr=1e-3, decoupled_weight_decay=True, weight_decay=0.1))
enter("RAdam", lambda p: torch.optim.RAdam(p, lr=1e-3))
enter("RMSprop", lambda p: torch.optim.RMSprop(p, lr=1e-3))
enter("RMSprop, centered, momentum", lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9))
enter("Rprop", lambda p: torch.optim.Rprop(p, lr=1e-3))
enter("SGD", lambda p: torch.optim.SGD(p, lr=1e-2))
enter("SGD, momentum", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))
enter("SGD, fused, nesterov", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True))
enter("Muon", lambda p: torch.optim.Muon(p, lr=1e-2), width=MUON, bias=False)


def _with_closure(width: int, **options: Any) -> Program:
    model = net(width)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3, **options)

    def train(step: int) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, width, step)
            loss.backward()
            return loss

        return float(optimizer.step(closure))  # type: ignore[arg-type]  # its closure returns a tensor

    return Program(train=train, tracked={"model": model, "optimizer": optimizer})


@case("torch.optim", "LBFGS", quick=True)
def lbfgs(start: Start) -> Program:
    return _with_closure(300)


@case("torch.optim", "LBFGS, tiny")
def lbfgs_tiny(start: Start) -> Program:
    return _with_closure(TINY)


@case("torch.optim", "LBFGS, strong Wolfe")
def lbfgs_wolfe(start: Start) -> Program:
    return _with_closure(64, line_search_fn="strong_wolfe")


def _sparse(rows: int, width: int) -> Program:
    table = nn.Embedding(rows, width, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=1e-2)

    def train(step: int) -> float:
        words = torch.randint(0, rows, (16,), generator=torch.Generator().manual_seed(step))
        loss = table(words).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(train=train, tracked={"model": table, "optimizer": optimizer})


@case("torch.optim", "SparseAdam")
def sparse_adam(start: Start) -> Program:
    return _sparse(4000, 128)


@case("torch.optim", "SparseAdam, tiny")
def sparse_adam_tiny(start: Start) -> Program:
    return _sparse(50, 8)


@case("torch.optim", "Muon beside AdamW")
def muon_and_adamw(start: Start) -> Program:
    model = net(MUON)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return supervised(model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)], MUON)


@case("torch.optim", "an optimizer per parameter, stepped inside backward")
def in_backward(start: Start) -> Program:
    model = net(200)
    optimizers: list[Optimizer] = [torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()]
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):

        def step(param: torch.Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    def train(number: int) -> float:
        loss = loss_of(model, 200, number)
        loss.backward()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizers})


class Lion(Optimizer):
    """State of the parameter's shape under a name that nobody knows."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            low, high = group["betas"]
            for param in (p for p in group["params"] if p.grad is not None):
                average = self.state[param].setdefault("lion_average", torch.zeros_like(param))
                param.add_(average.lerp(param.grad, 1 - low).sign_(), alpha=-group["lr"])
                average.lerp_(param.grad, 1 - high)


class Rebinding(Optimizer):
    """A number beside a tensor that is made new in each step."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["average"] = state.get("average", torch.zeros_like(param)) * 0.9 + param.grad
                param.add_(state["average"], alpha=-group["lr"])


class Changing(Rebinding):
    """State whose shape and number of tensors change: what was seen first is not what there will be."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                state = self.state[param]
                state["history"] = torch.arange(state["step"] * 50, dtype=torch.float64) + number
                if state["step"] % 2 == 0:
                    state[f"extra{state['step']}"] = torch.full_like(param, float(state["step"]))
                state.pop(f"extra{state['step'] - 2}", None)
                param.add_(state["history"].mean(), alpha=1e-9)


class Nested(Rebinding):
    """Dicts and lists of tensors in the state of a parameter, as preconditioners are kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                factors = state.setdefault("factors", {"left": torch.zeros(param.shape[0]), "history": []})
                factors["left"] += param.reshape(param.shape[0], -1).sum(1)
                factors["history"] = [*factors["history"][-1:], param.mean() * state["step"]]
                param.add_(factors["left"].mean() + factors["history"][0], alpha=-1e-6)


for own in (Lion, Rebinding, Changing, Nested):
    enter(
        f"own: {own.__doc__.split(':')[0].rstrip('.')[0].lower()}{own.__doc__.split(':')[0].rstrip('.')[1:]}",  # type: ignore[union-attr]  # each has one
        own,
        group="optimizers of one's own",
        quick=True,
    )


@case("optimizers of one's own", "own: state of the whole optimizer under a key that is no parameter")
def global_state(start: Start) -> Program:
    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            whole: dict[str, Any] = self.state["whole"]  # type: ignore[index]  # what such optimizers do
            whole["steps"] = whole.get("steps", 0) + 1
            whole["sum"] = whole.get("sum", torch.zeros(3)) + whole["steps"]
            super().step()
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(whole["sum"].mean(), alpha=1e-4)

    model = net(64)
    return supervised(model, Counting(model.parameters(), lr=1e-2), 64)
