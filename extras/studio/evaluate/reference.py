"""An independent reference where it is installed: transformers' logits of the same weights."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.hub.families import tensors_of
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.model.initial import box
from flashckpt.trainer.model.transformer import Transformer

TOLERANCE = 1e-5
"""Of the largest logit, or of 1 where that is larger."""


@torch.no_grad()
def differ_from_transformers(config: RunConfig, part: nn.Module) -> float | None:
    """Return how far the logits of a model are from those of transformers, in float32 on the CPU.

    Args:
        config: The run.
        part: The whole model, all of it on this rank.

    Returns:
        The largest difference; None where transformers is not installed or has no such model.

    Raises:
        ConfigError: They differ by more than rounding.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        settings = to_hub(config.model, config.train.seq_len, "float32")
    except ConfigError:
        return None
    weights = {name: box(parameter)[1].detach().float().cpu() for name, parameter in part.named_parameters()}
    mine = Transformer(config.model, config.train.seq_len).eval()
    mine.load_state_dict(weights)
    tokens = torch.randint(0, config.model.vocab, (2, config.train.seq_len), generator=torch.Generator().manual_seed(1))
    found, wanted = mine(tokens), _theirs(config, settings, weights, tokens)
    far = float((found - wanted).abs().max())
    if not far <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise ConfigError(
            f"this model computes other logits than {settings['architectures'][0]} of transformers",
            found=f"they differ by {far:.2e}",
            expected=f"at most {TOLERANCE:.0e} of the largest",
            remedy="do not export it; try model.* changed one by one to find the part",
        )
    return far


def _theirs(config: RunConfig, settings: dict[str, object], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found, unused-ignore]  # where it is installed

    tensors = {}
    for one in tensors_of(config.model):
        whole = weights[one.ours]
        tensors[one.theirs] = (whole if one.expert is None else whole[one.expert]).contiguous().clone()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits: Tensor = model.eval()(tokens).logits
    return logits
