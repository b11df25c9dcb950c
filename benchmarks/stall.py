"""What training loses per snapshot: flashckpt, a blocking copy into warm shared memory, torch.save, dcp.async_save, DLRover.

A Llama-shaped model with AdamW moments trains for real optimizer steps (`training_loop`). Every size and number of ranks
is one configuration; each rank is a process with its own shard, all in one gloo group. Methods take turns within every round, and one memcpy
of the state into warm shared memory, taken right before each, is the limit beside which everything is put.

    .venv/bin/python benchmarks/stall.py --gb 0.2,1.5,4 --ranks 1,4 --seconds 90 --json FILE
    .venv/bin/python benchmarks/stall.py --gb 0.2 --methods flashckpt,DLRover --dlrover-python DIR/bin/python     # with DLRover; `--dlrover-setup` says how to get it

Methods whose memory does not fit side by side run in groups, one group after the other, each with its own memcpys;
a method that does not fit alone is omitted, and both are reported. Blocked is what the training thread waits: the call, and the fence in
front of the next optimizer step. Lost adds what the step beside the copy takes longer than one without. Until restorable
counts from the call to COMPLETE in memory, digests included, or to the end of the write where nothing in memory can be restored from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dlrover_peer import SETUP, check_dlrover, environment, remove_leftovers
from processes import clean_up_on_sigterm, descendants, places, stream
from stall_table import summarised, table

from flashckpt.bench.host import available_bytes, peak_memory_of
from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.bench.worker import Workers
from flashckpt.errors import FlashckptError

HERE = Path(__file__).parent
LOOP_COPIES = 2.4
"""Parameters and moments (1), gradients (1/3), the target of the memcpy (1), and what the interpreter takes."""
METHODS = {
    "flashckpt": 3.0,
    "flashckpt, persisted": 0.0,
    "blocking copy": 0.0,
    "torch.save": 0.0,
    "dcp.async_save thread": 1.0,
    "dcp.async_save process": 1.0,
    "DLRover memory": 1.0,
    "DLRover disk": 0.0,
}
"""Memory of each method beside the loop's, as multiples of the state; one of a pair is counted with the other."""
PAIRS = {"flashckpt, persisted": "flashckpt", "DLRover disk": "DLRover memory"}
USABLE = 0.9
"""Share of the available memory that is planned with."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Methods that run in the same processes, or beside them, in turns.

    Attributes:
        slots: Of flashckpt; None: as many as it chooses.
        need: Multiples of the state.
    """

    methods: tuple[str, ...]
    need: float
    slots: int | None = None


def plan_groups(methods: list[str], room: float) -> tuple[list[Group], dict[str, str]]:
    """Put methods into groups that fit into `room` multiples of the state; return them, and why others were left out.

    flashckpt takes three slots where they fit, else two, as it does by default.
    """
    if need_of(methods) <= room:
        return [Group(methods=tuple(methods), need=need_of(methods))], {}
    groups: list[list[str]] = []
    left_out: dict[str, str] = {}
    for method in methods:
        if PAIRS.get(method) in left_out:
            left_out[method] = left_out[PAIRS[method]]
            continue
        for group in groups:
            pair = PAIRS.get(method)
            if pair in group or (pair not in methods and need_of([*group, method], slots=2) <= room):
                group.append(method)
                break
        else:
            if need_of([method], slots=2) <= room:
                groups.append([method])
            else:
                left_out[method] = (
                    f"needs {need_of([method], slots=2):.1f} times the state, there is room for {room:.1f}"
                )
    return [Group(methods=tuple(group), need=need_of(group, slots=2), slots=2) for group in groups], left_out


def need_of(methods: list[str], slots: int = 3) -> float:
    """Return the memory of a group, as multiples of the state: one loop per Python that takes part."""
    loops = len({method.startswith("DLRover") for method in methods})
    spared = 3 - slots if "flashckpt" in methods else 0
    return loops * LOOP_COPIES + sum(METHODS[method] for method in methods) - spared


