"""Which figures of README and docs hold on the machine at hand: `make figures`.

    python benchmarks/held.py [--only NAME ...] [--quick] [--minutes M] [--list] [--json FILE]

`held_figures.py` names each figure's page and words, the JSON that they came from, and the program that measures it
again. Compared are ratios within one run (to a raw write, to a memcpy, to torchrun), for seconds are a machine's own: a
figure holds where the ratio measured here lies within the published spread, or its own spread reaches into it. One that
lies outside while others used more than a quarter of the cores is not judged: BUSY. "does NOT hold" is no error: it says
what this machine is not like. Exit code 1 where the words of a page are not those of its JSON any more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from held_figures import ELSEWHERE, FIGURES, PRINTED, Figure, Printed, ratio, said

HERE = Path(__file__).parent
ROOT = HERE.parent
SHORTEST_S = 20.0
"""Of a measurement: with less time left none is begun."""
BUSY = 0.25
"""Share of the cores that others may use."""


def verdict(published: Sequence[float], here: Sequence[float], *, busy: bool = False) -> str:
    """Return whether a figure holds: its median within the published spread, or the two spreads overlap."""
    low, high = published[1], published[2]
    if low <= here[0] <= high:
        return "holds"
    if here[1] <= high and here[2] >= low:
        return "within reach"
    if busy:
        return "not judged: BUSY"
    return "better here" if here[0] < low else "does NOT hold here"


def text(values: Sequence[float]) -> str:
    """Return a ratio as pages print it."""
    return f"{values[0]:.2f} [{values[1]:.2f}-{values[2]:.2f}]"


def published_of(figure: Figure) -> dict[str, Any]:
    """Return the JSON of a figure; its results are all of it where it has no part of that name."""
    made: dict[str, Any] = json.loads((HERE / "results" / figure.published).read_text())
    return made if "results" in made else {"results": made}


def page_of(name: str) -> str:
    """Return the text of a page in one line."""
    return " ".join((ROOT / name).read_text().split())


def differs(figure: Figure) -> str:
    """Return what its page should say and does not; "" where all is well."""
    words = said(published_of(figure)["results"], figure)
    return "" if words in page_of(figure.page) else f"{figure.page} does not say {words!r}, as {figure.published} does"


def measure(figure: Figure, *, quick: bool, limit_s: float) -> Mapping[str, Any]:
    """Run the program of a figure; return its document.

    Raises:
        RuntimeError: It left none, or took too long.
    """
    words = figure.quick if quick and figure.quick else figure.program
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder) / "found.json", Path(folder) / "errors"
        command = [sys.executable, str(HERE / words[0]), *words[1:], "--json", str(path)]
        with errors.open("wb") as file:
            ended = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
            try:
                ended.wait(limit_s)
            except subprocess.TimeoutExpired:
                load = f"load average {os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"
                raise RuntimeError(f"{words[0]} was not through after {limit_s:.0f} s, {load}") from None
            finally:
                stop(ended)
        if not path.exists():
            raise RuntimeError(f"{words[0]} ended with {ended.returncode}: {errors.read_text()[-600:]}")
        made: Mapping[str, Any] = json.loads(path.read_text())
        return made


def stop(program: subprocess.Popen[bytes]) -> None:
    """End a program with all that it has started: first by SIGTERM, at which it cleans up."""
    if program.poll() is None:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def share_s(left_s: float, figures: int) -> float:
    """Return how long the next of so many figures may take: half more than its share, for most need less."""
    return min(left_s, 1.5 * left_s / figures)


def summed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the last line: how many figures of each verdict, and what to do about those without one."""
    counts = Counter(row["verdict"] for row in rows)
    line = "; ".join(f"{count} {word}" for word, count in counts.most_common())
    unknown = sum(count for word, count in counts.items() if word.startswith("not "))
    return f"{line}\n{unknown} say nothing: measure them again when nothing else runs" if unknown else line


