"""Every dtype that training may hold: as a buffer, and the floating ones as parameters with their optimizer's state."""

from __future__ import annotations

import torch
from torch import nn

from integration.frameworks.case import REGISTRY, Case, Program, Start, case, net
from integration.frameworks.modules import WIDTH, WithBuffer
from integration.frameworks.optimizers import supervised

GROUP = "dtypes"
TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HELD = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def _bytes(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return `count` elements of random bits, of numbers where the dtype has any that are none."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.rand(count) < 0.5
    if (dtype.is_floating_point and size > 1) or dtype.is_complex:
        return torch.randn(count).to(dtype)
    return torch.randint(0, 100, (count * size,), dtype=torch.uint8).view(dtype)


class Holding(nn.Module):
    """Holds a buffer of random bits, made new from the step's number in each forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = net(WIDTH), dtype
        self.register_buffer("held", _bytes(dtype, 500))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.held.view(torch.uint8).bitwise_xor_(1) if self.dtype != torch.bool else self.held.logical_not_()
        return self.layer(batch) * self.held.view(torch.uint8).float().mean()


for dtype in HELD:

    def held(start: Start, dtype: torch.dtype = dtype) -> Program:
        model = Holding(dtype)
        return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), WIDTH)

    name = f"{str(dtype).removeprefix('torch.')} buffer"
    REGISTRY[name] = Case(group=GROUP, name=name, build=held, quick=dtype in (torch.float8_e4m3fn, torch.uint16))

for dtype in TRAINED:
    for kind, make in (("AdamW", torch.optim.AdamW), ("SGD with momentum", torch.optim.SGD)):

        def trained(start: Start, dtype: torch.dtype = dtype, make: type = make) -> Program:
            model = net(WIDTH).to(dtype)
            options = {"momentum": 0.9} if make is torch.optim.SGD else {}
            return supervised(model, make(model.parameters(), lr=1e-3, **options), WIDTH, dtype=dtype)

        name = f"{str(dtype).removeprefix('torch.')} parameters, {kind}"
        REGISTRY[name] = Case(group=GROUP, name=name, build=trained, quick=dtype is torch.bfloat16 and kind == "AdamW")


class Constant(WithBuffer):
    """Holds a buffer that no operator reads."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


@case(GROUP, "float4_e2m1fn_x2 buffer")
def float4(start: Start) -> Program:
    model = Constant(torch.randint(0, 255, (100,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), WIDTH)


@case(GROUP, "bits8 buffer", refused="cannot be held")
def bits8(start: Start) -> Program:
    model = Constant(torch.randint(0, 255, (100,), dtype=torch.uint8).view(torch.bits8))
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), WIDTH)


@case(GROUP, "uint4 buffer", refused="cannot be held")
def uint4(start: Start) -> Program:
    model = Constant(torch.randint(0, 255, (100,), dtype=torch.uint8).view(torch.uint4))  # type: ignore[attr-defined]  # torch's stub lacks it
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), WIDTH)


@case(GROUP, "float32 parameters trained under autocast to bfloat16")
def autocast(start: Start) -> Program:
    model = net(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(step: int) -> float:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(batch).float() - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer})


@case(GROUP, "bfloat16 parameters, float32 master copies in the optimizer", quick=True)
def master_weights(start: Start) -> Program:
    model = net(WIDTH).bfloat16()
    masters = nn.ParameterList([nn.Parameter(p.detach().float()) for p in model.parameters()])
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)

    def train(step: int) -> float:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (model(batch) - batch).pow(2).mean()
        model.zero_grad()
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]  # backward made it
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        return loss.item()

    return Program(train=train, tracked={"model": model, "masters": masters, "optimizer": optimizer})
