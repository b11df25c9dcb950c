"""`ExactLoader`: any library's loader, continued at the next batch, and proved to be there by the batch before it.

    data = ExactLoader(loader)  # of Grain, torchdata, mosaicml-streaming, litdata, datasets, ...
    ckpt.track(model=model, optimizer=optimizer, data=data, rng=True)
    report = ckpt.restore()
    for epoch in data.epochs(3):
        for batch in data:
            ...
            ckpt.step(step)

A snapshot holds the library's state from before the last batch that was trained, and a digest of that batch. A restore
draws it once more: where it is another one, the library does not continue there, and nothing is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import SamplerStateError
from flashckpt.integrations.loader_reading import BatchReader, DataPlace, digest_of_batch, rows_of
from flashckpt.integrations.loader_sources import BEGIN_AGAIN, source_of
from flashckpt.state.placement import current_world

_VERSION = 1
_ELASTIC = ("streaming.base.dataloader", "StreamingDataLoader")
"""Of mosaicml: its state counts the samples of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """A batch that was handed out."""

    place: DataPlace
    digest: int
    rows: int


class ExactLoader:
    """A source of batches whose position is that of the batches that were trained.

    Args:
        source: A loader or stream with `state_dict()` and `load_state_dict()`; a data set whose iterators have `get_state()`
            and `set_state()`, or such an iterator.
        batches_per_step: Batches that this rank trains in each optimizer step.
        replay: The source has no state that tells the place: an epoch is read again from its beginning. `set_epoch` of
            the source, or of its sampler, is called where there is one.
        one_for_all: One state counts the samples of all ranks, so that other numbers of ranks continue, with the same
            global batch. None: true for mosaicml's StreamingDataLoader.
        identity: What of a batch is compared after a restore, for example `lambda batch: batch["id"]` where the rest is
            augmented at random. None: all of it.

    Raises:
        ConfigError: The source cannot be exact; names what can.
    """

    def __init__(
        self,
        source: Any,
        *,
        batches_per_step: int = 1,
        replay: bool = False,
        one_for_all: bool | None = None,
        identity: Callable[[Any], Any] | None = None,
    ) -> None:
        self._name = f"{type(source).__module__.partition('.')[0]}'s {type(source).__qualname__}"
        read = source_of(source, replay=replay)
        self._reader, self._workers = BatchReader(read, self._name), getattr(read, "workers", None)
        self._per_step, self._identity = batches_per_step, identity
        kind = (type(source).__module__, type(source).__qualname__)
        self.flashckpt_replicated = kind == _ELASTIC if one_for_all is None else one_for_all
        self.flashckpt_progress = 0
        self._trained = TrainedBatch(place=DataPlace(), digest=0, rows=0)
        self._ahead: deque[TrainedBatch] = deque()
        self._left = self._growths = 0  # handed out and not trained at the last step; steps in a row in which that grew

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: after a restore of the last batch of an epoch still that one, without any left."""
        return self._reader.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs up to `count`, from that of the position on."""
        while self.epoch < count:
            yield self.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch."""
        while True:
            try:
                batch = self._reader.draw()
            except StopIteration:
                return
            self._ahead.append(self._as_taken(batch))
            yield batch

    def commit(self, samples: int | None = None) -> None:  # noqa: ARG002 -- the signature of samplers
        """Count the batches of a step as trained; `ckpt.step()` calls it.

        Raises:
            SamplerStateError: The loop takes more batches than it commits, step after step.
        """
        before = len(self._ahead)
        for _ in range(min(self._per_step, before)):
            self._trained = self._ahead.popleft()
        self.flashckpt_progress += bool(before)
        self._watch(before)

    def _watch(self, before: int) -> None:
        left = len(self._ahead)
        taken = before - self._left
        self._growths = self._growths + 1 if left > self._left else 0
        self._left = left
        if self._growths > 1:
            raise SamplerStateError(
                "the loop takes more batches for each step than it commits",
                found=f"{taken} batches taken since the last step, and {self._per_step} committed; {left} are not committed by now",
                expected="as many: those of one optimizer step of this rank",
                state="The position is that of the last step. A restart would train again what was not committed.",
                remedy=f"ExactLoader(..., batches_per_step={taken}), or call ckpt.step() after every {self._per_step}",
            )

    def _as_taken(self, batch: Any) -> TrainedBatch:
        what = batch if self._identity is None else self._identity(batch)
        return TrainedBatch(place=self._reader.drawn, digest=digest_of_batch(what), rows=rows_of(batch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the last trained batch is drawn from, and what it was."""
        one, (rank, ranks) = self._trained, _rank_and_ranks()
        place = {"state": one.place.state, "epoch": one.place.epoch, "batches": one.place.batches}
        found = {"version": _VERSION, **place, "digest": one.digest, "rows": one.rows, "rank": rank, "ranks": ranks}
        return found if self._workers is None else {**found, "workers": self._workers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a recorded place: draw the batch before it once more, and compare it.

        Raises:
            SamplerStateError: It is another batch, or another number of ranks or workers; names what to change.
        """
        rank, ranks = _rank_and_ranks()
        if state_dict["ranks"] != ranks and not self.flashckpt_replicated:
            raise self._refusal(
                "has no position on another number of ranks",
                found=f"a position on {state_dict['ranks']} ranks",
                expected=f"one on {ranks}",
                remedy=f"start on {state_dict['ranks']} ranks; an indexed data set with an ElasticSampler continues on any number",
            )
        if (workers := state_dict.get("workers", self._workers)) != self._workers:
            raise self._refusal(
                "reads its stream in another order with other workers",
                found=f"{self._workers} workers",
                expected=f"{workers}, as recorded",
                remedy=f"num_workers={workers}; an indexed data set with an ElasticSampler continues with any number",
            )
        place = DataPlace(state=state_dict["state"], epoch=state_dict["epoch"], batches=state_dict["batches"])
        batch = self._reader.seek(place)
        self._ahead.clear()
        self._left = self._growths = 0
        if place.batches:
            self._trained = self._as_taken(batch)
            self._compare(state_dict, is_same_rank=(state_dict["rank"], state_dict["ranks"]) == (rank, ranks))

    def _compare(self, state_dict: Mapping[str, Any], *, is_same_rank: bool) -> None:
        _, ranks = _rank_and_ranks()
        rows = self._trained.rows
        if rows * ranks != state_dict["rows"] * state_dict["ranks"]:
            raise self._refusal(
                "deals another global batch",
                found=f"{rows} samples on each of {ranks} ranks",
                expected=f"{state_dict['rows'] * state_dict['ranks']} in all, as recorded",
                remedy=f"a batch size of {state_dict['rows'] * state_dict['ranks'] // ranks} on each rank",
            )
        if is_same_rank and self._trained.digest != state_dict["digest"]:
            raise self._refusal(
                "does not continue where it was: drawn once more, the last batch is another one",
                found=f"digest {self._trained.digest:016x}",
                expected=f"digest {state_dict['digest']:016x}",
                remedy="start with the data, the number of workers, the seed and the batch size of that run; where samples are "
                f"augmented at random, identity=lambda batch: ...; or {BEGIN_AGAIN}",
            )

    def _refusal(self, problem: str, *, found: str, expected: str, remedy: str) -> SamplerStateError:
        return SamplerStateError(
            f"{self._name} {problem}",
            found=found,
            expected=expected,
            state="Nothing was trained; every snapshot and checkpoint is intact.",
            remedy=remedy,
        )


def _rank_and_ranks() -> tuple[int, int]:
    world = current_world()
    return world.rank, world.size


__all__ = ["ExactLoader"]
