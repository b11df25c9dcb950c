"""Run the parts of `make gpu` one after the other within a time, print one table, write one JSON.

Each part is a process group of its own with a budget; at its end it is killed, and what it has written by then counts. Parts
that are not begun for lack of time are rows that say so. The JSON is written after every part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.native import implementation
from integration.gpu.goals import as_values, goals
from integration.gpu.parts import PARTS, Part

_TEST_LINE = re.compile(r"::test_\w+")  # with its outcome; the last one without, where it was cut off
DEFAULT_S = 540.0
GRACE_S = 5.0
"""What a part may take beyond its budget to end by itself."""


def run_part(part: Part, *, device: str, seconds: float, work: Path) -> dict[str, Any]:
    """Run one part; return its state ("passed", "failed", "cut off"), seconds, rows and results."""
    stem = part.name.replace(": ", "-").replace(", ", "-").replace(" ", "-")
    found, report, log = (work / f"{stem}.{kind}" for kind in ("json", "xml", "log"))
    for old in (found, report):
        old.unlink(missing_ok=True)
    fields = {"device": device, "seconds": f"{seconds:.0f}", "json": str(found), "xml": str(report)}
    words = [word.format(**fields) for word in part.words] + list(part.on_cpu if device == "cpu" else ())
    mark = f"GPU_TEST_PART={os.getpid()}-{stem}"
    until = f"GPU_TEST_UNTIL={time.time() + seconds}"
    environment = {**os.environ, "GPU_TEST_DEVICE": device, **dict(word.split("=", 1) for word in (mark, until))}
    began, timed_out = time.monotonic(), False
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            timed_out, code = True, -signal.SIGKILL
        finally:
            end(process, mark)
            clear_memory()
    state = "cut off" if timed_out else "passed" if code in (0, 5) else "failed"
    result: dict[str, Any] = {"name": part.name, "state": state, "seconds": round(time.monotonic() - began, 1)}
    result |= {"code": code, "rows": [], "log_end": log.read_text(errors="replace")[-2000:]}
    if report.exists():
        result |= tests_in(report)
    elif "pytest" in part.words:  # cut off: pytest writes its report at the end
        result["rows"] = [
            line[:200] for line in log.read_text(errors="replace").splitlines() if _TEST_LINE.search(line)
        ]
    elif found.exists():
        result |= {"results": json.loads(found.read_text())}
        result["rows"] = result["results"].get("rows", [])
    return result


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a part's process group, and what it has started in sessions of their own: known by their environment."""
    left = [process.pid]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                left.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def clear_memory() -> None:
    """Remove what a part that was cut off has left of its snapshots; only from memory that gpu.sh made for this run."""
    if "GPU_TEST_SHM" in os.environ:
        for left in Path(os.environ["GPU_TEST_SHM"]).iterdir():
            shutil.rmtree(left, ignore_errors=True)


def tests_in(report: Path) -> dict[str, Any]:
    """Return the outcome of every test of a junit report, and a row per outcome."""
    tests = []
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
        about = kinds.get(outcome, "")[:300]
        tests.append({"test": case.get("name", ""), "outcome": outcome, "why": about, "seconds": case.get("time")})
    rows = [f"{sum(t['outcome'] == 'passed' for t in tests)} passed of {len(tests)}"]
    rows += [f"{t['outcome']}: {t['test']}: {t['why'].splitlines()[0] if t['why'] else ''}" for t in tests
             if t["outcome"] != "passed"]  # fmt: skip
    return {"tests": tests, "rows": rows}


def machine() -> dict[str, Any]:
    """Return what the device, its driver and its link are, as torch and nvidia-smi say."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    facts["copied_by"] = implementation()
    query = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total"
    try:
        words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        facts["nvidia_smi"] = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        facts["nvidia_smi"] = f"not to be had: {error}"
    return facts


def headline(about: dict[str, Any], device: str) -> str:
    """Return the machine and its versions in one line."""
    versions = f"Python {about['python']}, torch {about['torch']}, CUDA {about['cuda'] or 'none'}; copied by {about['copied_by']}"
    return f"{device}; {versions}; {about['nvidia_smi'].strip()}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table: one line per part, its rows below it."""
    lines = [f"{'part':28} {'state':10} {'s':>6}"]
    for result in results:
        lines.append(f"{result['name']:28} {result['state']:10} {result['seconds']:6.1f}")
        lines += [f"    {row}" for row in result["rows"]]
        if result["state"] == "failed" and "tests" not in result:
            lines += [f"    | {line}" for line in result["log_end"].splitlines()[-8:]]
    return "\n".join(lines)


