"""Optimizers and wrappers of other projects; each case says which module it needs, and is skipped where that is missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from integration.frameworks.case import REGISTRY, Case, Program, Start, case, net
from integration.frameworks.modules import WIDTH
from integration.frameworks.optimizers import enter, loss_of, supervised

GROUP = "other projects"


def _torchao(name: str) -> Any:
    def make(params: list[nn.Parameter]) -> Optimizer:
        import torchao.optim

        torch.compiler.set_stance("force_eager")  # its step compiles itself: half a minute in each process
        return getattr(torchao.optim, name)(params, lr=1e-3)

    return make


enter("torchao _AdamW", _torchao("_AdamW"), group=GROUP, needs=("torchao",))
for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"):

    def low_bit(start: Start, name: str = name) -> Program:
        model = net(256)
        return supervised(model, _torchao(name)(list(model.parameters())), 256)

    REGISTRY[f"torchao {name}"] = Case(
        group=GROUP, name=f"torchao {name}", build=low_bit, needs=("torchao",), refused="cannot be held"
    )


@case(GROUP, "torchao Int8 weight-only training", needs=("torchao",), refused="cannot be held")
def int8_weights(start: Start) -> Program:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = net(256)
    quantize_(model, int8_weight_only_quantized_training())
    return supervised(model, _torchao("_AdamW")(list(model.parameters())), 256)


@case(GROUP, "torchao float8 training (emulated)", needs=("torchao",))
def float8_training(start: Start) -> Program:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch._dynamo.config.disable = True
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    model = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 256)


def _lion(params: list[nn.Parameter]) -> Optimizer:
    from lion_pytorch import Lion

    return Lion(params, lr=1e-4)


enter("lion-pytorch Lion", _lion, group=GROUP, needs=("lion_pytorch",))


def _schedule_free(name: str, **options: Any) -> Any:
    def make(params: list[nn.Parameter]) -> Optimizer:
        import schedulefree

        optimizer = getattr(schedulefree, name)(params, **options)
        optimizer.train()
        return optimizer

    return make


enter(
    "schedulefree AdamWScheduleFree",
    _schedule_free("AdamWScheduleFree", lr=1e-3, warmup_steps=2),
    group=GROUP,
    needs=("schedulefree",),
)
enter("schedulefree SGDScheduleFree", _schedule_free("SGDScheduleFree", lr=1e-2), group=GROUP, needs=("schedulefree",))
enter(
    "schedulefree RAdamScheduleFree", _schedule_free("RAdamScheduleFree", lr=1e-3), group=GROUP, needs=("schedulefree",)
)


@case(GROUP, "schedulefree ScheduleFreeWrapper around SGD", needs=("schedulefree",))
def schedule_free_wrapper(start: Start) -> Program:
    from schedulefree import ScheduleFreeWrapper

    model = net(WIDTH)
    optimizer = ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=1e-2), momentum=0.9)
    optimizer.train()
    return supervised(model, optimizer, WIDTH)


def _transformers_adafactor(**options: Any) -> Any:
    def make(params: list[nn.Parameter]) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(params, **options)

    return make


enter("transformers Adafactor", _transformers_adafactor(), group=GROUP, needs=("transformers",))
enter(
    "transformers Adafactor, first moment, own learning rate",
    _transformers_adafactor(lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9),
    group=GROUP,
    needs=("transformers",),
)

PYTORCH_OPTIMIZER = (
    "ADOPT", "AdaBelief", "AdamP", "Adan", "CAME", "FlashAdamW", "GaLore", "Lamb", "LARS", "Lion", "MADGRAD", "Prodigy",
    "Ranger21", "SOAP", "SPAM", "Shampoo", "ScalableShampoo", "SM3", "StableAdamW", "StableSPAM", "Tiger",
)  # fmt: skip
for name in PYTORCH_OPTIMIZER:

    def other(start: Start, name: str = name) -> Program:
        import pytorch_optimizer

        torch.compiler.set_stance("force_eager")  # as torchao's
        model = net(128)
        options = {"num_iterations": 100} if name == "Ranger21" else {}
        optimizer = getattr(pytorch_optimizer, name)(list(model.parameters()), lr=1e-3, **options)
        return supervised(model, optimizer, 128)

    REGISTRY[f"pytorch_optimizer {name}"] = Case(
        group=GROUP,
        name=f"pytorch_optimizer {name}",
        build=other,
        needs=("pytorch_optimizer",),
        refused="cannot be held" if name == "ScalableShampoo" else "",  # its preconditioners are objects
    )


def _with_lookahead(start: Start) -> Program:
    from pytorch_optimizer import Lookahead

    model = net(128)
    return supervised(model, Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-3), k=2), 128)


case(
    GROUP,
    "pytorch_optimizer Lookahead around AdamW",
    needs=("pytorch_optimizer",),
    refused="wraps another optimizer",
)(_with_lookahead)

BITSANDBYTES = ("Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit", "AdamW", "PagedAdamW8bit")
for name in BITSANDBYTES:

    def eight_bit(start: Start, name: str = name) -> Program:
        import bitsandbytes

        model = net(256)
        options = {"momentum": 0.9} if name.startswith("SGD") else {}
        optimizer = getattr(bitsandbytes.optim, name)(list(model.parameters()), lr=1e-3, **options)
        return supervised(model, optimizer, 256)

    shared = "" if name == "AdamW" else "is the same tensor as"  # the table of quantiles, of all parameters
    REGISTRY[f"bitsandbytes {name}"] = Case(
        group=GROUP, name=f"bitsandbytes {name}", build=eight_bit, needs=("bitsandbytes",), refused=shared
    )


class Adapted(nn.Module):
    """A frozen layer of bitsandbytes with a trained pair of narrow ones beside it."""

    def __init__(self, frozen: nn.Module, width: int) -> None:
        super().__init__()
        self.frozen, self.down, self.up = frozen, nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            base = self.frozen(batch)
        return base + self.up(self.down(batch))


def _quantized(kind: str, *, only_adapters: bool = False, left_out: bool = False, **options: Any) -> Program:
    import bitsandbytes

    trained = torch.get_rng_state()
    torch.manual_seed(5)  # the weights that a pretrained model brings along
    frozen = getattr(bitsandbytes.nn, kind)(64, 64, **options).to("cpu").requires_grad_(requires_grad=False)
    torch.set_rng_state(trained)
    model = Adapted(frozen, 64)
    parts = nn.ModuleDict({"down": model.down, "up": model.up})
    program = supervised(model, torch.optim.AdamW(parts.parameters(), lr=1e-3), 64)
    if left_out:
        return Program(train=program.train, tracked=program.tracked, options={"exclude": "frozen.*"})
    return Program(train=program.train, tracked={**program.tracked, "model": parts}) if only_adapters else program


for kind, facts in (("Linear4bit", {}), ("Linear8bitLt", {"has_fp16_weights": False})):

    def quantized(start: Start, kind: str = kind, facts: dict[str, Any] = facts) -> Program:
        return _quantized(kind, **facts)

    REGISTRY[f"bitsandbytes {kind}, frozen"] = Case(
        group=GROUP,
        name=f"bitsandbytes {kind}, frozen",
        build=quantized,
        needs=("bitsandbytes",),
        refused="neither a parameter nor a buffer",
    )


@case(GROUP, "bitsandbytes Linear4bit, frozen, only the adapters beside it tracked", needs=("bitsandbytes",))
def adapters(start: Start) -> Program:
    return _quantized("Linear4bit", only_adapters=True)


@case(GROUP, "bitsandbytes Linear4bit, frozen, left out by exclude=", needs=("bitsandbytes",))
def frozen_left_out(start: Start) -> Program:
    return _quantized("Linear4bit", left_out=True)


def _lora(start: Start, *, left_out: bool = False, **options: Any) -> Program:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_dropout=0.1, target_modules=["0", "3"], **options)
    begun = torch.get_rng_state()
    if left_out:
        torch.manual_seed(5)  # the weights that a pretrained model brings along
    base = net(WIDTH)
    if left_out:
        torch.set_rng_state(begun)
    model = get_peft_model(base, config)  # type: ignore[arg-type]  # any module will do
    trainable = [p for p in model.parameters() if p.requires_grad]
    program = supervised(model, torch.optim.AdamW(trainable, lr=1e-3), WIDTH)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return Program(train=program.train, tracked=program.tracked, options={"exclude": frozen} if left_out else {})


@case(GROUP, "peft LoRA", needs=("peft",))
def lora(start: Start) -> Program:
    return _lora(start)


@case(GROUP, "peft LoRA, frozen weights left out by exclude=", needs=("peft",))
def lora_left_out(start: Start) -> Program:
    return _lora(start, left_out=True)


@case(GROUP, "peft LoRA, DoRA with rank-stabilised scaling", needs=("peft",))
def dora(start: Start) -> Program:
    return _lora(start, use_dora=True, use_rslora=True)


def _accelerated(start: Start, *, raw: bool) -> Program:
    import logging

    from accelerate import Accelerator

    logging.getLogger("accelerate").setLevel(logging.ERROR)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = net(WIDTH)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, prepared = accelerator.prepare(plain, optimizer)

    def train(step: int) -> float:
        total = 0.0
        for half in range(2):
            with accelerator.accumulate(model):
                loss = loss_of(model, WIDTH, 10 * step + half)
                accelerator.backward(loss)
                prepared.step()
                prepared.zero_grad()
            total += loss.item()
        return total

    return Program(train=train, tracked={"model": model, "optimizer": optimizer if raw else prepared})


@case(GROUP, "accelerate: the prepared model and optimizer", needs=("accelerate",))
def accelerated(start: Start) -> Program:
    return _accelerated(start, raw=False)


@case(GROUP, "accelerate: the prepared model, the optimizer inside", needs=("accelerate",))
def accelerated_raw(start: Start) -> Program:
    return _accelerated(start, raw=True)


@case(GROUP, "transformers: a small GPT-2 with its cosine schedule", needs=("transformers",))
def gpt2(start: Start) -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 20)

    def train(step: int) -> float:
        words = torch.randint(0, 200, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer, "scheduler": scheduler})
