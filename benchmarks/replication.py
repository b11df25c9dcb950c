"""What replication costs the steps beside it, on a link of limited rate, and what a plain TCP stream of as many bytes costs there.

    sudo .venv/bin/python benchmarks/replication.py --mbit 200 --busy 0.2 1 --cycles 8 --json FILE

Two nodes (network namespaces, a rank each) train by `node_training.py`, each the other's partner; `tc` limits what each can send. One
job goes through cycles: a snapshot, its replicas on their way in both directions; then, in turns of order, a stream of as many bytes in
both directions by other processes (raw), and as long without either (quiet). What counts as beside a transfer is read from the counters
of the link: from 5 % to 95 % of the bytes. At last the link of the persisters alone is cut over one snapshot (cut). `--busy` is the share
of a step in which the rank's core multiplies; it waits for the rest, as for an accelerator. The figure is the mean step beside
replication over the mean step beside raw of the same cycle.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from node_machine import Nodes, marks, nodes, places, require_machine, require_room
from processes import clean_up_on_sigterm
from replication_cut import one_cut, set_up

from flashckpt.bench.measure import LoadWatch, document, summarise, write_json
from flashckpt.errors import FlashckptError

HERE = Path(__file__).parent
NODES = 2
COPIES = 6.5
"""As in node_loss.py: training, three slots, two replicas."""
SAMPLE_S = 0.02
RAW_PORT = 29900
LEAST_STEPS = 5
"""A cycle counts if each of its three times has as many whole steps."""

Times = tuple[float, float]


class LinkCounters:
    """Bytes that each node has sent, sampled beside the job, from the other ends of their links."""

    def __init__(self, them: Nodes) -> None:
        self._paths = [Path(f"/sys/class/net/{them.prefix}{node}b/statistics/rx_bytes") for node in range(NODES)]
        self._times: list[float] = []
        self._counts: list[list[int]] = [[] for _ in self._paths]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="link-counters", daemon=True)

    @contextmanager
    def sampled(self) -> Iterator[LinkCounters]:
        """Sample for the time of a block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            counts = [int(path.read_text()) for path in self._paths]
            for series, count in zip(self._counts, counts, strict=True):
                series.append(count)
            self._times.append(time.monotonic())  # last: who reads finds all that belongs to a time

    def transfer(self, began: float, nbytes: int) -> Times | None:
        """Return from when until when both nodes were between 5 % and 95 % of `nbytes` sent since `began`; None: not yet."""
        times = list(self._times)
        first = bisect.bisect_left(times, began)
        bounds = [within(times[first:], series[first : len(times)], nbytes) for series in self._counts]
        if any(one is None for one in bounds):
            return None
        return max(one[0] for one in bounds if one), min(one[1] for one in bounds if one)


def within(times: Sequence[float], counts: Sequence[int], nbytes: int) -> Times | None:
    """Return when a growing count passed 5 % and 95 % of `nbytes` above where it began; None where it has not."""
    if not counts or counts[-1] < counts[0] + 0.95 * nbytes:
        return None
    low, high = (bisect.bisect_left(counts, counts[0] + share * nbytes) for share in (0.05, 0.95))
    return times[low], times[high]


def mean_step(steps: Sequence[Mapping[str, Any]], between: Times) -> float | None:
    """Return the mean of the steps that lie wholly between two times; None where there are too few."""
    found = [one["seconds"] for one in steps if between[0] <= one["t"] - one["seconds"] and one["t"] <= between[1]]
    return statistics.mean(found) if len(found) >= LEAST_STEPS else None


