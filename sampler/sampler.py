"""The elastic sampler: this replica's part of one global order, resumed at the next untrained sample.

The global order is a pure function of (seed, epoch, index). The only state is the committed position in
it; world size, batch size and accumulation appear in slicing alone, so they may change between any two
steps. Sample k behind the committed position goes to replica k mod dp_size, so every global batch is the
same set of samples whatever the layout. Iterators run ahead of the position and never move it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from flashckpt.errors import ConfigError, DataError, LayoutError, SamplerStateError
from flashckpt.sampler.permutation import MAX_LENGTH
from flashckpt.sampler.replicas import resolve
from flashckpt.sampler.schedule import BatchSizes, Skips
from flashckpt.sampler.state import SamplerState, check_same, fingerprint_of
from flashckpt.sampler.stream import EpochStream, Stream

Int64Array = npt.NDArray[np.int64]

TAILS = ("span", "short", "pad", "drop")
_FIRST_CHUNK, _CHUNK = 64, 1 << 14  # ids made at once: few for a quick first batch, then many


@dataclass(frozen=True, slots=True, kw_only=True)
class TailCounts:
    """What the end of the current epoch does, in samples over all replicas, seen from the committed position."""

    remaining: int
    padded: int = 0
    dropped: int = 0
    borrowed: int = 0


class ElasticSampler(Sampler[int]):
    """Deal this replica's samples of each global batch, from the committed position on.

    Takes the arguments of `torch.utils.data.DistributedSampler`. Iterating gives one epoch: it begins at
    the committed position and ends as `tail` says. The position moves only in `commit()`.

    Args:
        dataset: The data set, or just its length.
        num_replicas: The same as `dp_size`.
        rank: The same as `dp_rank`: the index of the data-parallel replica, not the global rank.
        shuffle: False means order="sequential".
        seed: Key of the order; part of the state.
        drop_last: The same as tail="drop".
        dp_rank: Index of this replica. Tensor- and pipeline-parallel ranks of a replica pass the same one.
        dp_size: Number of replicas.
        mesh: A DeviceMesh to take both from (dimensions named "dp...").
        global_batch_size: Samples of one optimizer step over all replicas and micro-batches. Without it
            `commit` must be told how many samples a step trained.
        order: "global" or "sequential".
        tail: What happens where the epoch does not divide: "span" (default: the last batch goes on into the
            next epoch), "short" (the last batch is smaller, replicas differ by at most one sample), "pad"
            (samples of this epoch are repeated), "drop" (the rest is left out).
        fingerprint: Identity of the data; default: the data set's own `fingerprint`.
        ramp_up: (position, size) pairs: the global batch size from that stream position on.
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
        order: str = "global",
        tail: str | None = None,
        fingerprint: int | str | bytes | None = None,
        ramp_up: Iterable[tuple[int, int]] = (),
        auto_commit: bool = False,
    ) -> None:
        length = dataset if isinstance(dataset, int) else len(dataset)
        if not 1 <= length <= MAX_LENGTH:
            raise DataError("the data set is empty", found=f"{length} samples", expected="1 to 2**62 samples")
        self.dp_rank, self.dp_size = resolve(_either(dp_rank, rank), _either(dp_size, num_replicas), mesh)
        self.seed, self.tail = seed, tail or ("drop" if drop_last else "span")
        if self.tail not in TAILS:
            raise ConfigError("unknown tail", found=repr(tail), expected=", ".join(TAILS))
        self._stream: Stream = EpochStream(length, seed=seed, order=order if shuffle else "sequential")
        data = dataset if fingerprint is None and not isinstance(dataset, int) else fingerprint
        self.fingerprint = 0 if data is None else fingerprint_of(data)
        self._sizes: BatchSizes | None = None
        if global_batch_size is not None:
            self.set_global_batch_size(global_batch_size, ramp_up=ramp_up)
        self._skips = Skips()
        self._position = 0
        self._auto_commit = auto_commit
        self._touched = False  # a commit or a load has happened
        self._spent_at: int | None = None  # an iterator ran out here and nothing was committed since
        self._running: weakref.ref[ElasticIterator] | None = None

    # -- where it stands

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self._stream.length

    @property
    def epoch(self) -> int:
        """The epoch of the next sample to be trained."""
        return self._position // self.length

    @property
    def offset(self) -> int:
        """Samples of this epoch that are trained, over all replicas."""
        return self._position % self.length

    @property
    def position(self) -> int:
        """Samples since the start of epoch 0: epoch * length + offset."""
        return self._position

    @property
    def global_batch_size(self) -> int | None:
        """Samples of the next optimizer step over all replicas; None where it was not given."""
        return None if self._sizes is None else self._sizes.at(self._position)

    def set_global_batch_size(self, samples: int, *, ramp_up: Iterable[tuple[int, int]] = ()) -> None:
        """Change the global batch from the committed position on; the global order stays as it is."""
        sizes = BatchSizes.of(samples, ramp_up)
        for _, size in sizes.steps:
            if size % self.dp_size:
                raise LayoutError(
                    "the global batch does not divide over the replicas",
                    found=f"global batch of {size} samples, {self.dp_size} replicas",
                    expected="a multiple of the number of replicas",
                )
        self._sizes = sizes

    def __len__(self) -> int:
        """Samples of this replica in one epoch; the same after a resume, so schedulers may rely on it."""
        if self.tail == "short":
            return (self.length - self.dp_rank + self.dp_size - 1) // self.dp_size
        unit = self.global_batch_size or self.dp_size
        batches = self.length // unit if self.tail == "drop" else -(-self.length // unit)
        return batches * unit // self.dp_size

    def tail_counts(self) -> TailCounts:
        """Return what is left of this epoch, and what is padded, dropped or taken from the next one at its end."""
        left, planned = self._left(self._position), self._planned(self._position)
        more, less = max(0, planned - left), max(0, left - planned)
        borrowed = more if self.tail == "span" else 0
        return TailCounts(remaining=left, padded=more - borrowed, dropped=less, borrowed=borrowed)

    def next_ids(self) -> Int64Array:
        """Return this replica's sample ids of the next global batch (needs global_batch_size); nothing moves."""
        size = self._size_of_step(None)
        iterator = ElasticIterator(self, self._position)
        return iterator.ids(0, max(0, -(-(min(size, iterator.total) - self.dp_rank) // self.dp_size)))

    # -- iterating

    def __iter__(self) -> ElasticIterator:
        self._check_spent()
        iterator = ElasticIterator(self, self._position)
        self._running = weakref.ref(iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, unless the position is already in it.

        Raises:
            SamplerStateError: `epoch` is already trained, or a whole epoch was iterated and never committed.
        """
        self._check_spent()
        if epoch < self.epoch and self._touched:
            raise SamplerStateError(
                "set_epoch goes back to an epoch that is trained",
                found=f"set_epoch({epoch})",
                expected=f"{self.epoch} or later (epoch {self.epoch}, offset {self.offset} is committed)",
                state="The sampler keeps its position.",
                remedy="start the loop at sampler.epoch: for epoch in range(sampler.epoch, epochs)",
            )
        if epoch != self.epoch:
            self._position = epoch * self.length

    # -- the committed position

    def commit(self, samples: int | None = None) -> None:
        """Count a finished optimizer step.

        Args:
            samples: What the step trained, over all replicas and micro-batches; default: the global batch.

        Raises:
            SamplerStateError: more is committed than this replica's iterator has handed out.
        """
        left = self._left(self._position)
        count = self._size_of_step(samples)
        if self.tail != "span":
            if self.tail == "short" and samples is not None and samples > left:
                raise _too_many(samples, f"{left} samples are left of epoch {self.epoch}")
            count = min(count, left)
        target = self._skips.advance(self._position, count)
        running = self._running() if self._running else None
        if running is not None and running.handed_out and target > running.position:
            raise _too_many(count, f"this replica's iterator has handed out up to position {running.position}")
        self._position = self._normal(target)
        self._touched, self._spent_at = True, None

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what it refers to: the same on every rank, under 200 bytes."""
        return self._state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a recorded position.

        Raises:
            SamplerStateError: the state is of other data, another seed or order, or an iterator is running.
        """
        state = SamplerState.from_dict(state_dict)
        check_same(state, self._state())
        running = self._running() if self._running else None
        if running is not None and running.handed_out and not running.exhausted:
            raise SamplerStateError(
                "a sampler state is loaded while an iterator is running",
                found=f"an iterator that has handed out {running.handed_out} samples of this replica",
                expected="load_state_dict before iter()",
                state="The sampler keeps its position; nothing was loaded.",
                remedy="restore before the loader is iterated; to go back on purpose, drop the loader's iterator first",
            )
        self._skips = Skips(spans=tuple((int(s[1]), int(s[2])) for s in state.segments if s[0] == "skip"))
        self._position = state.epoch * self.length + state.offset
        self._touched, self._spent_at, self._running = True, None, None

    # -- internals

    def _state(self) -> SamplerState:
        return SamplerState(
            seed=self.seed,
            epoch=self.epoch,
            offset=self.offset,
            length=self.length,
            fingerprint=self.fingerprint,
            order=self._stream.name,
            segments=tuple(("skip", first, last) for first, last in self._skips.spans),
        )

    def _size_of_step(self, samples: int | None) -> int:
        size = self.global_batch_size if samples is None else samples
        if size is None or size < 1:
            raise SamplerStateError(
                "the size of the step is not known",
                found="no samples=" if samples is None else f"samples={samples}",
                expected="samples trained by the step, over all replicas",
                remedy="pass global_batch_size= to the sampler, or commit(samples)",
            )
        return size

    def _epoch_end(self, position: int) -> int:
        return (position // self.length + 1) * self.length

    def _left(self, position: int) -> int:
        return self._skips.count(position, self._epoch_end(position))

    def _planned(self, position: int) -> int:
        """Return how many samples, over all replicas, an iterator that begins at `position` hands out."""
        if self.tail == "short":
            return self._left(position)
        sizes = self._sizes or BatchSizes.of(self.dp_size)
        return sizes.cover(position, self._epoch_end(position), self._skips, whole=self.tail != "drop")

    def _normal(self, position: int) -> int:
        """Return `position`, or the next epoch's start where nothing of this one will be handed out."""
        if position % self.length and self._left(position) == 0:
            return self._epoch_end(position)
        if self.tail == "drop" and position % self.length and self._planned(position) == 0:
            return self._epoch_end(position)
        return position

    def _check_spent(self) -> None:
        if self._spent_at is None or self._spent_at != self._position:
            return
        raise SamplerStateError(
            "the sampler was iterated to its end and never committed",
            found=f"position {self._position} (epoch {self.epoch}, offset {self.offset}) before and after",
            expected="commit() after every optimizer step",
            state="Nothing of the last iteration counts as trained; a restart would repeat it.",
            remedy="track the sampler and call ckpt.step(), or sampler.commit(samples), or pass auto_commit=True",
        )

    def _ran_out(self, start: int, total: int) -> None:
        if self._auto_commit and self._position == start:
            whole = self.tail == "span"
            self._position = self._skips.advance(start, total) if whole else self._epoch_end(start)
            self._touched = True
        elif self._position == start and total:
            self._spent_at = start


class ElasticIterator(Iterator[int]):
    """One replica's walk from a position to the end of its epoch; holds no state that anybody records."""

    def __init__(self, sampler: ElasticSampler, start: int) -> None:
        self._sampler, self._start = sampler, start
        self.total = sampler._planned(start)  # noqa: SLF001 - the iterator is the sampler's other half
        rank, size = sampler.dp_rank, sampler.dp_size
        self._own = max(0, (self.total - rank + size - 1) // size)
        self._made, self._chunk, self._at = 0, [0][:0], 0
        self.exhausted = False

    def __iter__(self) -> ElasticIterator:
        return self

    def __next__(self) -> int:
        try:
            value = self._chunk[self._at]
        except IndexError:
            return self._refill()
        self._at += 1
        return value

    @property
    def handed_out(self) -> int:
        """Samples this replica has handed out."""
        return self._made - len(self._chunk) + self._at

    @property
    def position(self) -> int:
        """The stream position behind the last sample that any replica can have handed out by now."""
        used = min(self.handed_out * self._sampler.dp_size, self.total)
        return self._sampler._skips.advance(self._start, used)  # noqa: SLF001 - as above

    def ids(self, first: int, last: int) -> Int64Array:
        """Return the ids of this replica's samples `first` to `last` (exclusive) of the iteration."""
        sampler = self._sampler
        ordinals = np.arange(first, last, dtype=np.int64) * sampler.dp_size + sampler.dp_rank
        left = sampler._left(self._start)  # noqa: SLF001 - as above
        if sampler.tail == "pad" and len(ordinals) and ordinals[-1] >= left:
            begin = self._start // sampler.length * sampler.length
            padding = begin + (ordinals - left) % sampler.length
            used = sampler._skips.positions(self._start, np.minimum(ordinals, max(0, left - 1)))  # noqa: SLF001 - as above
            return sampler._stream.take(np.where(ordinals >= left, padding, used))  # noqa: SLF001 - as above
        return sampler._stream.take(sampler._skips.positions(self._start, ordinals))  # noqa: SLF001 - as above

    def _refill(self) -> int:
        if self._made >= self._own:
            if not self.exhausted:
                self.exhausted = True
                self._sampler._ran_out(self._start, self.total)  # noqa: SLF001 - as above
            raise StopIteration
        last = min(self._own, self._made + (_CHUNK if self._made else _FIRST_CHUNK))
        self._chunk, self._at = self.ids(self._made, last).tolist(), 1
        self._made = last
        return self._chunk[0]


def _either(one: int | None, other: int | None) -> int | None:
    if one is not None and other is not None and one != other:
        raise LayoutError(
            "two different data-parallel numbers were given", found=f"{one} and {other}", expected="one of the two"
        )
    return other if one is None else one


def _too_many(samples: int, why: str) -> SamplerStateError:
    return SamplerStateError(
        "more samples are committed than were handed out",
        found=f"commit of {samples} samples; {why}",
        expected="samples of one optimizer step, over all replicas and micro-batches",
        state="The sampler keeps its position.",
        remedy="pass global_batch_size=, or commit the samples that were trained, counted over all replicas",
    )
