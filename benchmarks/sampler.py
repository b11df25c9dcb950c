"""What a sampler costs at the start of an epoch, on a resume, and per sample in a loader.

Question 1: CPU seconds and memory until the first index of an epoch, and until the next index after 90 %
of it, for n = 10^6 to 10^12. Each case runs in a separate process; peak memory is that process's
growth over its state after the imports. CPU time, not wall time, so that a busy machine can be used.
Question 2: indices per second and core of the permutation itself.
Question 3: samples per second of a DataLoader with 0, 2 and 4 workers, against torch's own sampler.

    python benchmarks/sampler.py [--quick] [--json FILE] [--repeats N] [--only PART ...]

Samplers that are not installed are left out and named. The reference rows materialise an epoch, so they
stop at 10^8 (4.6 GB); what they would need beyond that is arithmetic, not measured, and not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

WORLD, BATCH, SEED = 8, 8, 1
LENGTHS = [10**6, 10**7, 10**8, 10**9, 10**12]
MATERIALISING_LIMIT = 10**8


class Length:
    """A data set that is only as long as it says."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def ours(n: int) -> Callable[[int], int]:
    from flashckpt.sampler import ElasticSampler

    def first(done: int) -> int:
        sampler = ElasticSampler(n, num_replicas=WORLD, rank=1, seed=SEED, global_batch_size=WORLD * BATCH)
        if done:
            sampler.load_state_dict(sampler.state_dict() | {"offset": done})
        return next(iter(sampler))

    return first


