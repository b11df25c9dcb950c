"""In what batch sizes the sample stream is used: pure integer arithmetic.

A *position* counts samples of the endless global stream from 0 (epoch * length + offset). *Skipped spans* are
ranges of positions that are never handed out; *batch sizes* change at given positions (ramp-up).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashckpt.errors import ConfigError
from flashckpt.sampler.order.spans import SkippedSpans
from flashckpt.sampler.order.state import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeBatches:
    """`batches` batches of `size` samples each, one after the other."""

    batches: int
    size: int

    @property
    def samples(self) -> int:
        """Samples of all of them."""
        return self.batches * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The global batch size by stream position: (first position, samples), ascending, the first at 0."""

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, base: int, ramp_up: Iterable[tuple[int, int]] = ()) -> BatchSizes:
        """Return `base` from position 0, replaced by each (position, size) of `ramp_up` from that position."""
        given = [(0, base), *ramp_up]
        steps = [(whole("a position", at), whole("global_batch_size", size)) for at, size in given]
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

    def cover(self, position: int, end: int, skips: SkippedSpans, *, whole: bool) -> list[AlikeBatches]:
        """Return the batches from `position` until one reaches `end`.

        Args:
            position: Where the first batch begins.
            end: The position to reach.
            skips: Excluded positions.
            whole: True counts the batch that crosses `end`, False omits it.
        """
        found: list[AlikeBatches] = []
        here = position
        while (left := skips.count(here, end)) > 0:
            size = self.at(here)
            border = min((first for first, _ in self.steps if here < first < end), default=end)
            batches = max(1, -(-skips.count(here, border) // size))  # batches that begin before the size changes
            if not whole and batches * size > left:
                return [*found, AlikeBatches(batches=left // size, size=size)]
            found.append(AlikeBatches(batches=batches, size=size))
            here = skips.advance(here, batches * size)
        return found
