"""Every way in which persisting can fail, under dlrun and plain Python, in programs that call wait() and that do not.

Each is a line in the job's output and a count in `flashckpt status`; what can catch up does; nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.dlrun import Launch, alive, dlrun
from support.ranks import wait_for

from flashckpt.commands.status import describe
from flashckpt.errors import PersistError
from flashckpt.shm.job_directory import JobDirectory

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import os, sys, time
import torch
from flashckpt import Checkpointer
from flashckpt.errors import PersistError

folder, waits = sys.argv[1], sys.argv[2] == "wait"
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(f"{folder}/root", snapshot_every=1, persist_every=5, job="watched")
ckpt.on_failure = lambda error: print("ON_FAILURE", error.problem, flush=True)
ckpt.track(model=model, optimizer=optimizer)
report = ckpt.restore()
step = report.step if report else 0
while step % 5 or not os.path.exists(f"{folder}/finish"):
    step += 1
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step(step)
    open(f"{folder}/step", "w").write(str(step))
    time.sleep(0.02)
if waits:
    try:
        ckpt.wait(100)
        print("WAITED", flush=True)
    except PersistError as error:
        print("NOT WAITED", error.found, flush=True)
ckpt.close()
print("LAST", step, flush=True)
"""
IN_THE_PERSISTER = """
import os, sys
if "flashckpt.daemon.persister.service" in sys.orig_argv:
    {}
"""


@dataclass(frozen=True)
class Fault:
    """What is done to a run, what must be in its output, and whether it catches up.

    Attributes:
        line: Expected in the output, matched without regard to lines.
        env: Of the job.
        hook: Runs in the persister before anything else.
        strike: Called once a first checkpoint is there (at a first step, where there will be none).
        heal: Called after the line was seen.
        counts: Whether `flashckpt status` counts failures.
        starts: Whether a persister ever runs.
        catches_up: Whether the last step gets to storage.
    """

    line: str
    env: dict[str, str] = field(default_factory=dict)
    hook: str = ""
    strike: Callable[[Run], None] | None = None
    heal: Callable[[Run], None] | None = None
    counts: bool = True
    starts: bool = True
    catches_up: bool = True


@dataclass
class Run:
    """A run under way."""

    folder: Path
    launch: Launch

    @property
    def directory(self) -> JobDirectory:
        return JobDirectory.open("watched", create=False)

    @property
    def persister(self) -> int:
        with contextlib.suppress(Exception):
            status = self.directory.read_status()
            return status.pid if status is not None and self.directory.daemon_alive() and alive(status.pid) else 0
        return 0

    def another(self, than: int) -> None:
        self.launch.until(lambda: self.persister not in (0, than), "another persister")
        assert not alive(than)

    def status(self) -> dict[str, Any]:
        try:
            return describe(self.directory)
        except OSError:  # not there yet
            return {"committed": None, "failures": 0, "notes": []}

    def has_step(self) -> bool:
        return (self.folder / "step").exists()

    def committed(self) -> list[int]:
        found = (self.folder / "root").glob("step-*/MANIFEST")
        return sorted(int(path.parent.name[5:14]) for path in found)


def kill(times: int, number: int = signal.SIGKILL) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        for _ in range(times):
            before = run.launch.until(lambda: run.persister, "the persister")
            os.kill(before, number)
            run.another(before)

    return strike


def take_storage_away(run: Run) -> None:
    (run.folder / "root").rename(run.folder / "away")
    (run.folder / "root").touch()


def bring_storage_back(run: Run) -> None:
    (run.folder / "root").unlink()
    (run.folder / "away").rename(run.folder / "root")


def start_elsewhere(run: Run) -> None:
    """The same job on another machine, by mistake: it claims the next generation."""
    environment = {**os.environ, "FLASHCKPT_SHM_DIR": str(run.folder / "elsewhere")}
    (run.folder / "other").mkdir()
    (run.folder / "other" / "root").symlink_to(run.folder / "root")
    (run.folder / "other" / "finish").touch()
    done = warm.run([str(run.folder / "train.py"), str(run.folder / "other"), "no"], run.folder, env=environment)
    assert done.returncode == 0, done.stderr


Never = partial(Fault, starts=False, catches_up=False)
FAULTS: dict[str, Fault] = {
    "a broken interpreter": Never("its log says nothing", hook="os._exit(139)"),
    "a missing module": Never("ModuleNotFoundError", hook='sys.modules["msgpack"] = None'),
    "storage that never takes anything": Never(
        "persisting fails .*on purpose.*nothing is on storage",
        hook="import flashckpt.errors as e, flashckpt.storage.posix as p\n"
        "    def refuse(*_, **__): raise e.StoreError('on purpose')\n"
        "    p.PosixStore.put_object = refuse",
    ),
    "no inotify instance": Fault(
        "",
        hook="import watchdog.observers as o; o.Observer = lambda: (_ for _ in ()).throw(OSError(24, 'inotify'))",
        counts=False,
    ),
    "killed once": Fault("the persister of job watched .*ended", strike=kill(1)),
    "killed repeatedly": Fault("the persister of job watched .*ended", strike=kill(3)),
    "stopped": Fault(r"reported nothing for \d+ s \(process \d+ is stopped\)", strike=kill(1, signal.SIGSTOP)),
    "storage away": Fault("persisting fails .*of step", strike=take_storage_away, heal=bring_storage_back),
    "fenced": Fault("persisting fails .*generation 2", strike=start_elsewhere, catches_up=False),
    "an inherited variable": Fault(
        "names an agent that is not running", {"FLASHCKPT_AGENT_DIR": "/gone"}, counts=False
    ),
}


