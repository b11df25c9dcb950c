"""Which figures of README and docs hold on the machine at hand: `make figures`.

    python benchmarks/held.py [--only NAME ...] [--quick] [--list] [--json FILE]

Each figure below names the page and the words that print it, the JSON that they came from, and the program that measures
it again. Compared are ratios within one run (to a raw write, to a memcpy, to torchrun), for seconds are a machine's own:
a figure holds where the ratio measured here lies within the published spread, or its own spread reaches into it. "Beyond" is
no error: it says what this machine is not like. Exit code 1 where the words of a page are not those of its JSON any more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure.

    Attributes:
        name: Short.
        page: That prints it.
        words: How: must be there.
        published: The JSON, below benchmarks/results.
        program: Of benchmarks/, with the words that measure it again.
        quick: Words that replace those, for a look.
        top: Path to its summary in the results; keys by "/".
        bottom: The same of what it is divided by; "" where it is a ratio already.
        depends: What it depends on, said where it does not hold.
    """

    name: str
    page: str
    words: str
    published: str
    program: tuple[str, ...]
    quick: tuple[str, ...] = ()
    top: str
    bottom: str = ""
    depends: str


_RESTART = "summary/{}/restart/total"
_STALL = "{}/groups/0/methods/flashckpt/x_memcpy/lost_s"
_LOADED = "a busy machine: other work on its cores makes both longer, and not by the same factor"
FIGURES = (
    Figure(
        name="restart, 1 MB", page="README.md", words="| **0.27 s** [0.18-0.36] | 4.6 s [4.1-5.3], torchrun |",
        published="2026-11-25/restart-1mb.json", program=("restart.py", "--state-mb", "1", "--runs", "2"),
        quick=("restart.py", "--state-mb", "1", "--runs", "1", "--kills", "2"),
        top=_RESTART.format("dlrun"), bottom=_RESTART.format("torchrun"), depends=_LOADED,
    ),
    Figure(
        name="restart, 1.5 GB", page="README.md", words="| **1.53 s** [1.46-1.57] | 5.31 s [4.93-5.66], torchrun and torch.load |",
        published="2026-11-25/restart-1500mb.json", program=("restart.py", "--state-mb", "1500", "--runs", "2"),
        top=_RESTART.format("dlrun"), bottom=_RESTART.format("torchrun"), depends=_LOADED,
    ),
    Figure(
        name="lost per snapshot", page="README.md", words="| **0.04** [-0.07-0.23] | 0.95 [0.79-1.31], a blocking copy |",
        published="2026-11-25/stall-1.5-1ranks.json", program=("stall.py", "--gb", "1.5", "--ranks", "1", "--seconds", "25"),
        top=_STALL.format("1.5 GB, 1 rank"), depends="a core that is free beside training: the copy is made by a thread",
    ),
    Figure(
        name="lost per snapshot, no core free", page="README.md", words="| 3.92 [0.74-9.30] | **1.46** [0.10-5.83], a blocking copy |",
        published="2026-11-25/stall-0.2.json", program=("stall.py", "--gb", "0.2", "--ranks", "4", "--seconds", "12"),
        top=_STALL.format("0.2 GB, 4 ranks"), depends="what else wants the two cores: four ranks do already",
    ),
    Figure(
        name="committed", page="README.md", words="| **0.70** [0.61-0.75] |",
        published="2026-11-25/end-to-end.json", program=("end_to_end.py", "--gb", "1.08", "--seconds", "40"),
        quick=("end_to_end.py", "--gb", "0.27", "--seconds", "10"),
        top="save, {gb} GB/x_raw/flashckpt, committed",
        depends=(
            "free cores and the disk. The raw write takes 4 threads and one file; where a disk has more to give to two files"
            " written at once, flashckpt is below 1. It hashes while it writes, so that on a busy machine (1.34 to 1.9 x on"
            " another EPYC) cores are what is missing, and quiet on that machine it was 1.00"
        ),
    ),
    Figure(
        name="restored from disk", page="README.md", words="| 2.69 s [2.65-3.05] | **2.05 s** [2.03-2.16], safetensors (unverified) |",
        published="2026-11-25/end-to-end-restore.json", program=("end_to_end.py", "--restore", "--gb", "1.5", "--seconds", "40"),
        quick=("end_to_end.py", "--restore", "--gb", "0.3", "--seconds", "10"),
        top="restore, {gb} GB/seconds/flashckpt, storage", bottom="restore, {gb} GB/seconds/safetensors",
        depends="how long imports take beside the read: half of it is Python's start",
    ),
    Figure(
        name="first start", page="benchmarks/README.md", words="`results/2026-11-26/first-start.json`",
        published="2026-11-26/first-start.json", program=("first_start.py",),
        quick=("first_start.py", "--rounds", "2"),
        top="torch/x_python/dlrun", depends=_LOADED,
    ),
)  # fmt: skip
NOT_HERE = {
    "the trainer beside nanoGPT and torchtitan": "trainer_speed.py needs their code: benchmarks/README.md, The trainer",
    "figures of the H200": "make gpu",
    "a lost node, replication": "node_loss.py, replication.py (root): benchmarks/README.md",
}


