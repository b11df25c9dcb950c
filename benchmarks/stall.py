"""What training loses per snapshot: flashckpt, a blocking copy into warm shared memory, torch.save, dcp.async_save.

A Llama-shaped model with AdamW moments of the wanted size trains for real optimizer steps; forward and backward are
stood in for by matrix products that last `--compute` times as long as one memcpy of the state (beside a copy they feel
the loss of memory bandwidth and cores as a real model would). Methods take turns within every round; one memcpy of the state into
warm shared memory, taken in the same round, is the limit beside which everything is put.

    .venv/bin/python benchmarks/stall.py [--bytes 1.5e9] [--ranks 1] [--rounds 7] [--no-peers] [--json FILE]

Blocked is what the training thread waits: the call, and the fence in front of the next optimizer step. Lost adds what
the step beside the copy takes longer than one without. Until restorable counts from the call to COMPLETE, digests included
(a peer that leaves nothing restorable in memory counts to the end of its write).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flashckpt import Checkpointer
from flashckpt.bench.host import peak_memory
from flashckpt.bench.measure import LoadWatch, cpu_seconds, document, median, summarise, write_json

PEERS = ("blocking copy into warm memory", "torch.save", "dcp.async_save thread", "dcp.async_save process")
_DCP = "dcp.async_save "


def model_of(nbytes: float, tensors: int | None) -> nn.Module:
    """A ParameterList of Llama-like shapes whose parameters and two moments take about `nbytes` in float32."""
    if tensors is not None:
        size = max(1, int(nbytes / 12 / (tensors / 4)))
        return nn.ParameterList([torch.randn(size) for _ in range(tensors // 4)])
    hidden = max(64, int((nbytes / 12 / (8 * 12.5)) ** 0.5) // 64 * 64)
    shapes: list[tuple[int, ...]] = []
    while sum(math.prod(s) for s in shapes) * 12 < nbytes * 0.97:
        shapes += [(hidden, hidden)] * 4 + [(hidden, int(2.75 * hidden))] * 3 + [(hidden,)] * 2
    return nn.ParameterList([torch.randn(s) * 0.02 for s in shapes])


class Loop:
    """A training loop: compute, optimizer step; counts what each takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = model_of(options.bytes, options.tensors)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.nbytes = sum(t.nbytes for t in self.state().values())
        self.left, self.right = torch.randn(512, 512), torch.randn(512, 512)
        self.target = mmap.mmap(-1, self.nbytes + (1 << 20), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memcpy_cpu_s: list[float] = []
        self.compute_s, self.products = 0.0, 1
        self.compute_s = options.compute * median([self.memcpy() for _ in range(3)])
        one = median([self._products(20) for _ in range(3)]) / 20
        self.products = max(1, int(self.compute_s / one))

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by name."""
        found = {f"model.{i}": p.detach() for i, p in enumerate(self.model.parameters())}
        for i, p in enumerate(self.model.parameters()):
            found |= {f"optimizer.{i}.{k}": v for k, v in self.optimizer.state[p].items()}
        return found

    def memcpy(self) -> float:
        """Seconds of one memcpy of the whole state into warm shared memory, tensor by tensor, one thread."""
        address = int(np.frombuffer(self.target, np.uint8).ctypes.data)
        started, cpu, at = time.perf_counter(), time.thread_time(), 0
        for tensor in self.state().values():
            ctypes.memmove(address + at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        self.memcpy_cpu_s.append(time.thread_time() - cpu)
        return time.perf_counter() - started

    def _products(self, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(self.left, self.right)
        return time.perf_counter() - started

    def step(self) -> dict[str, float]:
        """One step of training; the hook of the optimizer is the fence."""
        compute = self._products(self.products)
        started = time.perf_counter()
        self.optimizer.step()
        return {"compute": compute, "optimizer": time.perf_counter() - started}


def measured(
    loop: Loop, call: Callable[[], Any], fence: Callable[[Any], float], done: Callable[[Any], float] | None
) -> dict[str, float]:
    """Run one snapshot between steps: quiet step, call, step beside the copy with the fence in it, until restorable.

    `done` waits and returns seconds from the call to restorable; 0.0 for "now", None for "when the call returned".
    """
    with peak_memory() as usual:
        alone = loop.step()
    cpu = cpu_seconds()
    with peak_memory() as peak:
        started, call_cpu = time.perf_counter(), time.thread_time()
        handle = call()
        called, call_cpu = time.perf_counter() - started, time.thread_time() - call_cpu
        compute = loop._products(loop.products)
        fenced = fence(handle)
        began = time.perf_counter()
        loop.optimizer.step()
        optimizer = time.perf_counter() - began
        complete = called if done is None else done(handle) or time.perf_counter() - started
    blocked = called + fenced
    return {
        "call_s": called,
        "call_cpu_s": call_cpu,
        "fence_s": fenced,
        "blocked_s": blocked,
        "lost_s": blocked + (compute - alone["compute"]) + (optimizer - alone["optimizer"]),
        "restorable_s": complete,
        "cpu_s": cpu_seconds() - cpu,
        "peak_bytes": float(max(0, peak.extra_bytes - usual.extra_bytes)),
    }


def flashckpt_case(loop: Loop, root: str) -> tuple[Callable[[], dict[str, float]], Checkpointer]:
    """Return the measured case of flashckpt, and the Checkpointer behind it."""
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=10**9, job=f"stall-{os.getppid()}")
    ckpt.track(model=loop.model, optimizer=loop.optimizer, rng=True)
    ckpt.restore()
    life = ckpt._life
    assert life is not None
    count = iter(range(1, 10**9))

    def call() -> dict[str, float]:
        before = ckpt.stats.get("complete_s", 0.0)
        ckpt.step(next(count))
        return {"before": before}

    def fence(_: Any) -> float:
        started = time.perf_counter()
        ckpt.fence()
        return time.perf_counter() - started

    def done(handle: dict[str, float]) -> float:
        life._stager.finish()
        return ckpt.stats["complete_s"] - handle["before"]

    assert life.memory.wait_ready()
    return lambda: measured(loop, call, fence, done), ckpt


def peer_cases(loop: Loop, folder: Path) -> dict[str, Callable[[], dict[str, float]]]:
    """Return the peers; each writes into a new folder that is removed outside the measurement."""
    from torch.distributed.checkpoint.staging import DefaultStager
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    stagers: dict[str, Any] = {}

    def dcp(kind: str) -> Any:
        stager = stagers.get(kind) or stagers.setdefault(kind, DefaultStager(_staging(kind)))
        which = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD
        target = folder / f"{kind}-{time.monotonic_ns()}"
        return async_save(
            loop.state(), checkpoint_id=target, async_checkpointer_type=which, async_stager=stager
        ), target

    def dcp_fence(handle: Any) -> float:
        started = time.perf_counter()
        staged = getattr(handle[0], "staging_completion", None)
        if staged is not None:
            staged.result()
        return time.perf_counter() - started

    def dcp_done(handle: Any) -> float:
        getattr(handle[0], "upload_completion", handle[0]).result()
        shutil.rmtree(handle[1], ignore_errors=True)
        return 0.0

    def saved() -> None:
        torch.save(loop.state(), folder / "state.pt")

    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], float] | None]] = {
        PEERS[0]: (loop.memcpy, lambda _: 0.0, None),
        PEERS[1]: (saved, lambda _: 0.0, None),
        PEERS[2]: (lambda: dcp("thread"), dcp_fence, dcp_done),
        PEERS[3]: (lambda: dcp("process"), dcp_fence, dcp_done),
    }
    return {name: (lambda c=parts: measured(loop, *c)) for name, parts in cases.items()}  # type: ignore[misc]  # bound now


def _staging(kind: str) -> Any:
    """The newest options of torch's stager that work without an accelerator: kept buffers, staging off the caller."""
    from torch.distributed.checkpoint.staging import StagingOptions

    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=kind == "process",
        use_async_staging=True,
        use_non_blocking_copy=False,
    )


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One rank: run all cases in turns and return their series, and the memcpy of every round."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    loop = Loop(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        started = time.perf_counter()
        case, ckpt = flashckpt_case(loop, options.root)
        reserve_s = time.perf_counter() - started
        cases = {"flashckpt": case}
        if not options.no_peers:
            cases |= peer_cases(loop, Path(folder))
        first = {name: run() for name, run in cases.items()}
        series: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        memcpy = []
        for number in range(options.rounds):
            names = list(cases)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if options.ranks > 1:
                    dist.barrier()
                memcpy.append(loop.memcpy())
                series[name].append(cases[name]())
        copy_cpu_s = ckpt.stats["copy_cpu_s"] / ckpt.stats["snapshots"]
        assert ckpt._life is not None
        ckpt._life.close()
    return {
        "nbytes": loop.nbytes,
        "tensors": len(loop.state()),
        "reserve_s": reserve_s,
        "memcpy_s": memcpy,
        "memcpy_cpu_s": loop.memcpy_cpu_s[-len(memcpy) :],
        "copy_cpu_s": copy_cpu_s,
        "first": first,
        "series": series,
        "step_s": sum(loop.step().values()),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, wait for them, and return what the slowest one of each round saw."""
    shm = Path(tempfile.mkdtemp(prefix="flashckpt-stall-", dir="/dev/shm"))
    scratch = Path(tempfile.mkdtemp(prefix="flashckpt-stall-"))
    load = LoadWatch()
    try:
        command = [sys.executable, __file__, "--worker", "--root", str(scratch / "root"), "--folder", str(scratch)]
        command += ["--bytes", str(options.bytes / options.ranks), "--ranks", str(options.ranks)]
        command += ["--rounds", str(options.rounds), "--compute", str(options.compute)]
        command += ["--tensors", str(options.tensors)] if options.tensors else []
        command += ["--no-peers"] if options.no_peers else []
        environment = {**os.environ, "FLASHCKPT_SHM_DIR": str(shm), "FLASHCKPT_AGENT_DIR": str(scratch)}
        ranks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, env={**environment, "RANK": str(r)}, text=True)
            for r in range(options.ranks)
        ]
        answers = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    return document("stall", _arguments(options), summarised(answers), load=load)


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(options).items() if k in {"bytes", "ranks", "rounds", "compute", "tensors"}}


def summarised(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return summaries per method: the maximum over ranks of every round, and ratios to the memcpy of the run."""
    memcpy = [max(values) for values in zip(*(a["memcpy_s"] for a in answers), strict=True)]
    limit = median(memcpy)
    methods: dict[str, Any] = {}
    for name in answers[0]["series"]:
        rounds = list(zip(*(a["series"][name] for a in answers), strict=True))
        found: dict[str, Any] = {
            key: summarise([max(one[key] for one in ranks) for ranks in rounds]) for key in rounds[0][0]
        }
        found["first"] = {key: max(a["first"][name][key] for a in answers) for key in rounds[0][0]}
        found["ratio"] = {k: found[k].median / limit for k in ("blocked_s", "lost_s", "restorable_s")}
        methods[name] = found
    return {
        "nbytes": sum(a["nbytes"] for a in answers),
        "tensors_per_rank": answers[0]["tensors"],
        "start_s": max(a["reserve_s"] for a in answers),
        "step_s": max(a["step_s"] for a in answers),
        "memcpy_s": summarise(memcpy),
        "memcpy_cpu_s": summarise([v for a in answers for v in a["memcpy_cpu_s"]]),
        "flashckpt_copy_and_digest_cpu_s": max(a["copy_cpu_s"] for a in answers),
        "methods": methods,
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table, ratios first."""
    found, load = result["results"], result["load"]
    limit = found["memcpy_s"]["median"]
    about = (
        f"{found['nbytes'] / 1e9:.2f} GB, {found['tensors_per_rank']} tensors per rank, {result['arguments']['ranks']} rank(s); "
        f"memcpy {limit * 1e3:.0f} ms [{found['memcpy_s']['min'] * 1e3:.0f}-{found['memcpy_s']['max'] * 1e3:.0f}]; "
        f"step {found['step_s'] * 1e3:.0f} ms; load before {load['load_before']}, other cores {load['other_cores']}; "
        f"CPU of flashckpt's copy and digests {found['flashckpt_copy_and_digest_cpu_s'] / found['memcpy_cpu_s']['median']:.2f} "
        f"x that of a memcpy, of its call {found['methods']['flashckpt']['call_cpu_s']['median'] * 1e3:.2f} ms"
    )
    lines = [
        about,
        "",
        "| method | blocked x memcpy | lost x memcpy | restorable x memcpy | call ms p50 / p99 / max | fence ms p50 / p99 / max | first: blocked ms | CPU s | extra memory MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, m in found["methods"].items():
        spans = [
            " / ".join(f"{m[key][p] * 1e3:.2f}" for p in ("median", "p99", "max")) for key in ("call_s", "fence_s")
        ]
        ratio = m["ratio"]
        lines.append(
            f"| {name} | {ratio['blocked_s']:.3f} | {ratio['lost_s']:.2f} | {ratio['restorable_s']:.2f} | {spans[0]} | {spans[1]} "
            f"| {m['first']['blocked_s'] * 1e3:.1f} | {m['cpu_s']['median']:.2f} | {m['peak_bytes']['median'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse arguments; run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1.5e9, help="bytes of the state, all ranks together")
    parser.add_argument("--tensors", type=int, help="this many equal tensors instead of Llama shapes")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--compute", type=float, default=2.0, help="length of forward + backward, in memcpys of the state"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    for name in ("--worker",):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--root", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rank = int(os.environ["RANK"])
        store = dist.FileStore(f"{options.folder}/store", options.ranks)  # type: ignore[attr-defined]  # not in the stubs
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
        print(json.dumps(worker(options)), flush=True)
        dist.destroy_process_group()
        return
    result = json.loads(json.dumps(run(options), default=lambda o: {s: getattr(o, s) for s in o.__slots__}))
    print(table(result))
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
