"""How fast and how cheaply snapshots get to a disk or a bucket and back, against the raw limit and the usual peers.

Each of `--ranks` processes holds its share of `--gb` of float32 state in 100 tensors, in a slot of shared memory and as torch tensors
over it. Every round writes it once by each way, in turns, each durable (fsync included), and reads it back: cold (the
files' pages are dropped first; `mincore` says how many stayed), then warm (read once before). Peers run in the rank processes, all at
once; flashckpt writes from one process for all ranks, as its daemon does, and reads in every rank. "raw" is the limit: the same bytes by O_DIRECT,
16 MiB extents, fallocate and fsync, with as many threads as flashckpt; read back by as many as a restore takes.

    .venv/bin/python benchmarks/persist.py --gb 0.2,1.5,4 --ranks 1,4 --seconds 60 --json FILE
    .venv/bin/python benchmarks/persist.py --uplift --gb 0.2,1.5         # steps of a training loop beside writes
    .venv/bin/python benchmarks/persist.py --s3 --gb 0.2                 # the server at $S3_TEST_ENDPOINT, else moto's

With --s3 (access key "test", secret "testtest") flashckpt through obstore and through s3fs, and both libraries alone, are compared with
boto3's upload_file and download_file, 16 MiB x 4 each. moto's server is a mock in Python: it limits the rate, the client's CPU figures hold.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from processes import clean_up_on_sigterm, places

from flashckpt.bench.host import available_bytes, peak_memory_of
from flashckpt.bench.measure import LoadWatch, document, plain, summarise, write_json
from flashckpt.bench.worker import Workers, workers

HERE = Path(__file__).parent
WAYS = ("raw", "flashckpt", "torch.save", "safetensors", "dcp.save")
SLOW = "flashckpt zstd"
SLOW_GB = 0.5
"""Compression takes seconds per GB: measured up to this size only."""
NEED = 3.2
"""Slot, memory to read into, and what a peer loads into, as multiples of the state."""
NEED_LOOP = 2.4
USABLE = 0.9
PAUSE_S = 0.02


def rows_of(found: dict[str, list[dict[str, float]]], nbytes: int, limit: str) -> dict[str, Any]:
    """Return seconds, GB/s, CPU s/GB and the ratio to the limit of the same round, by way."""
    rows = {}
    for way, timings in found.items():
        pairs = zip(timings, found[limit], strict=True)
        rows[way] = {
            "wall_s": summarise([t["wall_s"] for t in timings]),
            "gb_s": summarise([nbytes / 1e9 / t["wall_s"] for t in timings]),
            "cpu_s_per_gb": summarise([t["cpu_s"] / (nbytes / 1e9) for t in timings]),
            "x_limit": summarise([one["wall_s"] / two["wall_s"] for one, two in pairs]),
        }
    done: dict[str, Any] = plain(rows)
    return done


def show(title: str, rows: dict[str, Any], limit: str, memory: dict[str, int] | None = None) -> None:
    """Print one table, ratios first."""
    print(f"\n{title}\n")
    print(f"| | x {limit} [min-max] | GB/s | CPU s/GB |" + (" peak extra MiB |" if memory else ""))
    print("|---|---|---|---|" + ("---|" if memory else ""))
    for way, row in rows.items():
        x = row["x_limit"]
        cells = [f"{x['median']:.2f} [{x['min']:.2f}-{x['max']:.2f}]", f"{row['gb_s']['median']:.2f}"]
        cells += [f"{row['cpu_s_per_gb']['median']:.3f}"] + ([str(memory[way] >> 20)] if memory else [])
        print(f"| {way} | " + " | ".join(cells) + " |")
    sys.stdout.flush()


def together(answers: list[dict[str, float] | None]) -> dict[str, float]:
    """Return the slowest rank's wall and all ranks' CPU seconds."""
    took_part = [one for one in answers if one is not None]
    return {"wall_s": max(one["wall_s"] for one in took_part), "cpu_s": sum(one["cpu_s"] for one in took_part)}


def in_turns(ways: list[str], seconds: float, rounds: int, one_round: Callable[[list[str]], None]) -> None:
    """Call `one_round` with the ways in rotating order, for about so many seconds, twice at least."""
    end, number = time.monotonic() + seconds, 0
    while number < rounds and (number < 2 or time.monotonic() < end):
        turn = number % len(ways)
        one_round(ways[turn:] + ways[:turn])
        number += 1


class Ranks:
    """The rank processes of one configuration, with their slots filled.

    Args:
        processes: Where they are started.
        config: Of all ranks.
        ranks: How many.
    """

    def __init__(self, processes: Workers, config: dict[str, Any], ranks: int) -> None:
        configs = {f"rank {rank}": {**config, "ranks": ranks, "rank": rank} for rank in range(ranks)}
        self._processes = processes
        self._numbers = processes.start([str(HERE / "persist_rank.py")], configs)
        self.pids: list[int] = processes.answers(self._numbers)  # all have answered: all slots exist
        self.ask("ready")

    def ask(self, do: str, **order: Any) -> list[Any]:
        """Give all ranks the same order; return their answers."""
        return self._processes.ask(self._numbers, do, **order)


def measure_disk(gigabytes: float, ranks: int, args: argparse.Namespace, disk: Path, shm: Path) -> dict[str, Any]:
    """Write and read by all ways in turns; look at memory in one more round that is not timed."""
    ways = [*WAYS, SLOW] if gigabytes <= SLOW_GB else list(WAYS)
    kinds = ("write", "read_cold", "read_warm")
    found: dict[str, dict[str, list[dict[str, float]]]] = {kind: {way: [] for way in ways} for kind in kinds}
    cached: dict[str, float] = dict.fromkeys(ways, 0.0)
    config = {"bytes": gigabytes * 1e9, "folder": str(disk), "shm": str(shm)}
    with workers(disk) as started:
        processes = Ranks(started, config, ranks)

        def one_round(order: list[str], *, keep: bool = True) -> None:
            for way in order:
                timings = {"write": together(processes.ask("write", way=way))}
                for kind, cold in (("read_cold", True), ("read_warm", False)):
                    share = max(processes.ask("prepare", way=way, cold=cold))
                    cached[way] = max(cached[way], share if cold else 0.0)
                    timings[kind] = together(processes.ask("read", way=way, cold=cold))
                processes.ask("remove", way=way)
                for kind, timing in timings.items() if keep else ():
                    found[kind][way].append(timing)

        one_round(ways, keep=False)
        in_turns(ways, args.seconds, args.rounds, one_round)
        memory = {}
        for way in ways:
            with peak_memory_of(lambda: processes.pids) as peak:
                processes.ask("write", way=way)
            processes.ask("remove", way=way)
            memory[way] = peak.extra_bytes
        nbytes = sum(processes.ask("nbytes"))
        processes.ask("close")
    rows = {kind: rows_of(found[kind], nbytes, "raw") for kind in kinds}
    for kind, text in zip(kinds, ("durable write", "cold read", "warm read"), strict=True):
        show(f"{gigabytes} GB, {ranks} rank(s), {text}", rows[kind], "raw", memory if kind == "write" else None)
    print(f"share still cached before a cold read: { {way: round(share, 3) for way, share in cached.items()} }")
    return {"bytes": nbytes, "ranks": ranks, **rows, "write_peak_bytes": memory, "cached_share": cached}


def measure_uplift(gigabytes: float, ranks: int, args: argparse.Namespace, disk: Path, shm: Path) -> dict[str, Any]:
    """Time steps of a training loop alone, beside raw writes and beside flashckpt's, in turns."""
    beside: dict[str, list[float]] = {"alone": [], "raw": [], "flashckpt": []}
    writes: dict[str, int] = dict.fromkeys(beside, 0)
    config = {"bytes": gigabytes * 1e9, "folder": str(disk), "shm": str(shm)}
    with workers(disk) as started:
        processes = Ranks(started, config, ranks)
        loop = started.start([str(HERE / "persist_loop.py")], {"loop": config})
        started.answers(loop)

        def one_round(order: list[str]) -> None:
            for way in order:
                started.tell(loop, "steps", seconds=seconds)
                while way != "alone" and not started.has_answered(loop[0]):
                    processes.ask("write", way=way)
                    processes.ask("remove", way=way)
                    writes[way] += 1
                beside[way].append(statistics.fmean(started.answers(loop)[0]))

        seconds = max(1.5, 4 * statistics.fmean(started.ask(loop, "steps", seconds=0)[0]))
        in_turns(list(beside), args.seconds, args.rounds, one_round)
        processes.ask("close")
    rounds = list(zip(*beside.values(), strict=True))
    uplift = {
        "raw": summarise([raw / alone - 1 for alone, raw, _ in rounds]),
        "flashckpt": summarise([ours / alone - 1 for alone, _, ours in rounds]),
        "beyond_raw": summarise([ours / raw - 1 for _, raw, ours in rounds]),
    }
    result = {"step_s": {way: summarise(steps) for way, steps in beside.items()}, "uplift": uplift, "writes": writes}
    print(f"\n{gigabytes} GB, {ranks} rank(s), steps of a training loop beside writes back to back\n")
    print("| | step longer by [min to max] | writes |\n|---|---|---|")
    for way, one in uplift.items():
        span = f"{one.median:+.1%} [{one.min:+.1%} to {one.max:+.1%}]"
        print(f"| {way.replace('_', ' ')} | {span} | {writes.get(way, '')} |", flush=True)
    done: dict[str, Any] = plain(result)
    return done


