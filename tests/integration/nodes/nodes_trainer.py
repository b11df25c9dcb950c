"""The project's trainer under three nodes (make test-nodes; root): one dies, two continue, it returns; storage is cut meanwhile.

The global batch divides over none of the numbers of replicas. In the first layout two nodes hold all state between them,
in the second every shard is on one node alone. The trace of each run is compared with that of one
process that nothing interrupted: the same samples in each step, each step once, the same loss and gradient norm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from support.nodes import Nodes, nodes
from support.ranks import run_ranks, values
from support.replicated import restored
from support.training import floats, train_rank, write_corpus

from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.trainer.config import read_config, to_values
from flashckpt.trainer.evaluate.check import single_process
from flashckpt.trainer.train.metrics import read_trace

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout on three nodes of `ranks` each.

    Attributes:
        batch: Samples of a step.
        padding: What the first line of a run says on three nodes, and on two.
        is_covered: Whether any two nodes hold all state in memory.
    """

    ranks: int
    parallel: str
    batch: int
    padding: tuple[str, str]
    is_covered: bool


CASES = {
    "hsdp": Case(
        ranks=2,
        parallel="dp_replicate = 2\ndp_shard = -1",
        batch=10,
        padding=("(2 of 12 rows are padding)", "(6 of 16 rows are padding)"),
        is_covered=True,
    ),
    "fsdp x tp x pp": Case(
        ranks=4,
        parallel="tp = 2\npp = 2\ndp_shard = -1",
        batch=5,
        padding=("(1 of 6 rows are padding)", "(3 of 8 rows are padding)"),
        is_covered=False,
    ),
}


class Disk:
    """The storage of all nodes, which can be cut off: full, so that nothing more is committed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def restore(self) -> None:
        (self.path / "filler").unlink()

    def committed(self) -> list[int]:
        return sorted(int(path.parent.name[5:14]) for path in self.path.glob("root/step-*/MANIFEST"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "storage"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "flashckpt-test", str(path)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"mount is refused here: {done.stderr.decode().strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def write_run(folder: Path, case: Case) -> Path:
    path = folder / "run.toml"
    path.write_text(
        "[model]\ndim = 16\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 32\n"
        f"[parallel]\n{case.parallel}\n"
        f"[train]\nsteps = 100000\nseq_len = 8\nglobal_batch = {case.batch}\nmicro_batch = 2\n"
        'device = "cpu"\n'
        '[optim]\nlr = 1e-4\nwarmup_steps = 0\nschedule = "constant"\n'
        f'[data]\nsource = {write_corpus(folder / "text")}\nfolder = "{folder}/tokens"\n'
        f'[checkpoint]\nroot = "{folder}/storage/root"\nsnapshot_every = 2\npersist_every = 10\n'
        f'[log]\nfolder = "{folder}/log"\nevery = 1000\n'
    )
    return path


def last_step(folder: Path) -> int:
    trace = read_trace(folder / "log" / "trace.jsonl")
    return int(trace[-1]["step"]) if trace else 0


def trained(them: Nodes, step: int) -> None:
    them.until(lambda: last_step(them.folder) >= step, f"step {step}", 300)


@pytest.mark.parametrize("name", CASES)
def test_node_is_lost_and_returns_while_storage_is_cut_and_the_trace_is_that_of_one_process(
    name: str, tmp_path: Path, disk: Disk
) -> None:
    """3 -> 2 -> 3 nodes. Where memory covers the loss storage is cut at that instant, else as soon as two nodes train."""
    case = CASES[name]
    config = write_run(tmp_path, case)
    words = (f"--nproc-per-node={case.ranks}", "--max-restarts=3", "-m", "flashckpt.trainer", "--config", config)
    with nodes(tmp_path, 3) as them:
        for node in range(3):
            them.start(node, *words, nnodes="2:3")
        trained(them, 12)
        them.until(disk.committed, "a committed checkpoint")
        if case.is_covered:
            disk.cut()
        them.kill(2)
        small = them.until(partial(restored, tmp_path / "log", 2 * case.ranks, 0), "two nodes", 300)
        if not case.is_covered:
            disk.cut()
        durable = disk.committed()
        trained(them, small.step + 12)
        them.start(2, *words, nnodes="2:3")  # its storage is cut, too
        again = them.until(
            partial(restored, tmp_path / "log", 3 * case.ranks, small.generation), "three nodes again", 300
        )
        trained(them, again.step + 12)
        disk.restore()
        them.until(lambda: disk.committed()[-1] > max(durable[-1], again.step), "a checkpoint of three nodes")
        them.processes[0].send_signal(signal.SIGTERM)
        assert [them.wait(node) for node in range(3)] == [RESUME_EXIT_CODE] * 3, them.log(0)
        log = "".join(them.log(node) for node in range(3))
    assert ("storage" in small.tiers) == (not case.is_covered)
    assert small.step >= durable[0]
    assert again.step >= small.step + 10, "what two nodes trained is not lost"
    assert set(again.tiers) <= {"memory", "peer"}
    assert all(padding in log for padding in case.padding)
    check_trace(tmp_path, config)


def check_trace(folder: Path, config: Path) -> None:
    """Compare with one process that nothing interrupted."""
    trace = read_trace(folder / "log" / "trace.jsonl")
    assert [line["step"] for line in trace] == list(range(1, len(trace) + 1))
    run = to_values(single_process(read_config(config)))
    (alone,) = values(run_ranks(train_rank, 1, run, len(trace), timeout_s=300))
    assert [line["samples"] for line in trace] == alone["samples"]
    assert [float.fromhex(line["loss"]) for line in trace] == pytest.approx(floats(alone["losses"]), abs=1e-4)
    assert [float.fromhex(line["norm"]) for line in trace] == pytest.approx(floats(alone["norms"]), rel=1e-2)
    tokens = trace[0]["tokens"]
    assert [line["tokens"] for line in trace] == [tokens * line["step"] for line in trace]  # padding is not counted
