"""`flashckpt bench job --like mlperf` beside DLIO, MLPerf Storage's own program: the same bytes on the same directory.

    PYTHONPATH=benchmarks python benchmarks/mlperf_dlio.py DIRECTORY --dlio CHECKOUT [--rounds 2] [--json FILE]

CHECKOUT is a checkout of github.com/argonne-lcf/dlio_benchmark: the release 2.0.0 on the package index neither fsyncs nor
reads checkpoints. Both write the 8B model at 1/64 of its bytes from 8 processes, ten times with fsync, and read it back
after the machine's caches were dropped (as root). They take turns, and a third with them: `plain` (mlperf_plain.py) has as many processes write and
read the same bytes through the page cache, as DLIO does, without torch. For what torch.save and torch.load cost alone all
are also run on tmpfs, where a device has no part in it: `--memory`. CPU is that of all processes
of a run beyond one of a single checkpoint, by checkpoint: written and read once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlperf_plain import plain
from race.entrants import Entrant

from flashckpt.bench.host import drop_caches
from flashckpt.bench.measure import LoadWatch, document, summarise, write_json

RANKS, NBYTES = 8, 1_757_000_000
PINS = (
    "mpi4py==4.1.1", "mpich==5.0.2", "hydra-core==1.3.2", "omegaconf==2.3.0", "pandas", "psutil", "h5py", "Pillow",
    "PyYAML", "pydftracer>=2.0.2",
)  # fmt: skip
# The 8B model with its widths divided by 8: products of two of them, nearly all of its bytes, become 1/64.
MODEL = {
    "num_layers": 32, "transformer.hidden_size": 512, "transformer.ffn_hidden_size": 1792, "transformer.vocab_size": 16032,
}  # fmt: skip


def ours(directory: Path, rounds: int) -> dict[str, Any]:
    """Return seconds and bytes of our run."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        words = ["bench", "job", str(directory), "--like", "mlperf", "--layout", "llama3-8b", "--scale", "1/64"]
        words += ["--ranks", str(RANKS), "--rounds", str(rounds), "--json", str(found)]
        ended = subprocess.run(
            [str(Path(sys.executable).with_name("flashckpt")), *words], check=False, capture_output=True, text=True
        )
        if not found.exists():
            raise SystemExit(f"flashckpt bench ended with {ended.returncode}: {ended.stderr[-800:]}")
        made = json.loads(found.read_text())["results"]
        summary = made["summary_s"]
        return {
            "nbytes": made["checkpoint_bytes"],
            "save_s": summary["checkpoint_write_s"]["median"],
            "load_s": summary["checkpoint_read_s"]["median"],
        }


def dlio(python: Path, checkout: Path, directory: Path, checkpoints: int) -> dict[str, Any]:
    """Return what DLIO says of its writes, and after caches were dropped of its reads."""
    folder = directory / "dlio"
    found: dict[str, Any] = {}
    try:
        for way, writes, reads in (("save", checkpoints, 0), ("load", 0, checkpoints)):
            with tempfile.TemporaryDirectory() as out:
                settings: dict[str, object] = {f"workload.model.{key}": value for key, value in MODEL.items()}
                settings |= {
                    "workload.checkpoint.checkpoint_folder": folder, "workload.checkpoint.num_checkpoints_write": writes,
                    "workload.checkpoint.num_checkpoints_read": reads, "workload.checkpoint.time_between_checkpoints": 0,
                    "workload.checkpoint.fsync": True, "workload.checkpoint.rank_sync": True, "workload.output.folder": out,
                }  # fmt: skip
                words = [str(python.parent / "mpiexec"), "-n", str(RANKS), str(python), "-m", "dlio_benchmark.main"]
                words += ["workload=llama_8b_zero3", f"hydra.run.dir={out}"]
                words += [f"++{key}={value}" for key, value in settings.items()]
                env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
                ended = subprocess.run(words, check=False, capture_output=True, text=True, env=env, cwd=out)
                if ended.returncode or not (Path(out) / "summary.json").exists():
                    raise SystemExit(f"DLIO ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-1500:]}")
                metric = json.loads((Path(out) / "summary.json").read_text())["metric"]
                found[f"{way}_s"] = metric[f"{way}_checkpoint_duration_mean_seconds"]
                found["nbytes"] = metric["checkpoint_size_GB"] * 1024**3
            drop_caches()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def compared(where: Path, python: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of both on a directory, in turns, and the CPU seconds of a checkpoint."""
    took: dict[str, list[float]] = {}
    ways = {
        "flashckpt": lambda count: ours(where, count),
        "dlio": lambda count: dlio(python, args.dlio, where, count),
        "plain": lambda count: {"nbytes": NBYTES, **plain(where, RANKS, NBYTES, count)},
    }
    single = {name: with_cpu(way, 1)[1] for name, way in ways.items()}
    sizes: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            found, used_s = with_cpu(way, args.checkpoints)
            sizes[name] = found["nbytes"]
            more = {"write": found["save_s"], "read": found["load_s"]}
            more["CPU"] = (used_s - single[name]) / max(1, args.checkpoints - 1)
            for what, seconds in more.items():
                took.setdefault(f"{name}, {what}", []).append(seconds)
                print(f"{where}: {name}, {what}: {seconds:.3f} s, {sizes[name] / seconds / 1e9:.2f} GB/s", flush=True)
    return {"nbytes": sizes, "seconds": {key: summarise(one) for key, one in took.items()}}


def with_cpu(way: Callable[[int], dict[str, Any]], count: int) -> tuple[dict[str, Any], float]:
    """Return what a run of so many checkpoints found, and the CPU seconds of its processes."""
    before = os.times()
    found = way(count)
    after = os.times()
    return found, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    """Take turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dlio", type=Path, required=True, help="a checkout of dlio_benchmark")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="also on /dev/shm: what both cost without a device")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    entrant = Entrant(name="dlio", venv="dlio", script=(), pins=PINS, module="mpi4py, hydra, pandas, dftracer.python")
    if why := entrant.setup():
        raise SystemExit(f"DLIO cannot be run here: {why}")
    load, results = LoadWatch(), dict[str, Any]()
    for where in [args.directory, *([Path("/dev/shm")] if args.memory else [])]:
        results["memory" if where != args.directory else "device"] = compared(where, entrant.python, args)
    if args.json:
        settings = {"rounds": args.rounds, "checkpoints": args.checkpoints}
        write_json(args.json, document("mlperf-dlio", settings, results, load=load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
