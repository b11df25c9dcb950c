"""One rank of `flashckpt bench job`: real tensors under a `Checkpointer`, which takes and restores them as in training.

Run as `python -m flashckpt.bench.rank` by `flashckpt.bench.job`, which plays the part of dlrun: it watches over the
ranks (FLASHCKPT_AGENT_DIR, FLASHCKPT_RESTART) and has the slots persisted by a separate process.

With --peers, other libraries write the same tensors in the same rounds: one file or folder per rank, without collectives,
which flatters them: a real run of torch.distributed.checkpoint plans across ranks. What a peer leaves to the page cache is
synced here, and counted apart, so that "durable" means the same for everybody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from flashckpt import Checkpointer
from flashckpt.bench import PEERS
from flashckpt.bench.data import fill as fill_data
from flashckpt.bench.layouts import copies_of
from flashckpt.bench.measure import cpu_seconds, median
from flashckpt.bench.worker import Command, serve
from flashckpt.core.records import digest
from flashckpt.core.shard import Shard, place
from flashckpt.core.superblock import SegmentSpec
from flashckpt.errors import DamagedError
from flashckpt.report import RestoreReport
from flashckpt.shm.segment import Segment


def write(
    state: dict[str, torch.Tensor],
    *,
    rank: int,
    name: str,
    directory: str,
    beside: Callable[[Callable[[], bool]], float],
) -> Mapping[str, Any]:
    """Write `state` below `directory`; return seconds blocked, lost beside, until written, and until it is synced.

    Args:
        state: Tensors by name.
        rank: Of the writer; names its file.
        name: One of PEERS.
        directory: Exists.
        beside: Computes until what it is given returns True, and returns by how many seconds that took too long.
    """
    folder = Path(directory) / f"{name}.{rank}"
    folder.mkdir()
    _process_group()
    started = time.perf_counter()
    future = _WRITERS[name](state, folder)
    blocked = time.perf_counter()
    beside_s = 0.0
    if future is not None:
        beside_s = beside(future.done)
        future.result()
    written = time.perf_counter()
    sync(folder)
    now = time.perf_counter()
    return {
        "blocked_s": blocked - started,
        "beside_s": beside_s,
        "written_s": written - started,
        "durable_s": now - started,
    }


def sync(folder: Path) -> None:
    """Make every file below a folder durable, and the folder itself."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _process_group() -> None:
    """Make a group of one: dcp.async_save asks for a CPU backend even where nobody else takes part."""
    distributed: Any = torch.distributed  # HashStore is public, but not in its type stubs
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def _torch_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save(state, folder / "state.pt")


def _dcp_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=folder / "dcp", no_dist=True)


def _dcp_async_save(state: dict[str, torch.Tensor], folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    return async_save(state, checkpoint_id=folder / "dcp")


def _safetensors(state: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "state.safetensors")


_WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], Any]] = dict(
    zip(PEERS, (_torch_save, _dcp_save, _dcp_async_save, _safetensors), strict=True)
)


MANIFEST_BYTES = 1 << 20
_SQUARE = 192  # rows of the matrices that stand for forward and backward: milliseconds each


