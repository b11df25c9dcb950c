"""A mixture of experts whose experts are spread over the data-parallel ranks (expert parallelism).

Each rank routes its own tokens; an all-to-all brings every token to the rank that holds its expert and
back. So experts are state that is not replicated over data parallelism: no rank holds another's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.joint import feed_forward, joins
from flashckpt.trainer.model.operators import swiglu
from flashckpt.trainer.model.router_loss import RouterLoad, RouterLoss, choose

_ALIGNED_BYTES = 16
"""Rows of what is multiplied begin at multiples of it."""


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Apply linear layer i to the i-th run of rows: (N, D), (experts, F, D) -> (N, F).

    Args:
        x: Rows, one run after the other.
        weights: Of all layers, each as `nn.Linear` has it.
        ends: (experts,), int32: behind the last row of each run.
    """
    return _grouped(x, weights, ends) if x.dtype == torch.bfloat16 else _uncompiled(x, weights, ends)


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; its compiler knows the product of bfloat16 alone (2.13)
def _uncompiled(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _grouped(x, weights, ends)


def obstacle(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """Return why there is no grouped product, for people; "" where there is.

    Args:
        device: On which it would be computed.
        dtype: In which.
        widths: Elements of the rows that would be multiplied.
    """
    if device.type == "meta":
        return "nothing is computed"
    uneven = [width for width in widths if width * dtype.itemsize % _ALIGNED_BYTES]
    if uneven:
        return f"rows of {uneven[0]} elements of {dtype.itemsize} bytes are no multiple of {_ALIGNED_BYTES} bytes"
    return _tried(device.type, dtype)


@functools.cache
def _tried(kind: str, dtype: torch.dtype) -> str:
    """Compute a small product both ways, forward and backward. Releases of torch differ in what they have."""
    draw = torch.Generator().manual_seed(0)  # the run's own numbers stay as they are
    x, weights, grad = (
        torch.randn(shape, generator=draw).to(kind, dtype).requires_grad_() for shape in ((8, 16), (3, 32, 16), (8, 32))
    )
    counts, ends = (3, 0, 5), torch.tensor([3, 3, 8], dtype=torch.int32, device=kind)
    try:
        with torch.enable_grad():
            found = grouped_linear(x, weights, ends)
            wanted = torch.cat(
                [F.linear(rows, one) for rows, one in zip(torch.split(x, list(counts)), weights, strict=True)]
            )
            mine, theirs = (torch.autograd.grad(out, [x, weights], grad.detach()) for out in (found, wanted))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} has none: {str(error).splitlines()[0][:100]}"
    pairs = zip((found, *mine), (wanted, *theirs), strict=True)
    near = all(torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2) for one, other in pairs)
    return "" if near else f"that of torch {torch.__version__} gives other results on this device"


EXPERT_WEIGHTS = ("experts.w1", "experts.w2", "experts.w3")


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.joint = True

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.joint and joins(x, self.w1, self.w2, self.w3):
            return feed_forward(x, self.w1.weight, self.w2.weight, self.w3.weight)
        return self.w2(swiglu(self.w1(x), self.w3(x)))  # type: ignore[no-any-return]  # nn.Module calls are Any


