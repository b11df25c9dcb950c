"""`ExactLoader`: any source of batches continues at the next one after a restart, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.errors import ConfigError, SamplerStateError, StoreError
from flashckpt.integrations import loaders
from flashckpt.integrations.loader_reading import digest_of_batch
from flashckpt.integrations.loader_sources import packed, unpacked
from flashckpt.integrations.loaders import ExactLoader
from flashckpt.sampler.datasets import reaching
from flashckpt.state.placement import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata
BATCHES, EPOCHS = 5, 3


class Counted:
    """A loader of five batches in an epoch that says how many it handed out, and begins the next epoch by itself.

    `ahead`: so many more than it did. `still`: the state stays what it was.
    """

    def __init__(self, *, ahead: int = 0, still: bool = False) -> None:
        self.at, self.epoch, self.ahead, self.still = 0, 0, ahead, still
        self.failing: list[Exception] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            if self.failing:
                raise self.failing.pop()
            self.at += 1
            yield self.batch(self.at - 1)
        self.at, self.epoch = 0, self.epoch + 1

    def batch(self, number: int) -> torch.Tensor:
        return torch.tensor([100 * self.epoch + 2 * number, 100 * self.epoch + 2 * number + 1])

    def state_dict(self) -> dict[str, int]:
        return {"at": 0 if self.still else min(self.at + self.ahead, BATCHES), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Position:
    """An iterator of Grain, by its methods."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.at == BATCHES:
            raise StopIteration
        self.at += 1
        return {"id": np.arange(2) + 2 * self.at}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class WithPositions:
    """A data set whose iterators have the state."""

    def __iter__(self) -> Iterator[Any]:
        return Position()


class Ordered(IterableDataset[int]):
    """A stream without state, in another order in each epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(2 * BATCHES, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Forever(Ordered):
    """The same without an end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def shuffled() -> Any:
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(range(2 * BATCHES), batch_size=2, shuffle=True, generator=generator)


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "loader with state": (Counted, {}),
    "iterators with state": (WithPositions, {}),
    "torchdata": (shuffled, {}),
    "read again": (Ordered, {"replay": True}),
    "loader read again": (lambda: DataLoader(Forever(), batch_size=2), {"replay": True}),
    "torchdata read again": (lambda: StatefulDataLoader(Forever(), batch_size=2), {"replay": True}),
}


def take(data: ExactLoader, steps: int) -> list[str]:
    """Train up to so many steps; return what was trained in each."""
    trained = []
    for _ in data.epochs(EPOCHS):
        for batch in data:
            trained.append(repr(batch))
            data.commit()
            if len(trained) == steps:
                return trained
    return trained


@pytest.mark.parametrize("kind", SOURCES)
def test_every_place_is_continued_from(kind: str) -> None:
    """In the middle of an epoch, after its last batch and its first one, and from there once more."""
    make, options = SOURCES[kind]
    whole = take(ExactLoader(make(), **options), 12)
    assert len(whole) == 12
    for first, second in ((1, 3), (BATCHES, 1), (BATCHES - 1, 2), (2 * BATCHES, 1)):
        data = ExactLoader(make(), **options)
        trained = take(data, first)
        for steps in (second, 12 - first - second):
            state, data = unpacked(packed(data.state_dict())), ExactLoader(make(), **options)
            data.load_state_dict(state)
            trained += take(data, steps)
        assert trained == whole


def test_nothing_trained_is_the_beginning() -> None:
    data = ExactLoader(Counted())
    data.load_state_dict(ExactLoader(Counted()).state_dict())
    assert take(data, 2) == take(ExactLoader(Counted()), 2)


def test_batches_that_are_fetched_ahead_are_dealt_again() -> None:
    data = ExactLoader(Counted())
    batches = iter(data)
    ahead = [next(batches) for _ in range(3)]
    for _ in range(2):  # trains the first, then the second; always two in flight
        data.commit()
        ahead.append(next(batches)) if len(ahead) < BATCHES else None
    again = ExactLoader(Counted())
    again.load_state_dict(data.state_dict())
    assert [batch.tolist() for batch in again] == [[4, 5], [6, 7], [8, 9]]


def test_steps_of_several_batches() -> None:
    data = ExactLoader(Counted(), batches_per_step=2)
    for number, _ in enumerate(data, start=1):
        if number % 2 == 0:
            data.commit()
        if number == 4:
            break
    again = ExactLoader(Counted(), batches_per_step=2)
    again.load_state_dict(data.state_dict())
    assert next(iter(again)).tolist() == [8, 9]


