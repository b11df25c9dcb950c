"""Wrappers around models and optimizers: DDP, FSDP, ZeRO, torch.compile, activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from integration.frameworks.case import Program, Start, case, net
from integration.frameworks.modules import WIDTH
from integration.frameworks.optimizers import loss_of

GROUP = "wrappers"


def trained(
    model: nn.Module,
    optimizer: Any,
    start: Start,
    *,
    dtype: torch.dtype = torch.float32,
    tracked: nn.Module | None = None,
    **options: Any,
) -> Program:
    """Return a program in which each rank has a batch of its own."""

    def train(step: int) -> float:
        loss = loss_of(model, WIDTH, 10 * step + start.rank, dtype)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    things = {"model": model if tracked is None else tracked, "optimizer": optimizer}
    return Program(train=train, tracked=things, options=options)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))


def _even(model: nn.Module) -> nn.Module:
    """Broadcast rank 0's weights, as a program does that seeds each rank by itself."""
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    return model


@case(GROUP, "DistributedDataParallel", world=2)
def ddp(start: Start) -> Program:
    model = nn.parallel.DistributedDataParallel(net(WIDTH))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start)


@case(
    GROUP,
    "DistributedDataParallel, batch norm, unused parameters",
    world=2,
    from_rank_0=".running_",
    note="from storage the running averages of all ranks are rank 0's, as DDP broadcasts them before the next forward",
)
def ddp_unused(start: Start) -> Program:
    model = nn.Sequential(net(WIDTH), nn.BatchNorm1d(WIDTH))
    model.register_parameter("spare", nn.Parameter(torch.zeros(100)))
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return trained(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3), start)


@case(GROUP, "DistributedDataParallel, Muon beside AdamW", world=2)
def ddp_muon(start: Start) -> Program:
    model = nn.parallel.DistributedDataParallel(net(WIDTH))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]

    def train(step: int) -> float:
        loss = loss_of(model, WIDTH, 10 * step + start.rank)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizers})


def _zero(start: Start, kind: type, **options: Any) -> Program:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net(WIDTH))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)
    return trained(model, optimizer, start)


@case(GROUP, "DDP with ZeroRedundancyOptimizer over AdamW", world=2, refused="wraps another optimizer")
def zero(start: Start) -> Program:
    return _zero(start, torch.optim.AdamW, lr=1e-3)


@case(
    GROUP,
    "DDP with ZeroRedundancyOptimizer over SGD with momentum, parameters as bucket views",
    world=2,
    refused="wraps another optimizer",
)
def zero_views(start: Start) -> Program:
    return _zero(start, torch.optim.SGD, lr=1e-2, momentum=0.9, parameters_as_bucket_view=True)


def _zero_inside(start: Start) -> Program:
    program = _zero(start, torch.optim.AdamW, lr=1e-3)
    return Program(train=program.train, tracked={**program.tracked, "optimizer": program.tracked["optimizer"].optim})


case(
    GROUP,
    "DDP with ZeroRedundancyOptimizer, the optimizer inside it tracked",
    world=2,
    refused="do not agree who persists",
)(_zero_inside)


@case(GROUP, "FSDP2", world=2)
def fsdp2(start: Start) -> Program:
    from torch.distributed.fsdp import fully_shard

    model, mesh = _even(net(WIDTH)), _mesh()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start, mesh=mesh)


@case(GROUP, "FSDP2, mixed precision (bfloat16 compute, float32 reduction)", world=2, quick=True)
def fsdp2_mixed(start: Start) -> Program:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = _even(net(WIDTH)), _mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start, mesh=mesh)


@case(GROUP, "FSDP2, Muon", world=2)
def fsdp2_muon(start: Start) -> Program:
    from torch.distributed.fsdp import fully_shard

    model, mesh = _even(net(WIDTH, bias=False)), _mesh()
    fully_shard(model, mesh=mesh)
    return trained(model, torch.optim.Muon(model.parameters(), lr=1e-2), start, mesh=mesh)


@case(GROUP, "FSDP2, a frozen layer that is unfrozen", world=2)
def fsdp2_unfrozen(start: Start) -> Program:
    from torch.distributed.fsdp import fully_shard

    model, mesh = _even(net(WIDTH)), _mesh()
    model[0].requires_grad_(requires_grad=False)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    program = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start, mesh=mesh)

    def train(step: int) -> float:
        if step >= 2:
            model[0].requires_grad_(requires_grad=True)
        return program.train(step)

    return Program(train=train, tracked=program.tracked, options=program.options)


def _fsdp1(start: Start, **options: Any) -> Program:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_even(net(WIDTH)), device_id=torch.device("cpu"), **options)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start)


@case(GROUP, "FSDP1 (FullyShardedDataParallel), original parameters", world=2)
def fsdp1(start: Start) -> Program:
    return _fsdp1(start, use_orig_params=True)


@case(GROUP, "FSDP1 (FullyShardedDataParallel), flat parameters", world=2)
def fsdp1_flat(start: Start) -> Program:
    return _fsdp1(start, use_orig_params=False)


@case(GROUP, "tensor parallel", world=2)
def tensor_parallel(start: Start) -> Program:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(_even(model), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    together = Start(restarted=start.restarted, rank=0)  # every rank has the same batch
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), together, mesh=mesh)


@case(GROUP, "DDP with PostLocalSGDOptimizer", world=2, refused="wraps another optimizer")
def local_sgd(start: Start) -> Program:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.parallel.DistributedDataParallel(net(WIDTH))
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return trained(model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=1, warmup_steps=1)), start)


@case(GROUP, "torch.compile of the model (aot_eager)")
def compiled(start: Start) -> Program:
    plain = net(WIDTH)
    model: Any = torch.compile(plain, backend="aot_eager")
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start)


@case(GROUP, "torch.compile in place, and of the optimizer's step (aot_eager)")
def compiled_in_place(start: Start) -> Program:
    model = net(WIDTH)
    model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    step = torch.compile(optimizer.step, backend="aot_eager")

    def train(number: int) -> float:
        loss = loss_of(model, WIDTH, number)
        optimizer.zero_grad()
        loss.backward()
        step()
        return loss.item()

    return Program(train=train, tracked={"model": model, "optimizer": optimizer})


@case(GROUP, "activation checkpointing")
def activation_checkpointing(start: Start) -> Program:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(net(WIDTH)), net(WIDTH))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start)


@case(GROUP, "DataParallel")
def data_parallel(start: Start) -> Program:
    model = nn.DataParallel(net(WIDTH))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), start)
