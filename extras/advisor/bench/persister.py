"""The persister of `flashckpt bench job`: one process per node, without torch, as the daemon is.

Run as `python -m flashckpt.bench.persister` by `flashckpt.bench.job`. It writes with the functions the daemon writes with, but
on order, so that each phase can be timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashckpt.bench.host import drop_caches, evict, peak_memory
from flashckpt.bench.measure import cpu_seconds
from flashckpt.bench.probe import timed
from flashckpt.bench.worker import Command, serve
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.errors import NoCheckpointError
from flashckpt.shm.inventory import pin_all, release, scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Pin
from flashckpt.storage.factory import open_store

WRITERS_AT_ONCE = 4  # as in the daemon


class Persister:
    """Persists the slots of all ranks of this node and commits.

    Args:
        config: Job directory, number of ranks, storage URL, options, compression.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.store, self.times = timed(open_store(config["url"], **config["options"]))

    def commands(self) -> dict[str, Command]:
        """Return what the parent may order."""
        return {"persist": self.persist, "make_cold": self.make_cold, "remove": self.remove}

    def persist(self, step: int) -> Mapping[str, Any]:
        """Pin every rank's slot of this snapshot, write packs and indexes, commit."""
        prefix, pins = self._pinned(step)
        options = PersistOptions(compression=self.config["compression"])
        self.times.written_s = []
        cpu, started = cpu_seconds(), time.perf_counter()

        def one(pin: Pin) -> tuple[float, int]:
            begin = time.perf_counter()
            index = persist_slot(pin, self.store, prefix, options=options)
            return time.perf_counter() - begin, int(index.table.nbytes.sum())

        try:
            with peak_memory() as peak, ThreadPoolExecutor(WRITERS_AT_ONCE) as pool:
                ranks_s, nbytes = zip(*pool.map(one, pins.values()), strict=True)
            written = time.perf_counter()
            commit(self.store, prefix, list(pins))
        finally:
            release(pins)
        now = time.perf_counter()
        return {
            "prefix": prefix,
            "ranks_s": ranks_s,
            "bytes": nbytes,
            "written_s": written - started,
            "commit_s": now - written,
            "durable_s": now - started,
            "cpu_s": cpu_seconds() - cpu,
            "peak_extra_bytes": peak.extra_bytes,
            "parts_s": self.times.written_s,
        }

    def _pinned(self, step: int) -> tuple[str, dict[int, Pin]]:
        """Return the prefix of the snapshot of a step, and leases on its slots by rank.

        Raises:
            NoCheckpointError: Not every rank holds it.
        """
        directory = JobDirectory.at(Path(self.config["directory"]))
        inventory = scan(directory, [record] if (record := directory.read_generation()) else ())
        for identity in inventory.common():
            if identity.step == step and (pins := pin_all(inventory, identity, range(self.config["ranks"]))):
                return prefix_of(*identity), pins
        raise NoCheckpointError(f"not every rank holds the snapshot of step {step}", found=f"{inventory.common()}")

    def make_cold(self, directory: str | None, drop: bool) -> Mapping[str, Any]:
        """Put the written files out of the page cache; say what is left there, and what could not be done."""
        if directory is None:
            return {"how": "not possible: caches are the server's", "cached_share": None}
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        shares = [(evict(path), path.stat().st_size) for path in files]
        total = sum(size for _, size in shares) or 1
        share = sum(share * size for share, size in shares) / total
        dropped = drop and drop_caches()
        how = "files evicted by posix_fadvise, checked by mincore" + (
            ", caches of the machine dropped" if dropped else ""
        )
        return {"how": how, "cached_share": share, "dropped": dropped}

    def remove(self, prefix: str) -> None:
        """Delete one checkpoint, so that the run never needs room for more than two."""
        for info in self.store.list(f"{prefix}/"):
            self.store.delete(info.key)


if __name__ == "__main__":
    serve(lambda config: Persister(config).commands())
