"""`flashckpt bench job --like mlperf`: starts the processes, has fio measure the device beneath, and asks `plan` what it means."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashckpt import entry_points
from flashckpt.bench.layouts import DEFAULTS, ModelLayout
from flashckpt.bench.mlperf import CHECKPOINTS, Pass, rank_bytes, results
from flashckpt.bench.scratch import Scratch
from flashckpt.bench.worker import Workers
from flashckpt.commands.quantity import show_rate, show_s
from flashckpt.storage.store import PART_BYTES, PARTS_IN_FLIGHT

Progress = Callable[[str, int, int | None], None]
_COLD = "files evicted by posix_fadvise, checked by mincore; what devices delivered counted by the kernel"
_ENOUGH = 0.001
"""Goodput that a faster store could still bring where one is called enough."""
_MOST, _HALVINGS = 64.0, 7  # a factor of 64 up or down, to 7 %


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeRun:
    """What to run: a layout of which the first `ranks` take part, and the GPUs and seconds per step of the job that asks.

    `checkpoints` are written, then read; `drop_caches` also drops those of the machine (root).
    """

    layout: ModelLayout
    name: str
    ranks: int
    gpus: int
    step_s: float = 1.0
    checkpoints: int = CHECKPOINTS
    drop_caches: bool = False

    @property
    def departs(self) -> str:
        """Where this is less than the rules ask for: a whole model on all its ranks (subset mode is 8B on its 8), ten times."""
        whole = DEFAULTS[self.name].total_bytes
        less = [f"{self.layout.total_bytes / whole:.2%} of its bytes"] if self.layout.total_bytes < whole else []
        less += [f"{self.ranks} of {self.layout.ranks} ranks"] if self.ranks < self.layout.ranks else []
        less += [f"{self.checkpoints} checkpoints, not {CHECKPOINTS}"] if self.checkpoints != CHECKPOINTS else []
        return f"{self.name} with {', '.join(less)}" if less else f"{self.name}, whole"

    @property
    def process_bytes(self) -> int:
        """Memory that one process takes, whatever it writes: nothing of a checkpoint is held."""
        return (3 * PARTS_IN_FLIGHT * PART_BYTES) + (100 << 20)

    @property
    def storage_bytes(self) -> int:
        """What lies on the storage at the end of the writes: the rules read every checkpoint back."""
        return sum(rank_bytes(self.layout, self.ranks)) * self.checkpoints + (64 << 20)


def run_like(run: LikeRun, memory: Path, scratch: Scratch, progress: Progress) -> dict[str, Any]:
    """Write, clear, read; return the results. All processes have ended when this returns or raises."""
    sizes = rank_bytes(run.layout, run.ranks)
    where = None if scratch.directory is None else str(scratch.directory)
    common = {"url": scratch.url, "options": dict(scratch.options), "directory": where}
    device = {} if scratch.directory is None else fio(scratch.directory, sizes, progress)
    workers, total, done = Workers(memory), 2 * run.checkpoints * sum(sizes), 0
    try:
        configs = {f"rank {rank}": {**common, "rank": rank, "nbytes": size} for rank, size in enumerate(sizes)}
        ranks = workers.start(["-m", "flashckpt.bench.mlperf_rank"], configs)
        workers.answers(ranks)
        passes: dict[str, list[Pass]] = {"write": [], "read": []}
        cold: list[Mapping[str, Any]] = []
        for way, taken in passes.items():
            for number in range(run.checkpoints):
                progress(way, done, total)
                answers = workers.ask(ranks, way, number=number)
                extra = {"cached_share": [one["cached_share"] for one in cold]} if way == "read" else {}
                fields = {key: [one[key] for one in answers] for key in answers[0]}
                taken.append(Pass(**{**fields, **extra}))
                done += sum(sizes)
            cold = cold or workers.ask(ranks, "make_cold", checkpoints=run.checkpoints, drop=run.drop_caches)
        workers.finish()
    finally:
        workers.close()
    how = (
        _COLD
        if where
        else "not possible: caches are the server's; read from another node, or after more than its memory"
    )
    made = results(passes["write"], passes["read"], device, run.departs, how)
    return {**made, "device": "fio" if device else _no_device(where), "answer": answer(run, made["rates"])}


def _no_device(where: str | None) -> str:
    return "fio is not there (apt-get install fio)" if where else "not known: the storage is a server"


def fio(directory: Path, sizes: Sequence[int], progress: Progress) -> dict[str, float]:
    """Return the device's own bytes per second: O_DIRECT with as many processes; {} where fio is not there or refuses."""
    if shutil.which("fio") is None:
        return {}
    found = {}
    for way in ("write", "read"):
        progress(f"fio, {way}", 0, None)
        size = max(1 << 24, min(max(sizes), 1 << 30) >> 24 << 24)
        words = [
            "fio", "--name=device", f"--directory={directory}", f"--rw={way}", "--bs=16M", f"--size={size}",
            f"--numjobs={len(sizes)}", "--direct=1", "--ioengine=libaio", "--iodepth=4", "--end_fsync=1", "--group_reporting",
            "--output-format=json",
        ]  # fmt: skip
        ended = subprocess.run(words, check=False, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        if ended.returncode:
            break  # tmpfs refuses O_DIRECT on older kernels
        found[way] = float(json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0][way]["bw_bytes"])
    for path in directory.glob("device.*"):
        path.unlink()
    return found