class UnknownPartError(ValueError):
    """No part has a name like that."""


def chosen(names: str) -> list[Part]:
    """Return the parts whose name has one of the words; all where none is given.

    Raises:
        UnknownPartError: No part's name has one of the words.
    """
    words = [word.strip() for word in names.split(",") if word.strip()]
    for word in words:
        if not any(word in part.name for part in PARTS):
            raise UnknownPartError(f"no part is called {word!r}; there are: {'; '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not words or any(word in part.name for word in words)]


def allowed_s(part: Part, later: Sequence[Part], left: float, scale: float) -> float:
    """Return the most seconds that a part may take.

    Tests may also have what the parts before them left over; numbers take all the time that they are given.

    Args:
        part: The next one.
        later: Those behind it.
        left: Seconds left for all of them.
        scale: What budgets are multiplied by.
    """
    spare = left - sum(other.seconds for other in later) * scale if part.name.startswith("tests") else 0.0
    return min(max(part.seconds * scale, spare), left)


def run_all(parts: Sequence[Part], *, device: str, seconds: float, out: Path, work: Path) -> list[dict[str, Any]]:
    """Run parts while there is time; the JSON is written after each."""
    end_at, load, results = time.monotonic() + seconds, LoadWatch(), list[dict[str, Any]]()
    scale = max(1.0, seconds / max(1, sum(part.seconds for part in parts)))  # fewer parts have more time each
    about = machine()
    for number, part in enumerate(parts):
        left = end_at - time.monotonic() - GRACE_S
        if left < part.least:
            why = f"skipped: {left:.0f} s of the time were left, it needs {part.least}"
            results.append({"name": part.name, "state": "skipped", "seconds": 0.0, "rows": [why]})
        else:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            allowed = allowed_s(part, parts[number + 1 :], left, scale)
            results.append(run_part(part, device=device, seconds=allowed, work=work))
        arguments = {"device": device, "seconds": seconds}
        found = {"machine": about, "parts": results, "goals": as_values(goals(results, device=device))}
        write_json(out / "gpu.json", document("gpu", arguments, found, load=load))
    return results


class Parser(argparse.ArgumentParser):
    """Ends with a code that says nothing else."""

    def error(self, message: str) -> NoReturn:
        """Print the message alone."""
        self.exit(4, f"gpu: {message}\n")


def main() -> int:
    """Parse arguments; run, print.

    Returns:
        0 where all was run and passed; 1: a part failed; 2: no GPU; 3: the time was over before all was run; 4: not begun.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=DEFAULT_S / 60, help="for all parts together")
    parser.add_argument("--parts", default="", help="only parts whose name has one of these words, by commas")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--work", type=Path, default=Path("out/gpu/parts"), help="for what the parts write themselves")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    options = parser.parse_args()
    try:
        parts = chosen(options.parts)
    except UnknownPartError as error:
        parser.error(str(error))
    if options.minutes <= 0:
        parser.error(f"--minutes must be more than 0, found {options.minutes:g}")
    if options.list:
        print("\n".join(f"{part.name:28} at most {part.seconds} s" for part in parts))
        return 0
    try:
        import torch
    except (ImportError, OSError) as error:
        parser.error(f"torch cannot be imported by {sys.executable}: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu: torch sees no GPU; --device cpu runs the same parts without one", file=sys.stderr)
        return 2
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    results = run_all(parts, device=options.device, seconds=options.minutes * 60, out=options.out, work=options.work)
    found = "\n".join(goal.row for goal in goals(results, device=options.device))
    text = f"{headline(machine(), options.device)}\n{table(results)}\n\n{found}\n"
    (options.out / "gpu.txt").write_text(text)
    print(f"\n{text}{options.out / 'gpu.json'}")
    states = {result["state"] for result in results}
    return 1 if "failed" in states else 3 if states & {"cut off", "skipped"} else 0


if __name__ == "__main__":
    sys.exit(main())
