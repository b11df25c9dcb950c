"""Faults of one rank of three, and the verdict on each; for jobs on one node and on several."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashckpt.core.incident import Incident
from support import incidents

_PROGRAM = """
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


def _killed(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGKILL)


def _stopped(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGSTOP)


def _out_of_memory(pid: int, folder: Path) -> None:
    """As the kernel logs it: the log is a stand-in."""
    with (folder / "kmsg").open("a") as file:
        file.write(f"4,1,1,-;Memory cgroup out of memory: Killed process {pid} (rank1) total-vm:9000000kB\n")
    os.kill(pid, signal.SIGKILL)


_WHERE = r"rank 1 \(pid \d+\) on \S+ at step \d+: "
_MET = "2 in (all_reduce|ending after an error|losing the connection)"
FAULTS = {
    "SIGKILL": Fault(rf"unknown: {_WHERE}signal 9 \(SIGKILL.* -> restart", others=_MET, strike=_killed),
    "out of memory": Fault(rf"memory: {_WHERE}signal 9 \(SIGKILL.* -> restart", others=_MET, strike=_out_of_memory),
    "exception": Fault(
        rf"script: {_WHERE}exit code 1: .*ValueError: wrong on purpose -> restart",
        code="in_step = wrong",
        others=_MET,
    ),
    "SIGSTOP": Fault(
        rf"unknown: {_WHERE}.*in stopped \(SIGSTOP\); the others waited for it", strike=_stopped, kind="hang"
    ),
    "slow disk": Fault(
        rf"storage: {_WHERE}.*in uninterruptible sleep \(disk or file server\)", code="in_step = slow_disk", kind="hang"
    ),
    "endless loop": Fault(rf"script: {_WHERE}.*in endless \(.*train.py:\d+\); the others waited for it", kind="hang"),
    "collective that never returns": Fault(
        "network: all_reduce never returned, though all ranks are in it -> restart",
        others="3 in all_reduce",
        code="in_step = crossed",
        kind="hang",
        rank=-1,
    ),
    "data worker dead": Fault(
        rf"data: {_WHERE}exit code 1: .*(DataLoader worker \(pid|Connection reset).* -> restart",
        code="in_data = worker_dies",
        others=_MET,
        workers=1,
    ),
}


def write_program(fault: Fault, folder: Path) -> dict[str, str]:
    """Write train.py and the kernel's log of a machine; return what dlrun's environment needs for it."""
    (folder / "train.py").write_text(_PROGRAM.replace("FAULT", fault.code).replace("WORKERS", str(fault.workers)))
    (folder / "kmsg").write_text("4,0,0,-;Out of memory: Killed process 1 (rank1), before the job\n")
    return {"FLASHCKPT_KERNEL_LOG": str(folder / "kmsg")}


def struck_pid(folder: Path) -> int:
    """Return the pid of the rank that has come to its fault; 0 before."""
    path = folder / "reached"
    return int(path.read_text() or 0) if path.exists() else 0


def check(fault: Fault, found: Incident, output: str, *, others: str = "") -> None:
    """Compare a report with what was to be said; `others` in place of the fault's."""
    (line,) = incidents.said(output)
    assert re.fullmatch(f"{fault.verdict}.*", line), output
    assert line == found.verdict
    assert (found.kind, found.rank, found.action) == (fault.kind, fault.rank, "restart")
    assert re.search(f"the other ranks: {others or fault.others}", output), output
    assert "restarts are left" in found.reason