def judge(figure: Figure, *, quick: bool, limit_s: float) -> dict[str, Any]:
    """Measure one figure; say and return what came of it."""
    published = ratio(published_of(figure)["results"], figure)
    began, row = time.monotonic(), {"name": figure.name, "published": published}
    if limit_s < SHORTEST_S:
        return {**row, "verdict": "not measured", "why": "no time was left"}
    try:
        made = measure(figure, quick=quick, limit_s=min(figure.limit_s, limit_s))
        here = ratio(made["results"], figure)
    except (RuntimeError, KeyError) as error:
        return {**row, "verdict": "not measured", "why": str(error)}
    used = made["load"]["other_cores"]
    busy = used > BUSY * made["load"]["cores"]
    word = verdict(published, here, busy=busy)
    return {**row, "here": here, "verdict": word, "others_cores": used, "seconds": time.monotonic() - began}


def line_about(figure: Figure, row: Mapping[str, Any]) -> str:
    """Return the lines about one figure."""
    host = published_of(figure).get("host", {"cpu": "?", "cores": "?"})
    line = f"{figure.name}: published {text(row['published'])}, {host['cpu']}, {host['cores']} cores; "
    if "here" not in row:
        return f"{line}{row['verdict']}: {row['why']}"
    line += f"here {text(row['here'])}, others used {row['others_cores']:.1f} cores, {row['seconds']:.0f} s: {row['verdict']}"
    outside = row["verdict"] in ("does NOT hold here", "not judged: BUSY")
    return f"{line}\n    it depends on {figure.depends}" if outside else line


def is_printed(one: Printed) -> bool:
    """Whether page and command both have the lines; says so."""
    begin = [sys.executable, "-m", one.command[0]]
    if one.command[0] == "flashckpt":
        begin = [str(Path(sys.executable).with_name("flashckpt"))]
    ended = subprocess.run([*begin, *one.command[1:]], check=False, capture_output=True, text=True, cwd=ROOT)
    prints, page = " ".join(ended.stdout.split()), page_of(one.page)
    wrong = [line for line in one.lines if line not in page or line not in prints]
    print(
        f"{one.page}: `{' '.join(one.command)}` {'prints the same' if not wrong else f'does not print {wrong}'}",
        flush=True,
    )
    return not wrong


def main() -> int:
    """Compare pages with their JSON, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    again = [figure for figure in FIGURES if figure.program]
    parser.add_argument("--only", nargs="+", choices=[figure.name for figure in again])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds, where ratios allow it")
    parser.add_argument("--minutes", type=float, help="that it may take in all (28; quick: 10)")
    parser.add_argument("--list", action="store_true", help="say where figures are from, and measure nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + 60 * (args.minutes or (10 if args.quick else 28))
    wrong = [words for figure in FIGURES if (words := differs(figure))]
    print(
        "\n".join([f"{len(FIGURES)} figures are compared with their JSON: {len(wrong)} are other ones", *wrong]),
        flush=True,
    )
    if args.list:
        for figure in FIGURES:
            by = " ".join(figure.program) or figure.depends
            print(
                f"{figure.name} ({figure.page}): {said(published_of(figure)['results'], figure)}; {figure.published}; {by}"
            )
        return bool(wrong)
    same = [is_printed(one) for one in PRINTED] if args.only is None else []
    asked = [figure for figure in again if args.only is None or figure.name in args.only]
    rows: list[dict[str, Any]] = []
    for figure in asked:
        limit_s = share_s(until - time.monotonic(), len(asked) - len(rows))
        rows.append(judge(figure, quick=args.quick, limit_s=limit_s))
        print(line_about(figure, rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    for name, why in {**{one.name: one.depends for one in FIGURES if not one.program}, **ELSEWHERE}.items():
        print(f"{name}: not measured here ({why})", flush=True)
    print(summed(rows), flush=True)
    return int(bool(wrong) or not all(same))


if __name__ == "__main__":
    sys.exit(main())
