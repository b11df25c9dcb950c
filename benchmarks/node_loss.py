"""What a lost node costs: seconds from SIGKILL of everything on it to the next step on three nodes, and steps that are trained again.

    sudo .venv/bin/python benchmarks/node_loss.py --gb 0.1 1 4 --rounds 3 --json FILE

Three nodes are network namespaces of this machine, with a rank each and a sharded state that no two of them hold the same rows of. One
loses its link, so that nobody hears of its end; all its processes are killed, its memory is removed, and a fourth takes its place at
once. Three ways take turns: dlrun with a replica in a partner's memory, dlrun with checkpoints on storage alone, and torchrun with
`dcp.async_save`. They train by the same program, and write to the same folder after the same number of steps. The loss comes later in
the interval between two checkpoints from round to round; files of checkpoints are dropped from the page cache before it. After each
restore the state is compared with that of the same step before the loss.

What it does not have: the way to storage of a cluster, a memory bus and cores per node, and the time that a scheduler takes to find a node.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from node_machine import LogTimes, Nodes, marks, nodes, places, rates, require_machine, require_room
from processes import clean_up_on_sigterm

from flashckpt.bench.host import evict
from flashckpt.bench.measure import LoadWatch, document, summarise, write_json
from flashckpt.errors import FlashckptError, SharedMemoryError

NODES, LOST = 3, 2
PROGRAM = Path(__file__).with_name("node_training.py")
PHASES = ("to the program", "group", "model", "restore", "step")
SOURCES = ("own memory", "replica", "peers", "storage")
COPIES = 6.5
"""Parameters, moments and gradients (1.34), three slots, two replicas, and what is under way, as multiples of the state per node."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of keeping the state: what launches it, by what it is kept, and with how many partners."""

    module: str
    way: str
    replicate: int = 0


ARMS = {
    "replicas": Arm(module="flashckpt.daemon.run", way="flashckpt", replicate=1),
    "storage": Arm(module="flashckpt.daemon.run", way="flashckpt"),
    "torchrun-dcp": Arm(module="torch.distributed.run", way="dcp"),
}


def sources_of(before: Mapping[int, str], after: Sequence[Mapping[str, Any]], lost: str) -> dict[str, int]:
    """Return how many bytes were restored from where.

    Args:
        before: Host by rank before the loss: no other held the rows of that rank.
        after: Of each rank after it: "rank", "host" and "tiers" (bytes by tier).
        lost: The host that was lost.
    """
    found = dict.fromkeys(SOURCES, 0)
    for one in after:
        holder = before[one["rank"]]
        for tier, nbytes in one["tiers"].items():
            if tier == "storage":
                found["storage"] += nbytes
            elif holder == lost or (tier == "memory" and holder != one["host"]):
                found["replica"] += nbytes
            else:
                found["own memory" if tier == "memory" else "peers"] += nbytes
    return found


def compared(step: int, values: Sequence[str], earlier: Mapping[int, set[str]]) -> str:
    """Return what is wrong with the values of all ranks after the first step of a restore; "" if nothing is."""
    if len(set(values)) != 1 or values[0].startswith("torn"):
        return f"step {step}: {sorted(set(values))}"
    if step in earlier and earlier[step] != set(values):
        return f"step {step}: {values[0]}, but {sorted(earlier[step])} before the loss"
    return ""


def events(folder: Path, kind: str, *, since: float = 0.0, until: float = float("inf")) -> list[dict[str, Any]]:
    """Return the marks of one kind of all hosts, in the order of time."""
    found = [
        {**one, "host": host}
        for host, lines in marks(folder).items()
        for one in lines
        if one["event"] == kind and since < one["t"] <= until
    ]
    return sorted(found, key=lambda one: one["t"])


def start(them: Nodes, node: int, arm: Arm, args: argparse.Namespace, nbytes: int) -> None:
    """Launch one node's agent."""
    config = {
        "folder": str(them.folder), "way": arm.way, "nbytes": nbytes, "step_s": args.step_s, "replicate": arm.replicate,
        "snapshot_every": args.snapshot_every, "persist_every": args.persist_every,
    }  # fmt: skip
    flags = [f"--nnodes={NODES}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=loss"]
    flags += [f"--rdzv-endpoint={them.address(0)}:29400", f"--local-addr={them.address(node)}"]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if arm.way == "dcp" else {}  # torchrun 2.13 hangs without it
    them.run(node, arm.module, *flags, PROGRAM, json.dumps(config), env=env)


