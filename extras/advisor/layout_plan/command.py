"""`python -m flashckpt.trainer plan --config FILE --gpus N --gpu NAME`. Torch-free, but for `--measure`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.parallel.float8_layers import needs_device, uses_float8
from flashckpt.trainer.parallel.switches import with_precision
from flashckpt.trainer.plan.forecast import EFFICIENCY
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.options import PlanOptions, parse, refuse_without_effect
from flashckpt.trainer.plan.report import candidate, plan_document, refuse_misfit
from flashckpt.trainer.plan.search import Found, LayoutChoice, corrected, search
from flashckpt.trainer.plan.text import as_text


def plan(words: Sequence[str]) -> int:
    """Print a plan; return the exit code.

    Raises:
        ConfigError: An option or a setting is wrong, or the GPU is not known.
        LayoutError: The layout does not divide or does not fit, or `--search` finds none that does.
    """
    options, rest = parse(words)
    refuse_without_effect(options)
    config = read_config(options.config, rest)
    if config.init.from_:
        from flashckpt.trainer.hub.start import with_model_of_weights

        config = with_model_of_weights(config)
    config = with_precision(config, "cuda" if options.gpu.device else "cpu")
    one, document = make_plan(config, options)
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if options.json else as_text(document))
    refuse_misfit(one, options.gpu)
    return 0


def make_plan(config: RunConfig, options: PlanOptions) -> tuple[LayoutChoice, dict[str, Any]]:
    """Return the run that is described, the best one of a search, and the document; raises as `plan`."""
    refuse_plan(config, options.gpu, measures=options.measure)
    found: Found | None = None
    origin = "assumed" if options.efficiency == EFFICIENCY else "given"
    if options.search:
        found = search(
            config, options.gpus, options.gpu, ranks_per_node=options.ranks_per_node, efficiency=options.efficiency
        )
        if options.measure:
            found, origin = _measured(found, options)
        one = found.ranked[0]
    else:
        one = candidate(config, options)
        if options.measure:
            alone, origin = _measured(Found(ranked=(one,), dropped={}), options)
            one = alone.ranked[0]
    return one, plan_document(one, options, found, origin)


def _measured(found: Found, options: PlanOptions) -> tuple[Found, str]:
    """Return the first candidates again, each with the efficiency that two of its blocks reach on this machine."""
    from flashckpt.trainer.plan.measure import BlockTimer

    timer = BlockTimer(options.gpu)
    few = replace(found, ranked=found.ranked[: max(options.top, 1)])
    return corrected(few, options.gpu, options.ranks_per_node, timer.efficiency), f"measured on {timer.device_name}"


def refuse_plan(config: RunConfig, gpu: Gpu, *, measures: bool) -> None:
    """Raise ConfigError if a plan is for a GPU without the float8 products that a run asks for, or would time others."""
    if not uses_float8(config):
        return
    if gpu.device and not gpu.float8_flops and not config.train.float8_emulate:
        raise needs_device(gpu.device)
    if measures:
        raise ConfigError(
            "--measure does not time products in float8",
            found=f"train.float8 = {config.train.float8}",
            expected='train.float8 = "off", or a plan without --measure',
            state="Nothing was computed.",
        )
