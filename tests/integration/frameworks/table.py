"""Write docs/compatibility.md: run every case and put down what came out. `python -m integration.frameworks.table`.

Results that are as promised are kept in out/compatibility, one file per case; the others have "no result" in the page.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from integration.frameworks.case import Case
from integration.frameworks.cases import CASES, DISTRIBUTIONS, missing, version, warm
from integration.frameworks.run import run_case
from integration.frameworks.verdict import Verdict, judge

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
NO_RESULT = "no result"
_ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<outcome>exact|refused|wrong|no result)\b", re.MULTILINE)
_VERSION = re.compile(r"^\| `(?P<name>[\w-]+)` \| (?P<version>\S+) \|$", re.MULTILINE)
_WORDS = {
    "track": "at `track()`",
    "start": "at the first start, before a step",
    "training of step 1": "at the first step",
}


def committed() -> dict[str, str]:
    """Return case -> outcome as the page says."""
    return {found["name"]: found["outcome"] for found in _ROW.finditer(PAGE.read_text())}


def committed_versions() -> dict[str, str]:
    """Return distribution -> version as the page says."""
    return {found["name"]: found["version"] for found in _VERSION.finditer(PAGE.read_text())}


def pinned_versions() -> dict[str, str]:
    """Return distribution -> version, of torch and of all that a case needs, as the requirements pin them."""
    text = (HERE / "requirements.txt").read_text() + (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    return {name: pins[name] for name in distributions()}


def distributions() -> list[str]:
    """Return the distributions whose versions the table is about."""
    needed = {DISTRIBUTIONS.get(name, name) for case in CASES.values() for name in case.needs}
    return ["torch", *sorted(needed)]


def page(verdicts: dict[str, Verdict]) -> str:
    """Return the text of the page."""
    return "\n".join([*_introduction(), *_versions(), *_groups(verdicts), ""])


def _introduction() -> Iterator[str]:
    yield "# What is restored exactly, and what is refused"
    yield ""
    yield "Written by `make compatibility`; a test holds its rows equal to the cases in `tests/integration/frameworks/`. Each case trains on"
    yield "CPU, is killed by SIGKILL in the middle of a step, goes on from **memory** in a new process with another seed, and is killed again. What"
    yield "it then left is restored twice, each time in a new process with another seed: from **memory**, and from **storage** alone."
    yield ""
    yield "* **exact**: parameters, buffers, optimizer state, everything else tracked and the random number generators are as restored, and"
    yield "  after every later step, equal bit for bit to those of a run that was neither tracked nor interrupted; so is each loss."
    yield "* **refused**: an error of flashckpt at `track()`, at the first start or at the first step, so before anything could be lost."
    yield "* **no result**: not run to its end on the machine that wrote this page."
    if any(case.known for case in CASES.values()):
        yield "* **wrong**: neither, today; what is wrong is said beside it. Do not use it."
    yield ""
    yield "`2 ranks` are processes joined by gloo. Nothing here was run on a GPU."
    yield ""


def _versions() -> Iterator[str]:
    yield "| package | version |"
    yield "|---|---|"
    for name in distributions():
        yield f"| `{name}` | {torch.__version__.partition('+')[0] if name == 'torch' else version(name)} |"


def _groups(verdicts: dict[str, Verdict]) -> Iterator[str]:
    for group in dict.fromkeys(case.group for case in CASES.values()):
        yield ""
        yield f"## {group[0].upper() + group[1:] if not group.startswith('torch') else group}"
        yield ""
        yield "| case | outcome | |"
        yield "|---|---|---|"
        for case in (case for case in CASES.values() if case.group == group):
            yield f"| {case.name} | {verdicts[case.name].outcome} | {_remark(case, verdicts[case.name])} |"


def _remark(case: Case, verdict: Verdict) -> str:
    remarks = ["2 ranks"] if case.world > 1 else []
    if verdict.outcome == "refused":
        where = _WORDS.get(verdict.stage, "at the first `step()`")
        remarks.append(f"{where}: `{verdict.message.splitlines()[0].replace('|', '/')}`")
    return "; ".join([*remarks, *filter(None, (case.known, case.note))])


def run(case: Case) -> Verdict:
    """Run one case in folders of its own."""
    warm(case)
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder, memory = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(prefix="flashckpt-table-", dir=shared))
    try:
        return judge(run_case(case, folder, memory), from_rank_0=case.from_rank_0)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)


def _result(case: Case) -> Path:
    folder = ROOT / "out" / "compatibility"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}.json"


def _kept(case: Case) -> Verdict:
    path = _result(case)
    return Verdict(**json.loads(path.read_text())) if path.exists() else Verdict(outcome=NO_RESULT)


def main(pattern: str = "") -> int:
    """Run the cases of one group, or those whose names hold `pattern`; write the page of all results there are."""
    bad = 0
    for case in (case for case in CASES.values() if pattern in case.name or pattern == case.group):
        lacking = missing(case)
        verdict = Verdict(outcome="missing", message=", ".join(lacking)) if lacking else run(case)
        as_promised = verdict.outcome == case.promised and case.refused in verdict.message
        bad += not as_promised
        (
            _result(case).write_text(json.dumps(asdict(verdict)))
            if as_promised
            else _result(case).unlink(missing_ok=True)
        )
        print(f"{'  ' if as_promised else '!!'} {case.name:60} {verdict.outcome} {verdict.message}", flush=True)
    verdicts = {case.name: _kept(case) for case in CASES.values()}
    PAGE.write_text(page(verdicts))
    left = [name for name, verdict in verdicts.items() if verdict.outcome == NO_RESULT]
    print(f"{bad} cases not as promised; {len(left)} in {PAGE.name} have no result {left[:3]}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