def test_loop_that_takes_more_than_it_commits_is_refused_in_its_second_step() -> None:
    data = ExactLoader(Counted())
    batches = iter(data)
    next(batches), next(batches)
    data.commit()
    next(batches), next(batches)
    with pytest.raises(SamplerStateError, match="more batches for each step than it commits") as caught:
        data.commit()
    assert "2 batches taken" in caught.value.found
    assert "batches_per_step=2" in caught.value.remedy


@pytest.mark.parametrize("ahead", [1, 2])
def test_state_that_is_ahead_of_the_batches_is_found_at_the_restore(ahead: int) -> None:
    """As of a data set behind a loader that fetches ahead: samples would be lost without a word."""
    data = ExactLoader(Counted(ahead=ahead))
    take(data, 2)
    with pytest.raises(SamplerStateError, match="drawn once more, the last batch is another one") as caught:
        ExactLoader(Counted(ahead=ahead)).load_state_dict(data.state_dict())
    assert "replay=True" in caught.value.remedy
    assert "Nothing was trained" in caught.value.state


def test_state_that_does_not_move_is_refused_while_training() -> None:
    with pytest.raises(SamplerStateError, match="does not move while batches are drawn"):
        take(ExactLoader(Counted(still=True)), BATCHES)


def test_what_is_compared_may_be_a_part_of_a_batch() -> None:
    class Augmented(Counted):
        def batch(self, number: int) -> Any:
            return {"id": super().batch(number), "noise": torch.rand(2)}

    whole, other = ExactLoader(Augmented()), ExactLoader(Augmented(), identity=lambda batch: batch["id"])
    take(whole, 2), take(other, 2)
    with pytest.raises(SamplerStateError, match="another one"):
        ExactLoader(Augmented()).load_state_dict(whole.state_dict())
    again = ExactLoader(Augmented(), identity=lambda batch: batch["id"])
    before = torch.get_rng_state()
    again.load_state_dict(other.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert next(iter(again))["id"].tolist() == [4, 5]


def on_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setattr(loaders, "current_world", lambda: World(rank=rank, size=ranks))


def test_other_number_of_ranks_is_refused_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(monkeypatch, 0, 2)
    data = ExactLoader(Counted())
    take(data, 1)
    state = data.state_dict()
    on_ranks(monkeypatch, 0, 1)
    with pytest.raises(SamplerStateError, match="no position on another number of ranks") as caught:
        ExactLoader(Counted()).load_state_dict(state)
    assert caught.value.found == "a position on 2 ranks"
    assert "ElasticSampler" in caught.value.remedy


def test_one_state_for_all_ranks_continues_on_others_with_the_same_global_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OfAll(Counted):
        """Counts samples of all ranks, two ids in each batch of a rank."""

        size = 2

        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(self.at // 4, BATCHES):
                self.at = 4 * (number + 1)
                yield torch.arange(self.size) + 4 * number

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at, "epoch": 0}

    on_ranks(monkeypatch, 1, 2)
    data = ExactLoader(OfAll(), one_for_all=True)
    take(data, 2)
    state = data.state_dict()
    assert data.flashckpt_replicated
    on_ranks(monkeypatch, 0, 1)
    with pytest.raises(SamplerStateError, match="deals another global batch") as caught:
        ExactLoader(OfAll(), one_for_all=True).load_state_dict(state)
    assert "a batch size of 4 on each rank" in caught.value.remedy
    whole = OfAll()
    whole.size = 4
    again = ExactLoader(whole, one_for_all=True)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [8, 9, 10, 11]


def test_storage_that_cannot_be_reached_for_a_while_costs_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_FIRST_WAIT_S", 0.001)
    source = Counted()
    data = ExactLoader(source)
    trained = take(data, 2)
    source.failing = [ConnectionResetError("gone"), TimeoutError("slow")]
    assert trained + take(data, 4) == take(ExactLoader(Counted()), 6)
    assert not source.failing


def test_storage_that_stays_away_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "PATIENCE_S", 0.0)
    source = Counted()
    source.failing = [ConnectionResetError("gone") for _ in range(9)]
    with pytest.raises(StoreError, match="cannot be reached"):
        next(iter(ExactLoader(source)))


def test_error_of_the_users_own_code_passes_as_it_is() -> None:
    source = Counted()
    source.failing = [KeyError("label")]
    with pytest.raises(KeyError, match="label"):
        next(iter(ExactLoader(source)))