def limit(them: Nodes, node: int, mbit: float) -> None:
    """Let a node send no more than `mbit` million bits a second, with at most 20 ms in the queue."""
    device = f"{them.prefix}{node}v"
    words = ["qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "20ms"]
    subprocess.run(["tc", "-n", f"{them.prefix}{node}", *words], check=True)


def start(them: Nodes, node: int, args: argparse.Namespace, busy: float) -> None:
    """Launch one node's dlrun."""
    config = {
        "folder": str(them.folder), "way": "flashckpt", "nbytes": int(args.gb * 1e9), "step_s": args.step_s, "busy": busy,
        "reduced_bytes": args.reduced_kb * 1000, "snapshot_every": args.every, "persist_every": None, "replicate": 1,
    }  # fmt: skip
    words = ["--nproc-per-node=1", HERE / "node_training.py", json.dumps(config)]
    them.start(node, *words, nnodes=str(NODES), env=set_up(them, node))


def stream(them: Nodes, nbytes: int) -> None:
    """Send `nbytes` in both directions at once; return when they have arrived."""
    began = []
    try:
        for node in range(NODES):
            for word, address in (("receive", them.address(node)), ("send", them.address(1 - node))):
                command = [sys.executable, "-S", str(HERE / "raw_stream.py"), word, address, str(RAW_PORT), str(nbytes)]
                began.append(subprocess.Popen(["ip", "netns", "exec", f"{them.prefix}{node}", *command]))
        for process in began:
            process.wait(600)
    finally:
        for process in began:
            process.kill()
            process.wait()


def one_cycle(
    them: Nodes,
    counters: LinkCounters,
    number: int,
    args: argparse.Namespace,
    steps: Callable[[], list[dict[str, Any]]],
) -> dict[str, Any]:
    """Wait for the snapshot of a cycle; return the mean steps beside its replicas, beside a raw stream, and in quiet."""
    nbytes = int(args.gb * 1e9)
    step = next_snapshot(steps(), args.every)
    (snapshot,) = them.until(lambda: [one for one in steps() if one["step"] == step], f"step {step}", 600)
    replicas: Times = them.until(lambda: counters.transfer(snapshot["t"] - SAMPLE_S, nbytes), "the replicas", 600)
    them.until(lambda: idle(counters, nbytes), "a quiet link", 60)
    spans = {"replicas": replicas}
    for name in ("raw", "quiet") if number % 2 else ("quiet", "raw"):
        began = time.monotonic()
        if name == "raw":
            stream(them, nbytes)
            spans[name] = them.until(partial(counters.transfer, began, nbytes), "the stream", 60)
        else:
            threading.Event().wait(replicas[1] - replicas[0])
            spans[name] = began, time.monotonic()
    done = steps()
    return {
        "in_time": done[-1]["step"] < step + args.every,
        **{name: mean_step(done, span) for name, span in spans.items()},
        "span_s": replicas[1] - replicas[0],
        "rates_mbit": {k: 0.9 * nbytes * 8e-6 / (v[1] - v[0]) for k, v in spans.items() if k != "quiet"},
        "load_average": os.getloadavg()[0],
    }


def next_snapshot(steps: Sequence[Mapping[str, Any]], every: int) -> int:
    """Return the step of the first snapshot that is still to come."""
    return ((int(steps[-1]["step"]) if steps else 0) // every + 1) * every


def idle(counters: LinkCounters, nbytes: int) -> bool:
    """Whether little has been sent in the last half second: the reduction of the steps."""
    return counters.transfer(time.monotonic() - 0.5, nbytes // 50) is None


def measure(args: argparse.Namespace, busy: float) -> dict[str, Any]:
    """Run one job through all cycles."""
    with places(args.dir) as folder, nodes(folder, NODES) as them:
        for node in range(NODES):
            limit(them, node, args.mbit)
            start(them, node, args, busy)
        host = f"{them.prefix}0"
        steps = lambda: [one for one in marks(folder).get(host, []) if one["event"] == "step"]  # noqa: E731 -- bound here
        rows = []
        with LinkCounters(them).sampled() as counters:
            for number in range(1, args.cycles + 2):
                row = one_cycle(them, counters, number, args, steps)
                if number == 1:
                    continue  # the first touch of slots and replicas
                rows.append(row)
                print(f"busy {busy:g}: " + line(row), flush=True)
        without = cut_steps(them, args.every, rows[-1]["span_s"], steps)
    print(f"busy {busy:g}, link cut: {json.dumps(without)}", flush=True)
    return {"rows": rows, "summary": summary(rows), "cut": without}


def cut_steps(them: Nodes, every: int, span_s: float, steps: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """Cut the link of the persisters over a snapshot; return the steps meanwhile and in quiet after it."""
    found = one_cut(them, NODES, lambda: next_snapshot(steps(), every), span_s, steps)
    began = time.monotonic()
    threading.Event().wait(span_s)
    spans, done = {"cut": found.pop("span"), "quiet": (began, time.monotonic())}, steps()
    return found | {
        f"{name}_ms": {"mean": (mean_step(done, span) or 0) * 1e3, "longest": longest(done, span) * 1e3}
        for name, span in spans.items()
    }


def longest(steps: Sequence[Mapping[str, Any]], between: Times) -> float:
    return max((one["seconds"] for one in steps if between[0] < one["t"] <= between[1]), default=0.0)


def line(row: Mapping[str, Any]) -> str:
    words = [f"{name} {row[name] * 1e3:.1f} ms" if row[name] else f"{name}: too few steps" for name in NAMES]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["rates_mbit"].items())
    return (
        ", ".join(words)
        + f" a step; Mbit/s: {rates}"
        + ("" if row["in_time"] else " (next snapshot too early: left out)")
    )


NAMES = ("replicas", "raw", "quiet")


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of a step by what is beside it, and the ratios within cycles; {} where no cycle counts."""
    whole = [row for row in rows if row["in_time"] and all(row[name] for name in NAMES)]
    if not whole:
        return {}
    ratios = {f"{a} / {b}": [row[a] / row[b] for row in whole] for a, b in (NAMES[:2], NAMES[1:], NAMES[::2])}
    return {name: summarise([row[name] * 1e3 for row in whole]) for name in NAMES} | {
        name: summarise(values) for name, values in ratios.items()
    }


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--mbit", type=float, default=200.0, help="what a node can send, in 10^6 bits per second")
    words.add_argument("--gb", type=float, default=0.15, help="state per node, in 10^9 bytes")
    words.add_argument("--busy", nargs="+", type=float, default=[0.2, 1.0], help="share of a step that takes a core")
    words.add_argument("--cycles", type=int, default=8, help="measured; one more comes before them")
    words.add_argument(
        "--every", type=int, default=300, help="steps between two snapshots: longer than three transfers"
    )
    words.add_argument("--step-s", type=float, default=0.1, help="seconds of a step without anything beside it, about")
    words.add_argument("--reduced-kb", type=int, default=64, help="reduced over the nodes in every step, in 10^3 bytes")
    words.add_argument("--dir", help="folder for logs (default: the temporary folder)")
    words.add_argument("--json", type=Path)
    return words


def main() -> int:
    """Parse arguments; run, print, write."""
    args = parser().parse_args()
    clean_up_on_sigterm()
    load, results = LoadWatch(), dict[str, Any]()
    try:
        require_machine("ip", "tc", "unshare")
        require_room(NODES, args.gb * 1e9, COPIES)
        for busy in args.busy:
            results[f"busy {busy:g}"] = measure(args, busy)
    except FlashckptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"\n{args.gb:g} GB per node at {args.mbit:g} Mbit/s, ms of a step beside, and ratios; median [min-max]\n")
    print("| | " + " | ".join(results) + " |\n" + "|---" * (len(results) + 1) + "|")
    for name in next((one["summary"] for one in results.values() if one["summary"]), {}):
        cells = [one["summary"][name].text(4) if one["summary"] else "-" for one in results.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if empty := [name for name, one in results.items() if not one["summary"]]:
        print(f"no cycle counts at {', '.join(empty)}: give a larger --every or --gb, or a smaller --step-s")
    made = document("replication", vars(args) | {"json": None}, results, load=load, paths=[Path("/dev/shm")])
    print(
        f"\nload average {made['load']['load_before']} before, {made['load']['other_cores']} cores used by others meanwhile"
    )
    if args.json:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
