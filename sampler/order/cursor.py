"""The committed position in a sample stream, and what is left of its epoch: pure arithmetic, no replicas."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.sampler.order.mixture import MixtureStream
from flashckpt.sampler.order.schedule import AlikeBatches, BatchSizes
from flashckpt.sampler.order.spans import SkippedSpans
from flashckpt.sampler.order.state import PACKED_VERSION, STATE_VERSION, SamplerState, Segment, check_same
from flashckpt.sampler.order.stream import Stream

PACKED_FROM = 1000
"""Skipped spans from which on they are recorded as one text: a list of 100,000 takes a third of a second each time."""
TAILS = ("span", "short", "pad", "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class TailCounts:
    """How the current epoch will end, in samples over all replicas, seen from the committed position."""

    remaining: int
    padded: int = 0
    dropped: int = 0
    borrowed: int = 0


class Cursor:
    """A position in a stream.

    Args:
        stream: The order.
        seed: Key of the order, for the state.
        fingerprint: Identity of the data, for the state.
        tail: How an epoch ends that does not divide into batches, see `ElasticSampler`.
        unit: Batch size to assume where no global batch size is set (one sample per replica).
    """

    def __init__(self, stream: Stream, *, seed: int, fingerprint: int, tail: str, unit: int) -> None:
        if tail not in TAILS:
            raise ConfigError("unknown tail", found=repr(tail), expected=", ".join(TAILS))
        self.stream, self.tail, self._unit = stream, tail, unit
        self._seed, self._fingerprint = seed, fingerprint
        self.position = 0
        self.ended: int | None = None
        """The epoch that the last commit finished, unless the loop had already begun the next one."""
        self.skips = SkippedSpans()
        self.sizes: BatchSizes | None = None

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self.stream.length

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self.position // self.length

    @property
    def offset(self) -> int:
        """Samples of the epoch before the position."""
        return self.position % self.length

    def epoch_end(self, position: int) -> int:
        """Return the first position of the next epoch."""
        return (position // self.length + 1) * self.length

    def left(self, position: int) -> int:
        """Return the used samples from `position` to the end of its epoch."""
        return self.skips.count(position, self.epoch_end(position))

    def batches(self, position: int) -> list[AlikeBatches]:
        """Return the batches, over all replicas, that an iteration from `position` hands out."""
        sizes, is_whole = self.sizes or BatchSizes.of(self._unit), self.tail not in {"drop", "short"}
        found = sizes.cover(position, self.epoch_end(position), self.skips, whole=is_whole)
        rest = self.left(position) - sum(each.samples for each in found)
        return [*found, AlikeBatches(batches=1, size=rest)] if self.tail == "short" and rest else found

    def planned(self, position: int) -> int:
        """Return how many samples, over all replicas, an iteration from `position` hands out."""
        return sum(each.samples for each in self.batches(position))

    def reached(self, start: int, used: int) -> int:
        """Return the position after the first `used` samples of an iteration from `start`."""
        if self.tail == "pad":
            used = min(used, self.left(start))  # padding is not progress
        return self.skips.advance(start, used)

    def after_step(self, position: int, samples: int) -> int:
        """Return the position after a step from `position` that trains so many samples."""
        return self.skips.advance(position, samples if self.tail == "span" else min(samples, self.left(position)))

    def settled(self, position: int) -> int:
        """Return `position`, or the next epoch's start if nothing more of its epoch will be handed out."""
        hidden = self.skips.end_of(position)
        if hidden >= self.epoch_end(position):
            position = hidden // self.length * self.length
        if self.tail == "drop" and position % self.length and self.planned(position) == 0:
            position = self.epoch_end(position)
        return position

    def settle(self, position: int) -> None:
        """Move to `position`, settled."""
        self.position = self.settled(position)

    def tail_counts(self) -> TailCounts:
        """Return what is left of this epoch and how it will end."""
        left, planned = self.left(self.position), self.planned(self.position)
        more, less = max(0, planned - left), max(0, left - planned)
        borrowed = more if self.tail == "span" else 0
        return TailCounts(remaining=left, padded=more - borrowed, dropped=less, borrowed=borrowed)

    # -- what is recorded

    def state(self) -> SamplerState:
        """Return the position and what it refers to."""
        is_packed = len(self.skips) >= PACKED_FROM
        segments: list[Segment] = [("skip", first, last) for first, last in (() if is_packed else self.skips.spans)]
        segments += [("skips", self.skips.packed)] if is_packed else []
        if self.sizes is not None and len(self.sizes.steps) > 1:
            segments += [("batch", at, size) for at, size in self.sizes.steps]
        if isinstance(self.stream, MixtureStream):
            segments += [("weights", segment.start, *segment.weights) for segment in self.stream.segments]
        if self.ended is not None:
            segments.append(("ended", self.ended))
        return SamplerState(
            seed=self._seed,
            epoch=self.epoch,
            offset=self.offset,
            length=self.length,
            fingerprint=self._fingerprint,
            order=self.stream.name,
            segments=tuple(segments),
            version=PACKED_VERSION if is_packed else STATE_VERSION,
        )

    def adopt(self, state: SamplerState) -> None:
        """Move to a recorded position, with its skipped spans and weights; an error changes nothing."""
        check_same(state, self.state())
        weights = [segment[1:] for segment in state.segments if segment[0] == "weights"]
        sizes = [segment[1:] for segment in state.segments if segment[0] == "batch"]
        if isinstance(self.stream, MixtureStream):
            self._adopt_weights(self.stream, weights)
        if sizes and self.sizes is None:
            self.sizes = BatchSizes.of(sizes[0][1], sizes[1:])
        self.ended = next((segment[1] for segment in state.segments if segment[0] == "ended"), None)
        self.skips = state.skips()
        self.settle(state.epoch * self.length + state.offset)

    @staticmethod
    def _adopt_weights(stream: MixtureStream, recorded: list[Segment]) -> None:
        own = stream.segments[0].weights
        if own not in {numbers[1:] for numbers in recorded}:
            raise SamplerStateError(
                "the sampler was resumed with other mixture weights",
                found=f"weights {list(own)} in this run",
                expected=f"weights {[list(numbers[1:]) for numbers in recorded]} as recorded",
                state="The sampler keeps its position; nothing was loaded.",
                remedy="resume with the recorded weights, then call sampler.set_weights({...})",
            )
        stream.segments = []
        for numbers in recorded:
            stream.set_weights(numbers[0], numbers[1:])