def test_state_that_a_library_refuses_names_the_library() -> None:
    class Strict(Counted):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("Worker count in checkpoint does not match")

    data = ExactLoader(Strict())
    take(data, 2)
    with pytest.raises(SamplerStateError, match="Strict does not take back the state that it gave") as caught:
        ExactLoader(Strict()).load_state_dict(data.state_dict())
    assert "Worker count in checkpoint does not match" in caught.value.found


def test_data_that_has_become_shorter_is_refused() -> None:
    data = ExactLoader(Ordered(), replay=True)
    take(data, 8)
    state = {**data.state_dict(), "batches": 99}
    with pytest.raises(SamplerStateError, match="ends before the place"):
        ExactLoader(Ordered(), replay=True).load_state_dict(state)


class Buffered:
    """A stream of `datasets` behind shuffle(), by its names."""


Buffered.__module__, Buffered.__qualname__ = "datasets.iterable_dataset", "IterableDataset"


def test_other_workers_of_a_stream_that_is_read_again_are_refused_whatever_batch_they_deal() -> None:
    """The first batch is the same with one worker and with none; what follows need not be."""

    def made(workers: int) -> ExactLoader:
        return ExactLoader(DataLoader(Ordered(), batch_size=2, num_workers=workers), replay=True)

    data = made(1)
    assert take(data, 1)
    for state in (data.state_dict(), {k: v for k, v in data.state_dict().items() if k != "workers"}):
        made(1).load_state_dict(state)  # a state of an earlier release does not say
    with pytest.raises(SamplerStateError, match="another order with other workers") as caught:
        made(0).load_state_dict(data.state_dict())
    assert caught.value.remedy.startswith("num_workers=1; ")


@pytest.mark.parametrize(
    ("thing", "found", "remedy"),
    [
        (lambda: DataLoader(range(4)), "keeps no state", "give the loader an ElasticSampler"),  # type: ignore[arg-type]
        (lambda: StatefulDataLoader(Ordered(), batch_size=2), "keeps no state that continues", "give its data set"),
        (Ordered, "keeps no state", "write both"),
        (type("IterableDataset", (Buffered,), {"__module__": "datasets.iterable_dataset"}), "buffer", "replay=True"),
        (object, "cannot be iterated", "replay=True"),
    ],
    ids=["loader", "loader of a stream", "stream", "shuffle buffer", "anything"],
)
def test_what_cannot_be_exact_is_refused_with_what_can(thing: Callable[[], Any], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="no exact position") as caught:
        ExactLoader(thing())
    assert found in caught.value.found
    assert remedy in caught.value.remedy
    assert "replay=True" in caught.value.remedy


def test_iterator_without_state_is_refused_at_the_first_batch() -> None:
    with pytest.raises(ConfigError, match="no exact position"):
        next(iter(ExactLoader([1, 2])))


def test_digest_sees_every_value_of_a_batch() -> None:
    base: dict[str, Any] = {"x": torch.ones(2, dtype=torch.bfloat16), "y": np.arange(3), "z": ["a", 1, None, b"b"]}
    others = [
        {**base, "x": torch.zeros(2, dtype=torch.bfloat16)},
        {**base, "x": torch.ones(2, 1, dtype=torch.bfloat16)},
        {**base, "y": np.arange(1, 4)},
        {**base, "z": ["a", 2, None, b"b"]},
        {**base, "z": ["a", 1, None]},
        {**base, "w": np.array(["a", 1], dtype=object)},
    ]
    found = [digest_of_batch(batch) for batch in (base, *others)]
    assert len(set(found)) == len(found)
    assert digest_of_batch({**base}) == found[0]


def test_state_of_a_library_is_kept_with_its_arrays_and_tensors() -> None:
    state = {
        "a": np.arange(3, dtype=np.int32),
        "b": [torch.tensor([1.5], dtype=torch.bfloat16), (1, 2)],
        "c": {0: b"x"},
    }
    again = unpacked(packed(state))
    assert again["a"].dtype == np.int32
    assert again["a"].tolist() == [0, 1, 2]
    assert again["b"][0].dtype == torch.bfloat16
    assert again["b"][1] == (1, 2)
    assert again["c"] == {0: b"x"}
    assert packed({"e": torch.empty(0, 3)}) == packed(unpacked(packed({"e": torch.empty(0, 3)})))
