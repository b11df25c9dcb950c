"""Write docs/compatibility.md: run every case and put down what came out. `python -m integration.frameworks.table`.

Results that are as promised are kept in out/compatibility, one file per case. The page is written once every case has one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from integration.frameworks.case import Case
from integration.frameworks.cases import CASES, DISTRIBUTIONS, installed, missing, version, warm
from integration.frameworks.run import run_case
from integration.frameworks.verdict import Verdict, judge

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
SKIPPED = "skipped"
PROCESSES = 2
_ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<outcome>[^|]+) \|", re.MULTILINE)
_EXACT = "Exact: "
_TINY = ", tiny"
_ALSO_TINY = "°"
_HEADINGS = ("package", "case", "---")
_VERSION = re.compile(r"^\| `(?P<name>[\w-]+)` \| (?P<version>\S+) \|$", re.MULTILINE)
_WORDS = {
    "track": "at `track()`",
    "start": "at the first start, before a step",
    "training of step 1": "at the first step",
}


def committed() -> dict[str, str]:
    """Return case -> outcome as the page says."""
    text = PAGE.read_text()
    rows = {name: found["outcome"] for found in _ROW.finditer(text) for name in found["name"].split("; ")}
    for paragraph in (" ".join(part.split()) for part in text.split("\n\n") if part.startswith(_EXACT)):
        for name in paragraph.removeprefix(_EXACT).split("; "):
            plain = name.removesuffix(_ALSO_TINY)
            rows |= dict.fromkeys([plain, plain + _TINY] if plain != name else [plain], "exact")
    return {name: outcome for name, outcome in rows.items() if name not in _HEADINGS and not name.startswith("`")}


def committed_versions() -> dict[str, str]:
    """Return distribution -> version as the page says."""
    return {found["name"]: found["version"] for found in _VERSION.finditer(PAGE.read_text())}


def pinned_versions() -> dict[str, str]:
    """Return distribution -> version, of torch and of all that a case needs, as the requirements pin them."""
    text = (HERE / "requirements.txt").read_text() + (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    return {name: pins[name] for name in distributions()}


def distributions() -> list[str]:
    """Return the distributions that a case needs."""
    needed = {DISTRIBUTIONS.get(name, name) for case in CASES.values() for name in case.needs}
    return ["torch", *sorted(needed)]


def page(verdicts: dict[str, Verdict]) -> str:
    """Return the text of the page."""
    return "\n".join([*_introduction(), *_versions(), *_groups(verdicts), ""])


def _introduction() -> Iterator[str]:
    yield "# What is restored exactly, and what is refused"
    yield ""
    yield "Written by `make compatibility`; a test holds it equal to the cases in `tests/integration/frameworks/`. Each case trains on CPU, is"
    yield "killed by SIGKILL in the middle of a step, continues from **memory** in a new process with another seed, and is killed again. What it"
    yield "then left is restored from **memory**, and from **storage** alone. Two ranks are joined by gloo; nothing was run on a GPU."
    yield ""
    yield "* **exact**: everything tracked and the generators are as restored, and after every later step, equal bit for bit to those of a run"
    yield "  that was neither tracked nor interrupted; so is each loss. °: also with layers whose state fits into a slot's spare room (*tiny*)."
    yield "* **refused**: an error of flashckpt at `track()`, at the first start or at the first step, so before anything could be lost."
    yield f"* **{SKIPPED}**: not run, since the package named beside it did not install."
    yield ""
    yield "What an optimizer counts in attributes that its `state_dict()` lacks is not seen; a number that changes is named in a warning."
    yield ""


def _versions() -> Iterator[str]:
    yield "| package | version |"
    yield "|---|---|"
    for name in (name for name in distributions() if name == "torch" or installed(name)):
        yield f"| `{name}` | {torch.__version__.partition('+')[0] if name == 'torch' else version(name)} |"


def _groups(verdicts: dict[str, Verdict]) -> Iterator[str]:
    for group in dict.fromkeys(case.group for case in CASES.values()):
        yield ""
        yield f"## {group[0].upper() + group[1:] if not group.startswith('torch') else group}"
        rows = []
        for case in (case for case in CASES.values() if case.group == group):
            verdict = verdicts[case.name]
            outcome = f"{SKIPPED}: {verdict.message}" if verdict.outcome == SKIPPED else verdict.outcome
            rows.append((case.name, outcome, _remark(case, verdict)))
        yield from rows_of(rows)


def rows_of(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a group: what is exact without a remark as one paragraph, else a row of the table."""
    exact = [name for name, outcome, remark in rows if outcome == "exact" and not remark]
    folded = {name + _TINY for name in exact}
    names = [name + _ALSO_TINY * (name + _TINY in exact) for name in exact if name not in folded]
    if exact:
        yield ""
        yield from textwrap.wrap(_EXACT + "; ".join(names), 118, break_long_words=False, break_on_hyphens=False)
    others: dict[tuple[str, str], list[str]] = {}
    for name, *found in (row for row in rows if row[0] not in exact):
        others.setdefault((found[0], found[1]), []).append(name)
    if others:
        yield ""
        yield "| case | outcome | |"
        yield "|---|---|---|"
        yield from (f"| {'; '.join(names)} | {outcome} | {remark} |" for (outcome, remark), names in others.items())


def _remark(case: Case, verdict: Verdict) -> str:
    remarks = ["2 ranks"] if case.world > 1 else []
    if verdict.outcome == "refused":
        where = _WORDS.get(verdict.stage, "at the first `step()`")
        remarks.append(f"{where}: `{verdict.message.splitlines()[0].replace('|', '/')}`")
    return "; ".join([*remarks, *filter(None, (case.note,))])


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


def _outcome(name: str) -> Verdict:
    case = CASES[name]
    lacking = missing(case)
    return Verdict(outcome=SKIPPED, message=", ".join(lacking)) if lacking else run(case)


def as_promised(case: Case, verdict: Verdict) -> bool:
    """Tell whether a case came out as it must: skipped only where a package that it needs is missing."""
    if verdict.outcome == SKIPPED:
        return bool(verdict.message) and set(verdict.message.split(", ")) <= set(case.needs)
    return verdict.outcome == case.promised and case.refused in verdict.message


def _result(case: Case) -> Path:
    folder = ROOT / "out" / "compatibility"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}.json"


def _keep(case: Case, verdict: Verdict) -> bool:
    good = as_promised(case, verdict)
    if good:
        _result(case).write_text(json.dumps(asdict(verdict)))
    else:
        _result(case).unlink(missing_ok=True)
    text = "" if good else f"\n{verdict.text}"
    print(f"{'  ' if good else '!!'} {case.name:60} {verdict.outcome} {verdict.message}{text}", flush=True)
    return good


def main(pattern: str = "") -> int:
    """Run the cases of one group, or those whose names hold `pattern`; write the page if every case has a result."""
    cases = [case for case in CASES.values() if pattern in case.name or pattern == case.group]
    cases.sort(key=lambda case: bool(case.needs))  # a process that has imported other projects forks slowly
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_outcome, case.name): case for case in cases}
        bad = [running[one].name for one in as_completed(running) if not _keep(running[one], one.result())]
    kept = {name: _result(case) for name, case in CASES.items()}
    left = [name for name, path in kept.items() if not path.exists()]
    print(f"{len(bad)} cases not as promised: {bad}; {len(left)} have no result: {left[:5]}")
    if not left:
        PAGE.write_text(page({name: Verdict(**json.loads(path.read_text())) for name, path in kept.items()}))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(bool(bad or left))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
