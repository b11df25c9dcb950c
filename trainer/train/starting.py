"""What a rank makes of its configuration before it trains, what of it is tracked, and why a checkpoint cannot be continued."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flashckpt import entry_points
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.core.manifest import Manifest
from flashckpt.core.superblock import SlotState
from flashckpt.errors import ConfigError, FlashckptError, SamplerStateError, ShardGapError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import job_id, open_in_rank
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import compare, other_data, refuse_changes
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.model.initial import name_seed
from flashckpt.trainer.model.moe import described_products
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.parallel.distributed import device_name
from flashckpt.trainer.parallel.groups import group_label
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import host_memory_switches
from flashckpt.trainer.train.phases import Phase
from flashckpt.trainer.train.record import say_once

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.trainer.optim.average import OuterOptimizer

RECORD = "run"


def training_data(config: RunConfig, seed: int, parallel: Parallel, layout: Layout) -> TrainingData:
    """Return this rank's batches of a phase; `layout` is that of the run."""
    return TrainingData(
        open_data(config, "train"),
        dp_rank=parallel.dp_rank,
        dp_size=layout.dp,
        global_batch=config.train.global_batch,
        rows=resolve_layout(config, layout.world).local_batch,
        seed=seed,
        ahead=config.data.read_ahead,
        pin=parallel.device.type != "cpu",
    )


def seed_rng(config: RunConfig, parallel: Parallel) -> None:
    """Seed torch's generators: for dropout, as far as ranks may drop different activations."""
    # Without sequence parallelism the tensor-parallel ranks hold the same activations: same dropout.
    tp = parallel.coordinate("tp") if config.parallel.sequence_parallel else 0
    name = f"rng:{parallel.coordinate('pp')}:{parallel.dp_rank}:{tp}"
    if parallel.context is not None:  # other tokens of the same rows
        name += f":{parallel.context.rank}"
    torch.manual_seed(name_seed(config.train.seed, name))


def announce(config: RunConfig, layout: Layout, parallel: Parallel) -> None:
    """Log the layout, the plan, and what has no effect."""
    device = parallel.device
    where = f"{config.train.precision} on {device.type}, {config.parallel.data_parallel}"
    say_once(logging.INFO, f"{layout.describe()}; {where}")
    if device.type == "cpu" and (moved := host_memory_switches(config.parallel)):
        say_once(logging.WARNING, f"{moved}: all is in host memory on a CPU: nothing is saved")
    if config.train.float8 != "off":
        float8 = entry_points.load(entry_points.EXTRAS, "float8-convert").described_float8(config, parallel.parts)
        say_once(logging.INFO, float8)
    if products := described_products(parallel.parts[0]):
        say_once(logging.INFO, products)
    if (start_line := entry_points.optional("start-line")) is not None:
        say_once(logging.INFO, start_line(config, layout, device_name(device)))
    if not config.checkpoint.root:
        say_once(logging.WARNING, "no checkpoints are made: checkpoint.root is empty, [checkpoint] has no effect")


def announce_phase(phase: Phase) -> None:
    """Log what a phase changes; the first one changes nothing."""
    if phase.number:
        config = phase.config
        say_once(
            logging.INFO,
            f"phase {phase.number} from step {phase.first_step}: seq_len {config.train.seq_len}, global batch "
            f"{config.train.global_batch}, rope base {config.model.rope_base:g}, lr {config.optim.lr:g}",
        )


def checkpointer(config: RunConfig, parallel: Parallel, outer: OuterOptimizer | None, **tracked: Any) -> Checkpointer:
    """Return a Checkpointer that tracks everything a resume needs: the weights, and what is `tracked` beside them."""
    from flashckpt import Checkpointer

    settings = config.checkpoint
    ckpt = Checkpointer(**{**settings.plain(), "job": settings.job or None})
    fenced = ("ema",) if outer is None else ("model", "outer")  # group weights belong to their optimizer
    ckpt.track(**weights_of(parallel, outer), **tracked, rng=True, fenced=fenced, mesh=parallel.mesh)
    return ckpt


