"""The elastic sampler: this replica's part of one global order, resumed at the next untrained sample.

The global order is a pure function of (seed, epoch, index). The only state is the committed position in
it; world size, batch size and accumulation appear in slicing alone, so they may change between any two
steps. Sample k after the committed position goes to replica k mod dp_size, so every global batch is the
same set of samples whatever the layout. Iterators run ahead of the position and never move it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler import errors
from flashckpt.sampler.iterations import Iterations, Place
from flashckpt.sampler.iterator import ElasticIterator, EpochWalk
from flashckpt.sampler.order.cursor import Cursor
from flashckpt.sampler.order.dealing import samples_of, weights_of
from flashckpt.sampler.order.mixture import Mixture, MixtureStream
from flashckpt.sampler.order.permutation import MAX_LENGTH, Int64Array
from flashckpt.sampler.order.schedule import BatchSizes
from flashckpt.sampler.order.state import SamplerState, fingerprint_of, whole
from flashckpt.sampler.order.stream import EpochStream, Order, Stream
from flashckpt.sampler.replicas import either, resolve
from flashckpt.sampler.seeded import SeededSamples

_log = logging.getLogger("flashckpt")
_MOST_IN_HAND = 3
"""Batches of a loader that a loop may hold when it comes to the end of an iteration from which nothing is committed."""


class ElasticSampler(Place):
    """Deal this replica's samples of each global batch, from the committed position.

    Takes the arguments of `torch.utils.data.DistributedSampler`. Iterating gives one epoch: it begins at
    the committed position and ends as `tail` says. The position moves only in `commit()`.

    Args:
        dataset: The data set, a `Mixture`, either of them in `SeededSamples`, or just a length.
        num_replicas: The same as `dp_size`.
        rank: The same as `dp_rank`: the index of the data-parallel replica, not the global rank.
        shuffle: False means order="sequential".
        seed: Key of the order; part of the state.
        drop_last: The same as tail="drop".
        dp_rank: Index of this replica. Tensor- and pipeline-parallel ranks of a replica pass the same one.
        dp_size: Number of replicas. Both may be left out where every rank is one: `Checkpointer.restore` confirms it.
        mesh: A DeviceMesh to take both from (dimensions named "dp...").
        global_batch_size: Samples of one optimizer step over all replicas and micro-batches. Without it
            `commit` needs the number of samples that a step trained.
        order: "global" (full shuffle), "block" (block-local shuffle, for storage read in blocks), "sequential",
            or an `Order` with sizes.
        tail: How an epoch ends that does not divide: "span" (default: the last batch continues into the
            next epoch), "short" (the last batch is smaller, replicas differ by at most one sample), "pad"
            (samples of this epoch are repeated), "drop" (the rest is dropped).
        fingerprint: Identifies the data; default: the data set's own `fingerprint`.
        ramp_up: (position, size) pairs: the global batch size from that stream position.
        auto_commit: An exhausted iterator counts as trained (evaluation, loops without checkpoints).

    Raises:
        DataError: the data set is empty.
        LayoutError: the replica is unknown, or a batch does not divide over the replicas.
        ConfigError: an unknown order or tail.
    """

    flashckpt_replicated = True
    """The state is the same on every rank: the Checkpointer records it once."""

    def __init__(  # noqa: PLR0917 - the positions of DistributedSampler, whose place it takes
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: Any = None,
        global_batch_size: int | None = None,
        order: str | Order = "global",
        tail: str | None = None,
        fingerprint: int | str | bytes | None = None,
        ramp_up: Iterable[tuple[int, int]] = (),
        auto_commit: bool = False,
    ) -> None:
        dp_rank, dp_size = either(dp_rank, rank), either(dp_size, num_replicas)
        self.dp_rank, self.dp_size = resolve(dp_rank, dp_size, mesh)
        self.place_is_assumed = dp_rank is None and mesh is None and self.dp_size > 1
        self.dataset, self.shuffle, self.seed = dataset, bool(shuffle), whole("seed", seed)
        inner = dataset.dataset if isinstance(dataset, SeededSamples) else dataset
        self.key_stride = len(dataset) if isinstance(dataset, SeededSamples) else 0
        is_length = isinstance(dataset, Integral)
        identity = dataset if fingerprint is None and not is_length else fingerprint
        self.cursor = Cursor(
            _stream_of(inner, self.seed, Order.of(order, shuffle=self.shuffle)),
            seed=self.seed,
            fingerprint=0 if identity is None else fingerprint_of(identity),
            tail=tail or ("drop" if drop_last else "span"),
            unit=self.dp_size,
        )
        self._mixture = inner if isinstance(inner, Mixture) else None
        self._auto_commit = auto_commit
        self._touched = False  # a commit or a load has happened
        self._iterations = Iterations()
        self._again: int | None = None  # the epoch that `epochs` yields again, with no samples left
        self._restored_end: int | None = None  # the epoch whose last step was restored, until the position moves
        self.was_drawn_from = False
        self.is_weighted = False
        """Whether the loop weighs the rows of a batch that does not divide: `weights` was read, or set by the loop."""
        if global_batch_size is not None:
            self.set_global_batch_size(global_batch_size, ramp_up=ramp_up)

    def next_ids(self) -> Int64Array:
        """Return this replica's sample ids of the next global batch (needs global_batch_size); nothing moves.

        No padding: where the batch does not divide, replicas have one more or one less, or none.
        """
        self._begin_drawing()
        walk = EpochWalk(self, self.position)
        size = min(self._size_of_step(None), walk.total)
        return walk.ids(0, samples_of(size, self.dp_rank, self.dp_size))

    def _begin_drawing(self) -> None:
        if self.place_is_assumed:
            raise errors.assumed(self.dp_size)
        self.was_drawn_from = True

    # -- iterating

    def __iter__(self) -> ElasticIterator:
        self._begin_drawing()
        if self._again is not None:
            return ElasticIterator.over(EpochWalk.over_nothing(self, self.position))
        latest = self._iterations.latest
        if self._auto_commit and latest is not None and latest.exhausted and latest.taken >= latest.handed_out:
            latest.close()  # a loop that takes as many batches as there are never asks for one more
        self._check_spent()
        self.cursor.settle(self.position)
        ahead = self._iterations.in_hand(self.position)
        start = self.position if ahead is None else self.cursor.settled(ahead.end)
        return self._iterations.begin(EpochWalk(self, start), self.cursor.skips.count(self.position, start))

    def epochs(self, stop: int) -> Iterator[int]:
        """Yield the remaining epochs up to `stop` (exclusive), beginning each one: the outer loop of a training run.

        Right after a restore to the last step of an epoch, that epoch comes first, with no samples left: the loop
        repeats what follows its last batch (evaluation, schedulers that count epochs), which the restored state
        does not contain.
        """
        if self._restored_end is not None and self.position:
            self._again, self._restored_end = self._restored_end, None
            yield self._again
            self._again = None
        for epoch in range(self.epoch, whole("stop", stop)):
            if (
                self._iterations.in_hand(self.position, is_asked=True) is None
            ):  # else the last step has yet to be committed, to its own epoch
                self.set_epoch(epoch)
            yield epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; if the position is in that epoch, continue there.

        Raises:
            SamplerStateError: `epoch` is already trained, or the previous one was iterated and never committed.
        """
        epoch = whole("epoch", epoch)
        if epoch == self.epoch:
            self._iterations.forget()  # on purpose: iterate over the untrained rest again
            return
        self._check_spent()
        if epoch < self.epoch and self._touched:
            raise errors.backwards(epoch, now=self.epoch, offset=self.offset)
        if (ahead := self._iterations.in_hand(self.position)) is not None:
            left = ahead.end - self.position
            _log.warning("set_epoch(%d): %d samples handed out before and not committed count as trained", epoch, left)
        self._again, self.cursor.ended = None, None
        self._iterations.forget()
        self.cursor.settle(epoch * self.length)

    # -- the committed position

    def commit(self, samples: int | None = None) -> None:
        """Count a finished optimizer step.

        Args:
            samples: Samples that the step trained, over all replicas and micro-batches; default: the global batch.

        Raises:
            SamplerStateError: more is committed than this replica's iterator has handed out.
        """
        samples, left = whole("samples", samples), self.cursor.left(self.position)
        count = self._size_of_step(samples)
        if self.cursor.tail in {"short", "drop"} and samples is not None and samples > left:
            raise errors.too_many(samples, left, f"left of epoch {self.epoch}")
        target = self.cursor.after_step(self.position, count)
        self._iterations.check(target, count, self)
        epoch, latest = self.epoch, self._iterations.latest
        self.cursor.settle(self._iterations.behind_dropped(target))
        has_begun = latest is not None and latest.start >= self.position  # the next iteration, already
        self.cursor.ended = epoch if self.epoch > epoch and not has_begun else None
        self._touched, self._iterations.ended, self._restored_end = True, None, None
        if samples is None and count % self.dp_size and not self.is_weighted and self.cursor.tail != "short":
            self.is_weighted = True  # logged once
            _log.warning(errors.UNWEIGHTED, count, self.dp_size)

    @property
    def weights(self) -> Tensor:
        """The weight of each row of the next step, float32 (rows,); 0: padding, 1: the global batch divides.

        The mean of loss times weight over rows and replicas is the mean over the samples of the global batch.

        Raises:
            SamplerStateError: the global batch size is not known.
            ConfigError: tail is "short": nothing is padded, replicas differ by one row.
        """
        return self.weights_in(self._size_of_step(None))[0]

    def weights_in(self, micro: int) -> Tensor:
        """Return `weights` cut into micro-batches of at most `micro` rows, float32 (micro-batches, rows of each)."""
        if self.cursor.tail == "short":
            raise errors.nothing_padded()
        self.is_weighted = True
        weights = weights_of(self._size_of_step(None), self.dp_rank, self.dp_size, micro)
        return torch.from_numpy(weights).float()

    @property
    def ahead(self) -> int:
        """Samples, over all replicas, that the program has got of the running iteration and that are not committed."""
        running = self._iterations.running
        return 0 if running is None else max(0, running.taken_to - self.position)

    @property
    def restored_stage(self) -> str:
        """The progress of the iteration in the loaded state: what a new loader counts as already drawn.

        "running": begun, so a new iterator repeats it; "between": exhausted, and the next one not begun;
        "unused": never begun.
        """
        if not self.position:
            return "unused"
        return "running" if self._restored_end is None else "between"

    @property
    def flashckpt_progress(self) -> tuple[int, int | None]:
        """The progress that a step makes: the position and the epoch that ended there. The Checkpointer compares it at every step."""
        return self.position, self.cursor.ended

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what it refers to: the same on every rank, under 200 bytes."""
        return self.cursor.state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a recorded position.

        Raises:
            SamplerStateError: the state belongs to other data, another seed or order, or an iterator is running.
        """
        state = SamplerState.from_dict(state_dict)
        self._check_idle("a sampler state is loaded")
        self.cursor.adopt(state)
        self._touched, self._iterations = True, Iterations()
        self._again, self._restored_end = None, self.cursor.ended

    # -- changes during training (on every rank, at the same position)

    def set_global_batch_size(self, samples: int, *, ramp_up: Iterable[tuple[int, int]] = ()) -> None:
        """Change the global batch from the committed position; the global order does not change.

        Args:
            samples: Samples of one optimizer step over all replicas and micro-batches.
            ramp_up: (position, size) pairs: other sizes for batches that begin at or after a stream position.

        Raises:
                SamplerStateError: an iterator is running (it has planned its end; use `ramp_up`).
        """
        self._check_idle("the global batch size is changed")
        sizes = BatchSizes.of(samples, ramp_up)
        # no iterator is running: samples that the last one handed out uncommitted will come again
        self.cursor.sizes = sizes
        self._iterations.forget()

    def skip(self, first: int, last: int) -> None:
        """Skip the stream positions `first` to `last` (exclusive): the bad batches of a loss spike.

        Call it after a restore to a snapshot before them. It becomes part of the state.

        Raises:
            SamplerStateError: some of them are already trained, or an iterator is running.
            ConfigError: the span is empty.
        """
        first, last = whole("first", first), whole("last", last)
        self._check_ahead("positions are skipped", first)
        self._iterations.forget()  # as for another batch size
        self.cursor.skips.add(first, last)
        self.cursor.settle(self.position)

    def leave_out(self, done: int, first: int, last: int) -> tuple[int, str]:
        """Skip the samples of the steps `first` to `last`, where the state of step `done` was restored.

        Returns:
            How many they are, and where in the stream.

        Raises:
            SamplerStateError: how many samples a step trains is not known, or an iterator is running.
        """
        self._size_of_step(None)
        begin = end = self.position
        for step in range(done + 1, last + 1 if self.cursor.sizes else 0):
            begin = end if step == first else begin
            end = self.cursor.settled(self.cursor.after_step(end, self.cursor.sizes.at(end)))  # type: ignore[union-attr]
        samples = self.cursor.skips.count(begin, end)
        if samples:
            self.skip(begin, end)
        return samples, f"positions {begin} to {end - 1} of the stream"

    def set_weights(self, weights: Mapping[str, int], *, start: int | None = None) -> None:
        """Change the weights of a mixture from stream position `start` (default: the committed one).

        It becomes part of the state; each source continues where it is.

        Raises:
            SamplerStateError: `start` is already trained, or an iterator is running.
            ConfigError: the data set is not a mixture, or the names are not its sources.
        """
        stream = self.cursor.stream
        if self._mixture is None or not isinstance(stream, MixtureStream) or set(weights) != set(self._mixture.names):
            raise ConfigError(
                "weights do not match the mixture",
                found=f"weights for {sorted(weights)}",
                expected=f"one for each of {self._mixture.names if self._mixture else 'no sources: not a mixture'}",
            )
        place = self.position if start is None else whole("start", start)
        self._check_ahead("weights are changed", place)
        self._iterations.forget()  # as for another batch size
        stream.set_weights(place, [whole("a weight", weights[name]) for name in self._mixture.names])

    def source_counts(self) -> dict[str, int]:
        """Return the samples of each source of a mixture that are trained, skipped ones not counted."""
        stream = self.cursor.stream
        if self._mixture is None or not isinstance(stream, MixtureStream):
            return {}
        return dict(zip(self._mixture.names, stream.counts(self.position, self.cursor.skips), strict=True))

    # -- for its iterators

    def drawn_from(self) -> None:
        """Note that the program begins an iteration."""
        self._iterations.ended = None

    def ran_out(self, walk: EpochWalk) -> None:
        """Note that the program came to the end of an iteration."""
        self._iterations.end(walk)
        self.cursor.settle(self._iterations.behind_dropped(self.position))
        if self._auto_commit and walk.total and self.position == walk.start:
            after = self.cursor.skips.advance(walk.start, walk.total)
            self.cursor.settle(after if self.cursor.tail == "span" else self.cursor.epoch_end(walk.start))
            self._touched = True

    def jump(self, position: int, *, is_end: bool) -> int:
        """Make `position` the committed one, as a stateful loader was restored; return the position reached.

        Args:
            position: A stream position.
            is_end: The loader had delivered the last batch of its epoch.
        """
        self.cursor.settle(position)
        self.cursor.ended = self._restored_end = (position - 1) // self.length if is_end and position else None
        self._touched = True
        self._iterations.forget()
        return self.position

    # -- checks

    def _size_of_step(self, samples: int | None) -> int:
        size = self.global_batch_size if samples is None else samples
        if size is None or size < 1:
            raise errors.unknown_size(samples)
        return size

    def _check_spent(self) -> None:
        ended = self._iterations.ended
        if ended is None or not ended.total or self.position > ended.start:
            return
        in_hand = (
            ended.batch * self.dp_size * _MOST_IN_HAND
        )  # begun again shortly before its end, by a loop that fetches ahead
        if self.cursor.skips.count(self.position, ended.end) > in_hand:
            raise errors.never_committed(self.position, epoch=self.epoch, offset=self.offset, taken=ended.end)

    def _check_idle(self, what: str) -> None:
        running = self._iterations.running
        if running is not None and not running.exhausted:
            raise errors.iterating(what, running.handed_out)

    def _check_ahead(self, what: str, position: int) -> None:
        self._check_idle(what)
        if position < self.position:
            raise errors.trained_already(what, position, committed=self.position)


def _stream_of(dataset: Sized | int, seed: int, order: Order) -> Stream:
    if isinstance(dataset, Mixture):
        return dataset.stream(seed=seed, order=order)
    length = whole("length", dataset) if isinstance(dataset, Integral) else len(dataset)  # type: ignore[arg-type]
    if not 1 <= length <= MAX_LENGTH:
        raise DataError("the data set is empty", found=f"{length} samples", expected="1 to 2**62 samples")
    return EpochStream(length, seed=seed, order=order)
