"""Does a step take longer because its batch is read? Seconds of a step without reading, with the thread, and without the thread.

    python benchmarks/read_ahead.py [--rounds 10] [--block 4] [--slow-ms 30] [--json FILE]

One process trains a model of 0.9 M parameters on two prepared sources with a mask of documents. Blocks of steps of each
kind come in turns: `none` trains one batch again and again, `thread` reads two batches ahead, `step` reads in the step. The
"slow" kinds read from a storage that takes so many milliseconds more for each batch. Medians and quartiles in ms; `waited` is
what the training thread waits for a batch, `cpu` its own CPU time for a step, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.data.windows import Batch
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.train.loop import Trainer


class SlowDataset(MixedDataset):
    """Each batch takes `seconds` more, as from a far storage."""

    seconds = 0.0

    def batch(self, ids: Any) -> Batch:
        """Read the batch, later."""
        time.sleep(self.seconds)
        return super().batch(ids)


def run_of(folder: Path) -> RunConfig:
    sources = [
        {"kind": "stdlib", "urls": [name], "channel": name, "weight": weight}
        for name, weight in (("code", 3), ("doc", 1))
    ]
    return from_values(
        {
            "model": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 384},
            "train": {"seq_len": 256, "global_batch": 4, "micro_batch": 4, "device": "cpu"},
            "data": {"folder": str(folder), "sources": sources},
        }
    )


def loaders(config: RunConfig, slow_s: float) -> dict[str, TrainingData | None]:
    """Return who gives the batches of each kind of step; None: nobody."""
    slow = SlowDataset(config, "train")
    slow.seconds = slow_s
    fast = MixedDataset(config, "train")
    size = config.train.global_batch
    return {
        "none": None,
        "thread": TrainingData(fast, dp_rank=0, dp_size=1, global_batch=size, seed=1, ahead=2),
        "step": TrainingData(fast, dp_rank=0, dp_size=1, global_batch=size, seed=1),
        "thread, slow": TrainingData(slow, dp_rank=0, dp_size=1, global_batch=size, seed=1, ahead=2),
        "step, slow": TrainingData(slow, dp_rank=0, dp_size=1, global_batch=size, seed=1),
    }


def one_step(trainer: Trainer, data: TrainingData | None, batch: Batch) -> tuple[float, float, float]:
    """Return seconds of a step, of waiting for its batch, and of CPU of this thread."""
    began, used = time.perf_counter(), time.thread_time()
    batch = batch if data is None else data.next()
    waited = time.perf_counter() - began
    totals = trainer.train_step.backward(batch)
    trainer._apply(totals, 1e-4)
    if data is not None:
        data.sampler.commit()
    return time.perf_counter() - began, waited, time.thread_time() - used


def measure(rounds: int, block: int, slow_s: float) -> dict[str, list[tuple[float, float, float]]]:
    """Return what each step of each kind took, without the first round."""
    with tempfile.TemporaryDirectory() as folder:
        config = run_of(Path(folder) / "tokens")
        prepare(config.data)
        with process_group(config, alone=True) as device:
            trainer = Trainer(config, resolve_layout(config, 1), device)
            trainer.initialise()
            batch, kinds = trainer.data.next(), loaders(config, slow_s)
            trainer.data.close()
            found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
            for number in range(rounds + 1):
                for kind in sorted(kinds, reverse=bool(number % 2)):
                    taken = [one_step(trainer, kinds[kind], batch) for _ in range(block)]
                    found[kind] += taken if number else []
            for data in kinds.values():
                if data is not None:
                    data.close()
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--slow-ms", type=float, default=30.0)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for kind, steps in measure(args.rounds, args.block, args.slow_ms / 1e3).items():
        low, middle, high = (1e3 * value for value in statistics.quantiles([step for step, _, _ in steps], n=4))
        waited = 1e3 * statistics.median(value for _, value, _ in steps)
        cpu = 1e3 * statistics.median(value for _, _, value in steps)
        rows[kind] = {"median_ms": middle, "quartiles_ms": [low, high], "waited_ms": waited, "cpu_ms": cpu}
        text = f"{kind:14} {middle:8.1f} ms [{low:.1f} - {high:.1f}], waited {waited:7.2f} ms, cpu {cpu:7.2f} ms"
        print(f"{text}, {len(steps)} steps", flush=True)
    if args.json:
        facts = {"load": os.getloadavg(), "torch": torch.__version__, "slow_ms": args.slow_ms, "kinds": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
