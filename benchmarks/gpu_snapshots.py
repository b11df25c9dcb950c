"""What a snapshot costs training on a GPU: blocked, lost and COMPLETE, beside torch.save, dcp.async_save and a pinned copy.

    python benchmarks/gpu_snapshots.py --gb 8 --seconds 75 --json out/gpu-8.json [--device cpu]

Methods take turns within every round, each beside a real training step (`gpu_loop`). Blocked is what the training thread waits:
the call, and the fence in front of the optimizer step. Lost is what the step that the snapshot begins in takes longer than a quiet one,
from an idle device to an idle device. COMPLETE counts from the call to the digests in memory, or to the end of the write where nothing in
memory can be restored from. A method whose last round took longer than what is left is left out of further rounds.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import gpu_loop
import torch
from gpu_time import end_of

from flashckpt.bench.measure import LoadWatch, document, median, summarise, write_json

KEYS = ("blocked_s", "call_s", "fence_s", "lost_s", "complete_s", "quiet_s", "next_step_s")


def measured(loop: gpu_loop.DeviceLoop, case: Any) -> dict[str, float]:
    """Two quiet steps, one snapshot, the step beside its copy, steps until nothing runs beside any more."""
    quiet = min(loop.step() for _ in range(2))
    started = time.perf_counter()
    case.call()
    called = time.perf_counter()
    loop.compute()
    fence = time.perf_counter()
    case.fence()
    fenced = time.perf_counter()
    loop.update()
    loop.synchronize()
    beside = time.perf_counter() - started
    behind: list[float] = []
    while not case.is_done() and len(behind) < 200:
        behind.append(loop.step())
    return {
        "blocked_s": called - started + fenced - fence,
        "call_s": called - started,
        "fence_s": fenced - fence,
        "lost_s": beside - quiet,
        "complete_s": case.finish() - started,
        "quiet_s": quiet,
        "next_step_s": median(behind) if behind else quiet,
    }


def rounds(loop: gpu_loop.DeviceLoop, cases: dict[str, Any], end: float, save: Any, left_out: dict[str, str]) -> None:
    """Run the cases in turns until the time is over; `save` is called with all series after each run.

    A case that fails is noted in `left_out` and not run again.
    """
    series: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    took = dict.fromkeys(cases, 0.0)
    for number in range(1000):
        turn = number % len(cases)
        left = [name for name in [*cases][turn:] + [*cases][:turn] if time.monotonic() + took[name] * 1.1 < end]
        if not left:
            return
        for name in left:
            if time.monotonic() + took[name] * 1.1 >= end:
                continue
            began = time.monotonic()
            try:
                found = measured(loop, cases[name])
            except Exception as error:  # noqa: BLE001 -- the other methods are still worth having
                left_out[name] = f"failed in round {number + 1}: {type(error).__name__}: {error}"
                took[name] = math.inf
                save(series)
                continue
            took[name] = time.monotonic() - began
            if number:  # the first one allocates
                series[name].append(found)
            else:
                series[name] = [found | {"first": 1.0}]
            save(series)


def row(name: str, series: list[dict[str, float]], nbytes: int) -> str:
    """Return the line of one method."""
    if not series:
        return f"{name}: no round fitted into the time"
    kept = series[1:] or series
    s = {key: summarise([one[key] for one in kept]) for key in KEYS}
    quiet = s["quiet_s"].median
    return (
        f"{name}: blocked {s['blocked_s'].median * 1e3:.2f} ms [{s['blocked_s'].min * 1e3:.2f}-{s['blocked_s'].max * 1e3:.2f}]"
        f" (call {s['call_s'].median * 1e3:.2f}), lost {s['lost_s'].median * 1e3:.1f} ms"
        f" [{s['lost_s'].min * 1e3:.1f}-{s['lost_s'].max * 1e3:.1f}] of a {quiet * 1e3:.0f} ms step,"
        f" COMPLETE {s['complete_s'].median:.2f} s [{s['complete_s'].min:.2f}-{s['complete_s'].max:.2f}]"
        f" = {nbytes / s['complete_s'].median / 1e9:.1f} GB/s, n={len(kept)}{'' if series[1:] else ' (the first one)'}"
    )


def run(options: argparse.Namespace, folder: Path) -> None:
    """Set up, measure, write after every run."""
    end, load = end_of(options.seconds), LoadWatch()
    loop = gpu_loop.DeviceLoop(options.gb * 1e9, device=torch.device(options.device), step_s=options.step_s)
    wanted = tuple((options.methods or "").split(","))
    cases: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in (name for name in gpu_loop.METHODS if name.startswith(wanted)):
        try:
            cases[name] = gpu_loop.make(name, loop, folder, options.slots)
        except Exception as error:  # noqa: BLE001 -- the other methods are still worth having
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    about = {"nbytes": loop.nbytes, "tensors": len(loop.state()), "micro_batches": loop.micro, "left_out": left_out}
    about |= {name: getattr(cases.get("flashckpt"), name, None) or 0.0 for name in ("ready_s", "reserving_lost_s")}

    def save(series: dict[str, list[dict[str, float]]]) -> None:
        lines = [
            f"{loop.nbytes / 1e9:.2f} GB in {about['tensors']} tensors; first slot ready after {about['ready_s']:.1f} s"
        ]
        lines.append(
            f"training lost {about['reserving_lost_s']:.2f} s, once, while the slots were reserved and page-locked"
        )
        lines += [row(name, one, loop.nbytes) for name, one in series.items()]
        lines += [f"{name}: left out: {why}" for name, why in left_out.items()]
        arguments = {"gb": options.gb, "device": options.device, "step_s": options.step_s, "slots": options.slots}
        result = document("gpu_snapshots", arguments, {"about": about, "series": series}, load=load)
        write_json(options.json, result | {"rows": lines})

    save({name: [] for name in cases})
    rounds(loop, cases, end, save, left_out)


def main() -> None:
    """Parse arguments; run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0, help="parameters and two moments, in 10^9 bytes")
    parser.add_argument("--step-s", type=float, default=0.5, help="length of a training step")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--methods", help="only methods that begin with one of these words, by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=75.0, help="for everything")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with gpu_loop.places(options.device) as folder:
        run(options, folder)


if __name__ == "__main__":
    main()
