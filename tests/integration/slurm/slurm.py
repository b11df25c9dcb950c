"""The batch scripts of docs/launching.md, word for word, in a Slurm of two nodes of its own (make test-slurm; root).

Only their size is set from outside, by options of sbatch. The cluster lies in namespaces (tests/integration/slurm/cluster.sh).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.paths import TESTS
from support.ranks import wait_for

pytestmark = [pytest.mark.timeout(170), pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

CLUSTER = str(Path(__file__).with_name("cluster.sh"))
NAMESPACES = "--mount --net --pid --ipc --uts --fork --kill-child --mount-proc"
SIZE = ("--gpus-per-node=2", "--cpus-per-task=2")


def script(test: str) -> str:
    """Return the block of docs/launching.md that names a test of this file."""
    text = (TESTS.parent / "docs" / "launching.md").read_text()
    (block,) = re.findall(rf"<!-- run: slurm\.py::{test} -->\n```bash\n(.*?)```\n", text, re.DOTALL)
    return str(block)


@dataclass(frozen=True)
class Slurm:
    """A running cluster with its state under `folder`."""

    folder: Path

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [CLUSTER, "in", str(self.folder), *command],
            capture_output=True, text=True, check=False, cwd=cwd, timeout=60, env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()


@dataclass(frozen=True)
class Job:
    """A submitted job and what it has written."""

    slurm: Slurm
    number: str
    folder: Path

    @property
    def output(self) -> str:
        return self._text("job.out")

    def trace(self, rank: int) -> list[list[str]]:
        return [line.split() for line in self._text(f"rank{rank}.trace").splitlines()]

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self.slurm("scontrol", "show", "job", self.number))
        return found[1] if found else ""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if not all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch")):
        pytest.skip("Slurm is not installed: tests/integration/slurm/cluster.sh install")
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-slurm.", dir="/var/tmp"))
    log = (folder / "output").open("wb")
    process = subprocess.Popen(
        ["unshare", *NAMESPACES.split(), CLUSTER, "serve", str(folder), "2"], stdout=log, stderr=log
    )
    cluster = Slurm(folder)

    def ready() -> bool:
        assert process.poll() is None, (folder / "output").read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if not children or not (folder / "serving").exists():
            return False
        (folder / "first").write_text(children[0])
        return cluster("sinfo", "--noheader", "--format=%T %D") == "idle 2"

    try:
        wait_for(ready, what="two idle nodes")
        yield cluster
    finally:
        process.kill()  # and with it, by --kill-child, the first process of the namespaces and all others in them
        process.wait()
        log.close()
        shutil.rmtree(folder)


def submit(slurm: Slurm, name: str, *size: str) -> Job:
    folder = slurm.folder / name
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    (folder / "job.sh").write_text(script(name))
    number = slurm("sbatch", "--parsable", "--output=job.out", *SIZE, *size, "job.sh", cwd=folder)
    return Job(slurm, number, folder)


def assert_goes_on_from_memory(job: Job, ranks: int, nodes: set[str]) -> None:
    """The job has been put back into the queue once, has trained each step once, and its end is a success."""
    wait_for(lambda: job.field("JobState") == "COMPLETED", deadline_s=90, what="the end of the requeued job")
    assert job.field("Restarts") == "1", job.output
    assert job.field("ExitCode") == "0:0"
    for rank in range(ranks):
        lines = job.trace(rank)
        ((at, (_, stopped, memory, storage)),) = [(i, line) for i, line in enumerate(lines) if line[0] == "restored"]
        assert int(memory) > 0, (lines[at], job.output)
        assert int(storage) == 0, (lines[at], job.output)
        steps = [int(line[0]) for line in lines if line[0] != "restored"]
        assert steps == list(range(1, int(stopped) + 21)), f"rank {rank} lost or repeated steps around {stopped}"
    assert {line[2] for rank in range(ranks) for line in job.trace(rank) if line[0] != "restored"} == nodes


def signalled_in_training(job: Job, ranks: int) -> None:
    """Send the batch shell what --signal=B:TERM@120 sends it, once every rank trains."""
    wait_for(lambda: all(len(job.trace(rank)) > 5 for rank in range(ranks)), deadline_s=90, what="training")
    job.slurm("scancel", "--batch", "--signal=TERM", job.number)
    wait_for(lambda: job.field("Restarts") == "1", deadline_s=60, what="the requeue")


def test_job_of_several_nodes(slurm: Slurm) -> None:
    """TERM to the shell: every node's dlrun stops in the same step, 75, requeued, restored from memory, finished."""
    job = submit(slurm, "test_job_of_several_nodes", "--nodes=2")
    signalled_in_training(job, 4)
    assert_goes_on_from_memory(job, 4, {"n1", "n2"})


def test_job_of_one_node_without_srun(slurm: Slurm) -> None:
    job = submit(slurm, "test_job_of_one_node_without_srun")
    signalled_in_training(job, 2)
    assert_goes_on_from_memory(job, 2, {"n1"})