def one_loss(arm: Arm, args: argparse.Namespace, nbytes: int, kill_step: int) -> dict[str, Any]:
    """Train on three nodes, lose one after `kill_step`, and train on three nodes again."""
    with places(args.dir) as folder, nodes(folder, NODES + 1) as them, LogTimes(folder) as logs:
        for node in range(NODES):
            start(them, node, arm, args, nbytes)
        hosts = {f"{them.prefix}{node}" for node in range(NODES)}
        if args.spare:
            them.until(lambda: reached(folder, args.persist_every) == hosts, "a round of three nodes", args.deadline_s)
            start(them, NODES, arm, args, nbytes)
        them.until(lambda: reached(folder, kill_step) == hosts, f"step {kill_step} on all nodes", args.deadline_s)
        for path in [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("marks-")]:
            try:
                evict(path)
            except OSError:
                continue  # a part of a checkpoint that is being written
        killed = time.monotonic()
        them.link(LOST, up=False)  # a lost node does not close its connections: nothing comes from it any more
        killing = threading.Thread(target=them.kill, args=(LOST,))
        killing.start()
        if not args.spare:
            start(them, NODES, arm, args, nbytes)
        hosts = (hosts - {f"{them.prefix}{LOST}"}) | {f"{them.prefix}{NODES}"}
        them.until(lambda: trained_again(folder, killed) == hosts, "the next step on three nodes", args.deadline_s)
        killing.join()
        return judged(folder, killed, f"{them.prefix}{LOST}") | {"timeline": timeline(folder, killed, logs)}


def timeline(folder: Path, killed: float, logs: LogTimes) -> list[tuple[float, str, str]]:
    """Return what agents said and ranks did after the loss, in the order of time: (seconds since it, node, what)."""
    found = [(at, node, line[:160]) for at, node, line in logs.lines if at > killed and line.startswith("[dlrun]")]
    for one in events(folder, "restored", since=killed):
        node = "node" + one["host"].rpartition("n")[2]
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one["seconds"].items() if seconds >= 0.01)
        names = {"began": "forked", "entered": "script runs", "joined": "group is there", "built": "model is built"}
        found += [(one[name], node, what) for name, what in names.items()]
        found.append((one["t"], node, f"restored ({parts})"))
    found += [(one["t"], "node" + one["host"].rpartition("n")[2], "first step") for one in first_steps(folder, killed)]
    return [(round(at - killed, 2), node, what) for at, node, what in sorted(found)]


def first_steps(folder: Path, killed: float) -> list[dict[str, Any]]:
    return [{**found["step"], "host": host} for host in marks(folder) if (found := last_start(folder, host, killed))]


def reached(folder: Path, step: int) -> set[str]:
    return {one["host"] for one in events(folder, "step") if one["step"] >= step}


def trained_again(folder: Path, killed: float) -> set[str]:
    """Return the hosts that have restored, trained a step, and looked at their values since the loss."""
    restored = {one["host"] for one in events(folder, "restored", since=killed)}
    return {host for host in restored if last_start(folder, host, killed)}


def last_start(folder: Path, host: str, killed: float) -> dict[str, Any] | None:
    """Return the marks of a host's last start since the loss, once its first step is whole; else None."""
    lines = [one for one in marks(folder)[host] if one["t"] > killed]
    starts = [i for i, one in enumerate(lines) if one["event"] == "restored"]
    rest = {one["event"]: one for one in reversed(lines[starts[-1] :])} if starts else {}
    return {**rest, "host": host} if {"step", "value"} <= set(rest) else None


def judged(folder: Path, killed: float, lost: str) -> dict[str, Any]:
    """Return the figures of one loss, from the marks of all hosts."""
    before = events(folder, "step", until=killed)
    last = min(max(one["step"] for one in before if one["host"] == host) for host in {one["host"] for one in before})
    ranks = {one["rank"]: one["host"] for one in events(folder, "restored", until=killed)}
    again = [found for host in marks(folder) if (found := last_start(folder, host, killed))]
    restored = [{**one["restored"], "host": one["host"]} for one in again]
    earlier: dict[int, set[str]] = {}
    for one in events(folder, "value", until=killed):
        earlier.setdefault(one["step"], set()).add(one["value"])
    if wrong := compared(again[0]["step"]["step"], [one["value"]["value"] for one in again], earlier):
        raise SystemExit(f"what was restored is wrong: {wrong}")
    names = ("entered", "joined", "built", "t")
    moments = [killed, *(max(one[name] for one in restored) for name in names), max(one["step"]["t"] for one in again)]
    step_s = statistics.median(one["seconds"] for one in before)
    seconds, steps = moments[-1] - killed, last - restored[0]["step"]
    return {
        "seconds": seconds,
        "phases": dict(zip(PHASES, (b - a for a, b in pairwise(moments)), strict=True)),
        "steps_lost": steps,
        "step_s": step_s,
        "lost_s": seconds + steps * step_s,
        "bytes": sources_of(ranks, restored, lost),
    }