def torch_distributed(n: int) -> Callable[[int], int]:
    from torch.utils.data import DistributedSampler

    def first(done: int) -> int:
        data: Any = Length(n)
        sampler: Any = DistributedSampler(data, num_replicas=WORLD, rank=1, seed=SEED)
        return int(next(islice(iter(sampler), done // WORLD, None)))

    return first


def torchdata_stateful(n: int) -> Callable[[int], int]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def first(done: int) -> int:
        sampler: Any = StatefulDistributedSampler(Length(n), num_replicas=WORLD, rank=1, seed=SEED)
        sampler.load_state_dict({"yielded": done // WORLD})
        return int(next(iter(sampler)))

    return first


def grain(n: int) -> Callable[[int], int]:
    module = import_module("grain._src.python.experimental.index_shuffle.python.index_shuffle_module")

    def first(done: int) -> int:
        return int(module.index_shuffle(done + 1, max_index=n - 1, seed=SEED, rounds=4))

    return first


def streaming_py1s(n: int) -> Callable[[int], int]:
    import numpy as np

    get_partitions = import_module("streaming.base.partition").get_partitions
    get_shuffle = import_module("streaming.base.shuffle").get_shuffle

    def first(done: int) -> int:
        parts = get_partitions("relaxed", n, WORLD, 1, WORLD, 1, BATCH, done, 1)
        sizes = np.full(-(-n // 4096), 4096, np.int64)
        sizes[-1] -= sizes.sum() - n
        order = get_shuffle("py1s", sizes, WORLD, SEED, 0, 1 << 18)
        return int(order[parts[0, 1, 0, 0, 0]])

    return first


SAMPLERS: dict[str, Callable[[int], Callable[[int], int]]] = {
    "flashckpt ElasticSampler": ours,
    "torch DistributedSampler": torch_distributed,
    "torchdata StatefulDistributedSampler": torchdata_stateful,
    "Grain index_shuffle (one index)": grain,
    "MosaicML streaming (relaxed + py1s)": streaming_py1s,
}
CONSTANT_MEMORY = {"flashckpt ElasticSampler", "Grain index_shuffle (one index)"}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_case(name: str, n: int, share: float) -> dict[str, Any]:
    """One case, in this process: {"cpu_s", "extra_bytes"} or {"missing"}."""
    try:
        first = SAMPLERS[name](n)
        first_index = SAMPLERS[name](1000)  # imports and first-call costs are not the sampler's
        first_index(0)
    except ImportError as error:
        return {"missing": str(error)}
    done = int(n * share) // (WORLD * BATCH) * (WORLD * BATCH)
    before, begin = peak_bytes(), time.process_time()
    first(done)
    return {"cpu_s": time.process_time() - begin, "extra_bytes": peak_bytes() - before}


def start_up(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    for name in SAMPLERS:
        for n in lengths:
            if n > MATERIALISING_LIMIT and name not in CONSTANT_MEMORY:
                continue
            for share in (0.0, 0.9):
                runs = [child(name, n, share) for _ in range(repeats if n < 10**8 or name in CONSTANT_MEMORY else 1)]
                row = {"sampler": name, "n": n, "share": share, "runs": len(runs)}
                if "missing" in runs[0]:
                    row["missing"] = runs[0]["missing"]
                else:
                    row["cpu_s"] = min(run["cpu_s"] for run in runs)
                    row["extra_bytes"] = max(run["extra_bytes"] for run in runs)
                table.append(row)
                print(json.dumps(row), file=sys.stderr)
                if "missing" in row:
                    break
            if "missing" in row:
                break
    return table


def child(name: str, n: int, share: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, str(n), str(share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"missing": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def permutation_speed(repeats: int) -> list[dict[str, Any]]:
    import numpy as np

    from flashckpt.sampler import Permutation

    rows = []
    worst = [2**k + 1 for k in (16, 17, 20, 40, 61)]
    for n in (10**6, 10**8, 10**12, *worst, 2**62):
        permutation, indices = Permutation(n, SEED), np.arange(1 << 20, dtype=np.int64) % n
        times = {"take": permutation.take, "index_of": permutation.index_of}
        row: dict[str, Any] = {"n": n}
        for label, call in times.items():
            spent = []
            for _ in range(repeats * 2):
                begin = time.process_time()
                call(indices)
                spent.append(time.process_time() - begin)
            row[f"{label}_million_per_s"] = len(indices) / min(spent) / 1e6
            row[f"{label}_median_million_per_s"] = len(indices) / statistics.median(spent) / 1e6
        rows.append(row)
    return rows


def throughput(samples: int, repeats: int) -> list[dict[str, Any]]:
    """Samples per second of a whole epoch; the runs alternate, so that both see the same machine."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    return [*throughput_alone(repeats), *throughput_of_loaders(samples, repeats)]


def samplers() -> dict[str, tuple[bool, Callable[[Any], Any]]]:
    """Return, by name, whether it gives whole batches, and how it is made for a data set."""
    from torch.utils.data import BatchSampler, DistributedSampler

    from flashckpt.sampler import ElasticBatchSampler, ElasticSampler

    return {
        "ElasticSampler": (False, lambda data: ElasticSampler(data, 1, 0)),
        "ElasticBatchSampler": (True, lambda data: ElasticBatchSampler(ElasticSampler(data, 1, 0), 32)),
        "torch DistributedSampler": (False, lambda data: DistributedSampler(data, 1, 0)),
        "torch BatchSampler(DistributedSampler)": (
            True,
            lambda data: BatchSampler(DistributedSampler(data, 1, 0), 32, drop_last=False),
        ),
    }


def throughput_alone(repeats: int) -> list[dict[str, Any]]:
    """Samplers without a loader: a million indices, the best of three times `repeats` runs."""
    million: Any = Length(10**6)
    rows = []
    for label, (_, make) in samplers().items():
        alone = []
        for _ in range(repeats * 3):
            begin = time.process_time()
            deque(iter(make(million)), maxlen=0)
            alone.append((time.process_time() - begin) / len(million))
        rows.append(throughput_row(label, "alone", 1 / min(alone), min(alone)))
    return rows


def throughput_of_loaders(samples: int, repeats: int) -> list[dict[str, Any]]:
    """Samplers under a `DataLoader` with 0, 2 and 4 workers, batches of 32 from memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(samples * 16).reshape(samples, 16))
    rows = []
    for workers in (0, 2, 4):
        spent: dict[str, list[tuple[float, float]]] = {label: [] for label in samplers()}
        for _ in range(repeats):
            for label, (batched, make) in samplers().items():
                options: Any = {"batch_sampler": make(data)} if batched else {"batch_size": 32, "sampler": make(data)}
                loader: Any = DataLoader(data, num_workers=workers, **options)
                wall, cpu = time.perf_counter(), total_cpu()
                count = sum(1 for _ in loader)
                assert count == -(-samples // 32)
                del loader
                spent[label].append((time.perf_counter() - wall, total_cpu() - cpu))
        for label, times in spent.items():
            fastest, least_cpu = min(wall for wall, _ in times), min(cpu for _, cpu in times)
            rows.append(throughput_row(label, workers, samples / fastest, least_cpu / samples))
    return rows


def throughput_row(label: str, workers: int | str, samples_per_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "sampler": label,
        "workers": workers,
        "samples_per_s": samples_per_s,
        "cpu_us_per_sample": cpu_s * 1e6,
    }


def total_cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def show(result: dict[str, Any]) -> None:
    print("\nCPU seconds / extra MB until the first index (0 %) and on a resume at 90 % of the epoch\n")
    print(f"{'sampler':38} {'n':>6} {'0 %':>20} {'90 %':>20}")
    rows = {(row["sampler"], row["n"], row["share"]): row for row in result["start_up"]}
    for (name, n, share), row in rows.items():
        if "missing" in row:
            print(f"{name:38} not installed: {row['missing']}")
        elif share == 0.0:
            cells = [rows[name, n, s] for s in (0.0, 0.9)]
            text = [f"{c['cpu_s']:10.5f} / {c['extra_bytes'] / 1e6:7.1f}" for c in cells]
            print(f"{name:38} {n:6.0e} {text[0]:>20} {text[1]:>20}")
    print("\nPermutation, million indices per second of CPU time: best (median) of both directions\n")
    for row in result["permutation"]:
        best = f"{row['take_million_per_s']:6.1f} ({row['take_median_million_per_s']:.1f})"
        back = f"{row['index_of_million_per_s']:6.1f} ({row['index_of_median_million_per_s']:.1f})"
        print(f"n = {row['n']:<22} forward {best:>16}   backward {back:>16}")
    print("\nDataLoader, batches of 32 from memory\n")
    for row in result["throughput"]:
        print(
            f"{row['workers']!s:>5} workers  {row['sampler']:40} {row['samples_per_s']:10.0f} samples/s"
            f" {row['cpu_us_per_sample']:8.3f} us CPU per sample"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat: does it run?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=["permutation", "throughput", "start_up"], help="others are kept")
    parser.add_argument("--case", nargs=3, metavar=("SAMPLER", "N", "SHARE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, n, share = arguments.case
        print(json.dumps(run_case(name, int(n), float(share))))
        return
    repeats = 1 if arguments.quick else arguments.repeats
    result: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }
    parts: dict[str, Callable[[], Any]] = {
        "permutation": lambda: permutation_speed(repeats),
        "throughput": lambda: throughput(2_000 if arguments.quick else 30_000, repeats + 1),
        "start_up": lambda: start_up(LENGTHS[:1] if arguments.quick else LENGTHS, repeats),
    }
    if arguments.only and arguments.json and arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    for name in arguments.only or parts:
        result[name] = parts[name]()
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for name in parts:
        result.setdefault(name, [])
    show(result)


if __name__ == "__main__":
    main()
