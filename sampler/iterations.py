"""The iterations of one sampler that are under way, and whether the loop commits what it takes from them."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass

from torch.utils.data import Sampler

from flashckpt.sampler import errors
from flashckpt.sampler.iterator import ElasticIterator, EpochWalk
from flashckpt.sampler.order.cursor import Cursor, TailCounts
from flashckpt.sampler.order.dealing import samples_of


class Place(Sampler[int]):
    """The read-only half of `ElasticSampler`: its position, its sizes, its replica."""

    cursor: Cursor
    dp_rank: int
    dp_size: int

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self.cursor.length

    @property
    def epoch(self) -> int:
        """The epoch of the next sample to be trained."""
        return self.cursor.epoch

    @property
    def offset(self) -> int:
        """Samples of this epoch that are trained, over all replicas."""
        return self.cursor.offset

    @property
    def position(self) -> int:
        """Samples since the start of epoch 0: epoch * length + offset."""
        return self.cursor.position

    @property
    def global_batch_size(self) -> int | None:
        """Samples of the next optimizer step over all replicas; None if it was not given."""
        return None if self.cursor.sizes is None else self.cursor.sizes.at(self.position)

    @property
    def global_batch_sizes(self) -> list[int]:
        """All sizes of the schedule, ramp-up included."""
        return [] if self.cursor.sizes is None else [size for _, size in self.cursor.sizes.steps]

    @property
    def rank(self) -> int:
        """Index of this replica; the name that DistributedSampler uses for `dp_rank`."""
        return self.dp_rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas; the name that DistributedSampler uses for `dp_size`."""
        return self.dp_size

    @property
    def num_samples(self) -> int:
        """Samples of this replica in one epoch; the name that DistributedSampler uses for len()."""
        return len(self)

    @property
    def tail(self) -> str:
        """The rule for the end of an epoch."""
        return self.cursor.tail

    @property
    def drop_last(self) -> bool:
        """Whether tail is "drop"."""
        return self.cursor.tail == "drop"

    def __len__(self) -> int:
        """Rows of this replica in one epoch, padding included; the same after a resume, so schedulers may rely on it."""
        unit = self.global_batch_size or self.dp_size
        batches, rest = divmod(self.length, unit)
        if self.cursor.tail == "short":
            own, last = (samples_of(size, self.dp_rank, self.dp_size) for size in (unit, rest))
            return batches * own + last
        if self.cursor.tail != "drop" and rest:
            batches += 1
        return batches * -(-unit // self.dp_size)

    def tail_counts(self) -> TailCounts:
        """Return what is left of this epoch, and what its end pads, drops or takes from the next one."""
        return self.cursor.tail_counts()


_log = logging.getLogger("flashckpt")
_RISES_IN_A_ROW, _RISES_BY_HAND = 2, 8
"""Steps that take too much, one after another, which are an error: what is drawn by hand may be fetched ahead, at any pace."""
_RISES, _MOST_BATCHES = 3, 16
"""The same of steps that take too much now and then: how many of them, and how far the loop is ahead by then."""
_LEVEL = 3
"""Steps with one lead after which a loop that fetches ahead is as far ahead as it will be: a rise is a step left out."""


@dataclass(slots=True)
class LeadWatch:
    """The lead of a loop: samples, over all replicas, that it has taken from one iteration and not yet committed.

    A loop may fetch ahead, any number of batches, or cut what it takes into steps of another size: then its lead rises
    once, or in some steps until it is as far ahead as it will be. One that takes more than it commits has a lead that rises
    for ever, by as much in each step, the first one too.
    """

    lead: int
    rows: int = 0
    taken: int = 0
    high: int | None = None
    first: int = 0
    at_once: bool = False
    rises: int = 0
    in_a_row: int = 0
    level: int = 0
    leaves_out: bool = False

    def grows(self, lead: int, *, taken: int, unit: int, by_hand: bool) -> bool:
        """Note another commit; whether the loop takes more than it commits.

        Args:
            lead: After it.
            taken: Samples since the commit before.
            unit: A number of samples by which the lead of a loop that fetches ahead by a constant number of batches never grows.
            by_hand: Not by a loader.
        """
        rises = lead - (self.lead if self.high is None else self.high) >= unit
        if self.high is None:
            self.first, self.at_once = lead, rises
        self.high = lead if rises or self.high is None else self.high
        self.leaves_out = rises and not by_hand and self.level >= _LEVEL
        self.level = self.level + 1 if lead == self.high and not rises else 0
        self.rises += rises
        self.in_a_row = (self.in_a_row if by_hand or taken == self.taken else 0) + 1 if rises else 0
        self.lead, self.taken = lead, taken
        if by_hand:
            return self.in_a_row >= _RISES_BY_HAND
        is_far = self.rises >= _RISES and lead - self.first >= _MOST_BATCHES * unit
        # a loop that fetches ahead may do so further with each step, but one that accumulates does so in the first as well
        return (self.at_once and self.in_a_row >= _RISES_IN_A_ROW) or is_far


class Iterations:
    """The iterations that were begun and are not yet dropped.

    Attributes:
        latest: The one that was begun last.
        ended: The one to whose end the program came last, if it has neither committed nor begun another since.
    """

    def __init__(self) -> None:
        self.latest: EpochWalk | None = None
        self.ended: EpochWalk | None = None
        self._is_reported = False
        self._dropped = (-1, -1)
        self._known: list[tuple[weakref.ref[ElasticIterator], EpochWalk, LeadWatch]] = []

    def begin(self, walk: EpochWalk, lead: int) -> ElasticIterator:
        """Return an iterator over `walk`, which begins so many samples after the committed position."""
        iterator = ElasticIterator.over(walk)
        pace = self._known[-1][2] if lead and self._known else LeadWatch(lead)  # else it continues that of the last one
        pace.rows = 0
        self.latest = walk
        self._known = [*self._under_way(), (weakref.ref(iterator), walk, pace)]
        return iterator

    def _under_way(self) -> list[tuple[weakref.ref[ElasticIterator], EpochWalk, LeadWatch]]:
        # a loader lets go of the iterator as soon as it has dealt all, a loop of the loader before it commits its last step
        return [
            (iterator, walk, pace)
            for iterator, walk, pace in self._known
            if iterator() is not None or walk is self.ended or (walk.drawing and walk.drawing.is_open)
        ]

    @property
    def running(self) -> EpochWalk | None:
        """The latest, if it is under way."""
        current = [walk for _, walk, _ in self._under_way() if walk.handed_out]
        return self.latest if self.latest in current else None

    def end(self, walk: EpochWalk) -> None:
        """Note that the program came to the end of one."""
        self.ended = walk
        if walk.taken < walk.handed_out:  # the loader drops what is no whole batch
            self._dropped = walk.taken_to, walk.end

    def forget(self) -> None:
        """Let the next one begin at the committed position, whatever the loop has in hand."""
        self.ended = None
        if self.latest is not None and self.latest.is_over:
            self.latest = None

    def in_hand(self, position: int, *, is_asked: bool = False) -> EpochWalk | None:
        """Return the one to whose end the loop came with samples of it in hand, for the next steps; None: it has none.

        What a loader had dealt ahead says nothing: a loop that leaves it begins again at the committed position. Nor does
        an end that steps came after: what they did not commit was dropped. `epochs` asks only when the loop is through.
        """
        if is_asked and self.latest is not None and self.latest.is_over:
            self.ended = self.latest
        return self.ended if self.ended is not None and position < self.ended.end else None

    def behind_dropped(self, position: int) -> int:
        """Return `position`, or that behind the samples from there on that a loader dropped at its end."""
        return self._dropped[1] if position == self._dropped[0] else position

    def check(self, target: int, count: int, sampler: Place) -> None:
        """Compare what the loop commits with what it has taken.

        Args:
            target: The position that it commits.
            count: The samples up to there.
            sampler: The sampler.

        Raises:
            SamplerStateError: It commits more, or less in one step after another, or others than the next ones.
        """
        drawn, running, skips = self._drawn(), self.running, sampler.cursor.skips
        seen = [walk for walk, _ in drawn] or ([running] if running else [])
        if seen and target > (reached := max(walk.taken_to for walk in seen)):
            taken = skips.count(sampler.position, max(sampler.position, reached))
            raise errors.too_many(count, taken, f"taken since the last step, up to position {reached}")
        if running and running.drawing and running.drawing.is_mixed(running.ids, running.handed_out):
            raise errors.mixed()
        if len(drawn) != 1:
            return  # none, or several: which of them was for this step is not known
        walk, pace = drawn[0]
        drawing, sizes = walk.drawing, sampler.global_batch_sizes
        if drawing is None or not drawing.is_exact or drawing.thread != threading.get_ident():
            return  # another thread fetches ahead, as far as it likes
        lead = skips.count(target, max(target, walk.taken_to))
        taken = count + lead - pace.lead
        unit = max(sizes) if len(sizes) > 1 else min(count, drawing.batch * sampler.dp_size or count)
        if pace.grows(lead, taken=taken, unit=unit, by_hand=not drawing.is_loader):
            raise errors.too_few(taken, count, lead=lead)
        if pace.leaves_out and not self._is_reported:
            self._is_reported = True
            _log.warning(errors.LEFT_OUT, taken, count, taken - count)

    def _drawn(self) -> list[tuple[EpochWalk, LeadWatch]]:
        """Return those that the program has taken from since this was last asked for."""
        found = []
        for _, walk, pace in self._under_way():
            rows = walk.taken
            if rows > pace.rows:
                found.append((walk, pace))
            else:
                pace.in_a_row = 0
            pace.rows = rows
        return found
