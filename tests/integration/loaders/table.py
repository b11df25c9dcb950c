"""Write the table of docs/data.md: run every trial and put down what came out. `python -m integration.loaders.table`.

Results that are as promised are kept in out/loaders, one file for each workload; the table is written once each has one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from support.paths import ROOT

from integration.loaders.trials import Trials, Verdict
from integration.loaders.workloads import EXACT, TRIALS, WORKLOADS, Workload, prepare

PAGE = ROOT / "docs" / "data.md"
KEPT = ROOT / "out" / "loaders"
BEGIN, END = "<!-- written by make exactness -->", "<!-- end -->"
DISTRIBUTIONS = {"grain": "grain", "torchdata": "torchdata", "streaming": "mosaicml-streaming", "litdata": "litdata"}
DISTRIBUTIONS |= {"datasets": "datasets", "webdataset": "webdataset"}
_HEADS = f"| {' | '.join(TRIALS.values())} | loaders |"
_ROW = re.compile(r"^\| (?P<cells>[^|]+ \| [^|]+ \| [^|]+) \| (?P<names>[^|]+) \|$", re.MULTILINE)


def committed() -> dict[str, list[str]]:
    """Return workload -> what the page says of each trial."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].replace(_HEADS, "")
    return {
        name: row["cells"].split(" | ")
        for row in _ROW.finditer(text)
        if not row["cells"].startswith("---")
        for name in row["names"].split("; ")
    }


def table(kept: dict[str, dict[str, str]]) -> str:
    """Return the lines of the table: one for each outcome, the loaders of which are named together."""
    rows: dict[str, list[str]] = {}
    for name, cells in kept.items():
        rows.setdefault(" | ".join(cells[trial] for trial in TRIALS), []).append(name)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in DISTRIBUTIONS.values())
    lines = [_HEADS, "|---|---|---|---|", *(f"| {cells} | {'; '.join(names)} |" for cells, names in rows.items())]
    return "\n".join([*lines, "", f"Tried with {versions}."])


def run(workload: Workload, data: Path) -> dict[str, Verdict]:
    """Run the trials of a workload."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").symlink_to(data)
        trials = Trials(workload, Path(folder))
        return {trial: trials.run(trial) for trial in TRIALS}


def is_as_promised(workload: Workload, found: dict[str, Verdict]) -> bool:
    """Print what came out; return whether it is what the workload promises."""
    good = True
    for trial, verdict in found.items():
        wanted = workload.promised.get(trial, EXACT)
        is_right = verdict.outcome == wanted
        good = good and is_right
        print(
            f"{'  ' if is_right else '!!'} {workload.name:55} {trial:8} {verdict.outcome} {verdict.message}", flush=True
        )
    return good


def main(pattern: str = "") -> int:
    """Run the workloads whose names hold `pattern`; write the table if every one has a result."""
    KEPT.mkdir(parents=True, exist_ok=True)
    paths = {name: KEPT / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json" for name in WORKLOADS}
    bad = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = memory  # a job that is refused keeps its state
        prepare(Path(folder) / "data")
        for name, workload in WORKLOADS.items():
            if pattern not in name:
                continue
            if lacking := workload.missing():
                print(f"   {name:55} skipped: {', '.join(lacking)} did not install")
                continue
            found = run(workload, Path(folder) / "data")
            paths[name].unlink(missing_ok=True)
            if is_as_promised(workload, found):
                paths[name].write_text(json.dumps({trial: verdict.outcome for trial, verdict in found.items()}))
            else:
                bad.append(name)
    left = [name for name, path in paths.items() if not path.exists()]
    print(f"{len(bad)} not as promised: {bad}; {len(left)} have no result: {left[:5]}")
    if not left:
        text = PAGE.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        kept = {name: json.loads(path.read_text()) for name, path in paths.items()}
        PAGE.write_text(f"{before}{BEGIN}\n{table(kept)}\n{END}{after}")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(bool(bad or left))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
