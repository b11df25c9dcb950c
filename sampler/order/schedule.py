"""Which positions of the sample stream are used, and in what batch sizes: pure integer arithmetic.

A *position* counts samples of the endless global stream from 0 (epoch * length + offset). **Skipped spans* are
ranges of positions that are never handed out; *batch sizes* change at given positions (ramp-up).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSpans:
    """Spans [first, last) of excluded positions: sorted, disjoint and not adjacent."""

    spans: tuple[tuple[int, int], ...] = ()

    def with_span(self, first: int, last: int) -> SkippedSpans:
        """Return these spans and [first, last), merged."""
        if not 0 <= first < last:
            raise ConfigError(
                "a span to skip must end after it begins",
                found=f"first {first}, last {last}",
                expected="0 <= first < last, counted in samples of the global stream",
                state="Nothing is skipped.",
            )
        merged: list[tuple[int, int]] = []
        for span in sorted([*self.spans, (first, last)]):
            if merged and span[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]))
            else:
                merged.append(span)
        return SkippedSpans(spans=tuple(merged))

    def count(self, first: int, last: int) -> int:
        """Return how many positions of [first, last) are used."""
        hidden = sum(max(0, min(last, end) - max(first, start)) for start, end in self.spans)
        return max(0, last - first) - hidden

    def advance(self, position: int, count: int) -> int:
        """Return the position after the next `count` used positions from `position` (`position` itself for 0)."""
        end = position + count
        for start, stop in self.spans:
            if stop <= position:
                continue
            begin = max(start, position)
            if begin >= end:
                break
            end += stop - begin
        return end

    def positions(self, position: int, ordinals: Int64Array) -> Int64Array:
        """Return the positions of the k-th used samples from `position`, for every k of `ordinals` (ascending)."""
        out = ordinals + position
        for start, stop in self.spans:
            if stop <= position:
                continue
            begin = max(start, position)
            out[out >= begin] += stop - begin
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The global batch size by stream position: (first position, samples), ascending, the first at 0."""

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, base: int, ramp_up: Iterable[tuple[int, int]] = ()) -> BatchSizes:
        """Return `base` from position 0, replaced by each (position, size) of `ramp_up` from that position."""
        steps = [(0, base), *((int(at), int(size)) for at, size in ramp_up)]
        places = [at for at, _ in steps]
        if any(size < 1 for _, size in steps) or places != sorted(set(places)):
            raise ConfigError(
                "a batch size schedule needs ascending positions and positive sizes",
                found=str(steps),
                expected="global_batch_size > 0, then ramp_up=[(position, size), ...] with positions of at least 1",
            )
        return cls(steps=tuple(steps))

    def at(self, position: int) -> int:
        """Return the size of a batch that begins at `position`."""
        return next(size for first, size in reversed(self.steps) if first <= position)

    def cover(self, position: int, end: int, skips: SkippedSpans, *, whole: bool) -> int:
        """Return how many used samples the batches from `position` hold until one reaches `end`.

        Args:
            position: Where the first batch begins.
            end: The position to reach.
            skips: Excluded positions.
            whole: True counts the batch that crosses `end`, False omits it.
        """
        total, here = 0, position
        while (left := skips.count(here, end)) > 0:
            size = self.at(here)
            border = min((first for first, _ in self.steps if here < first < end), default=end)
            batches = max(1, -(-skips.count(here, border) // size))  # batches that begin before the size changes
            if not whole and batches * size > left:
                return total + left // size * size
            total += batches * size
            here = skips.advance(here, batches * size)
        return total
