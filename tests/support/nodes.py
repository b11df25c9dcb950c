"""Several nodes on one machine: network namespaces on a bridge, each with a host name, memory tier and dlrun of its own.

Needs root and iproute2. A node is killed as a machine is: every process in its namespace by SIGKILL at
once, and its memory tier removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

PORT = 29400
_TAGS = map("".join, itertools.product(ascii_lowercase, repeat=2))


def ip(*words: object, check: bool = True) -> str:
    result = subprocess.run(["ip", *map(str, words)], check=check, capture_output=True, text=True)
    return result.stdout


class Nodes:
    """The nodes of one test; `start(k)` launches dlrun in node k, `kill(k)` ends the whole node."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        tag = f"fk{os.getpid() % 10000}{next(_TAGS)}"  # no test meets the links of the one before
        self.prefix = f"{tag}n"
        self.net = f"10.{90 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.bridge = f"{tag}br"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def address(self, node: int) -> str:
        return f"{self.net}.{node + 1}"

    def set_up(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for node in range(self.count):
            name, inside, outside = f"{self.prefix}{node}", f"{self.prefix}{node}v", f"{self.prefix}{node}b"
            ip("netns", "add", name)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            ip("link", "set", outside, "master", self.bridge, "up")
            ip("link", "set", inside, "netns", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", inside)
            ip("-n", name, "link", "set", inside, "up")
            hosts = Path(f"/etc/netns/{name}/hosts")
            hosts.parent.mkdir(parents=True, exist_ok=True)
            others = "".join(f"{self.address(k)} {self.prefix}{k}\n" for k in range(self.count))
            hosts.write_text(f"127.0.0.1 localhost\n{others}")

    def tear_down(self) -> None:
        for node in range(self.count):
            self.kill(node)
            ip("link", "del", f"{self.prefix}{node}b", check=False)  # a namespace lives on while a process of it dies
            ip("netns", "del", f"{self.prefix}{node}", check=False)
            shutil.rmtree(f"/etc/netns/{self.prefix}{node}", ignore_errors=True)
        ip("link", "del", self.bridge, check=False)

    def memory(self, node: int) -> Path:
        return Path(os.environ["FLASHCKPT_SHM_DIR"]) / f"node{node}"

    def log(self, node: int) -> str:
        try:
            return (self.folder / f"node{node}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(
        self, node: int, *args: object, nnodes: str, host: int = 0, conf: str = "", env: dict[str, str] | None = None
    ) -> None:
        """Launch dlrun in a node; the node `host` serves the rendezvous store."""
        rendezvous = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.address(host)}:{PORT}"]
        rendezvous += ["--rdzv-id=nodes", f"--local-addr={self.address(node)}"]
        rendezvous += [f"--rdzv-conf={conf}"] if conf else []
        self.run(node, "flashckpt.daemon.run", *rendezvous, *args, env=env)

    def run(self, node: int, module: str, *args: object, env: dict[str, str] | None = None) -> None:
        """Run `python -m module ARGS` in a node, with its host name and memory tier."""
        self.memory(node).mkdir(exist_ok=True)
        name = f"{self.prefix}{node}"
        environment = {
            **os.environ,
            "FLASHCKPT_SHM_DIR": str(self.memory(node)),
            "GLOO_SOCKET_IFNAME": f"{name}v",
            "TMPDIR": str(self.folder),
            **(env or {}),
        }
        words = [sys.executable, "-m", module, *map(str, args)]
        command = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "-u",
            "sh",
            "-c",
            f'hostname {name}; exec "$@"',
            "sh",
            *words,
        ]
        with (self.folder / f"node{node}.log").open("ab") as log:
            self.processes[node] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

    def slow_link(self, node: int, mbit: int) -> None:
        """Let a node send no more than `mbit` million bits a second."""
        words = ["qdisc", "add", "dev", f"{self.prefix}{node}v", "root", "tbf"]
        words += ["rate", f"{mbit}mbit", "burst", "64kbit", "latency", "400ms"]
        subprocess.run(["tc", "-n", f"{self.prefix}{node}", *words], check=True)

    def cut_from(self, node: int, others: list[int]) -> None:
        """Let a node reach none of `others`, though they may think that it does."""
        for other in others:
            ip("-n", f"{self.prefix}{node}", "route", "add", "blackhole", f"{self.address(other)}/32")

    def kill(self, node: int) -> None:
        """Switch the machine off: no process of it lives on, its memory is gone."""
        for _ in range(3):  # a process may fork between listing and killing
            for word in ip("netns", "pids", f"{self.prefix}{node}", check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
        if (process := self.processes.pop(node, None)) is not None:
            process.wait()
        shutil.rmtree(self.memory(node), ignore_errors=True)

    def link(self, node: int, *, up: bool) -> None:
        """Pull the node's cable, or plug it in again."""
        ip("-n", f"{self.prefix}{node}", "link", "set", f"{self.prefix}{node}v", "up" if up else "down")

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 150.0) -> Any:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.02)
        logs = "\n".join(f"--- node {node}\n{self.log(node)[-3000:]}" for node in range(self.count))
        raise AssertionError(f"waited {deadline_s} s in vain for {what}\n{logs}")

    def wait(self, node: int, deadline_s: float = 150.0) -> int:
        (code,) = self.until(lambda: self._code(node), f"the end of node {node}", deadline_s)
        return int(code)

    def _code(self, node: int) -> tuple[int] | None:
        code = self.processes[node].poll()
        return None if code is None else (code,)


@contextlib.contextmanager
def nodes(folder: Path, count: int) -> Iterator[Nodes]:
    them = Nodes(folder, count)
    try:
        them.set_up()
        yield them
    finally:
        them.tear_down()
