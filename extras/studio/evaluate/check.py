"""`--check`: compares three steps in this layout with three in one process, on the same samples.

Where transformers is installed, the logits of the trained weights are compared with its own as well.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashckpt.environment import env
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.hub.families import tensors_of
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.model.initial import box
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.loop import Trainer, prepare
from flashckpt.trainer.train.metrics import StepRecord

STEPS = 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-2}
_OF_LOGITS = 1e-5
"""Of the largest logit, or of 1 where that is larger."""


@torch.no_grad()
def differ_from_transformers(config: RunConfig, part: nn.Module) -> float | None:
    """Return how far the logits of a model are from those of transformers, in float32 on the CPU.

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
    if not far <= _OF_LOGITS * max(1.0, float(wanted.abs().max())):
        raise ConfigError(
            f"this model computes other logits than {settings['architectures'][0]} of transformers",
            found=f"they differ by {far:.2e}",
            expected=f"at most {_OF_LOGITS:.0e} of the largest",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Largest difference of losses (nats per token) and of gradient norms over the steps.

    `logits` is how far they are from those of transformers after the steps; None where it could not be asked.
    """

    loss: float
    norm: float
    tolerance: float
    logits: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether both differences are rounding."""
        return self.loss <= self.tolerance and self.norm <= 10 * self.tolerance


def single_process(config: RunConfig) -> RunConfig:
    """Return the same run on one rank: same samples, same weights; dropout is off in both."""
    defaults = ParallelConfig()
    alone = replace(
        config.parallel,
        pp=1,
        dp_replicate=1,
        dp_shard=1,
        cp=1,
        cp_exchange=defaults.cp_exchange,
        ep=0,
        tp=1,
        layers_per_stage=(),
        data_parallel="fsdp",
        schedule=defaults.schedule,
        stages_per_rank=0,
        loss_parallel=False,
        zero=defaults.zero,
        bucket_mb=defaults.bucket_mb,
        offload=defaults.offload,
        sync_every=0,
        outer_rate=defaults.outer_rate,
        outer_momentum=defaults.outer_momentum,
    )
    return replace(config, parallel=alone)


def compare_records(mine: Sequence[StepRecord], wanted: Sequence[StepRecord], tolerance: float) -> CheckResult:
    """Return the difference of two runs; NaN counts as infinite."""
    pairs = list(zip(mine, wanted, strict=True))

    def far(a: float, b: float) -> float:
        return abs(a - b) if a == a and b == b else float("inf")  # noqa: PLR0124 -- the test for NaN

    return CheckResult(
        loss=max(far(a.loss, b.loss) for a, b in pairs),
        norm=max(far(a.norm, b.norm) for a, b in pairs),
        tolerance=tolerance,
    )


def check(config: RunConfig) -> CheckResult | None:
    """Train three steps in the layout, then three alone on rank 0; return the comparison there, None elsewhere.

    Raises:
        LayoutError: they differ by more than rounding.
        ConfigError: transformers is installed and computes other logits with these weights.
    """
    # a number that is rounded to float8 otherwise is off by a sixteenth: no measure for a layout
    config = replace(config, model=replace(config.model, dropout=0.0), train=replace(config.train, float8="off"))
    config = replace(config, parallel=replace(config.parallel, reduce_dtype="float32"))
    layout = prepare(config, env.WORLD_SIZE)
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        precision = trainer.config.train.precision
        trainer.initialise()
        mine = [trainer.one_step() for _ in range(STEPS)]
        trainer.data.close()
        is_first = dist.get_rank() == 0
        del trainer
    if not is_first:
        return None
    if dist.is_initialized():  # a group that the caller created: the reference needs its own
        dist.destroy_process_group()
    alone = single_process(config)
    with process_group(alone, alone=True) as device:
        reference = Trainer(alone, resolve_layout(alone, 1), device)
        reference.initialise()
        wanted = [reference.one_step() for _ in range(STEPS)]
        reference.data.close()
        logits = differ_from_transformers(alone, reference.parallel.parts[0])
    result = replace(compare_records(mine, wanted, TOLERANCE[precision]), logits=logits)
    if not result.agrees:
        raise LayoutError(
            f"this layout does not train as one process does ({layout.describe()})",
            found=f"losses differ by {result.loss:.2e}, gradient norms by {result.norm:.2e} within {STEPS} steps",
            expected=f"at most {result.tolerance:.0e}",
            remedy="do not use this layout; change parallel.* one by one to find the cause",
        )
    return result
