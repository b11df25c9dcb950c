"""The plan as a person reads it: lines and tables for a terminal, and the picture. Pure but for the picture's file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from flashckpt.cli.quantity import as_setting, show_bytes, show_rate, show_s


def headline(plan: Mapping[str, Any]) -> list[str]:
    """Return the advice and where it comes from, line by line."""
    layout, state, costs, needs = plan["layout"], plan["state"], plan["costs"], plan["needs"]
    rules, chosen = plan["rules"], plan["intervals"]
    cut = f"tp {layout['tp']} x pp {layout['pp']} x dp {layout['dp']}, ZeRO {layout['zero']}"
    return [
        f"{plan['model']}: {state['parameters'] / 1e9:.2f}e9 parameters on {plan['gpus']:,} GPUs ({cut})",
        f"  checkpoint {show_bytes(state['checkpoint_bytes'])}, {show_bytes(state['rank_bytes'])} per rank",
        f"  one failure every {show_s(plan['mtbf_s'])}, {plan['storage_share']:.0%} of them take a node's memory along",
        "",
        (
            f"snapshot every {show_s(chosen['snapshot_s'])}{_steps(chosen)}, persist every {chosen['persist_every']}"
            f" snapshots ({show_s(chosen['persist_s'])})"
        ),
        f"  {_use(chosen)}",
        (
            f"  goodput {chosen['goodput']:.2%} = 100 % - stall {chosen['stall']:.2%} - recompute {chosen['recompute']:.2%}"
            f" - restart {chosen['restart']:.2%}; {plan['lost_gpu_hours_per_day']:,.0f} GPU-hours lost per day"
        ),
        (
            f"  rules of thumb for the snapshot: Young {show_s(rules['young_snapshot_s'])}, Daly"
            f" {show_s(rules['daly_snapshot_s'])}; not below {show_s(rules['shortest_snapshot_s'])} (staging, step)"
        ),
        (
            f"  and for the persist: Young {show_s(rules['young_persist_s'])}; not below"
            f" {show_s(rules['shortest_persist_s'])} (its duration and requests)"
        ),
        "",
        (
            f"costs: stall {show_s(costs['stall_s'])} per snapshot, restorable after {show_s(costs['staged_s'])}, durable"
            f" after {show_s(costs['persist_s'])}"
        ),
        (
            f"  of it {show_s(plan['coordination']['agree_s'])} until the nodes agree and"
            f" {show_s(plan['coordination']['commit_s'])} for the commit: {plan['coordination']['job_requests']:,} requests,"
            f" MANIFEST of {show_bytes(plan['coordination']['manifest_bytes'])} for {plan['state']['rank_rows']:,} tensors per rank"
        ),
        f"  restart {show_s(costs['restart_memory_s'])} from memory, {show_s(costs['restart_storage_s'])} from storage",
        (
            f"needs: {show_bytes(needs['host_memory_node_bytes'])} of host memory per node,"
            f" {show_bytes(needs['storage_bytes'])} of storage, {show_rate(needs['storage_bytes_per_s'])} to keep up"
        ),
    ]


def provenance(plan: Mapping[str, Any]) -> list[str]:
    """Return one line per rate: its value, and whether it was measured, given or assumed."""
    rates = dict(plan["rates"])
    sources = rates.pop("sources")
    lines = []
    for name, value in rates.items():
        if not math.isfinite(value):
            continue
        shown = _shown(name, value)
        lines.append(
            f"  {name.removesuffix('_bytes_per_s').removesuffix('_per_s').removesuffix('_s')}: {shown} {sources.get(name, 'assumed')}"
        )
    return lines + [f"  {name}: {show_s(plan['costs'][name])} given" for name in plan["given"]]


def _shown(name: str, value: float) -> str:
    if name == "requests_per_s":
        return f"{value:,.0f} per second"
    if name.endswith("bytes_per_s"):
        return show_rate(value)
    return show_s(value) if name.endswith("_s") else str(value)


def _use(chosen: Mapping[str, Any]) -> str:
    """Return the line of a program."""
    steps = f"snapshot_every={chosen['snapshot_steps']}, " if chosen.get("snapshot_steps") else ""
    return f'Checkpointer(root, {steps}persist_every="{as_setting(chosen["persist_s"])}")'


def _steps(choice: Mapping[str, Any]) -> str:
    return f" ({choice['snapshot_steps']:,} steps)" if choice.get("snapshot_steps") else ""


def size_table(plan: Mapping[str, Any]) -> Table:
    """Return the forecast at other sizes, each with its own best intervals."""
    table = Table(
        title="the same costs at other sizes", padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in (
        "GPUs",
        "MTBF",
        "snapshot",
        "persist",
        "agree+commit",
        "goodput",
        "stall",
        "recompute",
        "restart",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan["sizes"]:
        shares = [f"{row[name]:.2%}" for name in ("goodput", "stall", "recompute", "restart")]
        times = [show_s(row[name]) for name in ("mtbf_s", "snapshot_s", "persist_s", "coordination_s")]
        table.add_row(f"{row['gpus']:,}", *times, *shares)
    return table


def wall_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return at which size each cost becomes too much, with as many bytes per GPU."""
    return ["with as many bytes per GPU:"] + [
        f"  {one['wall']}: {'from ' + format(one['gpus'], ',') + ' GPUs on' if one['gpus'] else 'at no size up to 131,072 GPUs'}"
        for one in plan["walls"]
    ]


def wrong_table(plan: Mapping[str, Any]) -> Table:
    """Return what a wrong interval costs."""
    table = Table(
        title="goodput with the interval off by a factor",
        padding=(0, 1, 0, 0),
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for name in ("factor", "of the snapshots", "of the persists"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan["wrong_interval"]:
        table.add_row(f"{row['factor']:g}", f"{row['snapshot_goodput']:.2%}", f"{row['persist_goodput']:.2%}")
    return table


def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Draw goodput over the snapshot interval with the chosen point.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    from flashckpt.bench.plot import figure, finish

    drawing, axes = figure(f"{plan['model']} on {plan['gpus']:,} GPUs")
    seconds, goodput = zip(*plan["curve"], strict=True)
    axes.plot(seconds, [100 * value for value in goodput])
    chosen = plan["intervals"]
    axes.plot([chosen["snapshot_s"]], [100 * chosen["goodput"]], "o")
    axes.annotate(
        f"{show_s(chosen['snapshot_s'])}: {chosen['goodput']:.1%}",
        (chosen["snapshot_s"], 100 * chosen["goodput"]),
        textcoords="offset points",
        xytext=(0, -16),
        ha="center",
    )
    axes.set_xscale("log")
    axes.set_xlabel("seconds between snapshots")
    axes.set_ylabel("goodput, %")
    finish(drawing, path)
