"""`python -m flashckpt.trainer plan --config FILE --gpus N --gpu NAME`. Torch-free, but for `--measure`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.parallel.float8_layers import needs_device, uses_float8
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.plan.beyond import Sized, scaling
from flashckpt.trainer.plan.feedback import feedback
from flashckpt.trainer.plan.forecast import speed, step_time
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.options import PlanOptions, parse, refuse_without_effect
from flashckpt.trainer.plan.report import candidate, plan_document, refuse_misfit
from flashckpt.trainer.plan.search import Found, LayoutChoice, corrected, search
from flashckpt.trainer.plan.text import as_text
from flashckpt.trainer.train.metrics import TRACE, read_trace


def plan(words: Sequence[str]) -> int:
    """Print a plan; return the exit code.

    Raises:
        ConfigError: An option or a setting is wrong, or the GPU is not known.
        LayoutError: The layout does not divide or does not fit, or `--search` finds none that does.
    """
    options, rest = parse(words)
    refuse_without_effect(options)
    config = read_config(options.config, rest)
    if options.config is None and config.checkpoint.root:
        from flashckpt.trainer.hub.root_alone import is_root_alone, recorded_on_root

        if is_root_alone(config):
            config = read_config(None, rest, recorded=recorded_on_root(config))
    if config.init.from_:
        from flashckpt.trainer.hub.start import with_model_of_weights

        config = with_model_of_weights(config)
    config = on_device(config, "cuda" if options.gpu.device else "cpu")
    one, document = make_plan(config, options)
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if options.json else as_text(document))
    refuse_misfit(one, options.gpu)
    return 0


def make_plan(config: RunConfig, options: PlanOptions) -> tuple[LayoutChoice, dict[str, Any]]:
    """Return the run that is described, the best one of a search, and the document; raises as `plan`."""
    refuse_plan(config, options.gpu, measures=options.measure)
    origin = "given" if options.efficiency else "fitted to published runs"
    one, found = _planned(config, options)
    if options.measure:
        few, origin = _measured(found or Found(ranked=(one,), dropped={}), options)
        one, found = few.ranked[0], few if found else None
    document = plan_document(one, options, found, origin)
    run = (document["step"]["run_tokens"], document["failures"]["goodput"])
    document["scaling"] = scaling(list(_sizes(config, options, one)), run) if len(options.sizes) > 1 else []
    document["measured"] = _compared(one, options) if options.measured else None
    return one, document


def _planned(config: RunConfig, options: PlanOptions) -> tuple[LayoutChoice, Found | None]:
    if not options.search:
        return candidate(config, options), None
    found = search(
        config, options.gpus, options.gpu, ranks_per_node=options.ranks_per_node, efficiency=options.efficiency
    )
    return found.ranked[0], found


def _sizes(config: RunConfig, options: PlanOptions, first: LayoutChoice) -> Iterator[Sized]:
    """Yield the run on each number of GPUs, or why there is none."""
    yield options.gpus, (first.config, first.time)
    for gpus in options.sizes[1:]:
        try:
            one, _ = _planned(config, replace(options, gpus=gpus))
            refuse_misfit(one, options.gpu)
        except LayoutError as error:
            yield gpus, error
        else:
            yield gpus, (one.config, one.time)


def _compared(one: LayoutChoice, options: PlanOptions) -> dict[str, Any]:
    gpu = options.gpu

    def seconds(efficiency: float) -> float:
        per_node = options.ranks_per_node
        time = step_time(one.config, one.layout, gpu, one.memory, ranks_per_node=per_node, efficiency=efficiency)
        return time.estimate_s

    def share(step_s: float) -> float:
        return speed(one.config, one.time, gpu, one.layout.world, step_s).mfu

    path = Path(options.measured, TRACE)
    planned = one.time.peak_s / one.time.products_s
    return feedback(read_trace(path), one.config, one.memory, gpu=gpu, seconds=seconds, mfu=share, planned=planned)


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
