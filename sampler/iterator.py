"""One replica's walk through an epoch. It runs ahead of training and records nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from operator import length_hint
from typing import Any, Protocol

import numpy as np

from flashckpt.errors import SamplerStateError
from flashckpt.sampler.drawing import Drawing
from flashckpt.sampler.order.cursor import Cursor
from flashckpt.sampler.order.dealing import Dealing
from flashckpt.sampler.order.permutation import Int64Array

FIRST_CHUNK, CHUNK = 64, 1 << 14  # ids computed at a time: few for a quick first batch, then many


class EpochPlan(Protocol):
    """The facts about an epoch that the walk needs from its sampler."""

    dp_rank: int
    dp_size: int
    cursor: Cursor
    key_stride: int

    def drawn_from(self) -> None:
        """Record that the program begins an iteration: a loader may ask for it twice, and drop the first one."""
        ...

    def ran_out(self, walk: EpochWalk) -> None:
        """Record that the program came to the end of an iteration."""
        ...

    def jump(self, position: int, *, is_end: bool) -> int:
        """Make `position` the committed one (a stateful loader was restored); return the position reached."""
        ...


class EpochWalk(Iterator[Iterator[int]]):
    """One replica's walk from a position to the end of its epoch: chunks of sample ids, and how many were handed out.

    Args:
        plan: The sampler.
        start: Stream position of the first sample (of replica 0).
    """

    def __init__(self, plan: EpochPlan, start: int) -> None:
        self._plan = plan
        self.exhausted = self.is_over = False
        self.drawing: Drawing | None = None
        self._begin(start)

    def _begin(self, start: int) -> None:
        rank, size = self._plan.dp_rank, self._plan.dp_size
        cursor = self._plan.cursor
        self._dealing = Dealing(cursor.batches(start), rank=rank, replicas=size, is_padded=cursor.tail != "short")
        self.start, self.total = start, self._dealing.samples
        if start + self.total >= 1 << 62:
            raise SamplerStateError(
                "the sample stream is at its end", found=f"position {start}", expected="below 2**62"
            )
        self._own = self._dealing.rows
        self._made = 0
        self._items = iter([0][:0])  # computed but not handed out; its length hint is the counter

    @classmethod
    def over_nothing(cls, plan: EpochPlan, start: int) -> EpochWalk:
        """Return a walk that hands out nothing and moves nothing."""
        walk = cls(plan, start)
        walk._empty()
        return walk

    def __iter__(self) -> EpochWalk:
        return self

    def __next__(self) -> Iterator[int]:
        if self.drawing is None:
            self.drawing = Drawing(self._plan, self.close)
            self._plan.drawn_from()
        if self._made >= self._own:
            self._finish()
            raise StopIteration
        last = min(self._own, self._made + (CHUNK if self._made else FIRST_CHUNK))
        self._items = iter(self.ids(self._made, last).tolist())
        self._made = last
        return self._items

    def next_batch(self, size: int) -> list[int]:
        """Return the ids of the next `size` rows of this replica; fewer at the end of the epoch, none after it."""
        batch = list(islice(self._items, size))
        while len(batch) < size and self._made < self._own:
            batch += islice(next(self), size - len(batch))
        if not batch:
            self._finish()
        elif self.drawing is not None:
            self.drawing.cut(self.handed_out)
        return batch

    def left_of_batch(self) -> tuple[int, int]:
        """Return the size of the batch of which `next_batch` hands out rows, and this replica's rows that are left of it."""
        return self._dealing.left_of_batch(self.handed_out)

    @property
    def handed_out(self) -> int:
        """Rows this replica has handed out: its samples, and what fills batches that do not divide."""
        return self._made - length_hint(self._items)

    @property
    def taken(self) -> int:
        """Rows of this replica that the program has got: without those that a loader holds for it."""
        return self.handed_out if self.drawing is None else self.drawing.taken(self.handed_out)

    @property
    def position(self) -> int:
        """The stream position after the last sample that any replica can have handed out by now."""
        return self._reached(self.handed_out)

    @property
    def batch(self) -> int:
        """Rows of a batch of the loader that draws from it; 0: none is known to."""
        return self.drawing.batch if self.drawing is not None and self.drawing.is_loader else 0

    @property
    def taken_to(self) -> int:
        """The stream position after the last sample that the program of any replica can have got by now."""
        return self._reached(self.taken)

    def _reached(self, rows: int) -> int:
        return self._plan.cursor.reached(self.start, self.total if rows >= self._own else self._dealing.reached(rows))

    @property
    def end(self) -> int:
        """The stream position after its last sample."""
        return self._plan.cursor.reached(self.start, self.total)

    def ids(self, first: int, last: int) -> Int64Array:
        """Return the ids of this replica's rows `first` to `last` (exclusive) of the iteration.

        For `SeededSamples` they are its keys.
        """
        cursor, start = self._plan.cursor, self.start
        ordinals = self._dealing.ordinals(first, last)
        if cursor.tail != "pad" or not len(ordinals) or ordinals.max() < (left := cursor.left(start)):
            return self._named(cursor.skips.positions(start, ordinals))
        epoch = start // cursor.length * cursor.length
        padding = epoch + (ordinals - left) % cursor.length  # samples of this epoch again, from its start
        used = cursor.skips.positions(start, np.minimum(ordinals, max(0, left - 1)))
        return self._named(np.where(ordinals >= left, padding, used))

    def _named(self, positions: Int64Array) -> Int64Array:
        cursor, stride = self._plan.cursor, self._plan.key_stride
        ids = cursor.stream.take(positions)
        return ids + (positions // cursor.length + 1) * stride if stride else ids

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this iterator, for a loader that records what it has delivered."""
        return {"position": self.position, "ended": self.handed_out >= self._own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after what a loader had delivered; that becomes the committed position."""
        position = state_dict.get("position")
        if not isinstance(position, int) or position < 0:
            raise SamplerStateError("not a position", found=repr(position), expected="an integer of at least 0")
        deque(self._items, maxlen=0)
        self._begin(self._plan.jump(position, is_end=bool(state_dict["ended"])))
        if state_dict["ended"]:  # its epoch was finished: this iterator is empty, the next one continues
            self._empty()

    def _empty(self) -> None:
        self._own, self.total, self.exhausted = 0, 0, True

    def _finish(self) -> None:
        if not self.exhausted:
            self.exhausted = True
            drawing = self.drawing
            # a loader says so, when it has delivered what it was dealt; but not while it asks for its first batch
            if drawing is None or not drawing.is_loader or not (drawing.has_workers or self.taken):
                self.close()

    def close(self) -> None:
        """Record that the program came to the end."""
        if not self.is_over:
            self.is_over = True
            self._plan.ran_out(self)


class ElasticIterator(chain[int]):
    """The ids of a walk one by one; `itertools.chain` yields them without running Python code per sample."""

    walk: EpochWalk

    @classmethod
    def over(cls, walk: EpochWalk) -> ElasticIterator:
        """Return an iterator over `walk`, which keeps no reference to it: dropping it ends the iteration."""
        iterator: ElasticIterator = cls.from_iterable(walk)  # type: ignore[assignment]  # made as `cls`
        iterator.walk = walk
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """See `EpochWalk.state_dict`."""
        return self.walk.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `EpochWalk.load_state_dict`."""
        self.walk.load_state_dict(state_dict)