def measure_s3(gigabytes: float, endpoint: str, args: argparse.Namespace, disk: Path, shm: Path) -> dict[str, Any]:
    """Upload and download by all ways in turns; look at memory in one more round that is not timed."""
    config = {"bytes": gigabytes * 1e9, "shm": str(shm), "endpoint": endpoint}
    with workers(disk) as started:
        client = started.start([str(HERE / "persist_s3.py")], {"client": config})
        pids = started.answers(client)
        ways: list[str] = started.ask(client, "ways")[0]
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            kind: {way: [] for way in ways} for kind in ("up", "down")
        }

        def one_round(order: list[str]) -> None:
            for way in order:
                for kind, series in found.items():
                    series[way].append(started.ask(client, kind, way=way)[0])

        one_round(ways)
        for way in ways:
            for kind in found:
                found[kind][way].clear()
        in_turns(ways, args.seconds, args.rounds, one_round)
        memory: dict[str, dict[str, int]] = {kind: {} for kind in found}
        for way in ways:
            for kind, peaks in memory.items():
                with peak_memory_of(lambda: pids, 0.002) as peak:
                    started.ask(client, kind, way=way)
                peaks[way] = peak.extra_bytes
        started.ask(client, "close")
    nbytes = int(gigabytes * 1e9)
    rows = {kind: rows_of(series, nbytes, "boto3") for kind, series in found.items()}
    for kind, text in (("up", "S3 upload"), ("down", "S3 download")):
        show(f"{gigabytes} GB, {text}", rows[kind], "boto3", memory[kind])
    return {"bytes": nbytes, **rows, "peak_bytes": memory}


