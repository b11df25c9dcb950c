"""What the jobs on the emulated device train: modules, optimizers and dtypes by name, each small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, CLASSES, ROWS, WORDS = 40, 8, 6, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KEPT = (torch.bool, torch.int8, torch.int64, torch.float16, torch.float8_e4m3fn, torch.complex64)
"""Of buffers that count beside those of the net's own type."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class Net(nn.Module):
    """An embedding, something in the middle, a head; buffers of many types that change at each step, and a large one."""

    def __init__(self, middle: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.middle, self.dropout = nn.Embedding(VOCABULARY, 24), middle, nn.Dropout(0.1)
        self.head = nn.Linear(width, CLASSES)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(150, 120))
        for number, dtype in enumerate(KEPT):
            self.register_buffer(f"kept{number}", torch.zeros(5 + number, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.table.add_(0.5)
            for number, dtype in enumerate(KEPT):
                kept = self.get_buffer(f"kept{number}")
                kept.copy_((kept.to(torch.float32 if not dtype.is_complex else dtype) + 1).to(dtype))
        middle = self.middle(self.embedding(tokens))
        hidden = middle[0] if isinstance(middle, tuple) else middle  # of a recurrent one
        hidden = self.dropout(hidden.flatten(1))
        return self.head(hidden)  # type: ignore[no-any-return]


def mlp() -> Net:
    return Net(nn.Sequential(nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 160), nn.GELU()), 160)


def convolution() -> Net:
    """Running statistics, which no optimizer owns, and weights that are no run of memory."""
    first = nn.Conv2d(WORDS, 8, 3, padding=1)
    first.weight.data = first.weight.data.contiguous(memory_format=torch.channels_last)
    image = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU())
    return Net(nn.Sequential(nn.Unflatten(2, (4, 6)), image), 8 * 24)


def attention() -> Net:
    return Net(nn.TransformerEncoderLayer(24, 2, 32, dropout=0.1, batch_first=True), 24 * WORDS)


def recurrent() -> Net:
    return Net(nn.RNN(24, 16, batch_first=True), 16 * WORDS)


class Tied(Net):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(72, 24)), 24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


MODULES: dict[str, Callable[[], Net]] = {
    "mlp": mlp, "convolution": convolution, "attention": attention, "recurrent": recurrent, "tied": Tied,
}  # fmt: skip
