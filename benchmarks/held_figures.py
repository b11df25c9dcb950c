"""The figures that README and the pages of benchmarks print: where each stands, its JSON, and what measures it again. Data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Ends = tuple[float, float, float]
"""Median, least and most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure.

    Attributes:
        name: Short.
        page: That prints it.
        words: How, each figure as "{PLACE:FORMAT}": a source by its place, see `Said`.
        sources: Paths into the results of the JSON, see `found`.
        published: The JSON, below benchmarks/results.
        program: Of benchmarks/, with the words that measure it again; none where that needs what is not on every machine.
        quick: Words that replace those, for a look.
        limit_s: After which it is not waited for any more.
        top: Path to what is compared.
        bottom: To what that is divided by; "" where it is a ratio already.
        depends: What it depends on, said where it does not hold; or what measuring it needs.
    """

    name: str
    page: str
    words: str
    sources: tuple[str, ...]
    published: str
    program: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    limit_s: float = 240.0
    top: str = ""
    bottom: str = ""
    depends: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Lines of a page that a command prints again anywhere, for it only calculates.

    Attributes:
        page: That has them.
        command: The words of a line that starts it: flashckpt, or a module of Python's.
        lines: As the page has them.
    """

    page: str
    command: tuple[str, ...]
    lines: tuple[str, ...]


class Said:
    """A summary as pages print it: "{0:.2f}" the median, ".2f s" with its unit, "*" before it bold, "~" behind it with its spread.

    The unit "ms" makes milliseconds of seconds, "%" percent of a share.
    """

    def __init__(self, ends: Ends) -> None:
        self.ends = ends

    def __format__(self, spec: str) -> str:
        matched = re.fullmatch(r"(\*?)(,?\.\df)( ?[a-zA-Z%]*)(~?)", spec)
        if matched is None:
            raise ValueError(f"{spec!r} is no format of a figure")
        bold, digits, unit, spread = matched.groups()
        times = {"ms": 1e3, "%": 100}.get(unit.strip(), 1)
        middle, low, high = (format(one * times, digits) for one in self.ends)
        said = f"**{middle}{unit}**" if bold else f"{middle}{unit}"
        return f"{said} [{low}-{high}]" if spread else said


def ends_of(values: Any) -> Ends:
    """Return the ends of a summary, of one number, or of numbers.

    Raises:
        KeyError: It is none of these.
    """
    if isinstance(values, Mapping) and "median" in values:
        return values["median"], values["min"], values["max"]
    if isinstance(values, (int, float)):
        return values, values, values
    if isinstance(values, list) and values:
        ordered = sorted(values)
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2, ordered[0], ordered[-1]
    raise KeyError(f"no figure: {str(values)[:80]}")


def found(results: Any, path: str) -> Ends:
    """Return what is at a path, keys by "/" without spaces: "{gb}" is whichever size was measured first, "*" all of a list."""
    here: Any = results
    keys = re.split("(?<! )/(?! )", path)
    for place, key in enumerate(keys):
        if key == "*":
            rest = "/".join(keys[place + 1 :])
            return ends_of([found(one, rest)[0] for one in here])
        if isinstance(here, list):
            here = here[int(key)]
        elif "{gb}" in key:
            before, _, after = key.partition("{gb}")
            here = next(here[name] for name in here if name.startswith(before) and name.endswith(after))
        else:
            here = here[key]
    return ends_of(here)


def ratio(results: Any, figure: Figure) -> Ends:
    """Return median, least and most of a figure in one run; a quotient is as wide as both of its parts."""
    top = found(results, figure.top)
    if not figure.bottom:
        return top
    bottom = found(results, figure.bottom)
    ends = [high / low for high in top[1:] for low in bottom[1:]]
    return top[0] / bottom[0], min(ends), max(ends)


def said(results: Any, figure: Figure) -> str:
    """Return the words that a page should have, made of its JSON."""
    return figure.words.format(*(Said(found(results, source)) for source in figure.sources))


