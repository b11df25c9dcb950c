"""One report per incident (make test-launcher): faults of jobs on one node, each with its verdict in the output and on the root."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import incidents
from support.dlrun import Launch, dlrun

from flashckpt.cli import main as cli
from flashckpt.core.incident import Incident
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist
from flashckpt import Checkpointer

folder, life, rank = sys.argv[1], int(os.environ["FLASHCKPT_RESTART"]), int(os.environ["RANK"])

class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index):
        if life == 0 and rank == 1 and index == 40: in_data()
        return torch.ones(1)

def in_data(): pass
def in_step(): pass
def endless():
    while True: time.sleep(0.01)
def slow_disk():
    os.mkfifo(f"{folder}/disk")
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, f"{folder}/disk", os.O_RDONLY, 0)])
def worker_dies():
    os.kill(os.getpid(), signal.SIGKILL)
def wrong():
    raise ValueError("wrong on purpose")
def crossed():
    dist.all_reduce(torch.ones(1), group=groups[rank % 2])
FAULT

dist.init_process_group("gloo")
groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(folder + "/root", snapshot_every=1, persist_every=20)
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
report = ckpt.restore()
step = report.step if report else 0
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=WORKERS):
    step += 1
    if life == 0 and step == 20 and (rank == 1 or in_step is crossed):
        open(f"{folder}/reached", "w").write(str(os.getpid()))
        in_step()
    dist.all_reduce(torch.ones(1))
    model(batch).sum().backward()
    optimizer.step()
    ckpt.step(step)
    if life and rank == 0:
        open(f"{folder}/again", "w").close()
    if ckpt.should_stop:
        break
    time.sleep(0.01)
ckpt.wait()
ckpt.close()
"""


@dataclass(frozen=True)
class Fault:
    """What rank 1 of 3 does at step 20, what is done to it there, and the verdict.

    Attributes:
        verdict: Expected in the output, as a pattern.
        others: Expected of the other ranks, as a pattern.
        code: In the program.
        strike: Called with its pid and the folder.
        workers: Loader workers of each rank.
    """

    verdict: str
    others: str = "2 in all_reduce"
    code: str = "in_step = endless"
    strike: Callable[[int, Path], None] | None = None
    workers: int = 0
    kind: str = "failure"
    rank: int = 1


def killed(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGKILL)


def stopped(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGSTOP)


def out_of_memory(pid: int, folder: Path) -> None:
    """As the kernel logs it: the log is a stand-in."""
    with (folder / "kmsg").open("a") as file:
        file.write(f"4,1,1,-;Memory cgroup out of memory: Killed process {pid} (rank1) total-vm:9000000kB\n")
    os.kill(pid, signal.SIGKILL)


