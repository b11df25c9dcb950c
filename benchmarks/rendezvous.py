"""What a rendezvous of many agents costs: bytes, packets, CPU and time until all of them are in a round, cold and after one died.

    sudo .venv/bin/python benchmarks/rendezvous.py --agents 8 32 128 --json FILE

Each agent is a process forked from one that has imported torch, and has what dlrun's agent has: its handler, its keep-alive messages, and the look
at who waits five times a second. They meet in one store, in a separate network namespace whose loopback device counts bytes and
packets (acknowledgements of TCP are among them). One is then killed and another takes its place. Idle seconds are counted in between.

What it does not have: the delay of a network, and more cores than this machine has: times with many agents are those of its cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.daemon.launcher.rendezvous import handler_of
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous

_LOOK_S = 0.2
_CONF = {"join_timeout": "600", "last_call_timeout": "2", "keep_alive_interval": "2", "keep_alive_max_attempt": "3"}


def agent(port: int, size: int, pipe: Connection) -> None:
    """Be one agent: join a round, and another whenever nodes wait; report each round."""
    params = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "bench", size, size, local_addr="127.0.0.1", is_host="0", **_CONF
    )
    node = FreshStoreRendezvous(handler_of(params, lambda _: _no_other()))
    while True:
        info = node.next_rendezvous()
        pipe.send((info.rank, info.world_size, time.monotonic()))
        while not node.num_nodes_waiting():
            if pipe.poll(_LOOK_S):
                os._exit(0)
        pipe.send(("restarts", time.monotonic()))


def _no_other() -> Any:
    raise AssertionError("a c10d rendezvous is never torch's own")


class Agents:
    """Agents of one job in child processes, and their store in another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.children: dict[int, Connection] = {}
        for _ in range(size):
            self.start()

    def start(self) -> None:
        """Fork another agent."""
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            try:
                agent(self.store.port, self.size, theirs)
            finally:
                os._exit(1)
        theirs.close()
        self.children[pid] = ours

    def round(self) -> tuple[float, float]:
        """Return when the first agent began again (0.0 if none did), and when the last was in the round."""
        places: dict[Connection, int] = {}
        first, last = 0.0, 0.0
        while len(places) < self.size:
            for pipe in wait(list(self.children.values()), 300):
                assert isinstance(pipe, Connection)
                match pipe.recv():
                    case ("restarts", float(at)):
                        first = min(first or at, at)
                    case (int(rank), int(world), float(at)):
                        assert world == self.size
                        places[pipe], last = rank, max(last, at)
        assert sorted(places.values()) == list(range(self.size))
        return first, last

    def kill_one(self) -> None:
        """Kill an agent, and start another."""
        pid = list(self.children)[self.size // 2]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.children.pop(pid).close()
        self.start()

    def cpu_s(self) -> float:
        """Return the seconds of CPU of all that live and of this process, which serves the store."""
        ticks = 0
        for pid in self.children:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        own = resource.getrusage(resource.RUSAGE_SELF)
        return ticks / os.sysconf("SC_CLK_TCK") + own.ru_utime + own.ru_stime

    def end(self) -> None:
        """End all."""
        for pid, pipe in self.children.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()


def counted() -> tuple[int, int]:
    """Return the bytes and packets that the loopback device has carried."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.split(":")[0].strip() == "lo")
    fields = line.partition(":")[2].split()
    return int(fields[8]), int(fields[9])


def measure(size: int, idle_s: float) -> dict[str, dict[str, float]]:
    """Return what each phase of a job of `size` agents costs."""
    found: dict[str, dict[str, float]] = {}
    begun, (nbytes, packets), cpu_s = time.monotonic(), counted(), time.process_time()
    agents = Agents(size)

    def note(phase: str, seconds: float) -> None:
        nonlocal nbytes, packets, cpu_s
        (now, count), cpu = counted(), agents.cpu_s()
        found[phase] = {"s": seconds, "bytes": now - nbytes, "packets": count - packets, "cpu_s": max(0.0, cpu - cpu_s)}
        nbytes, packets, cpu_s = now, count, cpu

    try:
        note("cold", agents.round()[1] - begun)
        time.sleep(idle_s)
        note("idle", idle_s)
        killed = time.monotonic()
        agents.kill_one()
        first, last = agents.round()
        note("after a death", last - killed)
        found["after a death"] |= {"until seen": first - killed, "then": last - first}
    finally:
        agents.end()
    return found


def main() -> int:
    """Parse arguments; run in a network namespace, print, write."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--agents", nargs="+", type=int, default=[8, 32, 128])
    words.add_argument("--idle-s", type=float, default=5.0, help="seconds of which keep-alive messages are counted")
    words.add_argument("--json", type=Path)
    args = words.parse_args()
    if "BENCH_NETNS" not in os.environ:
        os.execvpe("unshare", ["unshare", "--net", sys.executable, *sys.argv], os.environ | {"BENCH_NETNS": "1"})
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    logging.getLogger("flashckpt.dlrun").setLevel(logging.ERROR)
    load, results = LoadWatch(), dict[str, Any]()
    print("| agents | phase | s | kB per agent | packets per agent | ms of CPU per agent |\n|---|---|---|---|---|---|")
    for size in args.agents:
        results[str(size)] = found = measure(size, args.idle_s)
        for phase, one in found.items():
            seconds = f"{one['s']:.2f}" + (f" ({one['until seen']:.2f} + {one['then']:.2f})" if "then" in one else "")
            print(
                f"| {size} | {phase} | {seconds} | {one['bytes'] / size / 1e3:.1f} | {one['packets'] / size:.0f}"
                f" | {one['cpu_s'] / size * 1e3:.1f} |",
                flush=True,
            )
    if args.json:
        write_json(args.json, document("rendezvous", vars(args) | {"json": None}, results, load=load, paths=[]))
    print(json.dumps({"load_average": os.getloadavg()[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
