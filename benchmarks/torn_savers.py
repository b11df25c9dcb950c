"""What a save is worth: how often each saver restores wrong values without an error.

    PYTHONPATH=benchmarks python benchmarks/torn_savers.py [--mb 64] [--instants 10] [--kills 5] [--json FILE]

Three trials of each saver, in the environments of the race (`make race ARGS=--setup`), one process, every element of the
state the number of its step. Every process below is a fork of one that has imported the saver and done nothing else:

* steps: a step of the optimizer at so many instants between the call of a save and its end, as a loop has one; most of
  them soon after the call, for that is when a copy is made;
* kills: SIGKILL at as many instants of a save, then a new process loads what the saver's documentation calls the newest;
* bits: one bit flipped at 43 % of one file of each kind, then it is loaded.

wrong: values of another step than the checkpoint claims to be of, or of two, and no error. error: an exception instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dlrover_peer import environment, remove_leftovers
from processes import clean_up_on_sigterm
from race.entrants import ENTRANTS, PLAIN
from torn import Writer
from torn_forks import Fork, Zygote

from flashckpt.bench.measure import LoadWatch, document, write_json

HERE = Path(__file__).parent
VENVS = {
    "flashckpt": "flashckpt", "dcp.async_save": "loop", "torch_checkpointing": "torch_checkpointing",
    "torch_checkpointing, its lock held": "torch_checkpointing", "Lightning AsyncCheckpointIO": "lightning",
    "DLRover": "dlrover", "torch.save": "loop",
}  # fmt: skip
SAME_FILES = ("torch_checkpointing, its lock held",)  # as the one before it: a lock changes neither kills nor bits
ENV = {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}


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


@dataclass(frozen=True, slots=True)
class Saver:
    """One of the field.

    Attributes:
        name: Of it.
        python: That has it.
        nbytes: Of the state.
        zygote: That its processes are forks of.
    """

    name: str
    python: Path
    nbytes: int
    zygote: Zygote


class Trial:
    """One saver in one folder, with what it needs beside it.

    Args:
        saver: Whose trial it is.
        folder: Of the trial.
    """

    def __init__(self, saver: Saver, folder: Path) -> None:
        self.saver, self.folder = saver, folder
        (folder / "shm").mkdir()
        (folder / "out").mkdir()
        self.agent: Writer | None = None
        self.host()

    def host(self) -> None:
        """Give it a separate memory, empty, and the agent that a process of DLRover's waits for."""
        self.run = f"torn{os.getpid()}x{time.time_ns() % 10**6}"
        self.env = {"FLASHCKPT_SHM_DIR": str(self.folder / "shm"), **ENV}
        if self.saver.name == "DLRover":
            self.env |= environment(0, 1, self.run)
            command = [str(self.saver.python), str(HERE / "torn_dlrover.py"), "agent", str(self.folder / "out")]
            self.agent = Writer(command, self.env)
            self.agent.wait_for("ready")

    def start(self, *words: str) -> Fork:
        """Start a process of the saver."""
        words = (str(self.folder / "out"), str(self.saver.nbytes), *words)
        return self.saver.zygote.fork(list(words), self.env, self.folder)

    def load(self, step: int | None = None, wanted: int | None = None) -> str:
        """Load in a new process; return the word for it."""
        process = self.start("load", *([] if step is None else [str(step)]))
        process.join()
        loaded = [one for one in process.said if one["event"] == "loaded"]
        return judged(loaded[-1]["step"], loaded[-1]["values"], wanted) if loaded else "error"

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
        self.host()

    def close(self) -> None:
        """End the agent."""
        if self.agent is not None:
            self.agent.process.kill()
            self.agent.close()
            self.agent = None
        remove_leftovers(self.run)


def finish(process: Fork, count: int) -> list[dict[str, Any]]:
    """Wait until so many saves are through; return what it reported of them."""
    process.join()
    if process.newest("saved") < count:
        raise RuntimeError(f"the saver ended after {process.newest('saved')} of {count} saves")
    return [one for one in process.said if one["event"] == "saved"]


def steps(saver: Saver, instants: int, folder: Path) -> list[str]:
    """Step the optimizer at each instant of a save; load every one."""
    with contextlib.closing(Trial(saver, _sub(folder))) as trial:
        said = finish(trial.start("steps", "-", "-", "-"), 3)
    delays = [f"{1e3 * said[-1]['s'] * (number / instants) ** 3:.3f}" for number in range(instants)]
    with contextlib.closing(Trial(saver, _sub(folder))) as trial:
        finish(trial.start("steps", "-", "-", *delays), instants + 2)
        trial.forget_memory()
        return [trial.load(step, step) for step in range(3, instants + 3)]