_RESTART = "summary/{}/restart/total"
_STALL = "{{gb}} GB, {}/groups/0/methods/{}/x_memcpy/lost_s"
_LOADED = "a busy machine: other work on its cores makes both longer, and not by the same factor"
_SAVE, _RAW = "save, {gb} GB/seconds/", "save, {gb} GB/x_raw/"
_RESTORE = "restore, {gb} GB/seconds/"
_H200 = "series/{}/0/lost_s"
MEASURED = "README.md"
OWN = "benchmarks/README.md"
FIGURES = (
    Figure(
        name="restart, 1 MB", page=MEASURED, words="| {0:*.2f s~} | {1:.1f s~}, torchrun |",
        sources=(_RESTART.format("dlrun"), _RESTART.format("torchrun")),
        published="2026-11-25/restart-1mb.json", program=("restart.py", "--state-mb", "1", "--runs", "2"),
        quick=("restart.py", "--state-mb", "1", "--runs", "1", "--kills", "2"),
        top=_RESTART.format("dlrun"), bottom=_RESTART.format("torchrun"), depends=_LOADED,
    ),
    Figure(
        name="restart, in short", page=MEASURED, words="{0:.2f s} from SIGKILL to the next step, where torchrun needs {1:.1f s}",
        sources=(_RESTART.format("dlrun"), _RESTART.format("torchrun")),
        published="2026-11-25/restart-1mb.json", depends="the row above",
    ),
    Figure(
        name="committed", page=MEASURED,
        words="x a raw write ({3:.2f s}) | {0:*.2f~} | {1:.2f~}, safetensors; {2:.2f~}, dcp.async_save |",
        sources=(_RAW + "flashckpt, committed", _RAW + "safetensors", _RAW + "dcp.async_save", _SAVE + "raw"),
        published="2026-11-25/end-to-end.json", program=("end_to_end.py", "--gb", "1.08", "--seconds", "40"),
        quick=("end_to_end.py", "--gb", "0.27", "--rounds", "3"), top=_RAW + "flashckpt, committed",
        depends=(
            "free cores and the disk. The raw write takes 4 threads and one file; where a disk has more to give to two files"
            " written at once, flashckpt is below 1. It hashes while it writes, so that on a busy machine (1.34 to 1.9 x on"
            " another EPYC) cores are what is missing, and quiet on that machine it was 1.00"
        ),
    ),
    Figure(
        name="lost per snapshot", page=MEASURED, words="x a memcpy ({2:.0f ms}) | {0:*.2f~} | {1:.2f~}, a blocking copy |",
        sources=(
            _STALL.format("1 rank", "flashckpt"), _STALL.format("1 rank", "blocking copy"),
            "{gb} GB, 1 rank/groups/0/memcpy_s",
        ),
        published="2026-11-25/stall-1.5-1ranks.json",
        program=("stall.py", "--gb", "1.5", "--ranks", "1", "--methods", "flashckpt,blocking", "--seconds", "25"),
        quick=("stall.py", "--gb", "0.5", "--ranks", "1", "--methods", "flashckpt,blocking", "--seconds", "5"),
        top=_STALL.format("1 rank", "flashckpt"), depends="a core that is free beside training: the copy is made by a thread",
    ),
    Figure(
        name="restored from disk", page=MEASURED, words="| {0:.2f s~} | {1:*.2f s~}, safetensors (unverified) |",
        sources=(_RESTORE + "flashckpt, storage", _RESTORE + "safetensors"),
        published="2026-11-25/end-to-end-restore.json", program=("end_to_end.py", "--restore", "--gb", "1.5", "--seconds", "40"),
        quick=("end_to_end.py", "--restore", "--gb", "0.3", "--rounds", "1"),
        top=_RESTORE + "flashckpt, storage", bottom=_RESTORE + "safetensors",
        depends="how long imports take beside the read: half of it is Python's start",
    ),
    Figure(
        name="lost per snapshot, no core free", page=MEASURED, words="| {0:.2f~} | {1:*.2f~}, a blocking copy |",
        sources=(_STALL.format("4 ranks", "flashckpt"), _STALL.format("4 ranks", "blocking copy")),
        published="2026-11-25/stall-0.2.json",
        program=("stall.py", "--gb", "0.2", "--ranks", "4", "--methods", "flashckpt,blocking", "--seconds", "12"),
        top=_STALL.format("4 ranks", "flashckpt"), depends="what else wants the two cores: four ranks do already",
    ),
    Figure(
        name="restart, 1.5 GB", page=MEASURED, words="| {0:*.2f s~} | {1:.2f s~}, torchrun and torch.load |",
        sources=(_RESTART.format("dlrun"), _RESTART.format("torchrun")),
        published="2026-11-25/restart-1500mb.json", program=("restart.py", "--state-mb", "1500", "--runs", "2"),
        quick=("restart.py", "--state-mb", "1500", "--runs", "1", "--kills", "1"),
        top=_RESTART.format("dlrun"), bottom=_RESTART.format("torchrun"), depends=_LOADED,
    ),
    Figure(
        name="the trainer", page=MEASURED, words="| {0:*.2f~} x | nanoGPT as large",
        sources=("layouts/1/ratios/flashckpt / nanoGPT as large/tokens_per_cpu_s",), published="2026-11-25/trainer-speed.json",
        depends=f"trainer_speed.py needs nanoGPT's code: {OWN}, The trainer",
    ),
    Figure(
        name="one H200", page=MEASURED,
        words=(
            "a step of {0:.2f s} longer by **{1:.0f ms}**, a blocking copy by {2:.0f ms}, to files dcp.async_save by"
            " {3:.1f s} and torch.save by {4:.1f s}"
        ),
        sources=(
            "series/flashckpt/0/quiet_s", _H200.format("flashckpt"), _H200.format("blocking pinned copy"),
            _H200.format("dcp.async_save pinned"), _H200.format("torch.save"),
        ),
        published="2026-11-26/gpu-h200-8gb.json", depends="`make gpu` on a GPU",
    ),
    Figure(
        name="the training of the race", page=MEASURED, words="a training of {0:.1f s} (two ranks", sources=("unbroken_s/loop",),
        published="2026-11-27/race.json", depends="make race",
    ),
    Figure(
        name="first start", page="benchmarks/results/measured.md",
        words="| torch | {0:.2f s~} | {1:.2f~} | 6.95 [6.27-6.98], 2.96 x python | {2:*.2f~}, {3:.2f} x python |",
        sources=("torch/seconds/python", "torch/seconds/torchrun", "torch/seconds/dlrun", "torch/x_python/dlrun"),
        published="2026-11-26/first-start.json", program=("first_start.py", "--rounds", "4"), quick=("first_start.py", "--rounds", "2"),
        top="torch/x_python/dlrun", depends=_LOADED,
    ),
    Figure(
        name="CPU of a persist", page=OWN, words="| {0:.2f} | {1:*.2f} | 2.79: the digest alone is {2:.2f} |",
        sources=("ratios/mapped_each_time", "ratios/persist", "ratios/digest"), published="2026-11-26/persist-cpu.json",
        program=("persist_cpu.py",), quick=("persist_cpu.py", "--rounds", "3"), top="rounds/persist/*/cpu_s_per_gb",
        bottom="rounds/raw/*/cpu_s_per_gb", depends="what the kernel takes for a bare O_DIRECT write: the less, the higher",
    ),
    Figure(
        name="no snapshot while two slots persist", page=OWN,
        words="| {0:.2f s} | {1:*.2f s} | {2:.2f s}; three slots: {3:.2f s} |",
        sources=(
            "medians/two, kept until the commit/gap_s", "medians/two, given back/gap_s", "medians/two, given back/durable_s",
            "medians/three/gap_s",
        ),
        published="2026-11-26/two-slots.json", program=("two_slots.py",), quick=("two_slots.py", "--rounds", "1"),
        top="rounds/two, given back/*/gap_s", bottom="rounds/two, given back/*/durable_s", depends=_LOADED,
    ),
    Figure(
        name="huge pages", page=OWN, words="| {1:.2f~} | {0:*.2f~} | |", sources=("huge/*/ratio", "4 KiB/*/ratio"),
        published="2026-11-26/huge-pages.json", depends="huge_pages.py needs a tmpfs with huge pages (root)",
    ),
    Figure(
        name="the first batch, kept", page=OWN, words="| {1:.2f} | {2:.2f~} | {0:.2f~} | {3:.2f} |",
        sources=("kept/seconds/step", "kept/seconds/restart", "kept/seconds/batch", "kept/seconds/resized"),
        published="2026-11-26/first-batch.json", program=("first_batch.py", "--rounds", "2", "--ranks", "1"),
        quick=("first_batch.py", "--rounds", "1", "--ranks", "1"), top="kept/seconds/step", bottom="plain/seconds/step",
        depends=_LOADED,
    ),
    Figure(
        name="the first batch, not kept", page=OWN, words="| {1:.2f} | {2:.2f~} | {0:.2f~} | {3:.2f} |",
        sources=("plain/seconds/step", "plain/seconds/restart", "plain/seconds/batch", "plain/seconds/resized"),
        published="2026-11-26/first-batch.json", depends="the row above",
    ),
    Figure(
        name="resuming a sampler", page=OWN, words="**{0:.4f s} of CPU, under 1 MB**; torch and torchdata {1:.0f s} and 4.8 GB",
        sources=("start_up/5/cpu_s", "start_up/15/cpu_s"), published="sampler.json", depends="sampler.py: 5 GB of memory",
    ),
    Figure(
        name="resuming a sampler, in a decision", page="docs/decisions/data.md", words="resuming at 90 % of 10^8 takes {0:.4f s}",
        sources=("start_up/5/cpu_s",), published="sampler.json", depends="sampler.py: 5 GB of memory",
    ),
    *(
        Figure(
            name=f"{cost}, by nodes", page="docs/scale.md", words=f"{words} |", sources=tuple(f"cost/{cost}/{n}" for n in (0, 2, 4)),
            published="scale.json", depends="scale.py counts",
        )
        for cost, words in (
            ("root requests of the job per idle minute, modelled", "per minute, modelled | {0:.1f} | {1:.0f} | {2:,.0f}"),
            ("the same where no ranks run, modelled", "its memory waits | {0:.0f} | {1:,.0f} | {2:,.0f}"),
            ("root requests of a commit", "to the root in a commit | {0:.0f} | {1:.0f} | {2:,.0f}"),
        )
    ),
    Figure(
        name="a commit by tensors per rank", page="docs/scale.md",
        words="CPU seconds, MB of memory of a commit | {0:.2f}, {1:.0f} (4.2) | {2:.1f}, {3:.0f} (16, 3,300) | {4:.1f}, {5:.0f} |",
        sources=tuple(
            f"cost/{ranks} ranks x 2169 rows/{what} of a commit" for ranks in (1024, 4096, 16384) for what in ("CPU s", "peak MB")
        ),
        published="2026-11-26/scale-indexes.json", depends="scale_rows.py",
    ),
)  # fmt: skip
PRINTED = (
    Printed(
        page=OWN, command=("flashckpt", "plan", "--gpus", "16384", "--mtbf", "50000h", "--layout", "llama3-405b"),
        lines=(
            "llama3-405b: 405.85e9 parameters on 16,384 GPUs (tp 8 x pp 32 x dp 64, ZeRO 1)",
            "checkpoint 5.682 TB (5.168 TiB), 3.487 GB (3.247 GiB) per rank",
            "goodput 96.26% = 100 % - stall 0.23% - recompute 0.26% - restart 3.25%; 14,707 GPU-hours lost per day",
        ),
    ),
    Printed(
        page="docs/trainer-plan.md",
        command=(
            "flashckpt.trainer", "plan", "--config", "configs/llama3-70b.toml", "--gpus", "256", "--gpu", "h100", "--tokens", "15T",
        ),
        lines=("256 x h100: 3.0 years and 6,756,627 GPU hours", "for 1.5e+13 tokens; MFU 31.6%, 166,046 tokens/s"),
    ),
    Printed(
        page="docs/trainer-dry-run.md",
        command=("flashckpt.trainer", "--dry-run", "--world", "16384", "--config", "configs/llama3-405b.toml"),
        lines=(
            "16384 ranks: DP 128 x TP 8 x PP 16 (Interleaved1F1B, 64 stages), 16 micro-batches, bubble 19.0%",
            "snapshots: 3 slots on each rank, 7.2 GB in the memory of a node of 8 ranks",
        ),
    ),
)  # fmt: skip
ELSEWHERE = {
    "the race": "make race (some 20 minutes, root)",
    "restores that are wrong without an error": "make torn",
    "a lost node, replication": f"node_loss.py, replication.py (root): {OWN}",
    "coordination by nodes": "scale.py: docs/scale.md",
    "seconds from SIGTERM until durable": "eviction.py: docs/operations.md",
}
"""Figures with a separate command."""
