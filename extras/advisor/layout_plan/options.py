"""The options of `plan`. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import click

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.command_line import parsed
from flashckpt.trainer.plan.failures import gpu_hours
from flashckpt.trainer.plan.gpus import GPUS, Gpu, find_gpu

_SUFFIX = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_FIGURES = {
    "gpu_memory": ("memory", 1e9, "GB of a device"),
    "gpu_flops": ("flops", 1e12, "TFLOPS of a device, dense bfloat16"),
    "gpu_float8_flops": ("float8_flops", 1e12, "TFLOPS of a device, dense float8"),
    "memory_rate": ("memory_rate", 1e9, "GB/s of a device's memory"),
    "node_link": ("node_link", 1e9, "GB/s between devices of a node, one direction"),
    "network": ("network", 1e9, "GB/s of a device to other nodes, one direction"),
}
_LIMIT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is asked of a plan.

    Attributes:
        config: Path of the run's file; None for the defaults.
        gpus: How many, the first of `sizes`.
        sizes: To compare.
        gpu: What each can do.
        ranks_per_node: GPUs that share a node.
        efficiency: Share of the peak that products reach; 0: the device's.
        tokens: To train; 0: what the run trains.
        failures: As it was given; `gpu_hours` of it.
        measured: Folder of a run's log that the plan is compared with; "": none.
        search, measure, json: Switches.
        top: Candidates that are shown.
    """

    config: str | None
    gpus: int
    sizes: tuple[int, ...]
    gpu: Gpu
    ranks_per_node: int
    efficiency: float
    tokens: float
    failures: str
    measured: str
    search: bool
    measure: bool
    json: bool
    top: int


def parse(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Return the options of a command line, and the words that override settings.

    Raises:
        ConfigError: An option is missing, unknown or out of range; the GPU is not known.
    """
    with parsed(_COMMAND, words) as context:
        found, rest = dict(context.params), context.args
    given = {name: found.pop(name) for name in _FIGURES}
    figures = {_FIGURES[name][0]: number * _FIGURES[name][1] for name, number in given.items() if number}
    gpu_hours(found["failures"])
    sizes = found.pop("gpus")
    found |= {"gpus": sizes[0], "sizes": sizes}
    ranks_per_node = min(found.pop("ranks_per_node"), found["gpus"])
    found |= {name: found[name] or 0.0 for name in ("tokens", "efficiency")}
    return PlanOptions(**found | {"gpu": find_gpu(found["gpu"], **figures), "ranks_per_node": ranks_per_node}), rest


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _LIMIT:
        raise click.BadParameter(f"{text!r} is not a number from 1 to {_LIMIT:,}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_count(one) for one in text.split(",")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise click.BadParameter(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise click.BadParameter(f"{text!r} is not a share above 0, up to 1")
    return value


def _tokens(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]{1,2})?)([KMGBT]?)", text)
    try:
        value = float(found[1]) * _SUFFIX[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if value < 1:
        raise click.BadParameter(f"{text!r} is not a number of tokens, such as 300e9 or 15T")
    return value


_COMMAND = click.Command(
    "plan",
    help="Say what a run needs and how long it takes on so many GPUs, by arithmetic; settings as --section.key VALUE.",
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": ["-h", "--help"],
    },
    params=[
        click.Option(["--config"], metavar="FILE.toml", help="the run; every setting has a default"),
        click.Option(["--gpus"], type=_counts, required=True, metavar="N,...", help="how many GPUs; more are compared"),
        click.Option(["--gpu"], required=True, metavar="NAME", help=" | ".join(GPUS)),
        click.Option(["--ranks-per-node"], type=_count, default="8", metavar="N", help="GPUs of a node (8)"),
        *(
            click.Option([f"--{name.replace('_', '-')}"], type=_positive, metavar="X", help=f"{what}, not the table's")
            for name, (_, _, what) in _FIGURES.items()
        ),
        click.Option(
            ["--efficiency"], type=_share, metavar="X",
            help="share of the peak that products reach; else one that is fitted to published runs",
        ),
        click.Option(
            ["--tokens"], type=_tokens, metavar="N", help="days to so many: 300e9, 15T; else the run's"
        ),
        click.Option(
            ["--failures"], default="llama3", metavar="PRESET",
            help="llama3 | 8-percent-month | hours per GPU, as 50000h",
        ),
        click.Option(
            ["--measured"], default="", metavar="FOLDER", help="compare with the log of a run, finished or not"
        ),
        click.Option(["--search"], is_flag=True, help="try layouts, and rank those that fit"),
        click.Option(["--top"], type=_count, default="5", metavar="N", help="how many of them to show (5)"),
        click.Option(["--measure"], is_flag=True, help="time two blocks per candidate on this machine"),
        click.Option(["--json"], is_flag=True, help="print one JSON document"),
    ],
)  # fmt: skip


def refuse_without_effect(options: PlanOptions) -> None:
    """Raise ConfigError for an option that would do nothing."""
    if options.top != 5 and not options.search:
        raise ConfigError(
            "--top has no effect without --search", found=f"--top {options.top}", expected="--search --top N",
            state="Nothing was computed.",
        )  # fmt: skip
