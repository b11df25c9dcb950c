"""One rank that does not exist: built as every rank is, on a process group without others and the meta device, and counted.

What `plan` and the dry run compute is compared with it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashckpt.core.shard import ITEMSIZE
from flashckpt.core.superblock import SegmentSpec
from flashckpt.sampler import ElasticSampler
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.structure import Structure
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.moe import EXPERT_WEIGHTS
from flashckpt.trainer.optim.average import OuterOptimizer, WeightAverage
from flashckpt.trainer.optim.builders import build_optimizers
from flashckpt.trainer.parallel.apply import Parallel, build_parallel, local_tensor
from flashckpt.trainer.parallel.groups import group_label
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.held import SLOTS
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.record import RunRecord
from flashckpt.trainer.train.starting import weights_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHoldings:
    """What one rank holds, in bytes.

    Attributes:
        parameters, gradients, optimizer: On the device.
        slot_data: Of one snapshot: parameters, optimizer state, and what aligns them.
        slot: Of one snapshot in memory, with its header and its manifest; that depends a little on random states.
        shared: Of one checkpoint: tensors that ranks of this pipeline rank hold together, each counted once.
        own: Of one checkpoint: tensors of this rank alone.
        block, rest, whole: Elements that FSDP gathers: of the largest block, outside of blocks, and of all of them.
    """

    parameters: int
    gradients: int
    optimizer: int
    slot_data: int
    slot: int
    shared: int
    own: int
    block: int
    rest: int
    whole: int


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[torch.device]:
    """Be one rank of a process group whose collectives do nothing; yield the meta device."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield torch.device("meta")
    finally:
        dist.destroy_process_group()


def built_rank(config: RunConfig, layout: Layout, rank: int) -> RankHoldings:
    """Return what a rank of a run holds, built by a forked process: torch keeps plans by mesh, wrong for another rank."""
    reader, writer = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(writer, "w") as pipe:
                json.dump(asdict(_held_by(config, layout, rank)), pipe)
        except BaseException:  # noqa: BLE001 -- nothing may return into a copy of the test
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    assert raw, f"rank {rank} could not be built; its process has said why"
    return RankHoldings(**json.loads(raw))


def _held_by(config: RunConfig, layout: Layout, rank: int) -> RankHoldings:
    """The process must be in no process group, and build no other rank."""
    # holds the same without, the compiler loads for seconds, and torchao need not be there
    config = replace(config, train=replace(config.train, compile=False, float8="off"))
    with fake_rank(rank, layout.world) as device:
        parallel = build_parallel(config, layout, device)
        optimizers = build_optimizers(config.optim, parallel.parts, tied=config.model.tied_embeddings)
        tracked = StateRegistry(current_world(parallel.mesh), plans_only=True)
        outer = OuterOptimizer(config.parallel, parallel, last=config.train.steps) if layout.groups > 1 else None
        for name, thing in weights_of(parallel, outer).items():
            if thing is not None:
                tracked.add(name, thing)
        tracked.add("optimizer", optimizers)
        if config.ema.decay:
            tracked.add("ema", WeightAverage(config.ema, parallel.bare_parts()).modules)
        sampler = ElasticSampler(1 << 40, dp_rank=parallel.dp_rank, dp_size=layout.dp, global_batch_size=layout.dp)
        for name, thing in {"sampler": sampler, "run": RunRecord(config), "guard": Guard(config.guard)}.items():
            tracked.add(name, thing)
        tracked.rng = True
        structure, captured = tracked.settled(ahead=True)
        need = tracked.layout().need(len(repr(captured.values)))
        spec = SegmentSpec(
            job="", root_digest=0, rank=rank, slots=SLOTS, layout_hash=need.layout,
            manifest_capacity=need.manifest_bytes, data_capacity=need.data_bytes,
        )  # fmt: skip
        whole = structure.with_forecast()
        parameters = sum(_nbytes(parameter) for parameter in parallel.parameters())
        return RankHoldings(
            parameters=parameters,
            gradients=sum(_nbytes(parameter) for parameter in parallel.parameters() if parameter.requires_grad),
            optimizer=sum(_on_rank(whole, f"{label}.") for label in _beside_weights(layout)),
            slot_data=spec.data_capacity,
            slot=spec.slot_bytes,
            shared=_in_checkpoint(whole, own=False, groups=layout.groups),
            own=_in_checkpoint(whole, own=True),
            **_gathered(parallel),
        )


def _beside_weights(layout: Layout) -> tuple[str, ...]:
    """Return what is tracked of the optimizers; where groups train apart, also the weights that they had in common last."""
    return ("optimizer", "ema", "outer", *(("model",) if layout.groups > 1 else ()))


def _nbytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def _on_rank(structure: Structure, prefix: str) -> int:
    pairs = zip(structure.names, structure.sets.tolist(), strict=True)
    return sum(structure.box_sets[number].nbytes for name, number in pairs if name.startswith(prefix))


def _in_checkpoint(structure: Structure, *, own: bool, groups: int = 1) -> int:
    """Return the bytes of whole tensors; `own`: of those that belong to one rank alone, else of the others.

    Where several `groups` train apart, each has tensors like those of this rank's.
    """
    of_group = (f"{group_label(0)}.", "optimizer.") if groups > 1 else ()
    total = 0
    for name, number in zip(structure.names, structure.sets.tolist(), strict=True):
        kind = structure.box_sets[number]
        if (kind.spread.per_rank or "@" in name) == own:
            nbytes = torch.Size(kind.whole[0].global_shape).numel() * ITEMSIZE[kind.dtype]
            total += nbytes * (groups if name.startswith(of_group) else 1)
    return total


def _gathered(parallel: Parallel) -> dict[str, int]:
    """Return the elements that all-gathers bring together: experts stay where they are, unless several ranks have the same."""
    units: Counter[str] = Counter()
    for part in parallel.bare_parts():
        for name, parameter in part.named_parameters():
            if not name.endswith(EXPERT_WEIGHTS) or "ep" in _mesh_names(parameter):
                units[".".join(name.split(".")[:2]) if name.startswith("layers.") else ""] += _whole_of(parameter)
    rest = units.pop("", 0)
    return {"block": max(units.values(), default=0), "rest": rest, "whole": rest + sum(units.values())}


def _whole_of(parameter: Any) -> int:
    """Return the elements of a parameter before data parallelism cuts it."""
    if not isinstance(parameter, DTensor):
        return int(parameter.numel())
    whole = int(parameter.numel())
    for name, placement, ranks in zip(
        _mesh_names(parameter), parameter.placements, parameter.device_mesh.shape, strict=True
    ):
        if name in ("tp", "ep") and not placement.is_replicate():
            whole //= ranks
    return whole


def _mesh_names(parameter: Any) -> tuple[str, ...]:
    return tuple(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
