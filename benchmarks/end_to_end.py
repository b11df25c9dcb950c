"""What a user waits for: from the call to a durable checkpoint, and from the start of a process to restored tensors.

Saving: one process holds `--gb` of float32 parameters in 100 tensors. Every round saves them once by each way, in turns, all from
the same start, the call. flashckpt's one call of `ckpt.step()` gives four times: until it returned, until the snapshot can be restored
from memory, until another process sees the checkpoint on storage, until `ckpt.wait()` returned. The others are durable when their
files and folders are synced. "raw" is the limit: as many bytes by O_DIRECT, 16 MiB extents, fallocate and fsync, two threads.

Restoring (`--restore`): a new process for each run, from its start until a model that exists already holds the saved values: import,
construction, reading. Files are dropped from the page cache before each run. "start" is a process that imports torch, makes the same
model and restores nothing: what no way can undercut.

    .venv/bin/python benchmarks/end_to_end.py --gb 1.08,4 --seconds 60 --json FILE
    .venv/bin/python benchmarks/end_to_end.py --gb 1.5 --restore --json FILE

The machine should be quiet: the JSON says how loaded it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from processes import clean_up_on_sigterm, places

from flashckpt.bench import PEERS
from flashckpt.bench.host import available_bytes, evict
from flashckpt.bench.measure import LoadWatch, Summary, document, interleave, summarise, write_json
from flashckpt.bench.worker import workers
from flashckpt.errors import ConfigError

HERE = Path(__file__).parent
NEED = 4.5
"""State, three slots of it, and what a peer serialises into, as multiples of the state."""
USABLE = 0.9
STAGES = ("call", "restorable", "committed", "wait")
RESTORES = ("start", "flashckpt, memory", "flashckpt, storage", "torch.load", "safetensors", "dcp.load")

Series = dict[str, list[float]]


def show(title: str, found: Mapping[str, Summary], limit: str, seconds: Mapping[str, Summary]) -> None:
    """Print one table: seconds and the ratio to the limit of the same round."""
    print(f"\n{title}\n\n| | s [min-max] | x {limit} [min-max] |\n|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {seconds[name].text()} | {one.median:.2f} [{one.min:.2f}-{one.max:.2f}] |")
    sys.stdout.flush()


def summaries(series: Series, limit: str) -> tuple[dict[str, Summary], dict[str, Summary]]:
    """Return seconds, and multiples of the limit of the same round, by name."""
    seconds = {name: summarise(values) for name, values in series.items()}
    limits = series[limit]
    ratios = {name: summarise([a / b for a, b in zip(v, limits, strict=True)]) for name, v in series.items()}
    return seconds, ratios


def in_rounds(cases: Mapping[str, Callable[[], Mapping[str, float]]], seconds: float, rounds: int) -> Series:
    """Run the cases in turns for about so many seconds, three rounds at least; the first is thrown away."""
    found: Series = {}
    end, number = time.monotonic() + seconds, 0
    while number < rounds and (number < 3 or time.monotonic() < end):
        timings = interleave(dict(cases), 1, warmup=1 if number == 0 else 0)
        for (one,) in timings.values():
            for name, value in one.value.items():
                found.setdefault(name, []).append(value)
        number += 1
    return found


def measure_save(gigabytes: float, args: argparse.Namespace, disk: Path, shm: Path) -> dict[str, Any]:
    """Save by all ways in turns, each from the call until its checkpoint is durable."""
    environment = {"FLASHCKPT_SHM_DIR": str(shm)}
    config = {"bytes": gigabytes * 1e9, "folder": str(disk)}
    program = [str(HERE / "end_to_end_save.py")]
    with workers(disk) as started:
        trainer = started.start(program, {"trainer": config}, environment=environment)
        reader = started.start(program, {"reader": {**config, "reads": True}}, environment=environment)
        started.answers([*trainer, *reader])
        nbytes = started.ask(trainer, "ready")[0]

        def ours() -> dict[str, float]:
            step, path = started.ask(trainer, "next_step")[0]
            started.tell(reader, "watch", path=path)
            stages = started.ask(trainer, "flashckpt", step=step)[0]
            stages["committed"] = started.answers(reader)[0] - stages.pop("began")
            return {f"flashckpt, {stage}": stages[stage] for stage in STAGES} | {
                "wait() after the commit": stages["wait"] - stages["committed"]
            }

        def theirs(way: str) -> Callable[[], dict[str, float]]:
            return lambda: dict(started.ask(trainer, "save", way=way)[0])

        cases = {"flashckpt": ours} | {way: theirs(way) for way in ("raw", "memcpy", *PEERS)}
        series = in_rounds(cases, args.seconds, args.rounds)
        started.ask(trainer, "close")
    after = summarise(series.pop("wait() after the commit"))
    seconds, ratios = summaries(series, "raw")
    show(f"{nbytes / 1e9:.2f} GB saved, from the call until durable", ratios, "raw", seconds)
    print(f"wait() returned {after.median * 1e3:.1f} ms [{after.min * 1e3:.1f}-{after.max * 1e3:.1f}] after the commit")
    return {"bytes": nbytes, "seconds": seconds, "x_raw": ratios, "wait_after_commit_s": after}


def remove_used(folder: Path, limit_s: float = 30.0) -> None:
    """Remove a folder in which a persister may still write: its job's processes are dead, and it ends."""
    end = time.monotonic() + limit_s
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def measure_restore(gigabytes: float, args: argparse.Namespace, disk: Path, shm: Path) -> dict[str, Any]:
    """Start a process for each way in turns, until its model holds what was saved."""
    program, nbytes = [sys.executable, str(HERE / "end_to_end_restore.py")], int(gigabytes * 1e9)
    environment = {
        **os.environ,
        "FLASHCKPT_SHM_DIR": str(shm),
        "OPENBLAS_NUM_THREADS": "1",
        "FLASHCKPT_DAEMON_LINGER": "0",
    }

    def start(way: str, **changes: str) -> dict[str, float]:
        for folder, _, names in os.walk(disk):  # a persister may still be at work there
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    evict(Path(folder) / name)
        began = time.monotonic()
        command = [*program, way, str(nbytes), str(disk)]
        done = subprocess.run(command, env={**environment, **changes}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"the process that restores by {way} failed", found=done.stderr[-2000:])
        marks = json.loads(done.stdout.splitlines()[-1])
        return {way: marks["restored"] - began, f"{way}: import and model": marks["made"] - began}

    start("write")  # leaves the files of every way, and a snapshot in memory as a crash leaves it

    def from_storage() -> dict[str, float]:
        empty = Path(tempfile.mkdtemp(dir=shm.parent, prefix="flashckpt-bench-"))
        try:
            return start("flashckpt, storage", FLASHCKPT_SHM_DIR=str(empty))
        finally:
            remove_used(empty)

    cases = {way: (lambda way=way: start(way)) for way in RESTORES} | {"flashckpt, storage": from_storage}
    series = in_rounds(cases, args.seconds, args.rounds)
    before = {name: series.pop(name) for name in list(series) if name.endswith("import and model")}
    seconds, ratios = summaries(series, "start")
    show(f"{gigabytes} GB restored, from the start of the process", ratios, "start", seconds)
    return {"bytes": nbytes, "seconds": seconds, "x_start": ratios, "before_reading_s": before}


def main() -> int:
    """Parse arguments; run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", default="1.08", help="sizes in 10^9 bytes, by commas")
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many, and at least three")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds, per size")
    parser.add_argument("--dir", help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--restore", action="store_true", help="restoring instead of saving")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clean_up_on_sigterm()
    load, results = LoadWatch(), dict[str, Any]()
    for size in map(float, args.gb.split(",")):
        name = f"{'restore' if args.restore else 'save'}, {size:g} GB"
        if size * 1e9 * NEED > USABLE * available_bytes():
            results[name] = {"left_out": f"needs {size * NEED:.1f} GB of memory"}
            print(f"\n{name}: left out, {results[name]['left_out']}")
            continue
        with places(args.dir) as (disk, shm):
            results[name] = (measure_restore if args.restore else measure_save)(size, args, disk, shm)
    made = document(
        "end to end", vars(args) | {"json": None}, results, load=load, paths=[Path(args.dir or tempfile.gettempdir())]
    )
    report = made["load"]
    print(f"\nload average {report['load_before']} before, {report['other_cores']} cores used by others meanwhile")
    if args.json:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