WHERE = r"rank 1 \(pid \d+\) on \S+ at step \d+: "
MET = "2 in (all_reduce|ending after an error|losing the connection)"
FAULTS = {
    "SIGKILL": Fault(rf"unknown: {WHERE}signal 9 \(SIGKILL.* -> restart", others=MET, strike=killed),
    "out of memory": Fault(rf"memory: {WHERE}signal 9 \(SIGKILL.* -> restart", others=MET, strike=out_of_memory),
    "exception": Fault(
        rf"script: {WHERE}exit code 1: .*ValueError: wrong on purpose -> restart",
        code="in_step = wrong",
        others=MET,
    ),
    "SIGSTOP": Fault(
        rf"unknown: {WHERE}.*in stopped \(SIGSTOP\); the others waited for it", strike=stopped, kind="hang"
    ),
    "slow disk": Fault(
        rf"storage: {WHERE}.*in uninterruptible sleep \(disk or file server\)", code="in_step = slow_disk", kind="hang"
    ),
    "endless loop": Fault(rf"script: {WHERE}.*in endless \(.*train.py:\d+\); the others waited for it", kind="hang"),
    "collective that never returns": Fault(
        "network: all_reduce never returned, though all ranks are in it -> restart",
        others="3 in all_reduce",
        code="in_step = crossed",
        kind="hang",
        rank=-1,
    ),
    "data worker dead": Fault(
        rf"data: {WHERE}exit code 1: .*(DataLoader worker \(pid|Connection reset).* -> restart",
        code="in_data = worker_dies",
        others=MET,
        workers=1,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_verdict_in_the_output_in_memory_and_on_the_root(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    (tmp_path / "train.py").write_text(PROGRAM.replace("FAULT", fault.code).replace("WORKERS", str(fault.workers)))
    (tmp_path / "kmsg").write_text("4,0,0,-;Out of memory: Killed process 1 (rank1), before the job\n")
    flags = ("--nproc-per-node=3", "--hang-timeout=3", tmp_path / "train.py", tmp_path)
    told = tmp_path / "told"
    settings = {"FLASHCKPT_KERNEL_LOG": str(tmp_path / "kmsg"), "FLASHCKPT_HOOK": f"sh -c 'cat >> {told}'"}
    with dlrun(tmp_path, *flags, env=settings) as launch:
        if fault.strike is not None:
            pid = launch.until(lambda: int((tmp_path / "reached").read_text() or 0) if reached(tmp_path) else 0, "it")
            fault.strike(pid, tmp_path)
        launch.until((tmp_path / "again").exists, "the next generation")
        (found,) = incidents.in_memory(memory_root().parent)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["status", "--json"])
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        assert [one["verdict"] for one in job["incidents"]] == [found.verdict]
        launch.until(lambda: incidents.on_root(tmp_path / "root"), "the incident on the root")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    check(fault, found, launch)
    assert incidents.on_root(tmp_path / "root") == [found]
    assert [one["event"] for one in hooked(told) if one["incident"].get("verdict") == found.verdict] == ["incident"]


def hooked(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


def reached(folder: Path) -> bool:
    return (folder / "reached").exists()


def check(fault: Fault, found: Incident, launch: Launch) -> None:
    (line,) = incidents.said(launch.output)
    assert re.fullmatch(f"{fault.verdict}.*", line), launch.output
    assert line == found.verdict
    assert (found.kind, found.rank, found.action) == (fault.kind, fault.rank, "restart")
    assert re.search(f"the other ranks: {fault.others}", launch.output), launch.output
    assert "restarts are left" in found.reason


def test_before_the_first_step_and_where_the_job_ends_there_is_a_verdict_too(tmp_path: Path) -> None:
    """A program without a Checkpointer: there is no job directory to write into."""
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': import flash_attn_that_is_not_there")
    with dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=0", tmp_path / "train.py") as launch:
        assert launch.wait() == 1
    (line,) = incidents.said(launch.output)
    assert re.match(r"script: rank 1 \(pid \d+\) on \S+ before its first step: .*ModuleNotFoundError.* -> stop", line)
    assert "-> stop: not restarting: --max-restarts is 0" in launch.output


STRAGGLER = """
import os, sys, time, torch, torch.distributed as dist
from flashckpt import Checkpointer

folder, phase, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(folder + "/root", snapshot_every=10)
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
ckpt.restore()
step = 0
while not ckpt.should_stop:
    step += 1
    begun = time.perf_counter()
    is_slow = rank == 1 and not os.path.exists(f"{folder}/fast")
    if phase == "data":
        time.sleep(0.05 if is_slow else 0.005)
        ckpt.phases(data=time.perf_counter() - begun)
    else:
        while time.perf_counter() - begun < (0.05 if is_slow else 0.005):
            pass
    dist.all_reduce(torch.ones(1))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    ckpt.step(step)
ckpt.close()
"""
QUICK = """
import sys
from flashckpt.daemon.launcher import slowness, stragglers
from flashckpt.daemon.run import main
stragglers.LOOK_S, slowness.NAMED_S = 0.5, 2.0
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("phase", ["data", "processor"])
def test_slow_rank_is_named_with_its_phase_while_it_trains_and_again_when_it_recovers(
    phase: str, tmp_path: Path
) -> None:
    """What a loop tells of its phases, and what the kernel knows of one that tells nothing. Looks are closer here than 10 s."""
    (tmp_path / "train.py").write_text(STRAGGLER)
    (tmp_path / "quick.py").write_text(QUICK)
    args = ("--nproc-per-node=3", tmp_path / "train.py", tmp_path, phase)

    def its_own() -> list[Incident]:  # a machine with other work may slow down others too
        return [one for one in incidents.in_memory(memory_root().parent) if one.rank == 1]

    with dlrun(tmp_path, *args, program=str(tmp_path / "quick.py")) as launch:
        (slow,) = launch.until(its_own, "its name")
        (tmp_path / "fast").touch()
        launch.until(lambda: len(its_own()) == 2, "its recovery")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert (slow.kind, slow.rank, slow.action) == ("straggler", 1, "continue")
    kind = "data" if phase == "data" else "unknown"
    first, second = (one for one in incidents.said(launch.output) if ": rank 1 " in one)
    assert re.fullmatch(
        rf"{kind}: rank 1 \(pid \d+\) on \S+ at step \d+: slow in {phase} for \d+ s: 0\.0[4-9]\d* s of each step, the median of the "
        r"ranks is 0\.0[0-3]\S* s -> continue", first
    ), first  # fmt: skip
    assert re.search(r"rank 1 .* is as fast as the others again, after \d+ s -> continue", second), second
