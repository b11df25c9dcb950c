"""How exactly a source of data continues after a restart, as far as its kind tells; logged once, when it is tracked.

Kinds of other libraries are known by their names, so that none of them is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

PAGE = "docs/data.md, which data source is exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What to expect of a source.

    Attributes:
        words: For people; begins with "exact" where it is.
        is_exact: Whether every sample comes once on the ranks that it had; False: not, or nobody can tell.
    """

    words: str
    is_exact: bool = True


ELASTIC = Continuation(words="exact on any number of ranks")
LOADER = Continuation(words="exact on the same number of ranks; with ElasticSampler as its sampler on any")
OWN_STATE = Continuation(
    words="exact on the same ranks and loader workers, if load_state_dict() of the data set continues at the next sample"
)
READ_AGAIN = Continuation(
    words="exact only if the data set yields the same samples each time: it keeps no state, and is read again from its beginning",
    is_exact=False,
)
STREAM = Continuation(words="exact on the same ranks, iterated in this process")
SHUFFLED_STREAM = Continuation(
    words="exact but for what its shuffle buffer holds: those samples do not come after a restart", is_exact=False
)


def continuation_of(thing: Any) -> Continuation | None:
    """Return how a tracked object continues; None for what is no source of data."""
    parts = [thing, *(getattr(thing, name, None) for name in ("sampler", "batch_sampler"))]
    if any(type(part).__module__.startswith("flashckpt.sampler.") for part in parts):
        return ELASTIC
    if _is(thing, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        data = thing.dataset
        if not isinstance(data, IterableDataset):
            return LOADER
        return OWN_STATE if _keeps_state(data) else READ_AGAIN
    if _is(thing, "datasets", "IterableDataset"):
        return SHUFFLED_STREAM if _has_buffer(thing) else STREAM
    return None


def refusal_of(thing: Any) -> tuple[str, str] | None:
    """Return (what was expected, what to do) for a source of data that has no state to track; None for anything else."""
    if isinstance(thing, DataLoader):
        return (
            "a sampler that keeps a position, or a loader that does",
            "give the loader an ElasticSampler and track that, or track torchdata's StatefulDataLoader",
        )
    if isinstance(thing, IterableDataset) or _is(thing, "webdataset", "DataPipeline"):
        return (
            "a data set with state_dict() and load_state_dict()",
            "write both (what was read so far, and how to continue there), or use one that is indexed, with an ElasticSampler",
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


def _keeps_state(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of `datasets` is shuffled within a buffer, or cannot be asked."""
    part = getattr(stream, "_ex_iterable", None)
    if part is None:
        return True
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None


def _is(thing: Any, package: str, name: str) -> bool:
    """Whether a class of this name, of this package, is among those of `thing`."""
    return any(
        kind.__name__ == name and (kind.__module__ + ".").startswith(package + ".") for kind in type(thing).__mro__
    )
