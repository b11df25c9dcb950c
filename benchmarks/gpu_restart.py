"""From SIGKILL of a rank to its next step on a GPU, by phase: the CUDA context and NCCL apart, the restore from memory to the device.

    python benchmarks/gpu_restart.py --gb 16 --seconds 60 --json out/gpu-restart.json [--device cpu]
    python benchmarks/gpu_restart.py --gb 0.1 --device emu --context-s 3 --standby 1 --turns 3 --kills 2 --seconds 200 --json ...

One rank under dlrun, which forks it from a process that has the imports done. 16 GB are a billion parameters with two moments.
With --standby the job without standby processes and the one with them take turns; a kill waits until they are ready. "emu" is the
emulated device of the tests (a C++ compiler), whose context takes --context-s.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_time import end_of
from processes import descendants

from flashckpt.bench.measure import LoadWatch, document, summarise, write_json

EMULATED = Path(__file__).resolve().parents[1] / "tests" / "support" / "emulated_dlrun.py"
RANK = Path(__file__).with_name("gpu_restart_rank.py")
READY = "standby processes are ready"
PHASES = ("fork", "import", "CUDA context", "process group", "build", "restore", "first step")
MARKS = ("entered", "imported", "context", "group", "built", "restored", "stepped")


def until(condition: Callable[[], Any], end: float) -> Any:
    """Poll; None when the time is over."""
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    return None


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all starts of the rank so far."""
    path = folder / "marks"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def phases(record: dict[str, Any], killed: float) -> dict[str, float]:
    """Return seconds by phase, from the kill to the first step."""
    ends = [record["marks"][name] for name in MARKS]
    begins = [killed, *ends[:-1]]
    found = {name: end - begin for name, begin, end in zip(PHASES, begins, ends, strict=True)}
    return found | {"kill to step": ends[-1] - killed}


def kills(options: argparse.Namespace, folder: Path, standby: int, end: float) -> tuple[list[dict[str, float]], str]:
    """Kill and measure while there is time; return the phases of every kill, and why it stopped early."""
    found: list[dict[str, float]] = []
    for number in range(options.kills):
        record = until(lambda n=number: len(starts(folder)) > n and starts(folder)[n], end)  # type: ignore[misc]
        if record is None:
            return found, f"start {number + 1} did not train in time"
        if until((folder / f"ready{record['pid']}").exists, end) is None:
            return found, f"start {number + 1} had no two snapshots in time"
        if standby and not until(lambda n=number: (folder / "log").read_text(errors="replace").count(READY) > n, end):  # type: ignore[misc]
            return found, f"start {number + 1} had no standby in time"
        killed = time.time()
        os.kill(record["pid"], signal.SIGKILL)
        behind = until(lambda n=number: len(starts(folder)) > n + 1 and starts(folder)[n + 1], end)  # type: ignore[misc]
        if behind is None:
            return found, f"no step within the time after kill {number + 1}"
        if not behind["restored"]:
            return found, "nothing was restored"
        found.append(phases(behind, killed))
        found[-1] |= {f"restore: {key}": value for key, value in behind["seconds"].items()}
    return found, ""


def job(options: argparse.Namespace, standby: int, end: float) -> tuple[list[dict[str, float]], str, list[str]]:
    """Run one job and kill its rank again and again; return the phases, why it stopped early, the end of its log then."""
    with tempfile.TemporaryDirectory(prefix="flashckpt-gpu-", ignore_cleanup_errors=True) as name:
        folder, base = Path(name), os.environ.get("FLASHCKPT_SHM_DIR", "/dev/shm")
        program = [str(EMULATED)] if options.device == "emu" else ["-m", "flashckpt.daemon.run"]
        words = [*program, "--standalone", "--nproc-per-node=1", f"--max-restarts={options.kills}"]
        words += [f"--standby={standby}", str(RANK), name, "--gb", str(options.gb), "--device", options.device]
        environment = {**os.environ, "FLASHCKPT_SHM_DIR": f"{base}/restart"}
        environment["EMULATED_CONTEXT_MS"] = str(round(options.context_s * 1000))
        if options.device == "emu":  # the zygote is forked with the device in it, which takes a single thread
            environment["OPENBLAS_NUM_THREADS"] = "1"
        with (folder / "log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                found, why = kills(options, folder, standby, end)
            finally:
                for pid in descendants(agent.pid):  # the agent itself, then its zygote, daemon and rank
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                agent.wait()
                subprocess.run(["rm", "-rf", f"{base}/restart"], check=False)
        return found, why, (folder / "log").read_text(errors="replace").splitlines()[-5:] if why else []


def rows_of(options: argparse.Namespace, found: list[dict[str, float]], title: str) -> list[str]:
    """Return the lines of one side: the median of each phase, and how quickly memory came to the device."""
    rows = [f"{options.gb:g} GB, {title}{len(found)} kills"]
    keys = list(dict.fromkeys(key for one in found for key in one))
    rows += [f"{key}: {summarise([one[key] for one in found if key in one]).text()} s" for key in keys]
    if found:
        rows.append(f"restore into the device: {summarise([options.gb / one['restore'] for one in found]).text()} GB/s")
    return rows


def main() -> None:
    """Parse arguments; run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--kills", type=int, default=3, help="of each job")
    parser.add_argument("--device", choices=("cuda", "cpu", "emu"), default="cuda")
    parser.add_argument("--standby", type=int, default=0, help="standby processes of every second job")
    parser.add_argument("--turns", type=int, default=1, help="jobs of each kind")
    parser.add_argument("--context-s", type=float, default=0.0, help="with --device emu: how long a context takes")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    end, load = end_of(options.seconds) - 1, LoadWatch()
    sides: dict[int, list[dict[str, float]]] = {0: []} | ({options.standby: []} if options.standby else {})
    rows: list[str] = []
    log: list[str] = []
    why = ""
    for left, (standby, found) in zip(
        range(options.turns * len(sides), 0, -1), [*sides.items()] * options.turns, strict=True
    ):
        more, early, tail = job(options, standby, time.monotonic() + (end - time.monotonic()) / left)
        found.extend(more)
        why, log = (early, tail) if early else (why, log)
    for standby, found in sides.items():
        rows += rows_of(options, found, f"--standby {standby}: " if options.standby else "")
    rows[0] += f"; {why}" if why else ""
    rows += [f"| {line}" for line in log]
    arguments = {key: getattr(options, key) for key in ("gb", "device", "standby", "turns", "context_s")}
    results: dict[str, Any] = {"kills": sides[0], "standby": sides.get(options.standby, []), "stopped": why}
    write_json(options.json, document("gpu_restart", arguments, results, load=load) | {"rows": rows})
    print("\n".join(rows))
    sys.exit(0 if all(sides.values()) else 1)


if __name__ == "__main__":
    main()
