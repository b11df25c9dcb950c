"""The trainer with `[checkpoint] replicate` on several nodes (make test-nodes; root): nodes are lost with their memory.

No second holder of the state but the replicas: FSDP over all ranks, or tensor and pipeline parallel. What the restore
reads comes from memory of the nodes that are left, byte for byte; the trace is that of a run in which nothing happened.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.nodes import Nodes, nodes
from support.training import write_corpus

from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.train.metrics import read_trace

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

FSDP = "dp_shard = -1"
TP_PP = "tp = 2\npp = 2"
STEPS = 100000


def write_run(folder: Path, layout: str, *, replicate: int = 1, steps: int = STEPS, root: str = "root") -> list[object]:
    """A run of the trainer that keeps a snapshot of every second step, and nothing on storage."""
    path = folder / f"{root}.toml"
    path.write_text(
        f"[model]\ndim = 32\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 64\n[parallel]\n{layout}\n"
        f'[train]\nsteps = {steps}\nseq_len = 8\nglobal_batch = 12\nmicro_batch = 2\ndevice = "cpu"\n'
        "[optim]\nwarmup_steps = 2\ndecay_steps = 1000\n"
        f'[data]\nsource = {write_corpus(folder / "text")}\nfolder = "{folder}/tokens"\n'
        f'[checkpoint]\nroot = "{folder}/{root}"\nsnapshot_every = 2\npersist_every = {STEPS}\nreplicate = {replicate}\n'
        f'[log]\nfolder = "{folder}/{root}-log"\nevery = 1\n'
    )
    return ["-m", "flashckpt.trainer", "--config", path]


def trace(folder: Path, root: str = "root") -> list[dict[str, Any]]:
    try:
        return read_trace(folder / f"{root}-log" / "trace.jsonl")
    except FileNotFoundError:
        return []


def replicated(them: Nodes, node: int) -> int:
    """The newest step that all partners hold, as a node's persister says."""
    for path in them.memory(node).glob("flashckpt-*/*/daemon.msgpack"):
        status = JobDirectory(path.parent).read_status()
        if status is not None and status.replicated is not None:
            return int(status.replicated.step)
    return 0


def run_on(them: Nodes, node: int, words: Sequence[object], nnodes: str, ranks: int) -> None:
    flags = (f"--nproc-per-node={ranks}", "--max-restarts=3")
    them.start(node, *flags, *words, nnodes=nnodes, conf="join_timeout=60")


def restores(them: Nodes, node: int = 0) -> list[str]:
    """What the log of a node says of its restores."""
    return re.findall(r"\[rank 0\] flashckpt: (restored step.*)", them.log(node))


def reference(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The same run in one process without an interruption: its samples are those of any layout, step by step."""
    words = write_run(folder, "", replicate=0, steps=steps, root="reference")
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, cwd=folder, timeout=300)
    return trace(folder, "reference")


def check_trace(folder: Path, *, same_layout: bool) -> None:
    """Each step once, each sample once; what was trained twice has the same loss, bit for bit on the same layout."""
    lines = trace(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    whole = reference(folder, len(lines))
    assert [line["samples"] for line in lines] == [line["samples"] for line in whole]
    for ours, other in zip(lines, whole, strict=True):
        assert float.fromhex(ours["loss"]) == pytest.approx(float.fromhex(other["loss"]), rel=1e-3)
    if same_layout:
        kept = {line["step"]: line for line in lines}
        for line in read_trace(folder / "root-log" / "abandoned.jsonl"):
            if line["step"] in kept:
                assert (line["loss"], line["norm"]) == (kept[line["step"]]["loss"], kept[line["step"]]["norm"])


def stop(them: Nodes, alive: Sequence[int]) -> None:
    """Let the job end on all nodes at one step."""
    them.processes[alive[0]].send_signal(signal.SIGTERM)
    assert [them.wait(node) for node in alive] == [RESUME_EXIT_CODE] * len(alive), them.log(alive[0])


@pytest.mark.parametrize(("layout", "ranks"), [(FSDP, 1), (TP_PP, 2)], ids=["fsdp", "tp2-pp2"])
def test_node_replaced_no_byte_from_storage_and_the_trace_is_that_of_a_run_without_the_loss(
    layout: str, ranks: int, tmp_path: Path
) -> None:
    count = 3 if ranks == 1 else 2
    with nodes(tmp_path, count + 1) as them:
        words = write_run(tmp_path, layout)
        for node in range(count):
            run_on(them, node, words, str(count), ranks)
        them.until(lambda: replicated(them, 0) >= 6, "step 6 with all partners")
        lost = count - 1
        them.kill(lost)
        run_on(them, count, words, str(count), ranks)
        before = len(trace(tmp_path))
        them.until(lambda: len(trace(tmp_path)) > before + 6, "6 more steps")
        (said,) = restores(them)
        assert "same layout" in said
        assert "peer" in them.log(0).partition(said)[2].partition("\nstep ")[0]
        assert not list((tmp_path / "root").glob("step-*.g1/MANIFEST")), (
            "nothing of before the loss is on storage, so that no byte came from there"
        )
        stop(them, [*range(count - 1), count])
    check_trace(tmp_path, same_layout=True)
