"""How exactly a source of data continues after a restart, as far as its kind tells; logged once, when it is tracked.

Kinds of other libraries are known by their names, so that none of them is imported.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from flashckpt.errors import SamplerStateError
from flashckpt.state.placement import World

_OF_NUMBERS = ("SequentialSampler", "DistributedSampler", "SeedableRandomSampler", "_InfiniteConstantSampler")
"""Samplers whose order follows from numbers that the program gives them: the epoch, a seed."""
_DRAWN = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
"""Samplers that draw another order each time."""
_OTHERS = (
    ("datasets", "IterableDataset"),
    ("grain", "DatasetIterator"),
    ("grain", "DataLoaderIterator"),
    ("litdata", "StreamingDataLoader"),
)
"""Loaders of other libraries that keep their own state."""
PAGE = "docs/data.md, which data source is exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What to expect of a source.

    Attributes:
        words: For people; begins with "exact" where it is.
        is_exact: Whether every sample comes once on the ranks that it had; False: not, or nobody can tell.
        remedy: What is exact instead, where this certainly is not: it is refused.
        is_kept_whole: An ExactLoader makes it exact.
    """

    words: str
    is_exact: bool = True
    remedy: str = ""
    is_kept_whole: bool = False


ELASTIC = Continuation(words="exact on any number of ranks")
LOADER = Continuation(words="exact on the same number of ranks; with ElasticSampler as its sampler on any")
NODES = Continuation(words="exact on the same number of ranks")
ONE_FOR_ALL = Continuation(words="exact on any number of ranks, with the same global batch")
BARE = Continuation(
    words="exact in the middle of one epoch at most: begun again at an end, or with other workers, it repeats samples or leaves them out",
    is_exact=False,
    remedy="track ExactLoader(loader) of flashckpt.integrations.loaders, and iterate over that",
    is_kept_whole=True,
)
OWN_STATE = Continuation(
    words="exact on the same ranks and loader workers, if load_state_dict() of the data set continues at the next sample"
)
REPLAY = "ExactLoader(loader, replay=True) of flashckpt.integrations.loaders reads an epoch again up to the place"
READ_AGAIN = Continuation(
    words="exact at the first restart only: its data set keeps no state and is read again from its beginning, and the loader counts "
    "that twice; the next restart leaves data out or fails",
    is_exact=False,
    remedy=f"give its data set state_dict() and load_state_dict(); or {REPLAY}",
)
ORDER_AGAIN = Continuation(
    words="exact only if its sampler gives the same order each time: it keeps no state, and is read again from its beginning; "
    "in flashckpt.integrations.loaders.ExactLoader another order is refused",
    is_exact=False,
)
RANDOM_ORDER = Continuation(
    words="exact to the end of the first epoch at most: its sampler draws another order each time, and keeps no state",
    is_exact=False,
    remedy="StatefulDataLoader(..., shuffle=True), a StatefulDistributedSampler, or an ElasticSampler, which continues on any "
    "number of ranks",
)
SHARED_GENERATOR = Continuation(
    words="exact to the end of the epoch: its sampler and the loader itself draw from one generator=, of which it records the "
    "sampler's part",
    is_exact=False,
    remedy="leave out generator=; or ExactLoader(loader) of flashckpt.integrations.loaders, which keeps it",
    is_kept_whole=True,
)
SHUFFLED_STREAM = Continuation(
    words="exact but for what its shuffle buffer holds: those samples do not come after a restart",
    is_exact=False,
    remedy=f"leave out shuffle(buffer_size=...); or an indexed data set with an ElasticSampler, which shuffles all of it; or {REPLAY}",
)


