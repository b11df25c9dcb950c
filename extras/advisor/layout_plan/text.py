"""A plan for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashckpt.cli.common import human_bytes
from flashckpt.cli.quantity import show_s


def as_text(plan: dict[str, Any]) -> str:
    """Return a document of `plan_document` as text."""
    parts = [_head(plan), _memory(plan), _wire(plan), _step(plan), _failures(plan)]
    if plan["search"] is not None:
        parts.append(_search(plan["search"]))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(plan: dict[str, Any]) -> list[str]:
    model, gpu, layout = plan["model"], plan["gpu"], plan["layout"]
    active = f", {model['active_parameters']:,} active" if model["active_parameters"] != model["parameters"] else ""
    return [
        (
            f"{model['parameters']:,} parameters{active}; {model['flops_per_token'] / 1e9:,.3g} GFLOPs per token, "
            f"{model['hardware_flops_per_token'] / 1e9:,.3g} with what is computed again"
        ),
        (
            f"{plan['gpus']:,} x {gpu['name']}: {gpu['memory'] / 1e9:.0f} GB, {gpu['flops'] / 1e12:,.4g} TFLOPS, of which "
            f"products reach {plan['efficiency']['share']:.0%} ({plan['efficiency']['from']})"
        ),
        *_float8(plan["float8"], model["hardware_flops_per_token"]),
        f"{layout['text']}; micro-batch {layout['micro_batch']}, {layout['data_parallel']}, recompute {layout['recompute']}",
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
    return [
        (
            f"step of {step['tokens']:,} tokens: {show_s(one['seconds'])} ({show_s(step['lower']['seconds'])} to "
            f"{show_s(step['upper']['seconds'])}): compute {show_s(step['compute_s'])}, communication "
            f"{show_s(step['communication_s'])}, optimizer {show_s(step['optimizer_s'])}, bubble {plan['layout']['bubble']:.1%}"
        ),
        (
            f"  MFU {one['mfu']:.1%} ({step['upper']['mfu']:.1%} to {step['lower']['mfu']:.1%}), HFU {one['hfu']:.1%}, "
            f"{one['tokens_per_s']:,.0f} tokens/s"
        ),
        f"  {step['run_tokens']:.3g} tokens: {step['days']:,.3g} days, {step['gpu_hours']:,.0f} GPU hours",
    ]


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
            f"     {human_bytes(one['peak_bytes'])}, {show_s(one['step_s'])}, MFU {one['mfu']:.1%}: {_list(one['reasons'])}",
        ]
    lines += ["dropped:", *(f"  {count:5} {reason}" for reason, count in search["dropped"].items())]
    return [*lines, "", "the settings of the first:", "", *search["paste"].rstrip().splitlines()]


def _list(reasons: Sequence[str]) -> str:
    return "; ".join(reasons)
