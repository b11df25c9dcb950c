"""`flashckpt plan`: intervals and goodput from measured or assumed costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from flashckpt.bench.layouts import DEFAULTS
from flashckpt.cli.common import console, json_file_option
from flashckpt.commands.quantity import DURATION, SHARE, SIZE, as_setting, show_bytes, show_rate, show_s
from flashckpt.errors import ConfigError
from flashckpt.plan.model import Costs
from flashckpt.printable import to_json


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


_LIMIT_GPUS = 10_000_000


@click.command("plan", context_settings={"show_default": True})
@click.option("--gpus", type=int, required=True, help="GPUs of the job (one rank each).")
@click.option("--layout", "name", type=click.Choice(sorted(DEFAULTS)), required=True, help="Model; sets tp, pp, ZeRO.")
@click.option("--tp", type=int, help="Tensor-parallel ranks instead of the layout's.")
@click.option("--pp", type=int, help="Pipeline stages instead of the layout's.")
@click.option("--zero", type=click.Choice(["0", "1", "3"]), help="ZeRO stage instead of the layout's.")
@click.option("--rows", type=click.IntRange(min=1), help="Tensors of a rank instead of the layout's.")
@click.option("--mtbf", type=DURATION, default="50677h", help="Mean time between failures per GPU.")
@click.option("--storage-share", type=SHARE, default="0.525", help="Failures that lose a node's memory.")
@click.option("--from", "bench", type=click.Path(path_type=Path), multiple=True, help="JSON of `flashckpt bench`.")
@click.option("--gpus-per-node", type=int, default=8, help="Ranks that share one node's memory and network.")
@click.option("--step-time", type=DURATION, help="Seconds per step: intervals become whole steps.")
@click.option("--relaunch", type=DURATION, default="60s", help="Restart without the restore, same nodes.")
@click.option(
    "--replace", "replace_s", type=DURATION, default="600s", help="Restart without the restore, one node replaced."
)
@click.option("--write-rate", type=SIZE, help="Durable bytes per second and node, instead of measured or assumed.")
@click.option("--read-rate", type=SIZE, help="Bytes read per second and node.")
@click.option("--storage-rate", type=SIZE, help="Bytes per second of the shared storage for all nodes together.")
@click.option("--copy-rate", type=SIZE, help="Bytes per second and rank into host memory.")
@click.option("--request-time", type=DURATION, help="Seconds of a small request to the shared storage.")
@click.option("--request-rate", type=click.FloatRange(min=1), help="Requests per second that it answers, of all nodes.")
@click.option("--stall", "stall_s", type=DURATION, help="Stall per snapshot, instead of the one from the rates.")
@click.option("--persist", "persist_s", type=DURATION, help="Seconds from the snapshot to the commit.")
@click.option("--restart-memory", "restart_memory_s", type=DURATION, help="Failure to first step, from memory.")
@click.option("--restart-storage", "restart_storage_s", type=DURATION, help="Failure to first step, from storage.")
@click.option("--slots", type=int, default=3, help="Snapshots per rank in host memory.")
@click.option("--keep-last", type=int, default=3, help="Checkpoints kept on storage.")
@json_file_option
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw goodput over the interval.")
def plan(**options: Any) -> None:
    """Say how often to snapshot and to persist, and what failures will cost.

    \b
        flashckpt plan --gpus 16384 --mtbf 50000h --layout llama3-405b
        flashckpt plan --gpus 64 --layout llama3-70b --from bench.json --plot goodput.png
    """  # noqa: D301 -- \b is click's mark for a block that is not wrapped
    _refuse_absurd(options)
    from flashckpt.bench.plot import refuse_picture_without
    from flashckpt.plan.report import plan_document

    if options["plot_path"] is not None:
        refuse_picture_without(options["plot_path"])
    given = {name: options[name] for name in (f.name for f in fields(Costs)) if options.get(name) is not None}
    document = plan_document(_request(options), _rates(options), given)
    _show(document, options["json_path"])
    if options["plot_path"] is not None:
        draw(document, options["plot_path"])


def _refuse_absurd(options: dict[str, Any]) -> None:
    for name in ("gpus", "gpus_per_node", "slots", "keep_last", "tp", "pp"):
        value = options[name]
        if value is not None and not 1 <= value <= _LIMIT_GPUS:
            raise ConfigError(
                f"--{name.replace('_', '-')} is out of range", found=f"{value:,}", expected=f"1 to {_LIMIT_GPUS:,}"
            )
    if options["slots"] < 2:
        raise ConfigError("--slots is out of range", found="1", expected="2 or more: one is written while one is kept")


def _request(options: dict[str, Any]) -> Any:
    from flashckpt.plan.report import PlanRequest

    layout = DEFAULTS[options["name"]]
    changes: dict[str, Any] = {key: int(options[key]) for key in ("tp", "pp", "zero") if options[key] is not None}
    return PlanRequest(
        layout=replace(layout, **changes),
        gpus=options["gpus"],
        gpus_per_node=options["gpus_per_node"],
        gpu_mtbf_s=options["mtbf"],
        storage_share=options["storage_share"],
        relaunch_s=options["relaunch"],
        replace_s=options["replace_s"],
        step_s=options["step_time"] or 0.0,
        slots=options["slots"],
        keep_last=options["keep_last"],
        rows=options["rows"],
    )


def _rates(options: dict[str, Any]) -> Any:
    """Return assumed rates, overridden by benchmark results in their order, and by what was given last."""
    from flashckpt.bench.measure import read_json
    from flashckpt.plan.report import Rates, measured_rates

    rates = Rates()
    for path in options["bench"]:
        rates = measured_rates(read_json(path), rates)
    given = {f"{kind}_bytes_per_s": options[f"{kind}_rate"] for kind in ("write", "read", "copy", "storage")}
    given = {name: float(value) for name, value in given.items() if value is not None}
    if options["request_time"] is not None:
        given["request_s"] = options["request_time"]
    if options["request_rate"] is not None:
        given["requests_per_s"] = options["request_rate"]
    return replace(rates, **given, sources={**rates.sources, **dict.fromkeys(given, "given")})


def _show(document: dict[str, Any], json_path: Path | None) -> None:
    from flashckpt.bench.measure import plain as without_nan
    from flashckpt.bench.measure import write_json

    if json_path is not None and str(json_path) == "-":
        click.echo(to_json(without_nan(document), indent=1))
        return
    if json_path is not None:
        write_json(json_path, document)
    out = console()
    for line in headline(document):
        out.print(line, markup=False)
    out.print("rates:")
    for line in provenance(document):
        out.print(line, markup=False)
    out.print(size_table(document))
    for line in wall_lines(document):
        out.print(line, markup=False)
    out.print(wrong_table(document))