@contextlib.contextmanager
def waiting_for_data(current: Callable[[], Checkpointer | None]) -> Iterator[None]:
    """Expect no step while data is waited for; the `current` checkpointer of a rollback may be closed meanwhile."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FlashckptError):
            if (ckpt := current()) is not None:
                stack.enter_context(ckpt.paused())
        yield


def weights_of(parallel: Parallel, outer: OuterOptimizer | None) -> dict[str, Any]:
    """Return what is tracked of the weights by name: where groups train apart, those of this rank's group are not `model`.

    `model` is what any reader of a checkpoint takes, so it has to be the same in all groups: what they had in common last.
    """
    if outer is None:
        return {"model": parallel.parts}
    momentum = None if outer.momentum is None else outer.momentum.modules
    return {group_label(parallel.group): parallel.parts, "model": outer.anchor.modules, "outer": momentum}


def explain(config: RunConfig, error: FlashckptError) -> None:
    """Raise ConfigError or DataError instead of `error` if a changed setting or other data is the reason."""
    settings = config.checkpoint
    before = recorded_config(settings.root, settings.job or None, settings.storage_options)
    if before is None:
        return
    try:
        refuse_changes(compare(before, config))
    except ConfigError as clearer:
        raise clearer from error
    if isinstance(error, SamplerStateError):
        raise other_data(error) from error


def recorded_config(
    root: str, job: str | None, storage_options: Mapping[str, Any], *, is_near_enough: bool = False
) -> dict[str, Any] | None:
    """Return the recorded values of the newest snapshot or checkpoint; None if none is readable.

    With `is_near_enough` storage is asked only where there is no snapshot in this node's memory.
    """
    found = [*_in_memory(root, job)]
    if not found or not is_near_enough:
        found += _on_storage(root, storage_options)
    newest = max(found, key=lambda manifest: manifest.identity, default=None)
    if newest is None:
        return None
    record = newest.values.get(RECORD)
    return dict(record["config"]) if isinstance(record, dict) and "config" in record else None


def _in_memory(root: str, job: str | None) -> Iterator[Manifest]:
    with contextlib.suppress(FlashckptError, OSError):
        for path in JobDirectory.open(job_id(root, job), create=False).segments():
            with contextlib.suppress(FlashckptError, OSError):
                yield from _of_segment(Segment.attach(path))


def _of_segment(segment: Segment) -> Iterator[Manifest]:
    try:
        for slot, header in enumerate(segment.headers()):
            pin = segment.pin(slot) if header.state == SlotState.COMPLETE else None
            if pin is not None:
                try:
                    yield pin.manifest()
                finally:
                    pin.close()
    finally:
        segment.close()


def _on_storage(root: str, storage_options: Mapping[str, Any]) -> Iterator[Manifest]:
    with contextlib.suppress(FlashckptError, OSError):
        store = open_in_rank(root, storage_options)
        for info in list_checkpoints(store):
            if not info.problem:
                yield read_manifest(store, info)
                return


def has_other_groups(config: RunConfig, device: torch.device) -> bool:
    """Return whether the newest state of the run, as any rank finds it, has another number of groups. Collective.

    A restart looks too: the one before may have died before its first snapshot. Where memory says it, storage is not asked.
    """
    settings = config.checkpoint
    recorded = recorded_config(settings.root, settings.job or None, settings.storage_options, is_near_enough=True) or {}
    before = recorded.get("parallel", {})
    differs = before.get("sync_every", 0) > 0 and before["dp_replicate"] != config.parallel.dp_replicate
    found = torch.tensor([float(differs)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def begin_if_new(outer: OuterOptimizer, parallel: Parallel, missing: Collection[str]) -> bool:
    """Let this rank's group begin with the weights that were synchronised last, if no source has it; return whether it did.

    `outer` is restored already. Its optimizer begins without a history, as that of a group that joins. A group that is no more takes with it what it trained since.

    Raises:
        ShardGapError: other state is missing, or a part of the group's.
    """
    if not missing:
        return False
    label = group_label(parallel.group)
    own = {name for name in missing if name.startswith((f"{label}.", f"optimizer.{label}."))}
    wanted = {f"{label}.{name}" for part in parallel.bare_parts() for name, _ in part.named_parameters()}
    if gaps := sorted({*missing} - own) or sorted(wanted - own):
        raise ShardGapError(
            f"the state of {gaps[0]!r} is incomplete for another number of groups",
            found=f"{len(missing)} of the names of {label} are in no source",
            expected="the complete state of every existing group, and none of a new one",
            state="Nothing was trained; the checkpoint is untouched.",
            remedy="set the recorded parallel.dp_replicate again",
        )
    outer.join()
    return True