def continuation_of(thing: Any) -> Continuation | None:
    """Return how a tracked object continues; None for what is no source of data."""
    thing = thing.thing if isinstance(thing, OfGetState) else thing
    for part in (thing, getattr(thing, "sampler", None), getattr(thing, "batch_sampler", None)):
        if type(part).__module__.startswith("flashckpt.sampler."):
            return ELASTIC
    if _is(thing, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        return _of_loader(thing)
    if _is(thing, "torchdata.nodes", "Loader"):
        return _of_nodes(thing)
    if _is(thing, "streaming", "StreamingDataLoader"):
        return ONE_FOR_ALL
    if _is(thing, "datasets", "IterableDataset") and _has_buffer(thing):
        return SHUFFLED_STREAM
    return BARE if any(_is(thing, package, name) for package, name in _OTHERS) else None


def _of_nodes(loader: Any) -> Continuation:
    found = [LOADER if keeps_state(part) else _read_again(part) for part in _leaves(loader.root)]
    worst = min(found, key=lambda one: (one.is_exact, not one.remedy), default=LOADER)
    return NODES if worst.is_exact else worst


def _of_loader(loader: Any) -> Continuation:
    data = loader.dataset
    if not isinstance(data, IterableDataset):
        found = _of_order(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        return SHARED_GENERATOR if found is LOADER and _shares_generator(loader) else found
    if any(_is(one, "datasets", "IterableDataset") and _has_buffer(one) for one in (data, *_members(data))):
        return SHUFFLED_STREAM
    if _is(data, "datasets", "IterableDataset"):
        return BARE
    return OWN_STATE if keeps_state(data) else READ_AGAIN


def _shares_generator(loader: Any) -> bool:
    """Whether the order is drawn in this process from the generator that gives each iterator its seed."""
    own, order = loader.generator, getattr(loader.sampler, "generator", None)
    return own is not None and own is order and not loader.num_workers


def _of_order(order: Any) -> Continuation:
    """Return how a loader continues whose samples are ordered so: by a state that is recorded, or read again up to the place."""
    inner = getattr(order, "sampler", None)
    if keeps_state(order) or _is(order, "torchdata", "RandomSampler"):
        return LOADER
    if _is(order, "torchdata", "BatchSampler"):  # its iterator keeps its own state, and that of the sampler's
        return _of_order(inner)
    if type(order) is BatchSampler:
        return _read_again(inner)
    return _read_again(order)


def _read_again(order: Any) -> Continuation:
    """Return how a loader continues of which the order is not recorded."""
    names = {kind.__name__ for kind in type(order).__mro__}
    if isinstance(order, (range, list, tuple)) or not names.isdisjoint(_OF_NUMBERS):
        return LOADER
    return ORDER_AGAIN if names.isdisjoint(_DRAWN) else RANDOM_ORDER


def _nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes of a pipeline of torchdata, each once."""
    waiting, seen = [root], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for value in vars(part).values():
            inside = list(value.values()) if isinstance(value, dict) else [value]
            waiting += [one for one in inside if _is(one, "torchdata.nodes", "BaseNode")]


def _leaves(root: Any) -> Iterator[Any]:
    """Yield what the nodes of torchdata draw from: samplers and iterables, and nothing that other nodes wrap."""
    for node in _nodes(root):
        yield from (value for name, value in vars(node).items() if name in ("sampler", "iterable"))


def is_of_its_ranks(thing: Any) -> bool:
    """Whether the state of a source holds the place of one of the ranks that it was dealt to, and of no other number of them."""
    return continuation_of(thing) not in (None, ELASTIC, ONE_FOR_ALL)


def workers_of(loader: Any, state: Any) -> tuple[str, str] | None:
    """Return the workers of a loader of torchdata, and those that a state of it needs; None for any other source."""
    if not isinstance(state, Mapping) or not state:
        return None
    if _is(loader, "torchdata.nodes", "Loader"):  # with a worker the state of a mapper has another form than without
        mappers = [one for one in _nodes(loader.root) if _is(one, "torchdata.nodes", "ParallelMapper")]
        now = sorted(one.num_workers for one in mappers)
        with_workers = sum(one > 0 for one in now)
        needed = sum(_mappers_with_workers(state))
        words = (
            "0" if not needed else "1 or more" if needed == len(now) else f"1 or more in {needed} of {len(now)} mappers"
        )
        shown = ", ".join(map(str, now))
        return (shown, shown if with_workers == needed else words)
    if _is(loader, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        taken_with = state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
        return str(loader.num_workers), str(taken_with)
    return None


def _mappers_with_workers(state: Any) -> Iterator[bool]:
    """Yield of each mapper in a state of a pipeline whether it had workers."""
    waiting = [state]
    for part in waiting:
        waiting += part.values() if isinstance(part, Mapping) else part if isinstance(part, (list, tuple)) else ()
        if isinstance(part, Mapping) and isinstance(inner := part.get("it_state"), Mapping):
            yield "snapshot" in (
                inner["source"] if "batch_idx" in inner else inner
            )  # in batches: within what cuts these


def begins_when_read(thing: Any) -> bool:
    """Whether an object may begin to read data when it is asked for its state: sources of data, and what has one inside."""
    return bool(_sources_in(thing))


def may_be_read_first(thing: Any) -> bool:
    """Whether a source can be given its state also after it was asked for it."""
    return all(isinstance(part, DataLoader) or _is(part, "datasets", "IterableDataset") for part in _sources_in(thing))


def is_lazy(thing: Any) -> bool:
    """Whether a source takes what it is given only when it is iterated: until then it tells something else, or fetches."""
    return any(isinstance(part, DataLoader) or fetches_when_read(part) for part in _sources_in(thing))


def fetches_when_read(thing: Any) -> bool:
    """Whether a source that was given its state fetches the next samples when it is asked for it, before the loop does."""
    return any(_is(part, "torchdata.nodes", "Loader") for part in (thing, *_members(thing)))


def _members(thing: Any) -> list[Any]:
    return list(getattr(thing, "__dict__", {}).values())


def _sources_in(thing: Any) -> list[Any]:
    parts = [thing, *(part for part in _members(thing) if isinstance(part, DataLoader) or keeps_state(part))]
    return [part for part in parts if _is_source(part)]


def _is_source(thing: Any) -> bool:
    plain = (Mapping, Sequence, AbstractSet, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type)
    if type(thing).__module__.startswith("flashckpt.") or isinstance(thing, plain):
        return False
    return any(hasattr(thing, name) for name in ("__iter__", "__next__", "commit"))


def refusal_of(thing: Any) -> tuple[str, str] | None:
    """Return (what was expected, what to do) for a source of data that has no state to track; None for anything else."""
    if asks_for_more(thing):
        return (
            "a loader that counts what it hands out: this state_dict() asks for that count",
            "iterate over it in its library's loader, such as StreamingDataLoader, and track that",
        )
    if (found := continuation_of(thing)) is not None and found.remedy:
        return f"a source that is exact at every restart; this one is {found.words}", found.remedy
    if isinstance(thing, DataLoader):
        return (
            "a sampler that keeps a position, or a loader that does",
            f"give the loader an ElasticSampler and track that, or track torchdata's StatefulDataLoader; or {REPLAY}",
        )
    if isinstance(thing, IterableDataset) or _is(thing, "webdataset", "DataPipeline"):
        return "a data set with state_dict() and load_state_dict()", (
            "write both (what was read so far, and how to continue there), or use one that is indexed (WebDataset's wids), "
            f"with an ElasticSampler; or {REPLAY}"
        )
    return None


def remedy_for(thing: Any) -> str:
    """Return what to do with an object that has no state to track, and is no source of data."""
    if hasattr(thing, "readline") or hasattr(thing, "fileno"):
        return (
            "a file has no state: track an object whose state_dict() returns {'at': file.tell()}, and whose "
            "load_state_dict(state) calls file.seek(state['at'])"
        )
    if callable(getattr(thing, "state_dict", None)):
        return "give it load_state_dict(state) too"
    return (
        "leave out what the program makes alike at each start, such as its configuration; what changes goes into an object "
        "whose state_dict() returns it as a dict, and whose load_state_dict(state) takes it back"
    )


def keeps_state(data: Any) -> bool:
    """Whether it has a state to ask for, and takes it."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def keeps_its_place(thing: Any) -> bool:
    """Whether its state can be asked for, and tells its place at every restart."""
    found = continuation_of(thing)
    return keeps_state(thing) and not asks_for_more(thing) and not (found is not None and found.remedy)


def asks_for_more(thing: Any) -> bool:
    """Whether its `state_dict()` needs arguments, as those of streaming data sets do: how much was read."""
    try:
        parameters = inspect.signature(thing.state_dict).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(one.default is one.empty and one.kind in kinds for one in parameters)


class OfGetState:
    """An object with `get_state()` and `set_state()`, as Grain's iterators and torch's generators are.

    Attributes:
        thing: The object.
    """

    flashckpt_is_of_users = True

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"state": self.thing.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give it its state."""
        self.thing.set_state(state_dict["state"])


def with_state_dict(thing: Any) -> Any:
    """Return an object with `state_dict()`: around one that has `get_state()` and `set_state()`; any other as it is."""
    has_other = callable(getattr(thing, "get_state", None)) and callable(getattr(thing, "set_state", None))
    return OfGetState(thing) if has_other and not keeps_state(thing) and not isinstance(thing, type) else thing


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of `datasets` is shuffled within a buffer, or cannot be asked."""
    waiting = [getattr(stream, "_ex_iterable", None)]
    for part in waiting:
        if part is None or type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if (inner := getattr(part, "ex_iterable", None)) is not None:
            waiting.append(inner)
        waiting += getattr(part, "ex_iterables", ())  # of streams that are interleaved or concatenated
    return False


def _is(thing: Any, package: str, name: str) -> bool:
    """Whether a class of this name, of this package, is among those of `thing`."""
    for kind in type(thing).__mro__:
        if kind.__name__ == name and (kind.__module__ + ".").startswith(package + "."):
            return True
    return False


_ELASTIC = f"an indexed data set with an ElasticSampler continues on any number ({PAGE})"


def refuse_other_ranks(name: str, thing: Any, owners: Iterable[str], recorded_ranks: int, world: World) -> None:
    """Compare to how many ranks a source was dealt, and is.

    Args:
        name: Its track name.
        thing: The source.
        owners: Marks of the ranks that recorded it.
        recorded_ranks: All ranks of that run.
        world: The ranks now.

    Raises:
        SamplerStateError: It is another number.
    """
    if not is_of_its_ranks(thing):
        return
    before, now = _dealt_before(owners) or recorded_ranks, _dealt_to(world)
    if before != now:
        raise SamplerStateError(
            f"{name!r}, a {type(thing).__qualname__}, has no position on another number of ranks",
            found=f"a position on {before} data-parallel ranks",
            expected=f"one on {now}",
            state="Nothing was trained; every snapshot and checkpoint is intact.",
            remedy=f"start on {before}; {_ELASTIC}. Left out of track(), the data begins again",
        )


def refuse_other_workers(name: str, thing: Any, state: Any) -> None:
    """Compare the workers of a loader with those that its state was taken with.

    Raises:
        SamplerStateError: It is another number.
    """
    found = workers_of(thing, state)
    if found is not None and found[0] != found[1]:
        raise SamplerStateError(
            f"{name!r}, a {type(thing).__qualname__}, has no position with another number of workers",
            found=f"num_workers={found[0]}",
            expected=f"num_workers={found[1]}, as recorded",
            state="Nothing was trained; every snapshot and checkpoint is intact.",
            remedy=f"num_workers={found[1]}; {_ELASTIC}",
        )


def _dealt_before(owners: Iterable[str]) -> int:
    """Return to how many ranks marks such as `pp0.dp1.tp0` say that data was dealt; 0: as many as there were."""
    parts = [owner.split(".") for owner in owners]
    places = {tuple(part for part in parts_of_one if part.startswith("dp")) for parts_of_one in parts}
    has_others = any(not part.startswith("dp") for parts_of_one in parts for part in parts_of_one)
    return len(places) if has_others and () not in places else 0


def _dealt_to(world: World) -> int:
    if (mesh := world.mesh) is None:
        return world.size
    names = enumerate(mesh.mesh_dim_names or ())
    sizes = [mesh.size(number) for number, name in names if name.startswith("dp")]
    return math.prod(sizes) if sizes else world.size