def answer(run: LikeRun, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return what this store costs a job, which would be enough for it, and the line that uses it.

    The rates are those of one node: each node of the job is taken to have as much.
    """
    command = entry_points.load(entry_points.COMMANDS, "plan")

    def plan(factor: float) -> dict[str, Any]:
        words = ["--gpus", str(run.gpus), "--layout", run.name, "--gpus-per-node", str(min(run.ranks, run.gpus))]
        words += ["--step-time", f"{run.step_s}s", "--json", "-"]
        for way in ("write", "read"):
            words += [f"--{way}-rate", f"{max(1, int(rates[f'{way}_bytes_per_s'] * factor))}B"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            command.main(args=words, prog_name="plan", standalone_mode=False)
        found: dict[str, Any] = json.loads(said.getvalue())
        return found

    here, most = plan(1.0), plan(_MOST)["intervals"]["goodput"]
    low, high = 1 / _MOST, _MOST  # goodput grows with the rate: halve the interval of its logarithm
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if plan(middle)["intervals"]["goodput"] >= most - _ENOUGH else (middle, high)
    chosen = here["intervals"]
    return {
        "gpus": run.gpus,
        "goodput": chosen["goodput"],
        "lost_to_storage": max(0.0, most - chosen["goodput"]),
        "enough_write_bytes_per_s": rates["write_bytes_per_s"] * high,
        "enough_read_bytes_per_s": rates["read_bytes_per_s"] * high,
        "durable_s": here["costs"]["persist_s"],
        "snapshot_every": chosen["snapshot_steps"],
        "persist_every": chosen["snapshot_steps"] * chosen["persist_every"],
        "step_s": run.step_s,
        "mtbf_s": here["mtbf_s"],
    }


def sentences(made: Mapping[str, Any], url: str) -> list[str]:
    """Return the results as sentences, what is wrong first."""
    got = made["answer"]
    lines = [*made["findings"], f"{made['follows']}; {made['departs']}"]
    for way in ("write", "read"):
        ratio = made["x_device"].get(way)
        beside = f", {ratio:.2f} x the device's own by fio" if ratio else f" (the device: {made['device']})"
        seconds = made["summary_s"][f"checkpoint_{way}_s"]
        count = "written" if way == "write" else "read back cold"
        lines.append(
            f"{seconds['n']} checkpoints {count}: {show_s(seconds['median'])} (slowest rank), "
            f"{show_rate(made['bytes_per_s'][way]['median'])} in all, {show_rate(min(made['rank_bytes_per_s'][way]))} the slowest rank{beside}"
        )
    lines += made["notes"]
    lines.append(
        f"at {got['gpus']:,} GPUs, each node with as much of it: {got['goodput']:.2%} goodput, of which this store costs"
        f" {got['lost_to_storage']:.2%}; enough (within {_ENOUGH:.1%}) per node: write {show_rate(got['enough_write_bytes_per_s'])},"
        f" read {show_rate(got['enough_read_bytes_per_s'])}"
    )
    lines.append(
        f"with steps of {got['step_s']:g} s: Checkpointer({url!r}, snapshot_every={got['snapshot_every']},"
        f" persist_every={got['persist_every']})"
    )
    return lines