def found(results: Mapping[str, Any], path: str) -> Mapping[str, float]:
    """Return the summary at a path; "{gb}" stands for whichever size was measured first.

    Raises:
        KeyError: There is none.
    """
    here: Any = results
    for key in path.split("/"):
        if isinstance(here, list):
            here = here[int(key)]
        elif "{gb}" in key:
            before, _, after = key.partition("{gb}")
            here = next(here[name] for name in here if name.startswith(before) and name.endswith(after))
        else:
            here = here[key]
    if not isinstance(here, Mapping) or "median" not in here:
        raise KeyError(path)
    return here


def ratio(results: Mapping[str, Any], figure: Figure) -> tuple[float, float, float]:
    """Return median, least and most of a figure in one run; a quotient is as wide as both of its parts."""
    top = found(results, figure.top)
    if not figure.bottom:
        return top["median"], top["min"], top["max"]
    bottom = found(results, figure.bottom)
    ends = [top[a] / bottom[b] for a in ("min", "max") for b in ("min", "max")]
    return top["median"] / bottom["median"], min(ends), max(ends)


def verdict(published: Sequence[float], here: Sequence[float]) -> str:
    """Return whether a figure holds: its median within the published spread, or the two spreads overlap."""
    low, high = published[1], published[2]
    if low <= here[0] <= high:
        return "holds"
    if here[1] <= high and here[2] >= low:
        return "within reach"
    return "better here" if here[0] < low else "does NOT hold here"


def text(values: Sequence[float]) -> str:
    """Return a ratio as pages print it."""
    return f"{values[0]:.2f} [{values[1]:.2f}-{values[2]:.2f}]"


def measure(figure: Figure, *, quick: bool) -> Mapping[str, Any]:
    """Run the program of a figure; return its document."""
    words = figure.quick if quick and figure.quick else figure.program
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        ended = subprocess.run(
            [sys.executable, str(HERE / words[0]), *words[1:], "--json", str(path)],
            check=False,
            capture_output=True,
            text=True,
        )
        if not path.exists():
            raise RuntimeError(f"{words[0]} ended with {ended.returncode}: {ended.stderr[-600:]}")
        made: Mapping[str, Any] = json.loads(path.read_text())
        return made


def main() -> int:
    """Compare pages with their JSON, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[figure.name for figure in FIGURES])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds, where ratios allow it")
    parser.add_argument("--list", action="store_true", help="say where figures are from, and measure nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wrong, rows = 0, []
    for figure in (figure for figure in FIGURES if args.only is None or figure.name in args.only):
        document = json.loads((HERE / "results" / figure.published).read_text())
        published = ratio(document["results"], figure)
        host = document["host"]
        if figure.words not in (ROOT / figure.page).read_text():
            wrong += 1
            print(f"{figure.name}: {figure.page} does not say {figure.words!r} any more", flush=True)
        said = f"{figure.name} ({figure.page}): published {text(published)}, {host['cpu']}, {host['cores']} cores"
        if args.list:
            print(f"{said}; {' '.join(figure.program)}", flush=True)
            continue
        began = time.monotonic()
        try:
            made = measure(figure, quick=args.quick)
        except RuntimeError as error:
            print(f"{said}; not measured: {error}", flush=True)
            continue
        here = ratio(made["results"], figure)
        word = verdict(published, here)
        loaded = "".join(f"; UNDER LOAD: {reason}" for reason in made["load"]["reasons"])
        print(f"{said}; here {text(here)}, {time.monotonic() - began:.0f} s: {word}{loaded}", flush=True)
        if word == "does NOT hold here":
            print(f"    it depends on {figure.depends}", flush=True)
        rows.append(
            {"name": figure.name, "published": published, "here": here, "verdict": word, "loaded": bool(loaded)}
        )
    for name, why in NOT_HERE.items():
        print(f"{name}: not measured here ({why})", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