class Rank:
    """The state of one rank and everything that is done to it.

    Args:
        config: `copies_of` arguments, memory directory, job id, slots, storage URL and options.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.config, self.rank = config, int(config["rank"])
        os.environ.update(config["environment"])
        if config["ranks"] > 1:
            store = dist.FileStore(f"{config['memory']}/rendezvous", config["ranks"])  # type: ignore[attr-defined]  # not in the stubs
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=config["ranks"])
        held = sorted(copies_of(config["table"], self.rank), key=lambda one: one[0].fqn)
        self.shards = [shard for shard, _ in held]
        self.tensors = [_tensor(shard) for shard in self.shards]
        self.model = _model(self.shards, self.tensors, [holders for _, holders in held])
        self.reference = [bytearray(shard.nbytes) for shard in self.shards]
        self.ckpt: Checkpointer | None = None
        self._restarts = 0
        self._complete, self._errors = threading.Event(), list[Exception]()
        self._square = torch.randn(_SQUARE, _SQUARE)
        self._alone_s = 0.0

    def commands(self) -> dict[str, Command]:
        """Return what the parent may order."""
        names = ("ready", "touch", "begin", "alone", "snapshot", "work", "restart", "restore_storage", "verify", "peer")
        return {name: getattr(self, name) for name in names}

    def ready(self) -> Mapping[str, Any]:
        """Return the sizes of this rank's state."""
        return {"held_bytes": sum(shard.nbytes for shard in self.shards), "tensors": len(self.shards)}

    def touch(self) -> Mapping[str, Any]:
        """Time the first touch of memory like that of this rank's slots, which go again at once."""
        spec = SegmentSpec(
            job="bench",
            root_digest=0,
            rank=self.rank,
            slots=self.config["slots"],
            manifest_capacity=MANIFEST_BYTES,
            data_capacity=place(self.shards).total,
            layout_hash=0,
        )
        segment = Segment.create(Path(self.config["memory"]) / f"touch{self.rank:05d}.seg", spec)
        try:
            started = time.perf_counter()
            segment.reserve()
            return {"seconds": time.perf_counter() - started, "bytes": spec.nbytes}
        finally:
            segment.path.unlink()
            segment.close()

    def begin(self) -> None:
        """Start the job: nothing is there to restore."""
        self.ckpt = self._checkpointer()
        self.ckpt.restore()

    def alone(self, seconds: float) -> Mapping[str, Any]:
        """Change the state; compute, and copy it, with nothing beside; later figures are compared with these."""
        for tensor in self.tensors:  # one value per page, so that no storage can recognise what it holds already
            _bytes(tensor)[::4096] += 1
        loops = self._loops(lambda spent: spent >= seconds)
        self._alone_s = median(loops)
        started = time.perf_counter()
        for tensor, reference in zip(self.tensors, self.reference, strict=True):
            np.copyto(np.frombuffer(reference, np.uint8), _bytes(tensor))
        return {"loop_s": self._alone_s, "memcpy_s": time.perf_counter() - started}

    def snapshot(self, step: int) -> Mapping[str, Any] | None:
        """Take one snapshot, computing beside the copy; None where no slot could be written yet."""
        ckpt = self._running()
        self._complete.clear()
        before, cpu, started = ckpt.stats, cpu_seconds(), time.perf_counter()
        ckpt.step(step)
        call_s = time.perf_counter() - started
        if ckpt.stats.get("skipped", 0.0) > before.get("skipped", 0.0):
            return None
        loops = self._loops(lambda _: self._complete.is_set())
        ckpt.fence()
        if self._errors:
            raise self._errors.pop()
        spent = {name: ckpt.stats[name] - before.get(name, 0.0) for name in ("complete_s", "copy_s", "copy_cpu_s")}
        return {
            "call_s": call_s,
            "beside_s": self._lost(loops),
            "restorable_s": spent["complete_s"],
            "copied_s": spent["copy_s"],
            "copy_cpu_s": spent["copy_cpu_s"],
            "cpu_s": cpu_seconds() - cpu,
        }

    def work(self, until: str) -> Mapping[str, Any]:
        """Compute until the file `until` exists; return the loop time and how much longer it is than alone."""
        stop = Path(until)
        loops = self._loops(lambda _: stop.exists())
        return {"loop_s": median(loops), "uplift": median(loops) / self._alone_s - 1 if self._alone_s else 0.0}

    def restart(self) -> Mapping[str, Any]:
        """Begin again as a rank that dlrun has restarted: the state comes back from the slots."""
        self._running().close()
        self._restarts += 1
        os.environ["FLASHCKPT_RESTART"] = str(self._restarts)
        self._blank()
        self.ckpt = self._checkpointer()
        started = time.perf_counter()
        report = self.ckpt.restore()
        return _restored(report, time.perf_counter() - started, tier="memory")

    def restore_storage(self, step: int) -> Mapping[str, Any]:
        """Read the checkpoint from storage alone, as ranks on new nodes do."""
        self._blank()
        reader = Checkpointer.readonly(self.config["url"], storage_options=self.config["options"])
        reader.track(state=self.model)
        cpu, started = cpu_seconds(), time.perf_counter()
        report = reader.restore(step=step)
        return _restored(report, time.perf_counter() - started, tier="storage") | {"cpu_s": cpu_seconds() - cpu}

    def verify(self) -> None:
        """Compare what was restored with what the snapshot was taken of, bit for bit.

        Raises:
            DamagedError: They differ: a bug of the product, which no figure may hide.
        """
        for shard, tensor, reference in zip(self.shards, self.tensors, self.reference, strict=True):
            if not np.array_equal(_bytes(tensor), np.frombuffer(reference, np.uint8)):
                raise DamagedError(f"rank {self.rank} restored other bytes than it held: {shard.fqn}")

    def peer(self, name: str, directory: str) -> Mapping[str, Any]:
        """Write the state with another library, computing beside it where it lets us."""

        def beside(is_done: Callable[[], bool]) -> float:
            return self._lost(self._loops(lambda _: is_done()))

        state = {shard.fqn: tensor for shard, tensor in zip(self.shards, self.tensors, strict=True)}
        return write(state, rank=self.rank, name=name, directory=directory, beside=beside)

    def _checkpointer(self) -> Checkpointer:
        config = self.config
        ckpt = Checkpointer(
            config["url"],
            snapshot_every=1,
            persist_every=None,  # the persister takes what it is asked for, and no daemon runs
            keep_last=None,
            job=config["job"],
            slots=config["slots"],
            storage_options=config["options"],
        )
        ckpt.on_snapshot = lambda _: self._complete.set()
        ckpt.on_failure = self._failed
        ckpt.track(state=self.model, fenced=("state",))
        return ckpt

    def _failed(self, error: Exception) -> None:
        self._errors.append(error)
        self._complete.set()

    def _running(self) -> Checkpointer:
        assert self.ckpt is not None, "begin first"
        return self.ckpt

    def _lost(self, loops: Sequence[float]) -> float:
        """Return by how many seconds loops took longer than they take alone."""
        return sum(max(0.0, loop - self._alone_s) for loop in loops) if self._alone_s else 0.0

    def _blank(self) -> None:
        for tensor in self.tensors:
            _bytes(tensor)[:] = 0

    def _loops(self, is_over: Callable[[float], bool]) -> list[float]:
        """Multiply matrices until `is_over(seconds so far)`; return the seconds of each multiplication."""
        loops, started = [], time.perf_counter()
        while True:
            begin = time.perf_counter()
            torch.mm(self._square, self._square)
            now = time.perf_counter()
            loops.append(now - begin)
            if is_over(now - started):
                return loops


