"""`flashckpt bench job` and `bench shm`: snapshot, persist, commit and restore at a real model's shard layout.

Real processes run the product's own code: ranks hold their state under a `Checkpointer`, which takes snapshots and
restores them; one torch-free process per node persists them, as the daemon does. This module starts them, gives the
orders, and gathers. Time is the maximum over ranks, throughput the minimum.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashckpt.bench.job_results import Gathered, JobMeasurement, results
from flashckpt.bench.layouts import ModelLayout, held_bytes, shards_of
from flashckpt.bench.measure import interleave, median, summarise
from flashckpt.bench.scratch import Scratch
from flashckpt.bench.worker import Workers
from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.shm.agent_folder import LOCK
from flashckpt.shm.lease import Lease

MOST_RANKS = 256
JOB = "bench"
_READY_S = 120.0
"""How long all ranks may take to reserve memory for one snapshot."""
Progress = Callable[[str, int, int | None], None]
"""Called with the current phase, the bytes done so far, and the total (None: unknown yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """What to run.

    Attributes:
        table: Description of the shards, see `layouts.shards_of`.
        ranks: Processes.
        rounds: Measured rounds.
        slots: Snapshots per rank in memory.
        peers: Names of `bench.PEERS` to run in the same rounds; [] for none.
        compression: As for `PersistOptions`.
        drop_caches: Also drop the caches of the whole machine before cold reads (root).
        keep: Leave the last checkpoint.
    """

    table: Mapping[str, Any]
    ranks: int
    rounds: int = 5
    slots: int = 2
    peers: Sequence[str] = ()
    compression: str = "off"
    drop_caches: bool = False
    keep: bool = False


def table_of(layout: ModelLayout, ranks: int) -> dict[str, Any]:
    """Return the description of a layout of which the first `ranks` take part.

    Raises:
        ConfigError: More ranks than the layout has, or than this program starts on one machine.
    """
    if not 1 <= ranks <= min(layout.ranks, MOST_RANKS):
        raise ConfigError(
            "--ranks is out of range",
            found=f"{ranks}",
            expected=f"1 to {min(layout.ranks, MOST_RANKS)} ({layout.model.name} is cut over {layout.ranks})",
        )
    return {**asdict(layout), "ranks": ranks}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNeed:
    """Bytes a run takes: slots in shared memory, live state and targets in private memory, checkpoints on storage."""

    shared_bytes: int
    private_bytes: int
    storage_bytes: int


def need_of(run: JobRun) -> BenchNeed:
    """Return what a run will take, before anything is started."""
    parts = [shards_of(run.table, rank) for rank in range(run.ranks)]
    held = sum(held_bytes(part) for part in parts)
    written = sum(shard.nbytes for part in parts for shard in part if shard.replica == 0)
    margin = 2 << 20
    return BenchNeed(
        shared_bytes=run.slots * (held + run.ranks * margin),
        private_bytes=(3 if run.peers else 2) * held + run.ranks * (300 << 20),
        # a checkpoint and the one before it, or a peer's files, which are removed after each round
        storage_bytes=2 * written + (held if run.peers else 0) + (64 << 20),
    )


class BenchJob:
    """The processes of one run.

    Args:
        run: What to run.
        memory: Directory of the segments.
        scratch: Where to persist; None measures memory only.
        progress: Receives the current phase.
    """

    def __init__(self, run: JobRun, memory: Path, scratch: Scratch | None, progress: Progress) -> None:
        self.run, self.memory, self.scratch, self._progress = run, memory, scratch, progress
        self.workers = Workers(memory)
        self._agent = Lease(memory / LOCK, create=True)
        self._agent.exclusive(0)
        self.found, self.first = Gathered(), Gathered()
        self._step = 0
        self._bytes = 0
        self.cold: Mapping[str, Any] = {}
        self.written: Sequence[int] = ()
        self._prefix = ""

    def start(self) -> None:
        """Start all processes and wait until they hold their state and their slots."""
        where: dict[str, Any] = {"url": str(self.memory / "root"), "options": {}}
        if self.scratch:
            where = {"url": self.scratch.url, "options": dict(self.scratch.options)}
        common = {
            "table": dict(self.run.table), "job": JOB, "slots": self.run.slots, "ranks": self.run.ranks,
            "memory": str(self.memory), **where,
        }  # fmt: skip
        configs = {
            f"rank {rank}": {**common, "rank": rank, "environment": self._environment(rank)}
            for rank in range(self.run.ranks)
        }
        self.ranks = self.workers.start(["-m", "flashckpt.bench.rank"], configs)
        self._progress("starting processes, making data", 0, None)
        self.workers.answers(self.ranks)
        self.sizes = self.workers.ask(self.ranks, "ready")
        self._progress("reserving memory", 0, None)
        self.touch = self.workers.ask(self.ranks, "touch")
        self.workers.ask(self.ranks, "begin")
        self.persister: list[int] = []
        if self.scratch:
            directory = self.memory / f"flashckpt-{os.getuid()}" / JOB
            config = {
                **where,
                "directory": str(directory),
                "ranks": self.run.ranks,
                "compression": self.run.compression,
            }
            self.persister = self.workers.start(["-m", "flashckpt.bench.persister"], {"persister": config})
            self.workers.answers(self.persister)
        self.workers.ask(self.ranks, "alone", seconds=0.1)  # touches what the state is compared with

    def _environment(self, rank: int) -> dict[str, str]:
        """Return what dlrun sets for a rank: this program plays its part, so that no daemon is started."""
        return {
            "FLASHCKPT_SHM_DIR": str(self.memory),
            "FLASHCKPT_AGENT_DIR": str(self.memory),
            "FLASHCKPT_JOB_ID": JOB,
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": env.GLOO_SOCKET_IFNAME or "lo",
        }

    def cycle(self, found: Gathered) -> None:
        """One round: snapshot, restore from memory, persist and commit, restore from storage, remove."""
        held = sum(size["held_bytes"] for size in self.sizes)
        self._say("plain copy")
        alone = self.workers.ask(self.ranks, "alone", seconds=0.1)  # every round: neighbours come and go
        found.add_ranks("memcpy_s", [answer["memcpy_s"] for answer in alone])
        self._say("snapshot")
        taken = self._snapshot()
        for name in ("call_s", "restorable_s", "copied_s", "cpu_s", "beside_s"):
            found.add_ranks(name, [answer[name] for answer in taken])
        found.add_ranks("stall_s", [answer["call_s"] + answer["beside_s"] for answer in taken])
        self._say("restore from memory", held)
        restored = self.workers.ask(self.ranks, "restart")
        found.add_ranks("restored_memory_s", [answer["bytes_s"] for answer in restored])
        for name in ("wall_s", "inventory_s", "plan_s", "read_s", "lineage_s"):
            found.add_ranks(f"memory_{name}", [answer[name] for answer in restored])
        self.workers.ask(self.ranks, "verify")
        if self.scratch is not None:
            self._persist(found, held)

    def _snapshot(self) -> list[Mapping[str, Any]]:
        """Take the snapshot of the next step on all ranks; right after a start some may have to reserve memory first."""
        end = time.monotonic() + _READY_S
        while True:
            self._step += 1
            taken = self.workers.ask(self.ranks, "snapshot", step=self._step)
            if None not in taken:
                return taken
            if time.monotonic() > end:
                raise FlashckptError(
                    "a rank takes no snapshot", found=f"none in {_READY_S:g} s", expected="one per round"
                )

    def _persist(self, found: Gathered, held: int) -> None:
        self._say("persist and commit", held)
        (written,) = self.workers.ask(self.persister, "persist", step=self._step)
        self._prefix, self.written = written["prefix"], written["bytes"]
        found.add_ranks("persist_s", written["ranks_s"])
        for name in ("written_s", "commit_s", "durable_s", "cpu_s", "peak_extra_bytes"):
            found.add(f"node_{name}", written[name])
        found.parts["write"] += written["parts_s"]
        self._say("restore from storage", held)
        self._restore(found)
        self.workers.ask(self.persister, "remove", prefix=self._prefix)
        self._say("restored", held)

    def _restore(self, found: Gathered) -> None:
        assert self.scratch is not None
        directory = None if self.scratch.directory is None else str(self.scratch.directory)
        (self.cold,) = self.workers.ask(self.persister, "make_cold", directory=directory, drop=self.run.drop_caches)
        restored = self.workers.ask(self.ranks, "restore_storage", step=self._step)
        found.add_ranks("restored_storage_s", [answer["bytes_s"] for answer in restored])
        for name in ("wall_s", "root_s", "plan_s", "read_s", "cpu_s"):
            found.add_ranks(f"storage_{name}", [answer[name] for answer in restored])
        self.workers.ask(self.ranks, "verify")

    def beside(self) -> float:
        """Persist once more while all ranks compute; return by how much their steps got longer (share)."""
        self._say("persist beside training")
        flag = self.memory / "stop"
        self.workers.ask(self.ranks, "alone", seconds=0.1)
        self._snapshot()
        self.workers.tell(self.ranks, "work", until=str(flag))
        try:
            (written,) = self.workers.ask(self.persister, "persist", step=self._step)
        finally:
            flag.touch()
        worked = self.workers.answers(self.ranks)
        if not self.run.keep:
            self.workers.ask(self.persister, "remove", prefix=written["prefix"])
        return max(0.0, median([answer["uplift"] for answer in worked]))

    def peer(self, name: str) -> Mapping[str, float]:
        """Let every rank write its state with another library; return the slowest rank's seconds."""
        assert self.scratch is not None
        assert self.scratch.directory is not None
        self._say(name)
        folder = self.scratch.directory / f"peer-{name}"
        folder.mkdir()
        try:
            answers = self.workers.ask(self.ranks, "peer", name=name, directory=str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def measure(self) -> dict[str, Any]:
        """Run a first round, the measured rounds, and the peers among them; return the results."""
        self.cycle(self.first)
        peers: dict[str, Any] = {}
        if self.run.peers:
            cases: dict[str, Callable[[], Any]] = {name: partial(self.peer, name) for name in self.run.peers}
            timings = interleave({"flashckpt": lambda: self.cycle(self.found), **cases}, self.run.rounds, warmup=0)
            for name in self.run.peers:
                runs = [timing.value for timing in timings[name]]
                peers[name] = {key: summarise([one[key] for one in runs]) for key in runs[0]}
        else:
            interleave({"flashckpt": lambda: self.cycle(self.found)}, self.run.rounds)
        uplift = self.beside() if self.scratch is not None else None
        self.workers.finish()
        return results(self._measured(uplift, peers))

    def _measured(self, uplift: float | None, peers: dict[str, Any]) -> JobMeasurement:
        return JobMeasurement(
            found=self.found,
            first=self.first,
            sizes=self.sizes,
            written=self.written,
            touch=self.touch,
            persists=self.scratch is not None,
            cold=self.cold,
            uplift=uplift,
            peers=peers,
        )

    def _say(self, what: str, nbytes: int = 0) -> None:
        self._bytes += nbytes
        self._progress(what, self._bytes, self._bytes_in_all())

    def _bytes_in_all(self) -> int:
        """Return how many bytes will have been reported to `progress` in the end."""
        held: int = sum(size["held_bytes"] for size in self.sizes)
        return held * (4 if self.scratch else 1) * (self.run.rounds + 1)


def run_job(run: JobRun, memory: Path, scratch: Scratch | None, progress: Progress) -> dict[str, Any]:
    """Run everything and return the results; all processes have ended when this returns or raises."""
    job = BenchJob(run, memory, scratch, progress)
    try:
        job.start()
        return job.measure()
    finally:
        job.workers.close()
