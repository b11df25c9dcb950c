"""Applies a layout to the model: mesh, pipeline stages, tensor + sequence parallel, FSDP2 / HSDP / DDP.

Order: build the stage on the meta device -> float8 -> tensor parallel -> activation checkpointing -> torch.compile -> data parallel ->
memory for what this rank holds. Nothing is filled here: a restore, a folder of weights or `Parallel.fill` does that, once.
The mesh always has four dimensions, size-1 ones kept. Where there is one data-parallel rank, `fully_shard` has nothing to
shard and is left out: it would copy every weight twice and every gradient once in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Shard

from flashckpt import entry_points
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.context import ContextSlice
from flashckpt.trainer.model.initial import fill, materialise
from flashckpt.trainer.model.moe import choose_products, experts_of, place_experts, spread_experts
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.layout import SPLIT_BACKWARD, Layout, expert_dimension, needs_fsdp
from flashckpt.trainer.parallel.switches import recompute_of
from flashckpt.trainer.parallel.tensor import tensor_parallel
from flashckpt.trainer.parallel.tied import is_tied_head


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What goes through the stages for one micro-batch, as tensors without data.

    Attributes:
        tokens: What the first stage takes.
        hidden: What a stage hands to the next.
        logits: What the last stage gives, with `loss_chunk` losses; None where they stay a DTensor.
    """

    tokens: Tensor
    hidden: Tensor
    logits: Tensor | None

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> MicroBatch:
        """Return that of a run."""
        rows, seq_len = layout.local_batch // layout.micro_batches, config.train.seq_len // layout.cp
        half = half_type(config)
        # FSDP casts the parameters and with them all activations; under autocast the sums between blocks stay float32
        is_cast = half is not None and config.parallel.data_parallel == "fsdp"
        hidden = half if is_cast else torch.float32
        logits = torch.float32 if config.train.loss_chunk else half or torch.float32
        last = (rows, seq_len) if config.train.loss_chunk else (rows, seq_len, config.model.vocab)
        length = seq_len // (layout.tp if config.parallel.sequence_parallel else 1)
        is_sharded = config.parallel.loss_parallel and layout.tp > 1
        with torch.device("meta"):
            return cls(
                tokens=torch.empty(rows, seq_len, dtype=torch.int64),
                hidden=torch.empty(rows, length, config.model.dim, dtype=hidden, requires_grad=True),
                logits=None if is_sharded else torch.empty(last, dtype=logits, requires_grad=True),
            )

    def ends(self, *, is_first: bool, is_last: bool) -> dict[str, Any]:
        """Return arguments of a PipelineStage: {} lets torch find the shapes by a trial micro-batch through all stages."""
        if self.logits is None:
            return {}
        return {
            "input_args": self.tokens if is_first else self.hidden,
            "output_args": self.logits if is_last else self.hidden,
        }


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """What one rank holds of a parallel model.

    Attributes:
        parts: One Transformer per local stage (DDP-wrapped under data_parallel = ddp).
        stages: Global stage number of each part.
        dp_rank: Which slice of the global batch this rank reads.
        replica: Its index along dp_replicate; with `parallel.sync_every`, of its group.
        has_first: Whether a part takes tokens; has_last: whether one computes the loss.
        micro_batch: What goes through the stages.
        tied: Whether the head is tied to the embedding.
        reporter: Whether this is the one rank that writes traces: last stage, data rank 0, tensor rank 0.
        context: Which part of its rows this rank holds; None: all.
    """

    layout: Layout
    mesh: DeviceMesh
    device: torch.device
    parts: list[nn.Module]
    stages: tuple[int, ...]
    dp_rank: int
    replica: int
    has_first: bool
    has_last: bool
    micro_batch: MicroBatch
    tied: bool
    reporter: bool
    context: ContextSlice | None = None

    @property
    def group(self) -> int:
        """The number of this rank's group among those that train apart; 0 where all ranks train together."""
        return self.replica if self.layout.groups > 1 else 0

    def coordinate(self, name: str) -> int:
        """Return this rank's coordinate along one mesh dimension."""
        return int(self.mesh[name].get_local_rank())

    def schedule(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """Return the torch pipeline schedule over the local stages, which computes `loss` in the last.

        It leaves gradients summed over the micro-batches: `TrainStep` divides them.
        """
        group = self.mesh["pp"].get_group()
        count = self.layout.stages
        built = []
        for stage, part in zip(self.stages, self.parts, strict=True):
            ends = self.micro_batch.ends(is_first=stage == 0, is_last=stage == count - 1)
            built.append(PipelineStage(part, stage, count, self.device, group=group, **ends))
        cls: Any = get_schedule_class(self.layout.schedule)
        held: Any = built[0] if self.layout.stages_per_rank == 1 else built
        return cls(held, n_microbatches=self.layout.micro_batches, loss_fn=loss, scale_grads=False)

    def forward_only(self, tokens: Sequence[Tensor], documents: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Return the last stage's outputs (empty where it is not), one per micro-batch, under any schedule. Collective.

        Stage after stage, all micro-batches of one before the next: the pipelines of torch that go backward in two halves
        cannot leave the backward out.

        Args:
            tokens: Inputs of the first stage, one tensor per micro-batch, all of one shape; rows may be shorter than in training.
            documents: Which document each token is of, for every stage; None: a row is one document.
        """
        rows = documents or [None] * len(tokens)
        group, owner, here = self.mesh["pp"].get_group(), self.layout.rank_of_stage, self.coordinate("pp")
        values, sends = list(tokens), []
        rows_of, length = tokens[0].shape
        hidden = self.micro_batch.hidden
        shape = (rows_of, length * hidden.shape[1] // self.micro_batch.tokens.shape[1], hidden.shape[2])
        for stage, part in zip(self.stages, self.parts, strict=True):  # ascending
            came_from = None if stage == 0 else owner(stage - 1)
            goes_to = None if stage == self.layout.stages - 1 else owner(stage + 1)
            for number in range(len(values)):
                if came_from not in (None, here):
                    values[number] = torch.empty(shape, dtype=hidden.dtype, device=self.device)
                    dist.recv(values[number], group=group, group_src=came_from)
                values[number] = part(values[number], rows[number]).contiguous()
                if goes_to not in (None, here):
                    sends.append(dist.isend(values[number], group=group, group_dst=goes_to))
        for send in sends:
            assert send is not None, "None is for ranks outside the group"
            send.wait()
        self.reshard()
        return values if self.has_last else []

    def reshard(self) -> None:
        """Free what a forward without backward left gathered: `parameters()` would be those, and miss a restore or zero_grad."""
        for module in (module for part in self.parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def fill(self, config: RunConfig) -> int:
        """Fill this rank's weights with the initial ones of the run; return the elements written."""
        return sum(fill(part, config.model, config.train.seed) for part in self.bare_parts())

    def counted_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all local parts without a head that is tied to the embedding."""
        named = [pair for part in self.parts for pair in part.named_parameters()]
        return [parameter for name, parameter in named if not (self.tied and is_tied_head(name))]

    def bare_parts(self) -> list[nn.Module]:
        """Return the parts without DDP around them."""
        ddp = nn.parallel.DistributedDataParallel
        return [part.module if isinstance(part, ddp) else part for part in self.parts]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all local parts, in a fixed order."""
        return [parameter for part in self.parts for parameter in part.parameters()]


def build_parallel(config: RunConfig, layout: Layout, device: torch.device) -> Parallel:
    """Build this rank's part of the model. Collective: every rank of the world calls it.

    On the meta device nothing gets memory: what a rank would hold (`dry_run`).
    """
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    mesh = init_device_mesh("cpu" if device.type == "meta" else device.type, sizes, mesh_dim_names=layout.mesh_names)
    if (adopt := entry_points.optional("rehearsed-plans")) is not None:
        adopt(mesh)
    pp_rank = mesh["pp"].get_local_rank()
    replica = int(mesh[layout.mesh_names[1]].get_local_rank())
    data_rank = replica * layout.dp_shard + mesh["dp_shard"].get_local_rank()
    dp_rank, context = data_rank // layout.cp, _context(config, layout)
    stages = layout.stages_of(pp_rank)
    has_last = layout.stages - 1 in stages
    return Parallel(
        layout=layout,
        mesh=mesh,
        device=device,
        parts=[_build_part(config, layout, mesh, device, stage, context=context) for stage in stages],
        stages=stages,
        dp_rank=dp_rank,
        replica=replica,
        has_first=0 in stages,
        has_last=has_last,
        micro_batch=MicroBatch.of(config, layout),
        tied=config.model.tied_embeddings,
        reporter=has_last and data_rank == 0 and mesh["tp"].get_local_rank() == 0,
        context=context,
    )


def _context(config: RunConfig, layout: Layout) -> ContextSlice | None:
    """Return which part of its rows this rank holds. Collective; no mesh dimension: to parameters its ranks are data-parallel."""
    if layout.cp == 1:
        return None
    together = torch.arange(layout.world).view(-1, layout.cp, layout.tp).transpose(1, 2).reshape(-1, layout.cp).tolist()
    timeout = timedelta(seconds=config.parallel.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration(together, timeout=timeout)  # type: ignore[no-untyped-call]  # untyped in torch
    return ContextSlice(dist.get_rank() // layout.tp % layout.cp, layout.cp, group)


def build_stage(config: RunConfig, layout: Layout, stage: int) -> Transformer:
    """Return one stage on the meta device, not yet sharded."""
    with torch.device("meta"):
        return Transformer(
            config.model,
            config.train.seq_len,
            layers=layout.stage_layers[stage],
            first=stage == 0,
            last=stage == layout.stages - 1,
        )


def _build_part(
    config: RunConfig,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    stage: int,
    *,
    context: ContextSlice | None = None,
) -> nn.Module:
    part = build_stage(config, layout, stage)
    part.context = context
    if config.train.float8 != "off":
        entry_points.load(entry_points.EXTRAS, "float8-convert").convert_layers(part, config, layout.tp, device)
    if layout.tp > 1:
        tensor_parallel(part, mesh["tp"], config)
    part.set_recompute(recompute_of(config.parallel), offload=config.parallel.activation_offload)
    part.loss_chunk = config.train.loss_chunk
    if layout.schedule in SPLIT_BACKWARD and layout.pp > 1:
        part.split_layers()
    part.uses_flex, part.uses_ring = config.train.attention == "flex", config.parallel.cp_exchange == "ring"
    if config.train.compile:
        part.compile_blocks()
    if config.parallel.data_parallel == "ddp":
        return _replicated(part, mesh, device, config)
    if needs_fsdp(config, layout):
        _fully_shard(part, mesh, config, layout)
    choose_products(part, device, half_type(config) or torch.float32)
    materialise(part, torch.device("cpu") if is_offloaded(config) and device.type != "meta" else device)
    return part


def _replicated(part: Transformer, mesh: DeviceMesh, device: torch.device, config: RunConfig) -> nn.Module:
    materialise(part, device)
    if half := half_type(config):
        # Float32 parameters, gradients and activations between blocks; half precision in every product. Forward only:
        # the backward of an operator runs in the type of its forward.
        part.forward = torch.autocast(mesh.device_type, dtype=half)(part.forward)  # type: ignore[method-assign]  # as torch documents it
    # find_unused_parameters: the buckets are then never rebuilt after the first backward, and a
    # resumed run adds gradients in the same order as the unbroken one.
    group = mesh["dp_replicate"].get_group()
    replicas = nn.parallel.DistributedDataParallel(
        part,
        process_group=group,
        bucket_cap_mb=config.parallel.bucket_mb,
        find_unused_parameters=True,
        init_sync=device.type != "meta",
    )
    if config.parallel.reduce_dtype == "bfloat16":
        # under its own name torch refuses it on CPUs, where gloo adds up bfloat16
        replicas.register_comm_hook(group, lambda among, bucket: bf16_compress_hook(among, bucket))  # noqa: PLW0108 -- see above
    return replicas


def _fully_shard(part: Transformer, mesh: DeviceMesh, config: RunConfig, layout: Layout) -> None:
    is_hybrid = layout.dp_replicate > 1 and layout.groups == 1
    dp_mesh = mesh["dp_replicate", "dp_shard"] if is_hybrid else mesh["dp_shard"]
    half = half_type(config)
    # The sharded float32 parameter is the master copy: one copy is held and stored, not two.
    added = torch.bfloat16 if config.parallel.reduce_dtype == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=added if half or added != torch.float32 else None)
    options: dict[str, Any] = {"mp_policy": policy}
    if is_offloaded(config):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    # with pipelines, gathering again for every micro-batch costs more than it frees
    reshard = layout.pp == 1 and config.parallel.zero in (-1, 3)
    if layout.edp > 1:
        _cut_experts(part, mesh, config, layout, {**options, "reshard_after_forward": reshard})
        options["mesh"] = dp_mesh
    else:
        experts = spread_experts(part, mesh[layout.mesh_names[1:]]) or None
        options |= {"mesh": dp_mesh, "ignored_params": experts}
    for block in part.layers.values():
        fully_shard(block, reshard_after_forward=reshard, **options)
    # The head is the first that backward needs: to free it after forward would be to gather it twice.
    fully_shard(part, reshard_after_forward=False, **options)


def _cut_experts(
    part: Transformer, mesh: DeviceMesh, config: RunConfig, layout: Layout, options: dict[str, Any]
) -> None:
    """Give experts to each of `ep` ranks, and cut them over those that have the same: FSDP gathers them there alone."""
    split = mesh._unflatten("dp_shard", (layout.edp, layout.ep), ("edp", "ep"))  # noqa: SLF001 -- torch has no public name for it
    over = split["dp_replicate", "edp"] if layout.dp_replicate > 1 else split["edp"]
    cut = Shard(expert_dimension(config.model.experts, layout.dp_shard))
    place_experts(part, mesh[layout.mesh_names[1:]], split["ep", "tp"])
    for experts in experts_of(part):
        fully_shard(experts, mesh=over, shard_placement_fn=lambda _: cut, **options)


def half_type(config: RunConfig) -> torch.dtype | None:
    """Return the type that products are computed in, where it is not that of the parameters."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.train.precision)


def is_offloaded(config: RunConfig) -> bool:
    """Return whether parameters, gradients and optimizer state lie in host memory."""
    return config.parallel.offload == "state"


def set_gradient_sync(part: nn.Module, *, last: bool, zero: int) -> None:
    """Choose what the next backward does with gradients and parameters.

    Args:
        part: A part of the model.
        last: Whether it is that of the step's last micro-batch.
        zero: `parallel.zero`: from 2 gradients are cut after each micro-batch, else after the last; up to 2 parameters stay
            whole until then.
    """
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(last or zero >= 2)
        part.set_reshard_after_backward(last or zero not in (0, 1, 2))
    elif isinstance(part, nn.parallel.DistributedDataParallel):
        part.require_backward_grad_sync = last


def local_tensor(value: Tensor) -> Tensor:
    """Return the local part of a DTensor, or the tensor itself; no communication."""
    return value.to_local() if isinstance(value, DTensor) else value
