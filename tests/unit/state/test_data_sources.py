"""What `track()` says of a source of data: how it continues, or why it cannot be tracked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.nodes import Batcher, Loader, Prefetcher, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler
from flashckpt.state import data_sources
from flashckpt.state.data_sources import (
    BARE,
    ELASTIC,
    LOADER,
    NODES,
    ONE_FOR_ALL,
    ORDER_AGAIN,
    OWN_STATE,
    RANDOM_ORDER,
    READ_AGAIN,
    SHARED_GENERATOR,
    SHUFFLED_STREAM,
    Continuation,
    continuation_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata

DATA = TensorDataset(torch.arange(12))


class Stream(IterableDataset[int]):
    """Yields numbers and keeps no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class StreamWithState(Stream):
    """Says where it is."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""


class WebStream(Stream):
    """As of another library."""


class Foreign:
    """A class of another library, by its name."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""


def foreign(package: str, name: str, *, base: type = object, **members: Any) -> Any:
    return type(name, (Foreign,) if base is object else (Foreign, base), {"__module__": package, **members})()


class ReadByAnother(Stream):
    """Says where it is to who knows how much was read, as the data sets of mosaicml and litdata."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""


class Position:
    """An iterator of Grain, by its name and methods."""

    def __init__(self) -> None:
        self.at = 0

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


class Shuffled(Sampler[int]):
    """Draws an order, and keeps none."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())

    def __len__(self) -> int:
        return 12


class ShuffledWithState(Foreign, Shuffled):
    """Says where it is."""


OF_NUMBERS = ("sequence", "epoch", "epoch with state")


def orders() -> dict[str, tuple[Callable[[], Any], Continuation]]:
    """Everything that may order the samples of a loader, and what a loader that it is given to is."""
    weights = [1.0] * 12
    return {
        "sequence": (lambda: SequentialSampler(DATA), LOADER),
        "epoch": (lambda: DistributedSampler(DATA, num_replicas=1, rank=0), LOADER),
        "epoch with state": (lambda: StatefulDistributedSampler(DATA, num_replicas=1, rank=0), LOADER),
        "own state": (ShuffledWithState, LOADER),
        "torchdata's random": (lambda: torchdata_sampler.RandomSampler(DATA), LOADER),
        "random": (lambda: RandomSampler(DATA), RANDOM_ORDER),
        "seeded random": (lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(1)), RANDOM_ORDER),
        "weights": (lambda: WeightedRandomSampler(weights, 12), RANDOM_ORDER),
        "subset": (lambda: SubsetRandomSampler(range(12)), RANDOM_ORDER),
        "one's own": (Shuffled, ORDER_AGAIN),
    }


def stream_of_datasets(*kinds: str) -> Any:
    """A stream as `datasets` 4.4 nests them, the first one inside."""
    part = foreign("datasets.iterable_dataset", "ExamplesIterable")
    for kind in kinds:
        part = foreign("datasets.iterable_dataset", kind, ex_iterable=part)
    return foreign("datasets.iterable_dataset", "IterableDataset", _ex_iterable=part)


def interleaved(*streams: Any) -> Any:
    parts = [one._ex_iterable for one in streams]
    part = foreign("datasets.iterable_dataset", "CyclingMultiSourcesExamplesIterable", ex_iterables=parts)
    return foreign("datasets.iterable_dataset", "IterableDataset", _ex_iterable=part)


def around(stream: Any) -> Any:
    """A loader of a data set that reads a stream and makes something of it, as torchtitan's."""
    data = StreamWithState()
    data.rows = stream  # type: ignore[attr-defined]
    return StatefulDataLoader(data, batch_size=2)