def kills(saver: Saver, count: int, folder: Path) -> list[str]:
    """Kill in so many stages of the third save; load the newest in a new process."""
    found, long_s = [], 0.0
    for number in range(count):
        with contextlib.closing(Trial(saver, _sub(folder))) as trial:
            process = trial.start("saves")
            process.wait_for("saved", 2)
            long_s = long_s or next(one["s"] for one in process.said if one["event"] == "saved" and one["step"] == 2)
            process.wait_for("call", 3)
            time.sleep(long_s * (number + 0.5) / count)
            process.kill()
            trial.after_death()
            found.append(trial.load())
        shutil.rmtree(trial.folder, ignore_errors=True)
    return found


def bits(saver: Saver, folder: Path) -> dict[str, str]:
    """Flip one bit in one file of each kind; load each time."""
    with contextlib.closing(Trial(saver, _sub(folder))) as trial:
        finish(trial.start("steps", "-"), 1)
        trial.forget_memory()
        files = [str(path) for path in (trial.folder / "out").rglob("*") if path.is_file() and path.stat().st_size]
        found = {}
        for kind, name_of_file in kinds_of(files).items():
            path = Path(name_of_file)
            whole = path.read_bytes()
            at = int(0.43 * len(whole))  # in the middle there may be nothing but padding between two halves
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
            found[kind] = trial.load()
            path.write_bytes(whole)
        return found


def _sub(folder: Path) -> Path:
    made = Path(tempfile.mkdtemp(dir=folder))
    made.chmod(0o700)
    return made


def measure(name: str, python: Path, args: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    """Run the three trials of one saver."""
    began = time.monotonic()
    zygote = Zygote([str(python), str(HERE / "torn_saver.py"), name, "serve"], ENV)
    with (
        contextlib.closing(zygote),
        tempfile.TemporaryDirectory(prefix="torn-", ignore_cleanup_errors=True) as where,
    ):
        saver, folder = Saver(name, python, nbytes, zygote), Path(where)
        found: dict[str, Any] = {"steps": steps(saver, args.instants, folder), "kills": [], "bits": {}}
        if name not in SAME_FILES:
            found |= {"kills": kills(saver, args.kills, folder), "bits": bits(saver, folder)}
        return {**found, "seconds": round(time.monotonic() - began, 1)}


def row(name: str, found: Mapping[str, Any]) -> str:
    """Return the line of the table: wrong without an error, of so many; what became of the others."""
    cells = []
    for trial in ("steps", "kills", "bits"):
        words = list(found[trial].values()) if trial == "bits" else found[trial]
        counts = Counter(words)
        said = f"{counts['wrong']} of {len(words)}" if words else "-"
        cells.append(
            (f"**{said}**" if counts["wrong"] else said) + (f", {counts['error']} errors" if counts["error"] else "")
        )
    return f"| {name} | " + " | ".join(cells) + " |"


def kept(path: Path | None) -> dict[str, Any]:
    """Return what a file has of savers that were measured before."""
    found: dict[str, Any] = json.loads(path.read_text())["results"] if path is not None and path.exists() else {}
    return found


def main() -> int:
    """Run all savers; print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--savers", nargs="+", choices=list(VENVS), default=list(VENVS))
    parser.add_argument("--mb", type=float, default=64, help="size of the state, 10^6 bytes")
    parser.add_argument("--instants", type=int, default=10, help="of the optimizer's step within a save")
    parser.add_argument("--kills", type=int, default=5, help="stages of a save that are struck")
    parser.add_argument("--json", type=Path, help="what it has of other savers stays")
    args = parser.parse_args()
    clean_up_on_sigterm()
    load, nbytes, results = LoadWatch(), int(args.mb * 1e6) >> 20 << 20, kept(args.json)
    arguments = {"bytes": nbytes, "instants": args.instants, "kills": args.kills}
    entrants = {entrant.name: entrant for entrant in (*ENTRANTS, PLAIN)}
    for name in args.savers:
        if why := entrants[VENVS[name]].setup():
            print(f"{name} is left out: {why}", flush=True)
            continue
        results[name] = measure(name, entrants[VENVS[name]].python, args, nbytes)
        print(f"{name}: {results[name]}", flush=True)
        if args.json:  # after each: a run that is cut short keeps what it has
            write_json(args.json, document("torn-savers", arguments, results, load=load))
    print(
        "\nwrong without an error\n\n| saver | a step within a save | a kill within a save | one flipped bit |\n|---|---|---|---|"
    )
    print("\n".join(row(name, results[name]) for name in VENVS if name in results))
    ours = results.get("flashckpt", {"steps": [], "kills": [], "bits": {}})
    return int("wrong" in [*ours["steps"], *ours["kills"], *ours["bits"].values()])


if __name__ == "__main__":
    sys.exit(main())