def _restored(report: RestoreReport | None, wall_s: float, *, tier: str) -> dict[str, Any]:
    """Return the seconds of the whole call, of its phases, and of those that bring the bytes back."""
    if report is None or report.tier != tier or report.passed_over or report.damaged:
        raise DamagedError(f"the state did not come back from {tier}", found=str(report))
    phases = {f"{name}_s": report.seconds.get(name, 0.0) for name in ("inventory", "root", "plan", "read", "lineage")}
    return {"wall_s": wall_s, "bytes_s": sum(phases[name] for name in ("root_s", "plan_s", "read_s")), **phases}


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).flatten().numpy()


def _tensor(shard: Shard) -> torch.Tensor:
    """Return a tensor with realistic bits, the same on every rank that holds a copy."""
    tensor = torch.empty(shard.lengths, dtype=getattr(torch, shard.dtype))
    fill_data(memoryview(_bytes(tensor)), shard.dtype, digest(shard.fqn.encode()))
    return tensor


def _model(shards: Sequence[Shard], tensors: Sequence[torch.Tensor], holders: Sequence[tuple[int, ...]]) -> nn.Module:
    """Return a module with a parameter per tensor; those that several ranks hold are replicated over them."""
    model, meshes = nn.Module(), dict[tuple[int, ...], DeviceMesh]()
    for shard, tensor, ranks in zip(shards, tensors, holders, strict=True):
        *path, name = shard.fqn.split(".")
        module = model
        for part in path:
            if part not in module._modules:  # noqa: SLF001 -- get_submodule takes a dotted path only
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = tensor
        if len(ranks) > 1:
            # no collective runs on it: without process groups, hundreds of which would have to be made by all ranks
            if ranks not in meshes:
                meshes[ranks] = DeviceMesh("cpu", list(ranks), _init_backend=False)
            value = DTensor.from_local(tensor, meshes[ranks], [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model


if __name__ == "__main__":
    serve(lambda config: Rank(config).commands())
