"""Linear layers of the blocks in float8, by torchao: which is imported only where they are.

Scales are found in every product (dynamic scaling), so there is no state: parameters keep their names, their type and
their bits, and a checkpoint is that of a run without float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.float8.layers import float8_layers, needs_device, refuse_without_torchao, uses_float8
from flashckpt.trainer.model.transformer import Transformer

CAPABILITY = (8, 9)
ROCM_CAPABILITY = (9, 4)
"""The first devices with float8 products: Ada Lovelace, and MI300."""


def convert_layers(part: Transformer, config: RunConfig, tp: int, device: torch.device) -> None:
    """Let linear layers of the blocks compute in float8 where the run says so; the part is not yet cut over ranks.

    Raises:
        ConfigError: torchao is not installed, or the device has no float8 products and emulation is not asked for.
    """
    if not uses_float8(config):
        return
    refuse_without_torchao(config)
    _refuse_without_products(config, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.train.float8)
    settings, wanted = replace(recipe, emulate=config.train.float8_emulate), float8_layers(config.model, tp)
    for block in part.layers.values():
        convert_to_float8_training(block, config=settings, module_filter_fn=lambda _, name: name in wanted)
    part.split_layers()  # joint operators take the weights past their layers


def described_float8(config: RunConfig, parts: Sequence[nn.Module]) -> str:
    """Return which layers of a rank are computed in float8, for people; "" where none are."""
    if not uses_float8(config):
        return ""
    count = sum(type(module).__name__ == "Float8Linear" for part in parts for module in part.modules())
    how = ", emulated: nothing is faster" if config.train.float8_emulate else ""
    return f"float8: {count} linear layers of a rank, scaled {config.train.float8} by torchao{how}"


def _refuse_without_products(config: RunConfig, device: torch.device) -> None:
    if config.train.float8_emulate or device.type == "meta":
        return
    if device.type != "cuda":
        raise needs_device(f"a device of type {device.type}")
    api = torch.get_device_module(device)
    found = api.get_device_capability(device)
    if found < (ROCM_CAPABILITY if torch.version.hip else CAPABILITY):
        raise needs_device(f"{api.get_device_name(device)} of compute capability {found[0]}.{found[1]}")
