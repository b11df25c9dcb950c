"""A group that is a separate run: it meets the others, and trains the share of the samples that it is given there."""

from __future__ import annotations

import logging

import torch

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.optim.average import OuterOptimizer
from flashckpt.trainer.separate_runs.meeting import GroupMeeting
from flashckpt.trainer.separate_runs.roster import Roster
from flashckpt.trainer.train.phased_data import PhasedData
from flashckpt.trainer.train.record import say_once


class Apart:
    """This group of a run."""

    def __init__(self, config: RunConfig, outer: OuterOptimizer, data: PhasedData, device: torch.device) -> None:
        self.meeting = GroupMeeting(config, device)
        self._outer, self._data = outer, data
        self._samples = config.parallel.sync_every * config.train.global_batch

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
        roster: Roster | None = self._outer.meet(self.meeting, step)
        if roster is None:
            say_once(
                logging.WARNING, f"step {step}: the other groups have ended the run; this one is not in its result"
            )
            return step
        if self.meeting.keeps(roster):
            return step
        self._data.next_position = roster.share_of(self.meeting.group) * self._samples
        return roster.step