@contextlib.contextmanager
def started(launcher: str, fault: Fault, folder: Path, *, waits: bool) -> Iterator[Run]:
    (folder / "train.py").write_text(PROGRAM)
    environment = dict(fault.env)
    if fault.hook:
        (folder / "hooks").mkdir()
        (folder / "hooks" / "sitecustomize.py").write_text(IN_THE_PERSISTER.format(fault.hook))
        environment["PYTHONPATH"] = str(folder / "hooks")
    log = folder / "output.log"
    log.touch()
    words = [folder / "train.py", folder, "wait" if waits else "no"]
    if launcher == "dlrun":
        with dlrun(folder, "--nproc-per-node=1", *words, env=environment) as launch:
            yield Run(folder, launch)
        return
    process = warm.start([str(word) for word in words], log, cwd=folder, env={**os.environ, **environment})
    try:
        yield Run(folder, Launch(process, log))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def zombies_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace").rpartition(")")[2].split()
            if words[0] == "Z" and int(words[1]) == pid:
                found.append(int(path.parent.name))
    return found


def cases() -> Iterator[Any]:
    """Yield each fault under both launchers, one of the two programs by turns; FLASHCKPT_TEST_LARGE=1: both programs."""
    for number, (name, launcher, waits) in enumerate(product(FAULTS, ["dlrun", "plain"], [True, False])):
        if number % 8 in (0, 3, 5, 6) or os.environ.get("FLASHCKPT_TEST_LARGE") == "1":
            yield pytest.param(name, launcher, waits, id=f"{name}-{launcher}-{'wait' if waits else 'no wait'}")


@pytest.mark.parametrize(("name", "launcher", "waits"), list(cases()))
def test_persisting_that_fails_is_reported_counted_and_catches_up(
    name: str, launcher: str, waits: bool, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    with started(launcher, fault, tmp_path, waits=waits) as run:
        launch = run.launch
        launch.until(lambda: run.status()["committed"] if fault.starts else run.has_step(), "the beginning")
        if fault.strike is not None:
            fault.strike(run)
        is_named = not fault.env.get("FLASHCKPT_AGENT_DIR") or launcher == "plain"  # dlrun sets its own
        if fault.line and is_named:
            launch.until(lambda: re.search(fault.line, launch.output), "the line")
        if fault.counts:
            launch.until(lambda: run.status()["failures"], "the count")
            launch.until(lambda: launch.says("ON_FAILURE persisting fails") or fault.strike, "the callback")
        wait_for(lambda: not zombies_of(launch.process.pid), what="no zombie")
        if fault.heal is not None:
            fault.heal(run)
        (tmp_path / "finish").touch()
        code = launch.wait()
        last = int(re.findall(r"LAST (\d+)", launch.output)[-1])
    assert code == (PersistError.exit_code if launcher == "dlrun" and not fault.starts else 0), launch.output
    if fault.line and is_named:
        lines = [line for line in launch.output.splitlines() if re.search(fault.line, line)]
        assert len([line for line in lines if "NOT WAITED" not in line and "  found:" not in line]) == 1, launch.output
    if waits:
        assert ("\nWAITED" in launch.output) == fault.catches_up, launch.output
    if fault.catches_up:
        wait_for(lambda: last in run.committed(), what="the last step on storage", deadline_s=60)
    else:
        assert last not in run.committed()


@pytest.mark.parametrize("launcher", ["dlrun", "plain"])
def test_metrics_port_that_is_taken_is_reported_and_used_once_it_is_free(launcher: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        fault = Fault("", {"FLASHCKPT_METRICS_PORT": str(port)})
        with started(launcher, fault, tmp_path, waits=True) as run:
            run.launch.until(lambda: run.launch.says(f"no metrics: port {port}"), "the line")
            assert any(f"no metrics: port {port}" in note for note in run.status()["notes"])
            other.close()

            def scraped() -> bool:
                with contextlib.suppress(OSError):
                    return b"flashckpt" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
                return False

            run.launch.until(scraped, "metrics")
            run.launch.until(lambda: not run.status()["notes"], "the note to go")
            (tmp_path / "finish").touch()
            assert run.launch.wait() == 0
    assert run.launch.output.count("no metrics:") == 1
