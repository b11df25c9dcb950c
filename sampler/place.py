"""The position of an elastic sampler: read-only properties."""

from __future__ import annotations

from torch.utils.data import Sampler

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
