"""A resume with another number of groups that train apart: `parallel.dp_replicate`, under `parallel.sync_every`.

A group that is new has no state anywhere. It begins as one does that joins: with the weights that all had in common last, and
without a history of its optimizer. A group that is no more takes with it what it trained since then.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from flashckpt.errors import ShardGapError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.optim.outer import OuterOptimizer
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.parallel.groups import group_label
from flashckpt.trainer.train.recorded_config import recorded_config


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

    Args:
        outer: Restored already.
        parallel: This rank's parts.
        missing: The names that no source has.

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