class Experts(nn.Module):
    """SwiGLU experts as three 3-D weights, first dimension the expert, then as `nn.Linear` has them: out, in.

    Attributes:
        obstacle: Why experts are computed one after another; "": they are computed as one grouped product.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))
        self.obstacle = "nothing was chosen"

    def choose_product(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute experts together where torch can for their sizes on this rank, the device and the type."""
        self.obstacle = obstacle(device, dtype, _widths(self.w1))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply local expert i to the i-th run of rows.

        Args:
            x: (N, D), rows sorted by local expert.
            counts: Rows of each local expert, integers; they add up to N.
        """
        w1, w2, w3 = (_local(weight).to(x.dtype) for weight in (self.w1, self.w2, self.w3))
        if not self.obstacle and len(x):
            ends = counts.cumsum(0).to(torch.int32)
            return grouped_linear(swiglu(grouped_linear(x, w1, ends), grouped_linear(x, w3, ends)), w2, ends)
        runs = enumerate(torch.split(x, counts.tolist()))
        return torch.cat([F.linear(swiglu(F.linear(rows, w1[i]), F.linear(rows, w3[i])), w2[i]) for i, rows in runs])


class MixtureOfExperts(nn.Module):
    """Top-k softmax routing over `config.experts` experts; `group` holds them, None means all are here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config.dim, config.shared_ffn) if config.shared_ffn else None
        self.shared_gate = nn.Linear(config.dim, 1, bias=False) if config.shared_ffn else None
        self.number, self.top_k, self.normalized = config.experts, config.experts_per_token, config.normalize_experts
        self.group: dist.ProcessGroup | None = None
        self.router_loss, self.router_load = RouterLoss(config), RouterLoad()
        self.router_bias: Tensor | None
        self.register_buffer("router_bias", torch.zeros(config.experts) if config.router_bias_rate else None)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat).float()
        weight, chosen = choose(torch.softmax(logits, -1), self.top_k, self.router_bias)
        if self.normalized:
            weight = weight / weight.sum(-1, keepdim=True)
        order = torch.argsort(chosen.reshape(-1), stable=True)  # rows by expert
        rows = flat[order // self.top_k]
        counts = torch.bincount(chosen.reshape(-1), minlength=self.number)
        if self.training:
            self.router_load.add(counts)
        done = self.experts(rows, counts) if self.group is None else self._exchange(rows, counts)
        done = done * weight.to(x.dtype).reshape(-1)[order][:, None]
        out = torch.zeros_like(flat).index_add(0, order // self.top_k, done)
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(flat)) * self.shared(flat)
        return (self.router_loss.carried(out, logits, counts) if self.training else out).view_as(x)

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send each row to the rank of its expert, apply it there, and bring it back. Collective over `group`."""
        assert self.group is not None
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)  # [source rank, local expert]
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = theirs.view(ranks, -1).sum(1).tolist()
        here = all_to_all_single_autograd(rows, got, sent, self.group)
        expert = torch.arange(self.number // ranks, device=rows.device).repeat(ranks).repeat_interleave(theirs)
        order = torch.argsort(expert, stable=True)
        done = self.experts(here[order], theirs.view(ranks, -1).sum(0))
        back: Tensor = all_to_all_single_autograd(done[torch.argsort(order)], sent, got, self.group)
        return back


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Give each data-parallel rank its experts, as DTensors; return their parameters.

    Args:
        module: A model part on the meta device.
        mesh: ("dp_replicate", "dp_shard", "tp"): experts are repeated over the first and cut over the second; over the
            third each expert's inner features are cut.
    """
    _share_experts(module, mesh, mesh["dp_shard"].get_group())
    return {weight for experts in experts_of(module) for weight in _placed(experts, mesh, [Replicate(), Shard(0)])}


def place_experts(module: nn.Module, mesh: DeviceMesh, own: DeviceMesh) -> None:
    """Give each rank of `own` its experts, as DTensors, to be cut further by FSDP.

    Args:
        module: A model part on the meta device.
        mesh: ("dp_replicate", "dp_shard", "tp"), all ranks that have tokens.
        own: ("ep", "tp"): experts are cut over the first, and each expert's inner features over the second.
    """
    _share_experts(module, mesh, own["ep"].get_group() if own["ep"].size() > 1 else None)
    for experts in experts_of(module):
        _placed(experts, own, [Shard(0)])


def experts_of(module: nn.Module) -> Iterator[Experts]:
    """Yield the experts of each layer of a model part."""
    return (layer for layer in list(module.modules()) if isinstance(layer, Experts))


def _share_experts(module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup | None) -> None:
    for layer in module.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.group = group
            layer.router_loss.groups = [mesh.get_group(dim) for dim in (0, 1) if mesh.size(dim) > 1]


def _placed(experts: Experts, mesh: DeviceMesh, outer: list[Placement]) -> list[nn.Parameter]:
    """Make weights DTensors, placed as `outer` says, and along the last dimension of the mesh by inner features."""
    for name, weight in list(experts.named_parameters()):
        placements: list[Placement] = [*outer, Shard(2 if name == "w2" else 1)]
        lengths = list(weight.shape)
        for placement, ranks in zip(placements, mesh.shape, strict=True):
            if isinstance(placement, Shard):
                lengths[placement.dim] //= ranks
        part = torch.empty(lengths, dtype=weight.dtype, device=weight.device)
        whole = DTensor.from_local(part, mesh, placements, run_check=False)
        experts.register_parameter(name, nn.Parameter(whole))
    return list(experts.parameters())


def choose_products(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let the experts of a model part be computed together where that can be."""
    for experts in experts_of(module):
        experts.choose_product(device, dtype)


def described_products(module: nn.Module) -> str:
    """Return how the experts of a model part are computed, for people; "" where it has none."""
    for experts in experts_of(module):
        why = experts.obstacle
        return f"experts are computed one after another: {why}" if why else "experts are computed as grouped products"
    return ""


def average_expert_gradients(module: nn.Module) -> None:
    """Turn the sums that experts hold after backward into means over all data-parallel ranks. Collective.

    Where FSDP cuts experts, they hold means over the ranks with the same experts, of sums over those that share them.
    """
    for experts in experts_of(module):
        for weight in experts.parameters():
            if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):
                mesh, local = weight.device_mesh, weight.grad.to_local()
                if isinstance(experts, FSDPModule):
                    local.div_(_size(mesh, "ep"))
                    continue
                if mesh.size(0) > 1:
                    dist.all_reduce(local, group=mesh.get_group(0))
                local.div_(mesh.size(0) * mesh.size(1))


def _widths(weight: Tensor) -> list[int]:
    """Return the lengths of an expert's first weight as products have it: inner features of this rank, and D."""
    inner, outer = weight.shape[1:]
    return [inner // (_size(weight.device_mesh, "tp") if isinstance(weight, DTensor) else 1), outer]


def _size(mesh: DeviceMesh, name: str) -> int:
    return mesh.size((mesh.mesh_dim_names or ()).index(name))


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
