"""Step time on a GPU with a snapshot each 1, 5 and 20 steps, beside steps without any; the four take turns.

python benchmarks/gpu_intervals.py --gb 8 --seconds 45 --json out/gpu-intervals.json [--device cpu]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import gpu_loop
import torch
from gpu_time import end_of

from flashckpt.bench.measure import LoadWatch, document, median, summarise, write_json

WINDOWS = {0: 6, 1: 6, 5: 10, 20: 20}
"""Steps of one turn by interval; 0: no snapshots."""


def window(loop: gpu_loop.DeviceLoop, case: Any, interval: int) -> float:
    """Seconds per step of one turn; the snapshot under way at its end is waited for outside of it."""
    steps = WINDOWS[interval]
    loop.synchronize()
    started = time.perf_counter()
    for step in range(steps):
        loop.compute()
        case.fence()
        loop.update()
        if interval and step % interval == 0:
            case.call()
    loop.synchronize()
    seconds = (time.perf_counter() - started) / steps
    if interval:
        case.finish()
    return seconds


def main() -> None:
    """Parse arguments; run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    end, load = end_of(options.seconds), LoadWatch()
    with gpu_loop.places(options.device) as folder:
        loop = gpu_loop.DeviceLoop(options.gb * 1e9, device=torch.device(options.device), step_s=options.step_s)
        case = gpu_loop.Flashckpt(loop, folder, None)
        case.finish()
        series: dict[int, list[float]] = {interval: [] for interval in WINDOWS}
        write(options, loop, series, dict(case.ckpt.stats), load)
        took = dict.fromkeys(WINDOWS, loop.step() * 10)
        while any(time.monotonic() + took[interval] < end for interval in WINDOWS) and len(series[0]) < 50:
            for interval in sorted(WINDOWS, key=lambda one: len(series[one])):
                if time.monotonic() + took[interval] < end:
                    began = time.monotonic()
                    series[interval].append(window(loop, case, interval))
                    took[interval] = time.monotonic() - began
            write(options, loop, series, dict(case.ckpt.stats), load)


def write(
    options: argparse.Namespace,
    loop: gpu_loop.DeviceLoop,
    series: dict[int, list[float]],
    stats: dict[str, float],
    load: LoadWatch,
) -> None:
    """Write the JSON, rows included."""
    rows = [
        f"{loop.nbytes / 1e9:.2f} GB; snapshots {stats.get('snapshots', 0):.0f}, skipped {stats.get('skipped', 0):.0f}"
    ]
    for interval, values in series.items():
        if not values or not series[0]:
            rows.append(f"each {interval} steps: no turn fitted into the time")
            continue
        name = f"each {interval} steps" if interval else "none"
        share = median(values) / median(series[0]) - 1
        rows.append(f"{name}: step {summarise(values).text()} s, {share:+.1%}, {len(values)} turns")
    arguments = {"gb": options.gb, "device": options.device, "step_s": options.step_s}
    result = document("gpu_intervals", arguments, {"step_s": series, "stats": stats}, load=load)
    write_json(options.json, result | {"rows": rows})


if __name__ == "__main__":
    main()
