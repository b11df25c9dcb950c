"""Machines of User Mode Linux: whole kernels that run as processes, joined by cables, killed as by a power cut.

Needs root and Debian's packages (tests/integration/nfs/machines.sh). A machine reads the host's files and changes none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.paths import TESTS

SCRIPT = str(TESTS / "integration" / "nfs" / "machines.sh")
KERNEL = "linux.uml"
PROGRAMS = (KERNEL, "exportfs", "rpc.nfsd", "modprobe", "ip", "mkfs.ext4")
CABLE_BYTES = 4 << 20
_MTU = 9000


def missing() -> str:
    """Name the first program that is not installed, "" where all are."""
    return next((name for name in PROGRAMS if not shutil.which(name)), "")


def refusal() -> str:
    """Return why no such machine runs here (a container that forbids ptrace), "" where one does."""
    with tempfile.TemporaryDirectory(prefix="nfs-") as folder:
        command = [KERNEL, "mem=64M", f"uml_dir={folder}", "rootfstype=hostfs", "rootflags=/", "ro", "init=/bin/true"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=100,
            env=environment(Path(folder)),
        )  # fmt: skip
    said = done.stdout.decode(errors="replace")
    return "" if "init! exitcode=0x00000000" in said else (said.strip().splitlines() or ["nothing is said"])[-1]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of machines whose files are in `folder`: processors with AMX are too wide without it."""
    library = folder / "wide_registers.so"
    compiler = shutil.which("cc")
    if compiler and not library.exists():
        source = str(Path(__file__).with_name("wide_registers.c"))
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), source], check=True)
    return {**os.environ, **({"LD_PRELOAD": str(library)} if compiler else {})}


class Cable:
    """Joins two machines; outlives both, so that one of them may be killed and started again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CABLE_BYTES)

    def plug(self, end: int, device: int) -> tuple[socket.socket, str]:
        mine = self.ends[end]
        address = f"02:00:00:00:{self.number:02x}:{end + 1:02x}"
        return mine, f"vec{device}:transport=fd,fd={mine.fileno()},mac={address},mtu={_MTU}"


class Machine:
    """A running machine, which is asked to call functions of modules under tests/."""

    def __init__(
        self, folder: Path, role: str, plugs: list[tuple[socket.socket, str]], *, memory: str, disk: Path | None = None
    ) -> None:
        self.log = folder / f"{role}.log"
        self._line, theirs = socket.socketpair()
        self._heard = b""
        self.is_idle = False
        command = [
            KERNEL, f"mem={memory}", f"uml_dir={folder}", f"umid={role}", "loglevel=5",
            "rootfstype=hostfs", "rootflags=/", "ro", "con=null", "con0=null,fd:1", f"con1=fd:{theirs.fileno()}",
            *([f"ubd0={disk}"] if disk else []), *(words for _, words in plugs),
            f"PYTHON={sys.executable}", f"init={SCRIPT}", "boot", role,
        ]  # fmt: skip
        with self.log.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[theirs.fileno(), *(end.fileno() for end, _ in plugs)], env={**environment(folder), "TMPDIR": _room(folder)},
            )  # fmt: skip

    def ready(self, deadline_s: float = 150) -> None:
        assert self.answer(deadline_s) == "ready"

    def call(self, function: str, *arguments: object, deadline_s: float = 100) -> Any:
        """Call `module:function` there, and return what it returns."""
        self.begin(function, *arguments)
        return self.answer(deadline_s)

    def begin(self, function: str, *arguments: object) -> None:
        module, _, name = function.partition(":")
        self.is_idle = False
        self._line.sendall(json.dumps([module, name, arguments]).encode() + b"\n")

    def answer(self, deadline_s: float = 100) -> Any:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._heard:
            self._line.settimeout(max(0.001, end - time.monotonic()))
            try:
                more = self._line.recv(1 << 16)
            except TimeoutError:
                raise AssertionError(f"no answer in {deadline_s} s; the machine says:\n{self._said()}") from None
            if not more:
                raise AssertionError(f"the machine has ended; it said:\n{self._said()}")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        self.is_idle = True
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def _said(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> None:
        """Cut the power: all that the machine had not written to its disk is lost.

        One signal for its whole group: a process of the machine must not go on as one of the host.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.is_idle = False
        self._process.wait()
        self._line.close()


def _room(folder: Path) -> str:
    """Where the kernel keeps its memory: a file without a name."""
    roomy = Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8 << 30
    return "/dev/shm" if roomy else str(folder)


class Network:
    """An NFS server and its clients, each joined to it by a cable; client N mounts 10.0.N.1:/."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.folder = folder
        self._cables = [Cable(number) for number in range(clients)]
        self._disk = folder / "disk"
        with self._disk.open("wb") as file:
            file.truncate(2 << 30)
        subprocess.run(["mkfs.ext4", "-q", str(self._disk)], check=True)
        self.start_server()
        self.clients = [
            Machine(folder, f"client{cable.number}", [cable.plug(1, 0)], memory="2500M") for cable in self._cables
        ]
        for machine in (self.server, *self.clients):
            machine.ready()

    def start_server(self) -> None:
        """Start it, again after `server.kill()`; `server.ready()` waits until it serves."""
        plugs = [cable.plug(0, cable.number) for cable in self._cables]
        self.server = Machine(self.folder, "server", plugs, memory="256M", disk=self._disk)

    @property
    def is_idle(self) -> bool:
        """Whether every machine runs and has answered all that it was asked."""
        return all(machine.is_idle for machine in (self.server, *self.clients))

    def close(self) -> None:
        for machine in (*self.clients, self.server):
            machine.kill()
        for cable in self._cables:
            for end in cable.ends:
                end.close()


@contextlib.contextmanager
def network(clients: int) -> Iterator[Network]:
    with tempfile.TemporaryDirectory(prefix="nfs-") as folder:  # a short path: the kernel puts a socket there
        joined = Network(Path(folder), clients)
        try:
            yield joined
        finally:
            joined.close()
