"""A group that is a separate run: it meets the others, and trains the share of the samples that it is given there."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
import torch.distributed as dist

from flashckpt.errors import ShardGapError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.optim.outer import OuterOptimizer
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.parallel.groups import group_label
from flashckpt.trainer.parallel.meeting import GroupMeeting
from flashckpt.trainer.train.phased_data import PhasedData
from flashckpt.trainer.train.record import say_once
from flashckpt.trainer.train.starting import recorded_config


class Apart:
    """This group of a run."""

    def __init__(self, config: RunConfig, outer: OuterOptimizer, data: PhasedData, device: torch.device) -> None:
        self.meeting = GroupMeeting(config, device)
        self._outer, self._data = outer, data
        self._samples = config.parallel.sync_every * config.train.global_batch

    @classmethod
    def of(
        cls, config: RunConfig, outer: OuterOptimizer | None, data: PhasedData, device: torch.device
    ) -> Apart | None:
        """Return it where groups are separate runs, else None."""
        return cls(config, outer, data, device) if outer is not None and config.parallel.groups else None

    @property
    def is_over(self) -> bool:
        """Whether the others have ended the run without this group."""
        return self.meeting.is_over

    def begin(self, done: int) -> int:
        """Continue behind step `done`, or with the others if they have met since; return the step that is reached. Collective."""
        if self.meeting.is_behind():
            say_once(
                logging.WARNING,
                f"step {done}: the other groups have synchronised without this one, which waits for them",
            )
            done = self.synchronise(done)
        elif done == 0:
            self._data.next_position = self.meeting.group * self._samples
        if (position := self._data.next_position) is not None:
            self._data.go_to(position)
        return done

    def synchronise(self, step: int) -> int:
        """Meet the others; return the step that all continue from. The share of the next steps begins at the next commit. Collective."""
        roster = self._outer.meet(self.meeting, step)
        if roster is None:
            say_once(
                logging.WARNING, f"step {step}: the other groups have ended the run; this one is not in its result"
            )
            return step
        if self.meeting.keeps(roster):
            return step
        self._data.next_position = roster.share_of(self.meeting.group) * self._samples
        return roster.step


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