class Family:
    """The rank processes of one configuration and group, of our Python and of DLRover's."""

    def __init__(self, options: argparse.Namespace, group: Group, nbytes: float, ranks: int, scratch: Path) -> None:
        self.kinds: dict[str, list[int]] = {}
        self.group, self.run_id = group, f"stall{os.getpid()}"
        self._workers, self._pids = Workers(scratch), list[int]()
        self._agent: subprocess.Popen[str] | None = None
        config = {
            "folder": str(scratch), "job": f"stall-{os.getpid()}", "bytes": nbytes, "ranks": ranks,
            "tensors": options.tensors, "compute": options.compute, "slots": group.slots,
        }  # fmt: skip
        try:
            for kind in dict.fromkeys(map(kind_of, group.methods)):
                python, environments = sys.executable, [{"RANK": str(rank)} for rank in range(ranks)]
                if kind == "dlrover":
                    python, environments = options.dlrover_python, self._dlrover(options.dlrover_python, ranks)
                self.kinds[kind] = self._start(python, {**config, "kind": kind}, environments)
                self._workers.ask(self.kinds[kind], "about")  # one after the other: they calibrate their loops
        except BaseException:
            self.close()
            raise

    def _start(self, python: str, config: dict[str, Any], environments: list[dict[str, str]]) -> list[int]:
        """Start a process per rank: libraries read their rank from the environment when they are imported."""
        numbers = []
        for rank, one in enumerate(environments):
            name = f"{config['kind']} rank {rank}"
            program = [str(HERE / "stall_rank.py")]
            numbers += self._workers.start(program, {name: config}, python=python, environment=one)
        self._pids += self._workers.answers(numbers)
        return numbers

    def _dlrover(self, python: str, ranks: int) -> list[dict[str, str]]:
        """Start DLRover's agent; return what its launcher sets for each rank, and where our modules are."""
        remove_leftovers(self.run_id)
        environments = [environment(rank, ranks, self.run_id) for rank in range(ranks)]
        self._start_agent(python, environments[0])
        more = {"STALL_AGENT_PID": str(self.agent_pid), "PYTHONPATH": str(HERE.parent)}
        return [one | more for one in environments]

    def ask(self, method: str, do: str) -> list[Any]:
        """Order something of the ranks that hold a method."""
        return self._workers.ask(self.kinds[kind_of(method)], do, case=method)

    def step(self, kind: str) -> None:
        """Take one quiet step on the ranks of a kind."""
        self._workers.ask(self.kinds[kind], "step")

    def about(self) -> list[dict[str, Any]]:
        """Size of the state by rank."""
        return self._workers.ask(next(iter(self.kinds.values())), "about")

    def pids(self, method: str) -> list[int]:
        """All processes that work for a method."""
        return sorted({pid for one in self.ask(method, "pids") for pid in one})

    def processes(self) -> list[int]:
        """All ranks with their descendants, and the agent."""
        return [pid for root in [*self._pids, *([self.agent_pid] if self._agent else [])] for pid in descendants(root)]

    @property
    def agent_pid(self) -> int:
        """Process id of DLRover's agent."""
        assert self._agent is not None
        return self._agent.pid

    def _start_agent(self, python: str, environ: dict[str, str]) -> None:
        command = [python, str(HERE / "stall_dlrover.py"), "--agent"]
        pipe = subprocess.PIPE
        self._agent = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={**os.environ, **environ}, text=True
        )
        while (line := stream(self._agent.stdout).readline()) and line != "ready\n":
            pass

    def close(self) -> None:
        """End all ranks, then the agent."""
        try:
            for numbers in self.kinds.values():
                self._workers.ask(numbers, "close")
            self._workers.finish()
        except FlashckptError as error:
            print(f"ending: {error.problem}", file=sys.stderr)
        self._workers.close()
        if self._agent is not None:
            stream(self._agent.stdin).close()
            try:
                self._agent.wait(30)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
            stream(self._agent.stdout).close()
            remove_leftovers(self.run_id)


def kind_of(method: str) -> str:
    return "dlrover" if method.startswith("DLRover") else "ours"


def measure_group(family: Family, seconds: float, rounds: int) -> dict[str, Any]:
    """Set every method up, then run rounds in turns for about `seconds`, then one untimed round that looks at memory."""
    setup_s, standing, first = {}, {}, {}
    for method in family.group.methods:
        started = time.perf_counter()
        with peak_memory_of(family.processes, 0.5) as peak:
            family.ask(method, "setup")
            setup_s[method] = time.perf_counter() - started
            first[method] = family.ask(method, "run")
        standing[method] = peak.end_bytes - peak.start_bytes
    series: dict[str, list[list[dict[str, Any]]]] = {method: [] for method in family.group.methods}
    end, number = time.monotonic() + seconds, 0
    while number < rounds and (number < 2 or time.monotonic() < end):
        turn = number % len(series)
        for method in [*series][turn:] + [*series][:turn]:
            series[method].append(family.ask(method, "run"))
        number += 1
    memory, usual = {}, {}
    for kind in family.kinds:  # the optimizer's own temporary memory
        with peak_memory_of(family.processes) as peak:
            family.step(kind)
        usual[kind] = peak.extra_bytes
    for method in family.group.methods:
        pids = family.pids(method)
        with peak_memory_of(lambda pids=pids: pids) as peak:  # type: ignore[misc]  # bound now
            family.ask(method, "run")
        memory[method] = {
            "standing_bytes": max(0, standing[method]),
            "peak_bytes": max(0, peak.extra_bytes - usual[kind_of(method)]),
        }
    alone: list[list[dict[str, Any]]] = []
    end = time.monotonic() + 10
    while "flashckpt" in family.group.methods and len(alone) < 9 and (len(alone) < 2 or time.monotonic() < end):
        alone.append(family.ask("flashckpt", "alone"))
    return {"setup_s": setup_s, "first": first, "series": series, "memory": memory, "alone": alone}


