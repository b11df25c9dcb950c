"""What a save is worth: how often each saver restores wrong values without an error.

    PYTHONPATH=benchmarks python benchmarks/torn_savers.py [--mb 64] [--instants 12] [--kills 8] [--json FILE]

Three trials of each saver, in the environments of the race (`make race ARGS=--setup`), one process, every element of the
state the number of its step:

* steps: a step of the optimizer at so many instants between the call of a save and its end, as a loop has one;
* kills: SIGKILL at as many instants of a save, then a new process loads what the saver's documentation calls the newest;
* bits: one bit flipped in the middle of one file of each kind, then it is loaded.

wrong: values of another step than the checkpoint claims to be of, or of two, and no error. error: an exception instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dlrover_peer import environment, remove_leftovers
from processes import clean_up_on_sigterm
from race.entrants import ENTRANTS, PLAIN
from torn import Writer

from flashckpt.bench.measure import LoadWatch, document, write_json

HERE = Path(__file__).parent
VENVS = {
    "flashckpt": "flashckpt", "dcp.async_save": "loop", "torch_checkpointing": "torch_checkpointing",
    "torch_checkpointing, its lock held": "torch_checkpointing", "Lightning AsyncCheckpointIO": "lightning",
    "DLRover": "dlrover", "torch.save": "loop",
}  # fmt: skip
WORDS = ("right", "wrong", "error")
DEADLINE_S = 300.0


def judged(claimed: int | None, values: Sequence[float], wanted: int | None = None) -> str:
    """Return the word for what was loaded: `wanted` is the step that was asked for, None for any."""
    if claimed is None:
        return "error"
    is_right = list(values) == [float(claimed)] and wanted in (None, claimed)
    return "right" if is_right else "wrong"


def kinds_of(paths: Sequence[str]) -> dict[str, str]:
    """Return one file of each kind: names that differ in their numbers alone are one kind."""
    found: dict[str, str] = {}
    for path in sorted(paths):
        found.setdefault(re.sub(r"\d+", "N", Path(path).name), path)
    return found


class Trial:
    """One saver in one folder, with what it needs beside it.

    Args:
        name: Of the saver.
        python: That has it.
        nbytes: Of the state.
        folder: Of the trial.
    """

    def __init__(self, name: str, python: Path, nbytes: int, folder: Path) -> None:
        self.name, self.python, self.nbytes, self.folder = name, python, nbytes, folder
        self.run = f"torn{os.getpid()}x{time.time_ns() % 10**6}"
        self.env = {"FLASHCKPT_SHM_DIR": str(folder / "shm"), "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
        (folder / "shm").mkdir()
        (folder / "out").mkdir()
        self.agent: Writer | None = None
        if name == "DLRover":
            self.env |= environment(0, 1, self.run)
            self.agent = Writer([str(python), str(HERE / "torn_dlrover.py"), "agent", str(folder / "out")], self.env)
            self.agent.wait_for("ready")

    def writer(self, *words: str) -> Writer:
        """Start the saver."""
        return Writer([*self._command(), *words], self.env)

    def load(self, step: int | None = None, wanted: int | None = None) -> str:
        """Load in a new process; return the word for it."""
        words = [*self._command(), "load", *([] if step is None else [str(step)])]
        try:
            ended = subprocess.run(
                words, env={**os.environ, **self.env}, check=False, capture_output=True, text=True, timeout=DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            return "error"
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"event": "loaded"')]
        if not lines:
            return "error"
        return judged(lines[-1]["step"], lines[-1]["values"], wanted)

    def after_death(self) -> None:
        """Let the agent do what it does when a worker has died."""
        if self.agent is not None:
            assert self.agent.process.stdin is not None
            self.agent.process.stdin.write("failed\n")
            self.agent.process.stdin.flush()
            self.agent.wait_for("saved")

    def forget_memory(self) -> None:
        """What is in memory goes, so that files are read."""
        self.close()
        shutil.rmtree(self.folder / "shm", ignore_errors=True)
        (self.folder / "shm").mkdir()

    def close(self) -> None:
        """End the agent."""
        if self.agent is not None:
            self.agent.process.kill()
            self.agent.close()
            self.agent = None
        remove_leftovers(self.run)

    def _command(self) -> list[str]:
        return [str(self.python), str(HERE / "torn_saver.py"), self.name, str(self.folder / "out"), str(self.nbytes)]


def finish(writer: Writer, count: int) -> list[dict[str, Any]]:
    """Wait until so many saves are through; return what it reported of them."""
    try:
        writer.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        writer.kill()
    writer.close()
    if writer.newest("saved") < count:
        raise RuntimeError(f"the saver ended after {writer.newest('saved')} of {count} saves")
    return [one for one in writer.said if one["event"] == "saved"]


def steps(trial: Trial, instants: int) -> list[str]:
    """Step the optimizer at each instant of a save; load every one."""
    said = finish(trial.writer("steps", "0", "0", "0"), 3)
    trial.close()
    fresh = Trial(trial.name, trial.python, trial.nbytes, _sub(trial.folder))
    long_ms = 1e3 * said[-1]["s"]
    delays = [f"{long_ms * number / instants:.3f}" for number in range(instants)]
    try:
        finish(fresh.writer("steps", *delays), instants)
        fresh.forget_memory()
        return [fresh.load(step, step) for step in range(1, instants + 1)]
    finally:
        fresh.close()


def kills(name: str, python: Path, nbytes: int, count: int, folder: Path) -> list[str]:
    """Kill in so many stages of the third save; load the newest in a new process."""
    found, long_s = [], 0.0
    for number in range(count):
        trial = Trial(name, python, nbytes, _sub(folder))
        try:
            writer = trial.writer("saves")
            writer.wait_for("saved", 2)
            long_s = long_s or next(one["s"] for one in writer.said if one["event"] == "saved" and one["step"] == 2)
            writer.wait_for("call", 3)
            time.sleep(long_s * (number + 0.5) / count)
            writer.kill()
            writer.close()
            trial.after_death()
            found.append(trial.load())
        finally:
            trial.close()
    return found


def bits(name: str, python: Path, nbytes: int, folder: Path) -> dict[str, str]:
    """Flip one bit in one file of each kind; load each time."""
    trial = Trial(name, python, nbytes, _sub(folder))
    try:
        finish(trial.writer("steps", "0"), 1)
        trial.forget_memory()
        files = [str(path) for path in (trial.folder / "out").rglob("*") if path.is_file() and path.stat().st_size]
        found = {}
        for kind, name_of_file in kinds_of(files).items():
            path = Path(name_of_file)
            whole = path.read_bytes()
            middle = len(whole) // 2
            path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x40]) + whole[middle + 1 :])
            found[kind] = trial.load()
            path.write_bytes(whole)
        return found
    finally:
        trial.close()


def _sub(folder: Path) -> Path:
    made = Path(tempfile.mkdtemp(dir=folder))
    made.chmod(0o700)
    return made


def measure(name: str, python: Path, args: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    """Run the three trials of one saver."""
    with tempfile.TemporaryDirectory(prefix="torn-", ignore_cleanup_errors=True) as where:
        folder = Path(where)
        trial = Trial(name, python, nbytes, _sub(folder))
        try:
            stepped = steps(trial, args.instants)
        finally:
            trial.close()
        killed = kills(name, python, nbytes, args.kills, folder)
        flipped = bits(name, python, nbytes, folder)
    return {"steps": stepped, "kills": killed, "bits": flipped}


def row(name: str, found: Mapping[str, Any]) -> str:
    """Return the line of the table: wrong without an error, of so many; what became of the others."""
    cells = []
    for trial in ("steps", "kills", "bits"):
        words = list(found[trial].values()) if trial == "bits" else found[trial]
        counts = Counter(words)
        said = f"{counts['wrong']} of {len(words)}"
        cells.append(
            (f"**{said}**" if counts["wrong"] else said) + (f", {counts['error']} errors" if counts["error"] else "")
        )
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> int:
    """Run all savers; print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--savers", nargs="+", choices=list(VENVS), default=list(VENVS))
    parser.add_argument("--mb", type=float, default=64, help="size of the state, 10^6 bytes")
    parser.add_argument("--instants", type=int, default=12, help="of the optimizer's step within a save")
    parser.add_argument("--kills", type=int, default=8, help="stages of a save that are struck")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clean_up_on_sigterm()
    load, nbytes, results = LoadWatch(), int(args.mb * 1e6) >> 20 << 20, {}
    entrants = {entrant.name: entrant for entrant in (*ENTRANTS, PLAIN)}
    for name in args.savers:
        if why := entrants[VENVS[name]].setup():
            print(f"{name} is left out: {why}", flush=True)
            continue
        results[name] = measure(name, entrants[VENVS[name]].python, args, nbytes)
        print(f"{name}: {results[name]}", flush=True)
    print(
        "\nwrong without an error\n\n| saver | a step within a save | a kill within a save | one flipped bit |\n|---|---|---|---|"
    )
    print("\n".join(row(name, found) for name, found in results.items()))
    if args.json:
        arguments = {"bytes": nbytes, "instants": args.instants, "kills": args.kills}
        write_json(args.json, document("torn-savers", arguments, results, load=load))
    ours = results.get("flashckpt", {"steps": [], "kills": [], "bits": {}})
    return int("wrong" in [*ours["steps"], *ours["kills"], *ours["bits"].values()])


if __name__ == "__main__":
    sys.exit(main())
