"""Tensor and sequence parallelism of one stage: which weights are cut how, and what is computed on local tensors."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.moe import MixtureOfExperts
from flashckpt.trainer.model.operators import rms_norm
from flashckpt.trainer.model.transformer import Transformer


def tensor_parallel(part: Transformer, mesh: DeviceMesh, config: RunConfig) -> None:
    """Cut a stage over the "tp" dimension of the mesh."""
    sequence = config.parallel.sequence_parallel
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if part.norm is not None:
        plan["norm"] = LocalNorm(sharded=sequence)
        keep = config.parallel.loss_parallel
        plan["output"] = ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if keep else Replicate(), use_local_output=not keep
        )
    parallelize_module(part, mesh, plan)
    if part.tok_embeddings is not None and config.train.compile:
        part.tok_embeddings.register_forward_hook(_arrived)
    for block in part.layers.values():
        plan = _block_plan(config.model, sequence=sequence)
        if config.model.kv_heads % mesh.size():
            plan |= {f"attention.{name}": SharedHeads(config.model) for name in ("wk", "wv")}
        parallelize_module(block, mesh, plan)


def _block_plan(model: ModelConfig, *, sequence: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
    }
    if model.experts:
        plan["feed_forward"] = LocalExperts(stream)
    else:
        plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
        plan["feed_forward.w2"] = RowwiseParallel(output_layouts=stream)
    if model.qk_norm:  # each rank normalises its own heads
        plan |= {f"attention.{name}": LocalNorm(sharded=True) for name in ("q_norm", "k_norm")}
    plan |= {"attention_norm": LocalNorm(sharded=sequence), "ffn_norm": LocalNorm(sharded=sequence)}
    if not sequence:
        return plan
    plan["attention"] = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    if not model.experts:
        plan["feed_forward"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return plan


def _arrived(_module: nn.Module, _tokens: Any, stream: Tensor) -> Tensor:
    """Return a plain tensor, which a copy of one that is still to arrive is: of that, torch 2.13 compiles a wrong backward."""
    return stream.clone()


class LocalNorm(ParallelStyle):
    """A norm of the tokens that this rank holds: it needs no other rank, so it is computed on local tensors.

    As DTensors its dozen small operators, and theirs backward, would be planned again in every process. Only the weight
    is one, replicated: every parameter then lies on the same mesh (one optimizer, one gradient norm).

    Args:
        sharded: Whether the ranks hold different tokens (sequence parallel): gradients of the weight are then parts of a sum.
    """

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        self._grad = Partial() if sharded else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = DTensor.from_local(
            module.get_parameter("weight").detach(), device_mesh, [Replicate()], run_check=False
        )
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = functools.partial(_norm, module, self._grad)
        return module


def _norm(module: Any, grad: Placement, tokens: Tensor) -> Tensor:
    weight = module.weight.to_local(grad_placements=[grad])
    return rms_norm(tokens, weight, module.eps)


class SharedHeads(ParallelStyle):
    """Keys or values whose heads do not divide over the ranks.

    Every rank holds all weights, and computes the heads that its queries meet: one for all of them, or one for each.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._model = model

    def heads_of(self, rank: int, ranks: int) -> list[int]:
        """Return the heads that a rank computes."""
        queries, shared = self._model.heads // ranks, self._model.heads // self._model.kv_heads
        met = [query // shared for query in range(rank * queries, (rank + 1) * queries)]
        return met[:1] if len(set(met)) == 1 else met

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, _cut(parameter, device_mesh, Replicate()))
        heads = self.heads_of(device_mesh.get_local_rank(), device_mesh.size())
        module.forward = functools.partial(_some_heads, module, heads, self._model.head_size, device_mesh)
        return module


def _some_heads(module: Any, heads: list[int], size: int, mesh: DeviceMesh, x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    weight, bias = module.weight.to_local(grad_placements=[Partial()]), None
    weight = weight.unflatten(0, (-1, size))[heads].flatten(0, 1)
    if module.bias is not None:
        bias = module.bias.to_local(grad_placements=[Partial()]).unflatten(0, (-1, size))[heads].flatten()
    return nn.functional.linear(x.to_local(grad_placements=[Partial()]), weight, bias)


class LocalExperts(ParallelStyle):
    """A mixture of experts of which each rank computes a part of every expert's inner features, for all tokens.

    Inside, all tensors are local: what goes in is gathered, what comes out is a part of a sum, and so are the gradients
    of the input and of the weights that every rank holds (router, gate of the shared expert).
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, MixtureOfExperts)
        module.router_loss.holders = device_mesh.size()
        for gate in (module.router, module.shared_gate):
            if gate is not None:
                gate.register_parameter("weight", _cut(gate.weight, device_mesh, Replicate()))
                gate.forward = functools.partial(_linear, gate, Partial())  # type: ignore[method-assign]  # as LocalNorm
        if module.shared is not None:
            for linear, dim in ((module.shared.w1, 0), (module.shared.w3, 0), (module.shared.w2, 1)):
                linear.register_parameter("weight", _cut(linear.weight, device_mesh, Shard(dim)))
                linear.forward = functools.partial(_linear, linear, None)  # type: ignore[method-assign]  # as above
        module.forward = functools.partial(self._forward, module.forward, device_mesh)  # type: ignore[method-assign]  # as above
        return module

    def _forward(self, forward: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [self._stream], run_check=False).redistribute(placements=[Replicate()])
        out = forward(whole.to_local(grad_placements=[Partial()]))
        return (
            DTensor.from_local(out, mesh, [Partial()], run_check=False)
            .redistribute(placements=[self._stream])
            .to_local()
        )


def _cut(weight: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local = weight.detach()
    if isinstance(placement, Shard):
        local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


def _linear(module: Any, grad: Placement | None, x: Tensor) -> Tensor:
    weight = module.weight.to_local(grad_placements=None if grad is None else [grad])
    return nn.functional.linear(x, weight)