def shuffled_by_one_generator(workers: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(DATA, batch_size=4, shuffle=True, generator=generator, num_workers=workers)


def sampler() -> ElasticSampler:
    return ElasticSampler(DATA, dp_rank=0, dp_size=1, global_batch_size=4, seed=0)


def ordered() -> dict[str, tuple[Callable[[], Any], Continuation | None]]:
    """Each of them in a loader, in a batch sampler that keeps no state, and in nodes."""
    found: dict[str, tuple[Callable[[], Any], Continuation | None]] = {}
    for kind, (make, wanted) in orders().items():

        def loader(make: Callable[[], Any] = make) -> Any:
            return StatefulDataLoader(DATA, batch_size=2, sampler=make())

        def by_batches(make: Callable[[], Any] = make) -> Any:
            return StatefulDataLoader(DATA, batch_sampler=BatchSampler(make(), 2, drop_last=False))

        def nodes(make: Callable[[], Any] = make) -> Any:
            return Loader(Prefetcher(Batcher(SamplerWrapper(make()), 2), 2))

        found[f"loader by {kind}"] = loader, wanted
        plain = (
            RANDOM_ORDER if kind == "torchdata's random" else wanted
        )  # read by what asks for no state of a sampler's iterator
        found[f"loader by batches of {kind}"] = by_batches, ORDER_AGAIN if kind == "own state" else plain
        found[f"nodes by {kind}"] = nodes, NODES if plain is LOADER else plain
    return found


SOURCES: dict[str, tuple[Callable[[], Any], Continuation | None]] = {
    "sampler": (sampler, ELASTIC),
    "batch sampler": (lambda: ElasticBatchSampler(sampler(), 2), ELASTIC),
    "loader of a sampler": (lambda: StatefulDataLoader(DATA, sampler=sampler()), ELASTIC),
    "loader": (lambda: StatefulDataLoader(DATA, batch_size=2, shuffle=True), LOADER),
    "loader with a generator": (lambda: shuffled_by_one_generator(0, 1), SHARED_GENERATOR),
    "loader with a generator and a worker": (lambda: shuffled_by_one_generator(1, 1), LOADER),
    **ordered(),
    "loader of a shuffled stream of datasets": (
        lambda: StatefulDataLoader(foreign("datasets.iterable_dataset", "IterableDataset", base=Stream), batch_size=2),
        SHUFFLED_STREAM,
    ),
    "loader of a data set with a stream": (lambda: around(stream_of_datasets("MappedExamplesIterable")), OWN_STATE),
    "loader of a data set with a shuffled stream": (
        lambda: around(stream_of_datasets("BufferShuffledExamplesIterable")),
        SHUFFLED_STREAM,
    ),
    "loader of a stream with state": (lambda: StatefulDataLoader(StreamWithState(), batch_size=2), OWN_STATE),
    "loader of a stream": (lambda: StatefulDataLoader(Stream(), batch_size=2), READ_AGAIN),
    "stream of datasets": (lambda: stream_of_datasets("MappedExamplesIterable"), BARE),
    "shuffled stream of datasets": (
        lambda: stream_of_datasets("BufferShuffledExamplesIterable", "MappedExamplesIterable"),
        SHUFFLED_STREAM,
    ),
    "streams of datasets, one of them shuffled": (
        lambda: interleaved(stream_of_datasets(), stream_of_datasets("BufferShuffledExamplesIterable")),
        SHUFFLED_STREAM,
    ),
    "streams of datasets": (lambda: interleaved(stream_of_datasets(), stream_of_datasets()), BARE),
    "stream of other datasets": (lambda: foreign("datasets.iterable_dataset", "IterableDataset"), SHUFFLED_STREAM),
    "iterator of Grain": (lambda: foreign("grain._src.python.dataset.dataset", "DatasetIterator"), BARE),
    "loader of Grain": (lambda: foreign("grain._src.python.data_loader", "DataLoaderIterator"), BARE),
    "loader of mosaicml": (lambda: foreign("streaming.base.dataloader", "StreamingDataLoader"), ONE_FOR_ALL),
    "loader of litdata": (lambda: foreign("litdata.streaming.dataloader", "StreamingDataLoader"), BARE),
    "of a package with a like name": (lambda: foreign("datasets_of_mine", "IterableDataset"), None),
    "object": (Foreign, None),
    "module": (lambda: torch.nn.Linear(2, 2), None),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_known_by_its_kind(name: str) -> None:
    make, wanted = SOURCES[name]
    assert continuation_of(make()) is wanted
    assert wanted is None or wanted.words.startswith("exact")


@pytest.mark.parametrize(("workers", "is_exact"), [(0, False), (1, True)])
def test_one_generator_for_order_and_loader_is_exact_as_it_is_said(workers: int, is_exact: bool) -> None:
    """The library's own continuation over the end of an epoch, which is what the words are about."""
    whole, again, restarted = (shuffled_by_one_generator(workers, seed) for seed in (1, 1, 2))
    trained = batches_of(whole, epochs=2)
    begun = iter(again)
    assert next(begun)[0].tolist() == trained[0]
    restarted.load_state_dict(again.state_dict())
    found = batches_of(restarted, epochs=2)
    assert found[:2] == trained[1:3]
    assert (found == trained[1:]) is is_exact
    known = continuation_of(whole)
    assert known is not None
    assert known.is_exact is is_exact


def test_a_stream_without_state_is_exact_at_the_first_restart_as_it_is_said() -> None:
    """The library counts twice what it reads again, and reads so much again at the next restart."""
    state, found = None, []
    for _ in range(3):
        loader = StatefulDataLoader(Stream(), batch_size=2)
        if state is not None:
            loader.load_state_dict(state)
        found.append(next(iter(loader)).tolist())
        state = loader.state_dict()
    assert found[:2] == [[0, 1], [2, 3]]
    assert found[2] != [4, 5], "torchdata counts now: the words can say more"


def batches_of(loader: Any, epochs: int) -> list[list[int]]:
    return [batch[0].tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [
        ("sampler", logging.INFO, "data (ElasticSampler): exact on any number of ranks"),
        ("loader by one's own", logging.WARNING, "data (StatefulDataLoader): exact only if its sampler gives the same"),
    ],
)
def test_track_says_once_how_it_continues(
    name: str, level: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flashckpt")
    Checkpointer(str(tmp_path / "root")).track(data=SOURCES[name][0]())
    (record,) = [one for one in caplog.records if "exact" in one.getMessage()]
    assert record.levelno == level
    assert record.getMessage().startswith(words)


@pytest.mark.parametrize(
    ("thing", "remedy"),
    [
        (lambda: DataLoader(DATA), "give the loader an ElasticSampler"),
        (SOURCES["loader of a stream"][0], "give its data set state_dict() and load_state_dict(); or ExactLoader("),
        (SOURCES["loader of a shuffled stream of datasets"][0], "leave out shuffle(buffer_size=...); or "),
        (SOURCES["shuffled stream of datasets"][0], "leave out shuffle(buffer_size=...); or "),
        (SOURCES["stream of datasets"][0], "track ExactLoader(loader) of "),
        (SOURCES["loader of litdata"][0], "track ExactLoader(loader) of "),
        (SOURCES["loader by random"][0], "StatefulDataLoader(..., shuffle=True)"),
        (SOURCES["nodes by random"][0], "StatefulDataLoader(..., shuffle=True)"),
        (SOURCES["loader with a generator"][0], "leave out generator=; or ExactLoader("),
        (WebStream, "write both"),
        (ReadByAnother, "iterate over it in its library's loader"),
        (object, "leave out what the program makes alike"),
    ],
    ids=[
        "loader",
        "loader of a stream",
        "loader of a shuffled stream",
        "shuffled stream",
        "bare stream",
        "loader of litdata",
        "loader by random",
        "nodes by random",
        "loader with a generator",
        "stream",
        "stream that asks",
        "anything",
    ],
)
def test_a_source_without_state_is_refused_with_what_to_use(
    thing: Callable[[], Any], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot track 'data'") as caught:
        Checkpointer(str(tmp_path / "root")).track(data=thing())
    assert caught.value.remedy.startswith(remedy)


def test_an_object_with_get_state_is_tracked_as_one_with_state_dict(tmp_path: Path) -> None:
    for thing in (Position(), torch.Generator().manual_seed(3)):
        Checkpointer(str(tmp_path / "root")).track(data=thing)
        wrapped = data_sources.with_state_dict(thing)
        before = wrapped.state_dict()
        torch.rand(3, generator=thing) if isinstance(thing, torch.Generator) else thing.set_state(7)
        wrapped.load_state_dict(before)
        assert str(wrapped.state_dict()) == str(before)
    assert data_sources.with_state_dict(Foreign) is Foreign


def test_the_page_that_it_names_is_there() -> None:
    path, _, section = data_sources.PAGE.partition(", ")
    page = (Path(__file__).parents[3] / path).read_text()
    assert section in page.lower()
