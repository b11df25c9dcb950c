"""How long a rank has no slot for its next snapshot while a checkpoint is persisted: two slots, three, and two without giving back.

One rank in this process: it sleeps in place of forward and backward, and steps its optimizer. Its persister reads and verifies
packs of 64 MiB at `--mb-s`, and holds what it holds `--commit-s` longer, as where other nodes are not done. In turns.

    .venv/bin/python benchmarks/two_slots.py [--mb 512] [--mb-s 150] [--commit-s 2] [--step-s 0.2] [--rounds 3] [--json FILE]

durable, committed: seconds from the begin until then; the first is the bound of two slots. gap: the longest time without a
new COMPLETE snapshot. skipped: snapshots. fence: seconds that training waited in its fences.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from flashckpt import Checkpointer
from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.checkpoint.writer import PersistOptions, write_packs
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.agent_folder import LOCK
from flashckpt.shm.inventory import pin_all, release, scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.lease import Lease
from flashckpt.storage.store import Store

VARIANTS = {"two, given back": (2, True), "two, kept until the commit": (2, False), "three": (3, False)}


class PacedStore:
    """Takes bytes at a rate, and keeps none."""

    url = "paced://root"

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Read and verify what a pack has, as every store does."""
        del key, nbytes
        for part in parts:
            time.sleep(len(part) / self._bytes_s)


class Rank:
    """One rank with so many slots, and the persister of its node."""

    def __init__(self, root: str, slots: int, nbytes: int, step_s: float) -> None:
        self.step, self._step_s, self._stop = 0, step_s, threading.Event()
        self.job = f"two-slots-{slots}-{time.monotonic_ns()}"
        self.ckpt = Checkpointer(root, snapshot_every=1, persist_every=None, slots=slots, job=self.job)
        self.model = torch.nn.ParameterList([torch.zeros(nbytes // 64) for _ in range(16)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, rng=True)
        self.ckpt.restore()
        self.completed: list[float] = []
        self.ckpt.on_snapshot = lambda _step: self.completed.append(time.monotonic())

    def train(self, *, until: threading.Event | None = None, steps: int = 1 << 30) -> None:
        """Step until the event, and once more."""
        while steps > 0 and not (until is not None and until.is_set()):
            time.sleep(self._step_s)  # the forward and backward
            self.optimizer.step()
            self.step, steps = self.step + 1, steps - 1
            self.ckpt.step(self.step)

    def persist(self, store: PacedStore, commit_s: float, *, gives_back: bool) -> dict[str, float]:
        """Train while the newest snapshot is persisted; return what became of the slots."""
        self.train(steps=4)
        view = scan(JobDirectory.open(self.job, create=False))
        identity: SnapshotId = view.complete()[-1]
        pins = pin_all(view, identity, [0])
        assert pins is not None
        times: dict[str, float] = {}
        over, began = threading.Event(), time.monotonic()

        def work() -> None:
            keep = pins[0].keep_only if gives_back else lambda _start, _stop: None
            write_packs(pins[0], cast("Store", store), "c", options=PersistOptions(pack_bytes=64 << 20), keep_only=keep)
            times["durable_s"] = time.monotonic() - began
            time.sleep(commit_s)
            times["committed_s"] = time.monotonic() - began
            release(pins)
            over.set()

        before = dict(self.ckpt.stats)
        thread = threading.Thread(target=work)
        thread.start()
        self.train(until=over)
        self.train(steps=2)
        thread.join()
        marks = [began, *(one for one in self.completed if one > began)]
        gaps = [b - a for a, b in itertools.pairwise(marks)]
        skipped = self.ckpt.stats.get("busy", 0.0) - before.get("busy", 0.0)
        waited = self.ckpt.stats.get("fence_s", 0.0) - before.get("fence_s", 0.0)
        return times | {"gap_s": max(gaps), "skipped": skipped, "fence_s": waited}


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("mb", 512.0), ("mb-s", 150.0), ("commit-s", 2.0), ("step-s", 0.2)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs for the slots")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = LoadWatch()
    with tempfile.TemporaryDirectory() as agent, tempfile.TemporaryDirectory(dir=arguments.shm) as memory:
        os.environ["FLASHCKPT_SHM_DIR"] = memory  # with it all goes that no daemon takes away
        lease = Lease(Path(agent) / LOCK, create=True)
        assert lease.exclusive(0)
        os.environ["FLASHCKPT_AGENT_DIR"] = agent  # as under an agent: no daemon is started
        store, rows = PacedStore(arguments.mb_s * 1e6), dict[str, list[dict[str, float]]]()
        nbytes = int(arguments.mb * 1e6)
        ranks = {
            name: Rank(f"{agent}/root{slots}", slots, nbytes, arguments.step_s) for name, (slots, _) in VARIANTS.items()
        }
        for _ in range(arguments.rounds):
            for name, (_, gives_back) in VARIANTS.items():
                rows.setdefault(name, []).append(ranks[name].persist(store, arguments.commit_s, gives_back=gives_back))
        for one in ranks.values():
            one.ckpt.close()
    results: dict[str, Any] = {name: middle(found) for name, found in rows.items()}
    print(f"{'':28}{'durable':>10}{'committed':>11}{'gap':>8}{'skipped':>9}{'fence':>8}")
    for name, row in results.items():
        print(f"{name:28}" + "".join(f"{row[k]:{w}.2f}" for k, w in zip(row, (10, 11, 8, 9, 8), strict=True)))
    if arguments.json:
        write_json(
            arguments.json,
            document("two_slots", vars(arguments) | {"json": None}, {"medians": results, "rounds": rows}, load=load),
        )


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    keys = ("durable_s", "committed_s", "gap_s", "skipped", "fence_s")
    return {key: statistics.median(row[key] for row in rows) for key in keys}


if __name__ == "__main__":
    main()
