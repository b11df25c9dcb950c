"""A process group for tensors of the emulated device: through the host, by gloo, which takes none of them itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # torch has no stub
from torch.futures import Future

NAME = "staged"


def register() -> None:
    """Let `init_process_group("staged")` make one, and name it as the backend of the device."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _made, devices=["cpu", "emu"])


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Staged:
    return Staged(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes: gloo moves few types."""
    return tensor.view(-1).view(torch.uint8)


_Group: Any = dist.ProcessGroup  # whose parameters have other names in each release


class Staged(_Group):  # type: ignore[misc]  # as that
    """Every call ends before it returns; what it queues on the device comes behind what was queued there."""

    def __init__(self, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)
        self._inner = inner
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)  # which holds its name

    def getBackendName(self) -> str:
        return NAME

    def _run(self, name: str, results: Sequence[tuple[torch.Tensor, torch.Tensor]], *given: Any) -> Any:
        """Call gloo with host tensors; `results` are pairs of (device tensor, host tensor) to be brought back."""
        getattr(self._inner, name)(*given).wait()
        for there, here in results:
            there.copy_(here)
        return _done([there for there, _ in results])

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        host = [one.cpu() for one in tensors]
        return self._run("allreduce", list(zip(tensors, host, strict=True)), host, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        plain: Any = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp if opts is not None else plain.reduceOp
        for one in tensors:
            self.allreduce([one], plain)
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        host = [one.cpu() for one in tensors]
        return self._run("broadcast", list(zip(tensors, host, strict=True)), [_bytes(one) for one in host], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        host = [[torch.empty_like(one, device="cpu") for one in group] for group in outputs]
        pairs = [pair for there, here in zip(outputs, host, strict=True) for pair in zip(there, here, strict=True)]
        return self._run("allgather", pairs, host, [one.cpu() for one in inputs])

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        host = torch.empty_like(output, device="cpu")
        return self._run("_allgather_base", [(output, host)], _bytes(host), _bytes(given.cpu()))

    all_gather_single = _allgather_base  # as it is called from torch 2.13 on

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any) -> Any:
        whole = given.cpu()  # summed everywhere, of which each takes its part
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        plain: Any = dist.AllreduceOptions()
        plain.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        self._inner.allreduce([whole], plain).wait()
        part = whole.view(-1).chunk(self.size())[self.rank()].view(output.shape)
        output.copy_(part / self.size() if is_mean else part)
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self._inner.barrier().wait()
        return _done([])
