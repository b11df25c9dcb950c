"""What a loop takes between two steps is what the step commits, or the second step says so."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Queue
from typing import Any

import pytest
from support.counting import Numbers
from torch.utils.data import DataLoader, dataloader

from flashckpt.errors import SamplerStateError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler, Mixture, drawing

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata
N, MICRO = 202, 4


def loader_of(sampler: ElasticSampler, kind: str = "plain", *, workers: int = 0, **options: Any) -> DataLoader[Any]:
    made: Any = DataLoader
    if kind == "stateful":
        made = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    if workers:
        options["num_workers"] = workers
    if kind == "micro":
        return DataLoader(Numbers(N), batch_sampler=ElasticBatchSampler(sampler, MICRO), **options)
    return made(Numbers(N), batch_size=MICRO, sampler=sampler, **options)  # type: ignore[no-any-return]  # one of the two


def train(sampler: ElasticSampler, batches: Iterator[Any], accumulation: int, steps: int) -> None:
    for _ in range(steps):
        for _ in range(accumulation):
            next(batches)
        sampler.commit()


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@pytest.fixture(autouse=True)
def _only_what_is_asked_for_is_said(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    if "is_said" not in request.node.name:
        assert "leaves out a batch" not in caplog.text


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("micro", {}),
    ("stateful", {}),
    ("plain", {"workers": 2}),
    ("micro", {"workers": 1, "prefetch_factor": 5}),
    ("plain", {"workers": 2, "persistent_workers": True, "prefetch_factor": 3}),
    ("stateful", {"workers": 1}),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_takes_more_than_it_commits_is_told_at_its_second_step(
    kind: str, options: dict[str, Any], ranks: int
) -> None:
    for taken, committed in ((4, 1), (2, 1), (3, 2))[: None if not options else 1]:
        sampler = ElasticSampler(N, dp_rank=ranks - 1, dp_size=ranks, global_batch_size=MICRO * committed * ranks)
        batches = iter(loader_of(sampler, kind, **options))
        train(sampler, batches, taken, 1)
        with pytest.raises(SamplerStateError, match="takes more samples for each step") as told:
            train(sampler, batches, taken, 1)
        assert f"{MICRO * taken * ranks} samples taken" in told.value.found
        assert f"{MICRO * committed * ranks} committed" in told.value.found
        assert f"global_batch_size={MICRO * taken * ranks}" in told.value.remedy
        assert sampler.position == MICRO * committed * ranks, "the second step was not counted"


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_loop_that_takes_less_than_it_commits_is_told_at_its_first_step(kind: str, options: dict[str, Any]) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO * 4)
    with pytest.raises(SamplerStateError, match="more samples are committed") as told:
        train(sampler, iter(loader_of(sampler, kind, **options)), 2, 1)
    assert told.value.found.startswith("commit of 16 samples; 8 taken")
    assert sampler.position == 0


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("tail", ["span", "short", "pad", "drop"])
def test_a_loop_that_accumulates_what_it_commits_is_not(kind: str, options: dict[str, Any], tail: str) -> None:
    """Over the ends of epochs, whose last step may be smaller; with workers two epochs."""
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO * 4, tail=tail)
    loader, steps = loader_of(sampler, kind, **options), 0
    for _ in sampler.epochs(2 if options else 4):
        rows = 0
        for batch in loader:
            rows += len(batch)
            if rows == min(MICRO * 4, N - sampler.offset if tail == "short" else N):
                sampler.commit()
                rows, steps = 0, steps + 1
        assert rows == 0
    assert sampler.epoch >= (2 if options else 4), "every epoch was committed to its end"


def fetched_ahead(loader: Any, depth: int) -> Iterator[Any]:
    batches, hand = forever(loader), deque[Any]()
    while True:
        while len(hand) <= depth:
            hand.append(next(batches))
        yield hand.popleft()


def by_a_thread(loader: Any) -> Iterator[Any]:
    """What a prefetching wrapper does: another thread takes, at its own pace, up to nine batches more."""
    queue: Queue[Any] = Queue(maxsize=9)
    over = threading.Event()

    def fill() -> None:
        for batch in forever(loader):
            queue.put(batch)
            if over.is_set():
                return

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        while True:
            yield queue.get()
    finally:
        over.set()
        while thread.is_alive():
            if not queue.empty():
                queue.get()
            thread.join(0.001)


WRAPPED: dict[str, Callable[[Any], Iterator[Any]]] = {
    "one batch ahead": lambda loader: fetched_ahead(loader, 1),
    "seven batches ahead": lambda loader: fetched_ahead(loader, 7),
    "a thread": by_a_thread,
}


@pytest.mark.matrix
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("options", [{}, {"workers": 2}])
@pytest.mark.parametrize("ramp_up", [(), [(64, 16), (96, 24), (160, 32)]])
def test_a_loop_that_fetches_ahead_is_not(wrapped: str, options: dict[str, Any], ramp_up: Any) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO * 2, ramp_up=ramp_up)
    batches = WRAPPED[wrapped](loader_of(sampler, **options))
    for _ in range(40):
        for _ in range((sampler.global_batch_size or 0) // MICRO):
            next(batches)
        sampler.commit()
    batches.close()  # type: ignore[attr-defined]  # a generator


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"workers": 2}])
@pytest.mark.parametrize("deepest", [2, 3, 15])
@pytest.mark.parametrize("by", [1, 2])
def test_a_loop_that_fetches_further_ahead_with_each_step_is_not(
    options: dict[str, Any], deepest: int, by: int
) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    batches, hand = forever(loader_of(sampler, **options)), deque[Any]()
    for step in range(40):
        while len(hand) <= min(step * by, deepest):
            hand.append(next(batches))
        hand.popleft()
        sampler.commit()


@pytest.mark.parametrize("taken", [2, 4])
def test_a_loop_whose_first_step_alone_is_of_one_batch_is_told_in_time(taken: int) -> None:
    """`if number % taken == 0` counted from 0. It takes as a loop that fetches further and further ahead does."""
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    batches = forever(loader_of(sampler))
    train(sampler, batches, 1, 1)
    with pytest.raises(SamplerStateError, match="takes more samples for each step"):
        train(sampler, batches, taken, 17)


@pytest.mark.parametrize(("batch", "step"), [(4, 1), (4, 3), (10, 9), (9, 10), (3, 7), (1, 4)])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_that_cuts_batches_into_steps_of_another_size_is_not(batch: int, step: int, by_hand: bool) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=step)
    loader: DataLoader[Any] = DataLoader(Numbers(N), batch_size=batch, sampler=sampler)
    stream: Any = sampler if by_hand else (number for batch in forever(loader) for number in batch)
    numbers: Iterator[Any] = forever(stream)
    rows = 0
    for _ in range(150):
        while rows < step:
            for _ in range(batch if by_hand else 1):
                next(numbers)
            rows += batch if by_hand else 1
        rows -= step
        sampler.commit()


def test_another_iterator_between_two_steps_does_not_count() -> None:
    """A look at a batch, and an evaluation over what the training reads from, while its own iterator goes on."""
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    loader = loader_of(sampler)
    batches = forever(loader)
    for _ in range(30):
        train(sampler, batches, 1, 3)
        kept = iter(loader)
        next(kept)
        for _ in loader:
            pass
    assert sampler.position == 90 * MICRO


@pytest.mark.parametrize("missing", ["_index_sampler", "_task_info", "_BaseDataLoaderIter"])
def test_with_a_torch_that_has_other_names_nothing_is_counted_and_that_is_said_once(
    missing: str, monkeypatch: Any, caplog: Any
) -> None:
    def there(self: Any, name: str) -> Any:
        if name == missing and not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    drawing._say_not_counted.cache_clear()
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__getattribute__", there, raising=False)
    if missing == "_BaseDataLoaderIter":
        monkeypatch.setattr(drawing, "_ITERATOR", None)
    for taken in (1, 2):
        sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
        train(sampler, forever(loader_of(sampler, workers=int(missing == "_task_info"))), taken, 20)
        assert sampler.position == 20 * MICRO
    said = [record.getMessage() for record in caplog.records if "cannot be counted" in record.getMessage()]
    assert len(said) == 1
    assert f"has no {missing}" in said[0]


def leaving_out(sampler: ElasticSampler, batches: Iterator[Any], times: int) -> None:
    for _ in range(times):
        train(sampler, batches, 1, 10)
        next(batches)  # its loss is not finite: no step


def test_a_batch_that_is_left_out_once_is_said_and_as_a_rule_an_error(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ElasticSampler(10_000, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    batches = iter(DataLoader(Numbers(10_000), batch_size=MICRO, sampler=sampler))
    leaving_out(sampler, batches, 3)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"took {2 * MICRO} samples since its last step, over all replicas, and commits {MICRO}" in said
    assert f"call sampler.commit({MICRO})" in said
    with pytest.raises(SamplerStateError, match="takes more samples for each step"):
        leaving_out(sampler, batches, 60)


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_a_batch_that_is_left_out_and_committed_comes_once(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO * 2)
    seen: list[int] = []
    for number, batch in enumerate(loader_of(sampler, **options)):
        seen += batch.tolist()
        if number % 7 == 3:
            sampler.commit(MICRO)
        elif number % 7 in (1, 4, 6):
            sampler.commit()
        if number == 20:
            break
    again = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO * 2)
    again.load_state_dict(sampler.state_dict())
    seen += [number for batch in loader_of(again) for number in batch.tolist()]
    assert sorted(seen[:N]) == list(range(N))
    assert not caplog.records


def test_samples_that_are_said_with_each_step_are_counted_too() -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1)
    batches = iter(loader_of(sampler))
    next(batches), next(batches)
    sampler.commit(MICRO)
    next(batches), next(batches)
    with pytest.raises(SamplerStateError, match="takes more samples for each step"):
        sampler.commit(MICRO)


def test_ids_that_are_drawn_by_hand_may_be_read_ahead_at_any_pace_but_not_for_ever() -> None:
    sampler = ElasticSampler(10_000, dp_rank=0, dp_size=1, global_batch_size=2)
    ids, taken = iter(sampler), 0
    for ahead in (0, 2, 8, 20, 40, 41, 80):
        while taken < sampler.position + 2 + ahead:
            next(ids)
            taken += 1
        sampler.commit()
    fours = (ids_of_one for ids_of_one in zip(*[ids] * 4, strict=False))
    with pytest.raises(SamplerStateError, match="takes more samples for each step"):
        train(sampler, fours, 2, 9)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_of_one_step_are_counted_together(workers: int) -> None:
    sampler = ElasticSampler(16, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    loader: DataLoader[Any] = DataLoader(Numbers(16), batch_size=MICRO, sampler=sampler, num_workers=workers)
    for epoch in sampler.epochs(2):
        assert len(list(loader)) == 4
        if epoch:
            break
        sampler.commit()
    with pytest.raises(SamplerStateError, match="takes more samples for each step"):
        sampler.commit()


class Pools:
    """A batch sampler that takes some batches at once and gives their samples out by length, as buckets do."""

    def __init__(self, sampler: ElasticSampler, batches: int) -> None:
        self.sampler, self.rows = sampler, batches * MICRO

    def __iter__(self) -> Iterator[list[int]]:
        ids = iter(self.sampler)
        while pool := sorted(islice(ids, self.rows)):
            for at in range(0, len(pool), MICRO):
                yield pool[at : at + MICRO]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_that_gives_samples_out_in_another_order_is_refused_at_the_second_step(workers: int) -> None:
    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    batches = iter(DataLoader(Numbers(N), batch_sampler=Pools(sampler, 5), num_workers=workers))
    train(sampler, batches, 1, 1)
    with pytest.raises(SamplerStateError, match="other samples than the next ones"):
        train(sampler, batches, 1, 1)
    assert sampler.position == MICRO


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_that_sorts_the_samples_of_a_step_is_not(workers: int, accumulation: int) -> None:
    sampler = ElasticSampler(N, dp_rank=1, dp_size=2, global_batch_size=2 * MICRO * accumulation)
    loader = DataLoader(Numbers(N), batch_sampler=Pools(sampler, accumulation), num_workers=workers)
    train(sampler, forever(loader), accumulation, 2 * N // (2 * MICRO * accumulation))
    assert sampler.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_small_source_that_come_again_within_a_step_are_in_order(workers: int) -> None:
    data: Any = Mixture({"small": (Numbers(3), 3), "large": (Numbers(N), 1)})
    sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    loader = DataLoader(data, batch_sampler=Pools(sampler, 1), num_workers=workers)
    train(sampler, forever(loader), 1, 40)
    assert sampler.position == 40 * MICRO


def test_ids_that_a_batch_sampler_changes_are_not_compared() -> None:
    class Pairs(Pools):
        def __iter__(self) -> Iterator[Any]:
            return ([(one, MICRO) for one in batch] for batch in super().__iter__())

    sampler = ElasticSampler(N, dp_rank=0, dp_size=1, global_batch_size=MICRO)
    batches: Any = iter(DataLoader(Numbers(N), batch_sampler=Pairs(sampler, 1), num_workers=0))
    for _ in range(5):
        batches._next_index()  # its data: Numbers takes no pairs
        sampler.commit()
