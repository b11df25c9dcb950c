"""A fresh optimizer's state as the optimizer itself would make it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashckpt.state import optimizer_entries

PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [_StridedShard(0, split_factor=3), Shard(0)],
    [Replicate(), Shard(1)],
    [Replicate(), Replicate()],
]


@pytest.fixture(params=[0, 5])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    try:
        yield init_device_mesh("cpu", (2, 3))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "whole", [torch.zeros(7, 5), torch.zeros(5, 7).t(), torch.zeros(2, 9)], ids=["uneven", "turned", "empty"]
)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_state_of_a_sharded_parameter_lies_as_torch_would_lay_it(
    mesh: DeviceMesh, placements: list[Placement], whole: torch.Tensor
) -> None:
    if isinstance(placements[0], _StridedShard) and whole.shape[0] % 6:
        whole = torch.zeros(12, 5)  # as fully_shard lays it beside tensor parallelism
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
    made = optimizer_entries.allocate(
        param, "exp_avg", shape=tuple(param.shape), dtype=torch.float64, group={}, fqn="weight"
    )
    wanted = torch.empty_like(param, dtype=torch.float64, requires_grad=False)
    assert isinstance(made, DTensor)
    assert isinstance(wanted, DTensor)
    assert made._spec == wanted._spec
    assert made.to_local().shape == wanted.to_local().shape
    assert made.to_local().stride() == wanted.to_local().stride()
    assert (made.dtype, made.requires_grad, made.is_leaf) == (torch.float64, False, True)