@contextmanager
def s3_server() -> Iterator[tuple[str, str]]:
    """Give endpoint and kind of a server: the one named by S3_TEST_ENDPOINT, else moto's, started here."""
    if endpoint := os.environ.get("S3_TEST_ENDPOINT"):
        yield endpoint, "S3_TEST_ENDPOINT"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("moto_server")
    command = [str(program), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while not _answers(endpoint):
            if time.monotonic() > end or server.poll() is not None:
                raise RuntimeError("moto's server did not start")
            time.sleep(0.05)
        yield endpoint, "moto"
    finally:
        server.terminate()
        server.wait()


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=2)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all configurations that fit into memory; say which do not."""
    results: dict[str, Any] = {}
    with s3_server() if args.s3 else no_server() as (endpoint, kind):
        for size in args.gb.split(","):
            for ranks in ["1"] if args.s3 else args.ranks.split(","):
                what = f"s3 ({kind})" if args.s3 else "uplift" if args.uplift else "disk"
                name = f"{what}, {size} GB" + ("" if args.s3 else f", {ranks} rank{'s' * (ranks != '1')}")
                need = float(size) * 1e9 * (NEED + NEED_LOOP * args.uplift)
                if need > USABLE * available_bytes():
                    results[name] = {
                        "left_out": f"needs {need / 1e9:.1f} GB, {available_bytes() / 1e9:.1f} GB are available"
                    }
                    print(f"\n{name}: left out, {results[name]['left_out']}")
                    continue
                with places(args.dir) as (disk, shm):
                    if args.s3:
                        results[name] = measure_s3(float(size), endpoint, args, disk, shm)
                    else:
                        run = measure_uplift if args.uplift else measure_disk
                        results[name] = run(float(size), int(ranks), args, disk, shm)
    return results


@contextmanager
def no_server() -> Iterator[tuple[str, str]]:
    """Stand in for a server where none is needed."""
    yield "", ""


def main() -> int:
    """Parse arguments; run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", default="0.2,1.5", help="sizes, all ranks together, in 10^9 bytes, by commas")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, by commas")
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many, and at least two")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds, per configuration")
    parser.add_argument("--dir", help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--uplift", action="store_true", help="steps of a training loop beside writes")
    parser.add_argument("--s3", action="store_true", help="S3 instead of the disk")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clean_up_on_sigterm()
    load = LoadWatch()
    results = measure(args)
    where = [Path(args.dir or tempfile.gettempdir())]
    made = document("persist", vars(args) | {"json": None}, results, load=load, paths=where)
    report = made["load"]
    print(f"\nload average {report['load_before']} before, {report['other_cores']} cores used by others meanwhile")
    if args.json:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
