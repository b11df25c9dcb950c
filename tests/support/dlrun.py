"""Run dlrun as a user does, on small scripts, and watch what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import warm

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist

folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, life = dist.get_rank(), os.environ.get("FLASHCKPT_RESTART", "none")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    one = torch.ones(1)
    dist.all_reduce(one)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(pause)
    if step == 0:
        open(f"{folder}/life{life}-rank{rank}", "w").write(f"{os.getpid()} {int(one)} {time.time()}")
    while step == steps - 1 and not os.path.exists(f"{folder}/finish"):
        time.sleep(0.01)
dist.destroy_process_group()
"""


class Launch:
    """A running dlrun with its output in a file."""

    def __init__(self, process: subprocess.Popen[bytes] | warm.Program, log: Path) -> None:
        self.process, self.log = process, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""  # made when it starts

    def says(self, text: str) -> bool:
        return text in self.output

    def wait(self, deadline_s: float = 150.0) -> int:
        """Wait for the end and return the exit code; the output is shown if it takes too long."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"dlrun still runs after {deadline_s} s:\n{self.output}") from None

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 150.0) -> Any:
        """Poll until `condition()` is truthy; fail with the output if dlrun ends or the time is over."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if value := condition():
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise AssertionError(f"waited in vain for {what} (exit code {self.process.poll()}):\n{self.output}")


@contextmanager
def dlrun(
    folder: Path,
    *args: object,
    env: dict[str, str] | None = None,
    torchrun: bool = False,
    fresh: bool = False,
    program: str = "",
    module: str = "flashckpt.daemon.run",
) -> Iterator[Launch]:
    """Start `dlrun ARGS` (or torchrun, to compare) in a session of its own; killed whole at the end.

    It is forked from an interpreter that has imported torch already (`support.warm`), unless `fresh`. `program` is a
    script that runs dlrun, `module` another module than dlrun's.
    """
    log = folder / "output.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(env or {})}
    module = "torch.distributed.run" if torchrun else module
    words = [*([program] if program else ["-m", module]), *map(str, args)]
    process = warm.start(words, log, cwd=folder, env=environment, fresh=fresh or torchrun)
    try:
        yield Launch(process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_dlrun(folder: Path, *args: object, deadline_s: float = 150.0, **kwargs: Any) -> tuple[int, str]:
    """Run dlrun to its end; return exit code and output."""
    with dlrun(folder, *args, **kwargs) as launch:
        return launch.wait(deadline_s), launch.output


def first_steps(folder: Path, life: int, world: int) -> dict[int, int] | None:
    """Return the pid of every rank that has trained its first step in this life, None until all have."""
    pids = {}
    for rank in range(world):
        try:
            words = (folder / f"life{life}-rank{rank}").read_text().split()
        except FileNotFoundError:
            return None
        if len(words) != 3:
            return None
        assert int(words[1]) == world
        pids[rank] = int(words[0])
    return pids


def processes_of(folder: Path) -> dict[int, str]:
    """Return every live process (not a zombie) that mentions `folder` in its arguments or working directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = re.sub(r"^.*\) ", "", (entry / "stat").read_text())[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = str((entry / "cwd").readlink())
        except OSError:
            continue
        if state != "Z" and int(entry.name) != os.getpid() and (str(folder) in command or cwd == str(folder)):
            found[int(entry.name)] = command
    return found


def alive(pid: int) -> bool:
    """Return whether a process lives; a zombie does not."""
    try:
        return re.sub(r"^.*\) ", "", Path(f"/proc/{pid}/stat").read_text())[0] != "Z"
    except OSError:
        return False


ENGINE = """
import os, sys, time
import torch, torch.distributed as dist
from flashckpt import Checkpointer

folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, life = dist.get_rank(), os.environ["FLASHCKPT_RESTART"]
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(f"{folder}/root", snapshot_every=2, persist_every=50)
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
report = ckpt.restore()
first = report.step if report else 0
for step in range(first + 1, steps + 1):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), float(step % 7))).square().sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)  # equal on all ranks: exact for any world size
    optimizer.step()
    with open(f"{folder}/trace{rank}", "a") as file:  # before step(): who dies behind that is not asked for this step again
        file.write(f"{life} {step} {loss.item().hex()}\\n")
    ckpt.step(step)
    if step == first + 1:
        open(f"{folder}/life{life}-rank{rank}", "w").write(f"{os.getpid()} {dist.get_world_size()} {first}")
    if ckpt.should_stop:
        break
    if os.path.exists(f"{folder}/explode") and rank == 1 and step == 11:
        raise ValueError("the same thing again")
    time.sleep(pause)
ckpt.wait()
ckpt.close()
dist.destroy_process_group()
"""


def traces(folder: Path, world: int) -> list[dict[int, set[str]]]:
    """Return per rank: step -> every loss that was seen for it, in whatever life."""
    ranks = []
    for rank in range(world):
        seen: dict[int, set[str]] = {}
        for line in (folder / f"trace{rank}").read_text().splitlines():
            _, step, loss = line.split()
            seen.setdefault(int(step), set()).add(loss)
        ranks.append(seen)
    return ranks


def script(folder: Path, text: str) -> Path:
    """Return a program of this text."""
    path = folder / "script.py"
    path.write_text(text)
    return path
