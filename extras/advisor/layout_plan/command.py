"""`python -m flashckpt.trainer plan --config FILE --gpus N --gpu NAME`. Torch-free, but for `--measure`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.cli.common import human_bytes
from flashckpt.commands.quantity import show_s
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.float8.layers import needs_device, uses_float8
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.plan.beyond import WORTH_DAYS, Sized, scaling
from flashckpt.trainer.plan.feedback import feedback
from flashckpt.trainer.plan.forecast import speed, step_time
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.options import PlanOptions, parse, refuse_without_effect
from flashckpt.trainer.plan.report import candidate, plan_document, refuse_misfit
from flashckpt.trainer.plan.search import Found, LayoutChoice, corrected, search
from flashckpt.trainer.train.metrics import TRACE, read_trace


def as_text(plan: dict[str, Any]) -> str:
    """Return a document of `plan_document` as text: a summary of 80 columns, then the parts behind it."""
    parts = [_summary(plan), _head(plan), _memory(plan), _wire(plan), _step(plan), _besides(plan), _failures(plan)]
    if plan["scaling"]:
        parts.append(_scaling(plan["scaling"]))
    if plan["search"] is not None:
        parts.append(_search(plan["search"]))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _summary(plan: dict[str, Any]) -> list[str]:
    step, held, run = plan["step"], plan["memory"], plan["run"]
    room = "fits" if held["fits"] else "DOES NOT FIT"
    peak = max(held["step_bytes"], held["restore_bytes"], held["start_bytes"])
    lines = [
        f"{plan['gpus']:,} x {plan['gpu']['name']}: {show_days(step['days'])} and {step['gpu_hours']:,.0f} GPU hours",
        f"for {step['run_tokens']:.3g} tokens; MFU {step['estimate']['mfu']:.1%}, {step['estimate']['tokens_per_s']:,.0f} tokens/s",
        f"{human_bytes(peak)} of {human_bytes(held['usable_bytes'])} per device: {room}",
        f"{run['gpu_days']:,.0f} GPU days; a thousand GPUs pay from {WORTH_DAYS:,}{'' if run['needs_thousand'] else ', so they do not'}",
    ]
    return lines + (_measured_lines(plan["measured"], plan["efficiency"]["share"]) if plan["measured"] else [])


def _measured_lines(found: dict[str, Any], planned: float) -> list[str]:
    lines = [
        f"planned MFU {found['planned_mfu']:.1%}, measured {found['mfu']:.1%} (median of {found['steps']:,} steps)"
    ]
    if found["efficiency"] is None:
        lines.append("no --efficiency makes the plan as slow or as fast: products are not what differs")
    else:
        lines.append(f"as measured: --efficiency {found['efficiency']:.2g} (planned: {planned:.2g})")
    return [*lines, *(f"to change: {text}" for text in found["change"])]


def show_days(days: float) -> str:
    """Return days, above a thousand years."""
    return f"{days:,.3g} days" if days < 1000 else f"{days / 365.25:,.1f} years"


def _head(plan: dict[str, Any]) -> list[str]:
    model, gpu, layout = plan["model"], plan["gpu"], plan["layout"]
    active = f", {model['active_parameters']:,} active" if model["active_parameters"] != model["parameters"] else ""
    saved = [f"zero {layout['zero']}"] if layout["zero"] >= 0 else []
    saved += [f"loss_chunk {layout['loss_chunk']}"] if layout["loss_chunk"] else []
    saved += [f"offload {layout['offload']}"] if layout["offload"] != "none" else []
    saved += ["activation_offload"] if layout["activation_offload"] else []
    return [
        f"{model['parameters']:,} parameters{active}",
        (
            f"{model['flops_per_token'] / 1e9:,.3g} GFLOPs per token, {model['hardware_flops_per_token'] / 1e9:,.3g} with what "
            f"is computed again; {plan['run']['flops']:.3g} in all"
        ),
        (
            f"{gpu['memory'] / 1e9:.0f} GB and {gpu['flops'] / 1e12:,.4g} TFLOPS each; products reach "
            f"{plan['efficiency']['share']:.0%} ({plan['efficiency']['from']})"
        ),
        *_float8(plan["float8"], model["hardware_flops_per_token"]),
        layout["text"],
        ", ".join(
            [
                f"micro-batch {layout['micro_batch']}",
                layout["data_parallel"],
                f"recompute {layout['recompute']}",
                *saved,
            ]
        ),
    ]


def _float8(float8: dict[str, float] | None, of: float) -> list[str]:
    if float8 is None:
        return []
    return [f"float8: {float8['flops_per_token'] / of:.0%} of these FLOPs, at {float8['rate'] / 1e12:,.4g} TFLOPS"]


def _memory(plan: dict[str, Any]) -> list[str]:
    held = plan["memory"]
    names = ("parameter", "gradient", "optimizer", "gathered", "activation")
    rows = ", ".join(f"{name} {human_bytes(held[f'{name}_bytes'])}" for name in names)
    on_host, moved = held["state_on_host_bytes"], held["activations_on_host_bytes"]
    room = "fits" if held["fits"] else "DOES NOT FIT"
    modes = ", ".join(f"{mode} {human_bytes(nbytes)}" for mode, nbytes in plan["activations"].items())
    stages = ", ".join(f"{one['stage']}: {human_bytes(one['bytes'])}" for one in plan["zero"])
    return [
        f"bytes on the fullest rank (pp {held['pp']}): {rows}" + ("; state in host memory" if on_host else ""),
        (
            f"  at start {human_bytes(held['start_bytes'])}, at restore {human_bytes(held['restore_bytes'])}, in a step "
            f"{human_bytes(held['step_bytes'])} of {human_bytes(held['usable_bytes'])} usable: {room}"
        ),
        f"  activations by recompute mode: {modes}",
        f"  states by ZeRO stage, at 16 bytes per parameter: {stages} (stage 3 sends 1.5 times as much)",
        (
            f"  host: {held['slots']} slots of {human_bytes(held['slot_bytes'])}, {human_bytes(held['host_node_bytes'])} per node"
            f"{', state included' if on_host else ''}{f', with {human_bytes(moved)} of activations' if moved else ''}; checkpoint {human_bytes(plan['checkpoint_bytes'])}"
        ),
    ]


def _wire(plan: dict[str, Any]) -> list[str]:
    lines = ["wire, sent by a rank per step:" if plan["wire"] else "wire: nothing, each rank works alone"]
    lines += [
        f"  {one['dimension']:<12} {human_bytes(one['sent']):>9}  {one['link']} at {human_bytes(one['rate'])}/s: "
        f"{show_s(one['seconds'])}"
        for one in plan["wire"]
    ]
    if plan["bubbles"]:
        idle = ", ".join(f"{name} {share:.1%}" for name, share in plan["bubbles"].items())
        lines.append(f"bubble by schedule: {idle}")
    return lines


def _step(plan: dict[str, Any]) -> list[str]:
    step = plan["step"]
    one = step["estimate"]
    host = f", host link {show_s(step['host_s'])}" if step["host_s"] else ""
    return [
        (
            f"step of {step['tokens']:,} tokens: {show_s(one['seconds'])} ({show_s(step['lower']['seconds'])} to "
            f"{show_s(step['upper']['seconds'])})"
        ),
        (
            f"  compute {show_s(step['compute_s'])}, of which products {show_s(step['products_s'])}; optimizer "
            f"{show_s(step['optimizer_s'])}{host}"
        ),
        (
            f"  communication {show_s(step['communication_s'])}, of which not hidden {show_s(step['exposed_s'])}; bubble "
            f"{plan['layout']['bubble']:.1%}, slowest rank {step['straggling'] - 1:.1%}"
        ),
        f"  MFU {one['mfu']:.1%} ({step['upper']['mfu']:.1%} to {step['lower']['mfu']:.1%}), HFU {one['hfu']:.1%}",
    ]


def _besides(plan: dict[str, Any]) -> list[str]:
    run, use = plan["run"], plan["run"]["inference"]
    parts = ", ".join(f"{one['part']} {one['flops_per_byte']:,.3g} ({one['bound']})" for one in run["intensity"])
    lines = [f"run: {run['flops']:.3g} FLOPs, {run['wire_bytes']:.3g} bytes sent by all ranks"]
    lines += [f"  {channel}: {count:,.3g} epochs of what is prepared" for channel, count in run["epochs"].items()]
    return [
        *lines,
        f"FLOPs per byte, where {run['ridge']:,.0f} are needed to be bound by computing: {parts}",
        (
            f"the trained model: {use['flops_per_token'] / 1e9:,.3g} GFLOPs per token, {human_bytes(use['weight_bytes'])} of 16-bit "
            f"weights on {use['gpus']} or more"
        ),
        (
            f"  keys and values {human_bytes(use['kv_bytes_per_token'])} per token, {human_bytes(use['kv_bytes_per_row'])} per row; "
            f"at most {use['tokens_per_s_alone']:,.3g} tokens/s for one reader on one"
        ),
        f"  by rule of thumb {human_bytes(run['rule_bytes'])}: 6 GB per 10^9 parameters",
    ]


def _scaling(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["   GPUs        step        days   GPU hours  speed-up  of ideal"]
    for one in rows:
        if "problem" in one:
            lines.append(f"{one['gpus']:>7,}  {one['problem']}")
        else:
            lines.append(
                f"{one['gpus']:>7,}  {show_s(one['step_s']):>10}  {one['days']:>10,.3g}  {one['gpu_hours']:>10,.0f}  "
                f"{one['speedup']:>8.2f}  {one['efficiency']:>8.0%}"
            )
    return lines


def _failures(plan: dict[str, Any]) -> list[str]:
    found = plan["failures"]
    return [
        (
            f"failures ({found['preset']}, one per {found['gpu_hours']:,.0f} GPU hours): {found['per_day']:.3g} a day, "
            f"one or more on {found['chance_of_one_in_a_day']:.1%} of the days"
        ),
        (
            f"  snapshot every {found['snapshot_every_steps']:,} steps ({show_s(found['snapshot_s'])}), persist every "
            f"{found['persist_every_steps']:,} ({show_s(found['persist_s'])}): goodput {found['goodput']:.2%}"
        ),
    ]


def _search(search: dict[str, Any]) -> list[str]:
    lines = [f"{search['fit']} layouts fit; the best:"]
    for number, one in enumerate(search["ranked"], 1):
        lines += [
            f"  {number}. {one['text']}; micro-batch {one['micro_batch']}, {one['data_parallel']}, recompute {one['recompute']}",
            f"     {human_bytes(one['peak_bytes'])}, {show_s(one['step_s'])}, MFU {one['mfu']:.1%}: {'; '.join(one['reasons'])}",
        ]
    lines += ["dropped:", *(f"  {count:5} {reason}" for reason, count in search["dropped"].items())]
    return [*lines, "", "the settings of the first:", "", *search["paste"].rstrip().splitlines()]


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
