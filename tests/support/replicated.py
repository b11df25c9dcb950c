"""Runs of the trainer with `[checkpoint] replicate` on several nodes: how far they are, who holds what, and the damage that is done to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashckpt.core.manifest import Manifest
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.trainer.config import read_config, to_values
from flashckpt.trainer.evaluate.check import single_process
from flashckpt.trainer.train.metrics import read_trace
from support.nodes import Nodes, ip
from support.ranks import run_ranks, values
from support.training import train_rank, write_corpus

FSDP = "dp_shard = -1"
TP_PP = "tp = 2\npp = 2"
DP_TP_PP = f"tp = 2\npp = 2\n{FSDP}"
STEPS = 100000


def write_run(folder: Path, layout: str, *, replicate: int = 1, persist_every: int = STEPS) -> list[object]:
    """A run of the trainer that keeps a snapshot of every second step; on storage nothing, unless `persist_every` says so."""
    path = folder / "root.toml"
    path.write_text(
        f"[model]\ndim = 32\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 64\n[parallel]\n{layout}\n"
        f'[train]\nsteps = {STEPS}\nseq_len = 8\nglobal_batch = 12\nmicro_batch = 2\ndevice = "cpu"\n'
        "[optim]\nwarmup_steps = 2\ndecay_steps = 1000\n"
        f'[data]\nsource = {write_corpus(folder / "text")}\nfolder = "{folder}/tokens"\n'
        f'[checkpoint]\nroot = "{folder}/root"\nsnapshot_every = 2\npersist_every = {persist_every}\n'
        f'replicate = {replicate}\n[log]\nfolder = "{folder}/root-log"\nevery = 1\n'
    )
    return ["-m", "flashckpt.trainer", "--config", path]


def run_on(
    them: Nodes,
    node: int,
    words: Sequence[object],
    nnodes: str,
    ranks: int = 1,
    *,
    host: int = 0,
    env: dict[str, str] | None = None,
) -> None:
    """Launch the run in a node; the node `host` serves the rendezvous store."""
    flags = (f"--nproc-per-node={ranks}", "--max-restarts=3", "--hang-timeout=600")
    them.start(node, *flags, *words, nnodes=nnodes, host=host, conf="join_timeout=60", env=env)


def stop(them: Nodes, alive: Sequence[int]) -> None:
    """Let the job end on all nodes at one step."""
    them.processes[alive[0]].send_signal(signal.SIGTERM)
    assert [them.wait(node) for node in alive] == [RESUME_EXIT_CODE] * len(alive), them.log(alive[0])


# -- how far a run is ------------------------------------------------------------------------------------


def trace(folder: Path) -> list[dict[str, Any]]:
    return read_trace(folder / "root-log" / "trace.jsonl")


def train_on(them: Nodes, steps: int = 6) -> None:
    """Wait until the job has trained some more steps."""
    before = len(trace(them.folder))
    them.until(lambda: len(trace(them.folder)) > before + steps, f"{steps} more steps")


def replicated(them: Nodes, node: int) -> int:
    """The newest step that all partners hold, as a node's persister says."""
    for path in them.memory(node).glob("flashckpt-*/*/daemon.msgpack"):
        status = JobDirectory(path.parent).read_status()
        if status is not None and status.replicated is not None:
            return int(status.replicated.step)
    return 0


def committed(folder: Path) -> dict[int, int]:
    """The checkpoints on storage: step -> the generation that took it."""
    names = [path.parent.name for path in (folder / "root").glob("step-*/MANIFEST")]
    return {int(name[5:14]): int(name.partition(".g")[2]) for name in names}


def restores(them: Nodes, node: int = 0) -> list[str]:
    """What the log of a node says of its restores."""
    return re.findall(r"\[rank 0\] flashckpt: (restored step.*)", them.log(node))


@dataclass(frozen=True, kw_only=True)
class Restored:
    """One generation as its ranks reported it: from which step, and the bytes of each tier over all ranks."""

    generation: int
    step: int
    tiers: dict[str, int]


