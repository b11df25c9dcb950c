"""Where Accelerate's training is in its data: which sources can be resumed, and the position of a prepared loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.integrations.shared import Share, check_share, elastic_in
from flashckpt.state import rng

_REMEDY = (
    "leave the loader out of prepare() and give it an ElasticSampler, or prepare it with "
    "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
)


def positions_of(sources: Sequence[Any], accelerator: Any) -> list[Any]:
    """Return what is tracked of each source of the training data.

    Raises:
        ConfigError: The position of one cannot be resumed.
    """
    if not [source for source in sources if source is not None]:
        raise ConfigError(
            "data= is missing: the loader or sampler that training reads",
            expected="FlashCheckpoint(accelerator, root, data=loader)",
            remedy=_REMEDY,
        )
    return [_position(source, accelerator) for source in sources]


def refuse_other_loaders(accelerator: Any, sources: Sequence[Any]) -> None:
    """Refuse prepared loaders that would silently begin again: what shuffles is for training. Others are for evaluation.

    Raises:
        ConfigError: One is not among the sources, and shuffles.
    """
    for loader in accelerator._dataloaders:  # noqa: SLF001 -- what its save_state reads
        if any(loader is source for source in sources):
            continue
        if elastic_in(loader) is not None:
            raise _dealt_twice()
        if isinstance(_sampler_of(loader), RandomSampler):
            raise ConfigError(
                "a prepared loader shuffles, and its position is in no snapshot",
                found=f"a loader over {type(loader.dataset).__qualname__} that is not in data=",
                expected="every loader of the training in data=",
                remedy=_REMEDY + "; for evaluation: shuffle=False",
            )


def _position(source: Any, accelerator: Any) -> Any:
    is_prepared = isinstance(source, (DataLoaderShard, DataLoaderDispatcher))
    if (elastic := elastic_in(source)) is not None:
        if is_prepared:
            raise _dealt_twice()
        check_share(elastic, source, _share(accelerator))
        return elastic
    if is_prepared:
        return PreparedPosition(source, ranks=accelerator.num_processes)
    if isinstance(source, DataLoader) and not callable(getattr(source, "state_dict", None)):
        raise ConfigError(
            "the position of a loader cannot be resumed",
            found=f"a {type(source).__qualname__} with a {type(source.sampler).__qualname__}, not prepared",
            expected="an ElasticSampler in it, or a StatefulDataLoader",
            remedy=_REMEDY,
        )
    return source


def _share(accelerator: Any) -> Share:
    return Share(
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        accumulation=accelerator.gradient_accumulation_steps,
        place_remedy="ElasticSampler(dp_rank=accelerator.process_index, dp_size=accelerator.num_processes, ...)",
        batch_remedy="Accelerator(gradient_accumulation_steps=global batch // (micro-batch * ranks)), or change the global batch",
    )


def _dealt_twice() -> ConfigError:
    return ConfigError(
        "a prepared loader has an ElasticSampler, and its samples would be dealt to the ranks twice",
        expected="a loader that prepare() did not see",
        remedy="leave it out of prepare(), and move its batches to accelerator.device",
    )


def _sampler_of(loader: Any) -> Any:
    return None if isinstance(loader.dataset, IterableDataset) else loader.get_sampler()


class PreparedPosition:
    """The position of a prepared loader over a stateful one, for as many ranks: batches of this rank, and the epoch.

    Accelerate restores the former only, and orders each epoch by the number that its loader counts from 0 again.

    Args:
        loader: What `prepare` returned.
        ranks: Of the accelerator.

    Attributes:
        is_ended: Whether the restored step was the last one of its epoch, and `epochs` has yet to yield that one again.
        deals_nothing: Whether the loader is over that epoch now.

    Raises:
        ConfigError: Its position cannot be resumed.
    """

    def __init__(self, loader: Any, *, ranks: int) -> None:
        self._loader, self._ranks = loader, ranks
        self._stage = "unused"
        self._before_next: rng.Generators | None = None
        self._replayed: dict[str, Any] | None = None
        self.is_ended = self.deals_nothing = False
        if problem := self._problem():
            raise ConfigError(
                "the position of a prepared loader cannot be resumed",
                found=problem,
                expected="a stateful loader in sequence, or shuffled by a seed",
                remedy=_REMEDY,
            )
        # prepare() began an iterator, which with workers deals the first epoch in another order than that of its seed
        loader.load_state_dict({})
        self._watch(loader)

    def _watch(self, loader: Any) -> None:
        """Note the generators before each batch that is fetched ahead, and fetch the first one after a restore with them."""
        note, inner = loader._update_state_dict, loader.base_dataloader  # noqa: SLF001 -- called before each fetch

        def _update_state_dict() -> None:
            note()
            self._before_next = rng.Generators.now()

        loader._update_state_dict = _update_state_dict  # noqa: SLF001 -- as above
        inner.__iter__ = lambda: self._begun(inner)  # as Accelerate asks for it, by this name

    def _begun(self, loader: Any) -> Iterator[Any]:
        """Yield batches; the first one after a restore is one that had been fetched when the snapshot was taken."""
        if self.deals_nothing:
            return
        made = type(loader).__iter__(loader)
        state, self._replayed = self._replayed, None
        if state is not None:
            now = rng.capture()
            rng.restore(state)
            first = next(made)
            rng.restore(now)
            yield first
        yield from made

    def _problem(self) -> str:
        loader = self._loader
        if isinstance(loader, DataLoaderDispatcher):
            return "batches that rank 0 reads for all (dispatch_batches)"
        if not loader.use_stateful_dataloader:
            return "use_stateful_dataloader=False"
        if isinstance(loader.dataset, IterableDataset):
            return f"{type(loader.dataset).__qualname__}, which is read in sequence and has no index"
        if type(_sampler_of(loader)) not in {SeedableRandomSampler, SequentialSampler}:
            return f"a {type(_sampler_of(loader)).__qualname__}: its order is not that of a seed"
        return ""

    def epochs(self, stop: int, others: Sequence[Any] = ()) -> Iterator[int]:
        """See `ElasticSampler.epochs`; where this epoch has ended, `others` that have deal nothing either."""
        first = self._loader.iteration
        if self.is_ended:
            ended = [one for one in (self, *others) if isinstance(one, PreparedPosition) and one.is_ended]
            for one in ended:
                one.is_ended, one.deals_nothing = False, True
            yield first - 1
            for one in ended:
                one.deals_nothing = False
        yield from range(first, stop)

    @property
    def batch_sampler(self) -> Any:
        """What the loader inside draws from: by it a restore knows the first iterator."""
        return self._loader.batch_sampler

    @property
    def restored_stage(self) -> str:
        """See `ElasticSampler.restored_stage`."""
        return self._stage

    def commit(self, samples: int | None = None) -> None:
        """Nothing to do: the loader has counted. That it moves is checked."""

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the seed of the order, and what the loader says of its batches."""
        state: Mapping[str, Any] = self._loader.state_dict()
        return {
            "epoch": self._loader.iteration,
            "is_end": bool(state.get("_iterator_finished")),
            "seed": getattr(_sampler_of(self._loader), "initial_seed", None),
            "shares": [self._ranks, self._loader.total_batch_size],
            "loader": dict(state),
            "before_next": None if self._before_next is None else self._before_next.packed(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a recorded position.

        Raises:
            SamplerStateError: It is one on another number of ranks, or with batches of another size.
        """
        shares = [self._ranks, self._loader.total_batch_size]
        if list(state_dict["shares"]) != shares:
            found, now = ("{} ranks with {} samples together".format(*one) for one in (state_dict["shares"], shares))
            raise SamplerStateError(
                "the position of a prepared loader is one on other ranks",
                found=found,
                expected=now,
                state="Nothing was trained.",
                remedy="continue on as many ranks, or read from a loader with an ElasticSampler",
            )
        if state_dict["seed"] is not None:
            _sampler_of(self._loader).initial_seed = state_dict["seed"]
        is_end = state_dict["is_end"]
        self.is_ended = bool(is_end)
        self._replayed = None if is_end else state_dict.get("before_next")
        self._loader.iteration = state_dict["epoch"] + is_end
        self._stage = "between" if is_end else "running"
        # at the end of an epoch: nothing, but the iterator that was made when it was first asked for its state
        self._loader.load_state_dict({} if is_end else dict(state_dict["loader"]))