def measure(args: argparse.Namespace, gigabytes: float) -> dict[str, Any]:
    """Lose a node in every way, in turns, `args.rounds` times."""
    nbytes, names = int(gigabytes * 1e9), list(args.ways)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, list[str]] = {name: [] for name in names}
    for number in range(args.rounds):
        offset = int(args.persist_every * (number + 0.5) / args.rounds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            load = os.getloadavg()[0]
            try:
                row = one_loss(ARMS[name], args, nbytes, 2 * args.persist_every + offset)
            except AssertionError as error:  # it took too long: with the logs of all nodes
                failed[name].append(str(error))
                print(f"{name}: FAILED\n{error}", file=sys.stderr, flush=True)
                continue
            rows[name].append({**row, "load_average": load})
            print(
                f"{gigabytes:g} GB, round {number}, {name}: {row['seconds']:.1f} s to the next step,"
                f" {row['steps_lost']} steps lost, load average {load:.1f}",
                flush=True,
            )
            if args.timeline:
                print("\n".join(f"{at:8.2f} s  {node}  {what}" for at, node, what in row["timeline"]), flush=True)
    with places(args.dir) as folder:
        beside = rates(folder, nbytes)
    return {"rows": rows, "failed": failed, "summary": {k: summary(v) for k, v in rows.items() if v}, "rates": beside}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians with spread of one way."""
    found: dict[str, Any] = {
        name: summarise([float(row[name]) for row in rows]) for name in ("seconds", "steps_lost", "step_s", "lost_s")
    }
    for group, names in (("phases", PHASES), ("bytes", SOURCES)):
        found[group] = {name: summarise([float(row[group][name]) for row in rows]) for name in names}
    return found


def cells_of(one: Mapping[str, Any]) -> dict[str, str]:
    """Return one way's column of the table, by the name of the row."""
    return {
        "seconds to the next step": one["seconds"].text(),
        "steps lost": one["steps_lost"].text(),
        "an ordinary step, s": one["step_s"].text(),
        "lost in all, s": one["lost_s"].text(),
        **{f"of the seconds: {name}": one["phases"][name].text() for name in PHASES},
        **{f"MB from {name}": f"{one['bytes'][name].median / 1e6:.1f}" for name in SOURCES},
    }


def show(gigabytes: float, found: Mapping[str, Any]) -> None:
    """Print one table per size."""
    table, beside = found["summary"], found["rates"]
    print(f"\n{gigabytes:g} GB per node, {NODES} nodes; median [min-max]\n\n| | " + " | ".join(table) + " |")
    print("|---" * (len(table) + 1) + "|")
    cells = [cells_of(one) for one in table.values()]
    for name in cells[0] if cells else ():
        print(f"| {name} | " + " | ".join(one[name] for one in cells) + " |")
    print(
        f"\nmemcpy {beside['memcpy_bytes_per_s'] / 1e9:.1f} GB/s, write with fsync {beside['write_bytes_per_s'] / 1e9:.2f} GB/s",
        flush=True,
    )


def sizes_that_fit(sizes: Sequence[float]) -> tuple[list[float], dict[float, str]]:
    """Return the sizes (GB) that fit into this machine, and why each other one is left out.

    Raises:
        SharedMemoryError: None fits.
    """
    fit, left_out = [], dict[float, str]()
    for size in sizes:
        try:
            require_room(NODES, size * 1e9, COPIES)
            fit.append(size)
        except SharedMemoryError as error:
            if len(left_out) + 1 == len(sizes):
                raise
            left_out[size] = str(error)
            print(error, file=sys.stderr, flush=True)
    return fit, left_out


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--gb", nargs="+", type=float, default=[0.1, 1.0], help="state per node, in 10^9 bytes")
    words.add_argument("--rounds", type=int, default=3, help="losses per way and size")
    words.add_argument("--ways", nargs="+", choices=sorted(ARMS), default=list(ARMS))
    words.add_argument("--step-s", type=float, default=0.25, help="seconds of a step without a snapshot, about")
    words.add_argument("--snapshot-every", type=int, default=2, help="steps between snapshots in memory")
    words.add_argument("--persist-every", type=int, default=20, help="steps between checkpoints on storage")
    words.add_argument(
        "--spare", action="store_true", help="the fourth node waits from the start, and is not started at the loss"
    )
    words.add_argument("--timeline", action="store_true", help="print what happened when, after each round")
    words.add_argument("--deadline-s", type=float, default=240.0, help="after which a round has failed")
    words.add_argument("--dir", help="folder for what stands for storage (default: the temporary folder)")
    words.add_argument("--json", type=Path)
    return words


def main() -> int:
    """Parse arguments; run, print, write."""
    args = parser().parse_args()
    clean_up_on_sigterm()
    load = LoadWatch()
    try:
        require_machine("ip", "unshare")
        sizes, left_out = sizes_that_fit(args.gb)
    except FlashckptError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    results = {}
    for size in sizes:
        results[f"{size:g} GB"] = found = measure(args, size)
        show(size, found)
    results |= {f"{size:g} GB": {"left_out": why} for size, why in left_out.items()}
    made = document("node_loss", vars(args) | {"json": None}, results, load=load, paths=[Path(args.dir or "/tmp")])
    print(
        f"\nload average {made['load']['load_before']} before, {made['load']['other_cores']} cores used by others meanwhile"
    )
    if args.json:
        write_json(args.json, made)
    return int(any(ways for found in results.values() for ways in found.get("failed", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