def measure(options: argparse.Namespace, gigabytes: float, ranks: int, methods: list[str]) -> dict[str, Any]:
    """Measure one configuration, group by group."""
    nbytes, available = gigabytes * 1e9, available_bytes()
    groups, left_out = plan_groups(methods, available * USABLE / nbytes)
    found = []
    for group in groups:
        share = len(group.methods) / len(methods)
        try:
            found.append(measure_in_processes(options, group, nbytes, ranks, options.seconds * share))
        except FlashckptError as error:  # the other groups and configurations are still worth having
            print(f"{', '.join(group.methods)}: FAILED\n{error}", file=sys.stderr)
            reason = str(error).strip().splitlines()
            left_out |= dict.fromkeys(
                group.methods, f"failed: {next((r for r in reversed(reason) if 'rror' in r), reason[-1])}"
            )
    return {"left_out": left_out, "available_bytes": available, "groups": found}


def measure_in_processes(
    options: argparse.Namespace, group: Group, nbytes: float, ranks: int, seconds: float
) -> dict[str, Any]:
    """Start the processes of one group, measure, and end them."""
    with places(options.dir) as (folder, memory):
        os.environ["FLASHCKPT_SHM_DIR"] = str(memory)
        family = Family(options, group, nbytes, ranks, folder)
        try:
            about = family.about()
            found = summarised(about, measure_group(family, seconds, options.rounds))
        finally:
            family.close()
    return found | {"need": group.need, "slots": group.slots or 3}


def main() -> None:
    """Parse arguments; run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", default="1.5", help="sizes of the state, all ranks together, in 10^9 bytes, by commas")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, by commas")
    parser.add_argument("--tensors", type=int, help="this many equal tensors per rank instead of Llama shapes")
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many, and at least two")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds, per configuration")
    parser.add_argument("--compute", type=float, default=2.0, help="forward and backward, in memcpys of the state")
    parser.add_argument("--methods", help="only methods that begin with one of these words, by commas")
    parser.add_argument("--dlrover-python", help="a Python that has DLRover; without it DLRover is left out")
    parser.add_argument("--dlrover-setup", action="store_true", help="print how to get such a Python")
    parser.add_argument("--dir", help="folder on the disk to write to (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.dlrover_setup:
        print(SETUP)
        return
    wanted = tuple((options.methods or "").split(","))
    methods = [method for method in METHODS if method.startswith(wanted)]
    versions = check_dlrover(options.dlrover_python) if options.dlrover_python else None
    if versions is None:
        methods = [method for method in methods if kind_of(method) == "ours"]
    clean_up_on_sigterm()
    load, results = LoadWatch(), {}
    for size in options.gb.split(","):
        for ranks in options.ranks.split(","):
            results[f"{size} GB, {ranks} rank{'s' * (ranks != '1')}"] = one = measure(
                options, float(size), int(ranks), methods
            )
            print(table(f"{size} GB, {ranks} rank(s)", one), flush=True)
    arguments = {
        k: v for k, v in vars(options).items() if k in {"gb", "ranks", "rounds", "seconds", "compute", "tensors"}
    }
    result = document("stall", arguments | {"dlrover": versions}, results, load=load)
    if versions is None and "DLRover".startswith(wanted):
        print("\nDLRover was left out: no --dlrover-python was given (see --dlrover-setup).")
    print(f"\nload before {result['load']['load_before']}, cores used by others {result['load']['other_cores']}")
    if options.json:
        write_json(options.json, json.loads(json.dumps(result)))
    if any(why.startswith("failed") for one in results.values() for why in one["left_out"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