def restored(log: Path, world: int, after: int) -> Restored | None:
    """Return the newest generation after `after` that all of `world` ranks have restored."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with contextlib.suppress(FileNotFoundError):
        for line in (log / "restores.jsonl").read_text().splitlines():
            one = json.loads(line)
            found[one["generation"]].append(one)
    for generation in sorted((number for number in found if number > after), reverse=True):
        if {one["rank"] for one in found[generation]} == set(range(world)):
            tiers: dict[str, int] = defaultdict(int)
            for one in found[generation]:
                for tier, count in one["bytes"].items():
                    tiers[tier] += count
            (step,) = {one["step"] for one in found[generation]}
            return Restored(generation=generation, step=step, tiers={tier: n for tier, n in tiers.items() if n})
    return None


def restore_of(them: Nodes, world: int, after: int = 1) -> Restored:
    """Wait for the first restore after a generation."""
    log = them.folder / "root-log"
    found: Restored = them.until(lambda: restored(log, world, after), f"the restore of {world} ranks")
    return found


# -- the ranks of a node, and what lies where ------------------------------------------------------------


def ranks_on(them: Nodes, node: int) -> dict[int, int]:
    """The ranks of a node that live: rank -> pid."""
    found = {}
    for word in ip("netns", "pids", f"{them.prefix}{node}").split():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{word}/comm").read_text().strip()
            if re.fullmatch(r"rank\d+", name):
                found[int(name.removeprefix("rank"))] = int(word)
    return found


def hold(them: Nodes, nodes: Sequence[int]) -> int:
    """Stop the ranks of some nodes, so that the others wait for them in the middle of a step.

    Returns:
        The newest step that all ranks have in memory, once all partners hold it: what a restore has to find.
    """
    ranks = [rank for node in nodes for rank in ranks_on(them, node)]
    for node in nodes:
        for pid in ranks_on(them, node).values():
            os.kill(pid, signal.SIGSTOP)
    newest = {rank: max(steps_of(path)) for node in nodes for rank, path in own_segments(them, node)}
    assert sorted(newest) == sorted(ranks)
    step = min(newest.values())
    them.until(lambda: replicated(them, 0) == step, f"step {step} with all partners")
    return step


def own_segments(them: Nodes, node: int) -> Iterator[tuple[int, Path]]:
    """The segments of the ranks of a node."""
    for path in them.memory(node).glob("flashckpt-*/*/r*.seg"):
        yield int(path.name[1:6]), path


def replicas_on(them: Nodes, node: int) -> dict[int, Path]:
    """The segments of the ranks whose replicas a node keeps."""
    return {int(path.name[1:6]): path for path in them.memory(node).glob("flashckpt-*/*/replicas/r*.seg")}


def steps_of(path: Path) -> list[int]:
    """The steps that a segment holds COMPLETE."""
    with contextlib.closing(Segment.attach(path)) as segment:
        return [header.step for header in segment.headers() if header.is_complete]


@dataclass(frozen=True)
class Replica:
    """What a partner keeps of one step of one rank, and the file and place that it lies in."""

    path: Path
    manifest: Manifest
    manifest_at: int
    data_at: int

    @classmethod
    def of(cls, path: Path, step: int) -> Replica:
        with contextlib.closing(Segment.attach(path)) as segment:
            (slot,) = [k for k, header in enumerate(segment.headers()) if header.is_complete and header.step == step]
            pinned = segment.pin(slot)
            assert pinned is not None
            with pinned:
                spec = segment.spec
                return cls(path, pinned.manifest(), spec.manifest_at(slot), spec.data_at(slot))

    @property
    def state_bytes(self) -> int:
        """Bytes of tensors, without what lies between them."""
        return int(self.manifest.table.nbytes.sum())

    def damage_row(self, row: int) -> int:
        """Flip the bits of a row's last byte; return the bytes of the row."""
        table = self.manifest.table
        nbytes = int(table.nbytes[row])
        self._flip(self.data_at + int(table.byte_offset[row]) + nbytes - 1)
        return nbytes

    def damage_record(self) -> int:
        """Flip the bits of one byte of the manifest; return the bytes of state that nothing describes any more."""
        self._flip(self.manifest_at + 100)
        return self.state_bytes

    def _flip(self, at: int) -> None:
        with self.path.open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0xFF]), at)


# -- what was trained ------------------------------------------------------------------------------------


def uninterrupted(folder: Path, world: int, steps: int) -> dict[str, Any]:
    """The samples, losses and norms of the same run on as many ranks, or on one, that nothing interrupts."""
    config = read_config(folder / "root.toml")
    run = to_values(config if world > 1 else single_process(config))
    ranks = values(run_ranks(train_rank, world, run, steps, timeout_s=300))
    found: dict[str, Any] = next(one for one in ranks if one["reporter"])
    return found


def check_trace(folder: Path, *, same_layout: bool) -> None:
    """Each step once, each sample once; what was trained twice has the same loss, bit for bit on the same layout."""
    lines = trace(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    whole = uninterrupted(folder, 1, len(lines))
    assert [line["samples"] for line in lines] == whole["samples"]
    for ours, other in zip(lines, whole["losses"], strict=True):
        assert float.fromhex(ours["loss"]) == pytest.approx(float.fromhex(other), rel=1e-3)
    if same_layout:
        kept = {line["step"]: line for line in lines}
        for line in read_trace(folder / "root-log" / "abandoned.jsonl"):
            if line["step"] in kept:
                assert (line["loss"], line["norm"]) == (kept[line["step"]]["loss"], kept[line["step"]]["norm"])


def check_exact(folder: Path, world: int) -> None:
    """Each step once, with the samples, loss and gradient norm of as many ranks that nothing interrupts, bit for bit."""
    lines = trace(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    whole = uninterrupted(folder, world, len(lines))
    for name, column in {"samples": "samples", "loss": "losses", "norm": "norms"}.items():
        assert [line[name] for line in lines] == whole[column], name
