"""Kinds of modules, of parameters and buffers, and models that change while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from integration.frameworks.case import Program, Start, case, net
from integration.frameworks.optimizers import loss_of, supervised

GROUP = "modules"
WIDTH = 300


def adamw(model: nn.Module, width: int = WIDTH, **facts: Any) -> Program:
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), width, **facts)


@case(GROUP, "batch norm")
def batch_norm(start: Start) -> Program:
    return adamw(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))


@case(GROUP, "batch norm with a cumulative average, group norm, layer norm, RMS norm")
def norms(start: Start) -> Program:
    layers = (nn.BatchNorm1d(WIDTH, momentum=None), nn.GroupNorm(4, WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH))
    return adamw(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers))


@case(GROUP, "a recurrent layer (flattened weights)")
def recurrent(start: Start) -> Program:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(32, 32, num_layers=2, dropout=0.1, batch_first=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.cells(batch.view(8, -1, 32))[0].reshape(8, -1)

    return adamw(Recurrent(), 320)


@case(GROUP, "attention and dropout of a transformer layer")
def transformer(start: Start) -> Program:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch.view(8, -1, 32)).reshape(8, -1)

    return adamw(Layer(), 320)


class WithBuffer(nn.Module):
    """A layer whose output is scaled by a buffer that changes in each forward."""

    def __init__(self, buffer: torch.Tensor, *, persistent: bool = True, changing: bool = True) -> None:
        super().__init__()
        self.layer = net(WIDTH)
        self.register_buffer("scale", buffer, persistent=persistent)
        self.changing = changing

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.changing:
            self.scale.mul_(1.01)
        return self.layer(batch) * self.scale.float().mean()


@case(GROUP, "a buffer that changes in each forward")
def buffer(start: Start) -> Program:
    return adamw(WithBuffer(torch.rand(200)))


@case(GROUP, "a buffer that each forward rebinds to a new tensor")
def rebound_buffer(start: Start) -> Program:
    class Rebound(WithBuffer):
        scale: torch.Tensor

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.scale = self.scale * 1.01
            return self.layer(batch) * self.scale.mean()

    return adamw(Rebound(torch.rand(200)))


@case(
    GROUP,
    "a non-persistent buffer that the constructor computes",
    note="non-persistent buffers are not part of the state, as in torch's own state dict",
)
def non_persistent(start: Start) -> Program:
    return adamw(WithBuffer(torch.arange(200) / 100, persistent=False, changing=False))


@case(GROUP, "an expanded buffer (elements share memory)")
def expanded_buffer(start: Start) -> Program:
    class Expanded(WithBuffer):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.scale[0:1].as_strided((1,), (1,)).mul_(1.01)
            return self.layer(batch) * self.scale.mean()

    return adamw(Expanded(torch.rand(1).expand(5)))


@case(GROUP, "an expanded buffer of two dimensions")
def expanded_matrix(start: Start) -> Program:
    return adamw(WithBuffer(torch.rand(40, 1).expand(40, 30), changing=False))


@case(GROUP, "buffers that are overlapping views of one storage", quick=True)
def overlapping_buffers(start: Start) -> Program:
    class Overlapping(WithBuffer):
        def __init__(self) -> None:
            super().__init__(torch.rand(100))
            self.register_buffer("head", self.scale[:60])
            self.register_buffer("tail", self.scale[40:])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.head.mul_(1.01)
            return super().forward(batch) + self.tail.mean()

    return adamw(Overlapping())


@case(GROUP, "buffers and parameters that are transposed, strided or empty, and a scalar")
def strided(start: Start) -> Program:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(200, WIDTH).t() * 0.05)
            self.back = nn.Parameter(torch.randn(200, 2 * WIDTH)[:, ::2] * 0.05)
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.register_buffer("every_third", torch.rand(99)[::3])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.every_third.mul_(1.01)
            return batch @ self.transposed @ self.back * self.scalar + self.every_third.mean() + self.empty.sum()

    return adamw(Strided())


@case(GROUP, "tied weights", quick=True)
def tied(start: Start) -> Program:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    model[2].weight = model[0].weight
    return adamw(model)


@case(GROUP, "tied weights, one of them transposed")
def tied_transposed(start: Start) -> Program:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(WIDTH, 100, bias=False)
            self.register_buffer("up", self.down.weight.detach().t())

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(torch.tanh(self.down(batch)), torch.as_tensor(self.up))

    return adamw(Transposed())


@case(GROUP, "one module at two places")
def shared_module(start: Start) -> Program:
    layer = nn.Linear(WIDTH, WIDTH)
    return adamw(nn.Sequential(layer, nn.Tanh(), layer))


@case(GROUP, "a lazy layer after its first forward")
def lazy(start: Start) -> Program:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH))
    model(torch.zeros(1, WIDTH))
    return adamw(model)


@case(GROUP, "a lazy layer before its first forward", quick=True, refused="uninitialized")
def lazy_too_early(start: Start) -> Program:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return supervised(model, torch.optim.AdamW(model[2].parameters(), lr=1e-3), WIDTH)


@case(GROUP, "a model made on the meta device, then given memory")
def meta(start: Start) -> Program:
    with torch.device("meta"):
        model = net(WIDTH)
    model.to_empty(device="cpu")
    for layer in (model[0], model[3]):
        layer.reset_parameters()
    return adamw(model)


@case(GROUP, "a parameter still on the meta device", refused="cannot be held")
def still_meta(start: Start) -> Program:
    model = net(WIDTH)
    model.register_buffer("later", torch.empty(5, device="meta"))
    return adamw(model)


@case(GROUP, "memory format channels last")
def channels_last(start: Start) -> Program:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 3, 3, padding=1)
            )

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            images = batch.view(8, 3, 10, 10).to(memory_format=torch.channels_last)
            return self.layers(images).contiguous().view(8, -1)

    return adamw(Images().to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # torch's stub knows only 4-d tensors


@case(GROUP, "complex parameters")
def complex_parameters(start: Start) -> Program:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) * 0.05)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(batch.to(torch.complex64) @ self.weight).sum(-1)

    return adamw(Complex())


@case(GROUP, "buffers that are lazily conjugated or negated")
def conjugated(start: Start) -> Program:
    class Conjugated(WithBuffer):
        def __init__(self) -> None:
            value = torch.randn(50, dtype=torch.complex64)
            super().__init__(value.conj(), changing=False)
            self.register_buffer("negative", value.conj().imag)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch) * self.scale.abs().mean() + self.negative.mean()

    return adamw(Conjugated())


@case(GROUP, "weight norm (parametrization)")
def weight_norm(start: Start) -> Program:
    return adamw(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), net(WIDTH)))


@case(GROUP, "weight norm (the old hook)")
def old_weight_norm(start: Start) -> Program:
    return adamw(nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), net(WIDTH)))  # type: ignore[no-untyped-call]  # torch leaves it without types


@case(GROUP, "spectral norm (parametrization)")
def spectral_norm(start: Start) -> Program:
    return adamw(nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), net(WIDTH)))


@case(GROUP, "spectral norm (the old hook)")
def old_spectral_norm(start: Start) -> Program:
    return adamw(nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), net(WIDTH)))


@case(GROUP, "orthogonal parametrization")
def orthogonal(start: Start) -> Program:
    return adamw(nn.Sequential(parametrizations.orthogonal(nn.Linear(60, 60)), net(60)), 60)


@case(GROUP, "a parametrization of one's own")
def own_parametrization(start: Start) -> Program:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return adamw(layer)


@case(GROUP, "pruned weights (mask buffers)")
def pruned(start: Start) -> Program:
    from torch.nn.utils import prune

    model = net(WIDTH)
    prune.random_unstructured(model[0], "weight", amount=0.3)  # type: ignore[no-untyped-call]  # torch leaves it without types
    return adamw(model)


class WithExtraState(nn.Module):
    """State of its own beside the tensors, made by `make` from the number of forwards."""

    def __init__(self, make: Any, read: Any) -> None:
        super().__init__()
        self.layer, self.make, self.read, self.count = net(WIDTH), make, read, 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(batch) * (1 + self.count / 100)

    def get_extra_state(self) -> Any:
        return self.make(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(self.read(state))


@case(GROUP, "extra state: a number")
def extra_number(start: Start) -> Program:
    return adamw(WithExtraState(lambda count: {"count": count}, lambda state: state["count"]))


@case(GROUP, "extra state: a tensor")
def extra_tensor(start: Start) -> Program:
    return adamw(WithExtraState(torch.tensor, lambda state: state))


@case(GROUP, "extra state: tensors in dicts and lists")
def extra_nested(start: Start) -> Program:
    return adamw(
        WithExtraState(
            lambda count: {"last": [torch.tensor([count]), torch.full((100, 100), float(count))], "name": "n"},
            lambda state: state["last"][0][0],
        )
    )


@case(GROUP, "extra state: tensors whose number and shape change", quick=True)
def extra_changing(start: Start) -> Program:
    return adamw(
        WithExtraState(
            lambda count: {f"t{i}": torch.full((count * 30,), float(count)) for i in range(count)},
            lambda state: state["t0"][0] if state else 0,
        )
    )


@case(GROUP, "extra state: an object of a class of one's own", quick=True, refused="cannot be held")
def extra_object(start: Start) -> Program:
    return adamw(WithExtraState(lambda count: {"count": Start(restarted=False, rank=count)}, lambda state: 0))


def _nested_tuple(depth: int, count: int) -> Any:
    value: Any = count
    for _ in range(depth):
        value = (value,)
    return value


def _innermost(value: Any) -> Any:
    while isinstance(value, tuple):
        (value,) = value
    return value


@case(GROUP, "extra state: tuples nested 10 deep")
def extra_deep(start: Start) -> Program:
    return adamw(WithExtraState(lambda count: _nested_tuple(10, count), _innermost))


@case(GROUP, "extra state: tuples nested 300 deep", refused="nested")
def extra_too_deep(start: Start) -> Program:
    return adamw(WithExtraState(lambda count: _nested_tuple(300, count), _innermost))


@case(GROUP, "a layer frozen for ever")
def frozen(start: Start) -> Program:
    model = net(WIDTH)
    model[0].requires_grad_(requires_grad=False)
    return adamw(model)


def _unfrozen(width: int) -> Program:
    model = net(width)
    model[0].requires_grad_(requires_grad=False)
    program = supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), width)

    def train(step: int) -> float:
        if step >= 2:
            model[0].requires_grad_(requires_grad=True)
        return program.train(step)

    return Program(train=train, tracked=program.tracked)


@case(GROUP, "a layer frozen, then unfrozen")
def unfrozen(start: Start) -> Program:
    return _unfrozen(700)


@case(GROUP, "a layer frozen, then unfrozen, tiny")
def unfrozen_tiny(start: Start) -> Program:
    return _unfrozen(12)


@case(GROUP, "a layer frozen from the third step on")
def frozen_later(start: Start) -> Program:
    model = net(WIDTH)
    program = adamw(model)

    def train(step: int) -> float:
        if step >= 3:
            model[0].requires_grad_(requires_grad=False)
        return program.train(step)

    return Program(train=train, tracked=program.tracked)


class Growing(nn.Module):
    """A model that gets one layer more."""

    def __init__(self, *, grown: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([net(WIDTH)])
        if grown:
            self.grow()

    def grow(self) -> None:
        self.layers.append(nn.Linear(WIDTH, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch


@case(GROUP, "a layer and a parameter group added in the second step, and built by the restarted program", quick=True)
def grown(start: Start) -> Program:
    model = Growing(grown=start.restarted)
    optimizer = torch.optim.AdamW(model.layers[0].parameters(), lr=1e-3)
    if start.restarted:
        optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-2})

    def train(step: int) -> float:
        if step == 2:
            model.grow()
            optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-2})
        loss = loss_of(model, WIDTH, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer})


@case(GROUP, "a parameter that takes part in no step")
def unused(start: Start) -> Program:
    model = net(WIDTH)
    model.register_parameter("spare", nn.Parameter(torch.randn(100)))
    return adamw(model)


@case(GROUP, "two models and two optimizers (a generator and its critic)")
def adversarial(start: Start) -> Program:
    generator, critic = net(200), nn.Sequential(net(200), nn.Linear(200, 1))
    first = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def train(step: int) -> float:
        noise = torch.randn(8, 200)  # of the global generator
        truth = torch.randn(8, 200, generator=torch.Generator().manual_seed(step))
        loss = critic(generator(noise).detach()).mean() - critic(truth).mean()
        second.zero_grad()
        loss.backward()
        second.step()
        fooled = -critic(generator(noise)).mean()
        first.zero_grad()
        fooled.backward()
        first.step()
        return loss.item() + fooled.item()

    return Program(train=train, tracked={"generator": generator, "critic": critic, "g": first, "c": second})


@case(GROUP, "a sparse buffer", refused="cannot be held")
def sparse_buffer(start: Start) -> Program:
    model = net(WIDTH)
    model.register_buffer("mask", torch.eye(20).to_sparse())
    return adamw(model)


@case(
    GROUP, "a quantized layer of torch.ao before a trained one", quick=True, refused="neither a parameter nor a buffer"
)
def quantized(start: Start) -> Program:
    import torch.ao.nn.quantized.dynamic as quantized

    layer = quantized.Linear(WIDTH, WIDTH)
    layer.set_weight_bias(torch.quantize_per_tensor(torch.randn(WIDTH, WIDTH), 0.1, 0, torch.qint8), None)
    return adamw(nn.Sequential(layer, nn.Tanh(), net(WIDTH)))


@case(GROUP, "quantization-aware training of torch.ao (observers, fake quantization)")
def quantization_aware(start: Start) -> Program:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model.qconfig = get_default_qat_qconfig("qnnpack")  # type: ignore[no-untyped-call, assignment]  # torch leaves it without types
    return adamw(prepare_qat(model.train()))  # type: ignore[no-untyped-call]  # as above
