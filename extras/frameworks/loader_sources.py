"""Sources of batches of other libraries: how each is begun at its own state, and asked for it; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from flashckpt.core.values import pack_values, unpack_values
from flashckpt.errors import ConfigError
from flashckpt.state import pytree
from flashckpt.state.data_sources import (
    RANDOM_ORDER,
    SHUFFLED_STREAM,
    asks_for_more,
    continuation_of,
    keeps_its_place,
    keeps_state,
    refusal_of,
)

BEGIN_AGAIN = "ExactLoader(..., replay=True) reads an epoch again from its beginning, up to the place"


class BatchSource(Protocol):
    """What can be begun at a state.

    Attributes:
        has_epochs: `begin` knows the beginning of each epoch without a state.
    """

    has_epochs: bool

    def begin(self, state: Any, epoch: int) -> Iterator[Any]:
        """Return an iterator from a state on; None: over the next epoch, or all of `epoch` where `has_epochs`."""

    def state(self) -> Any:
        """Return the state behind the last batch; None: it keeps none."""


class Loader:
    """A loader that keeps its state: `state_dict()` and `load_state_dict()`. Its own generators are kept beside it.

    torchdata's continues the order of an epoch, but not the generator that the next one is drawn from.
    """

    has_epochs = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parts = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        found = [getattr(part, "generator", None) for part in (*parts, getattr(parts[2], "sampler", None))]
        self._generators = {id(one): one for one in found if isinstance(one, torch.Generator)}

    def begin(self, state: Any, epoch: int) -> Iterator[Any]:
        """Give it the state, then iterate."""
        _set_epoch(self._loader, epoch)
        if state is None:
            return iter(self._loader)
        self._loader.load_state_dict(state["loader"])
        return self._from(state["generators"])

    def _from(self, generators: list[torch.Tensor]) -> Iterator[Any]:
        """Iterate, and undo what beginning in an epoch draws once more."""
        for number, batch in enumerate(self._loader):
            if number == 0:
                for generator, before in zip(self._generators.values(), generators, strict=True):
                    generator.set_state(before)
            yield batch

    def state(self) -> Any:
        """Return what it says."""
        generators = [generator.get_state() for generator in self._generators.values()]
        return {"loader": self._loader.state_dict(), "generators": generators}


class WithIterators:
    """A data set whose iterators keep the state: `get_state()` and `set_state()` as in Grain; or such an iterator."""

    has_epochs = False

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Any = None

    def begin(self, state: Any, epoch: int) -> Iterator[Any]:
        """Return a new iterator, given the state."""
        _set_epoch(self._source, epoch)
        iterator: Iterator[Any] = iter(self._source)
        self._iterator = iterator
        if not _has_get_state(iterator):
            raise _refused(self._source, "neither it nor its iterator has any state")
        if state is not None:
            self._iterator.set_state(state)
        return iterator

    def state(self) -> Any:
        """Return what the iterator says."""
        assert self._iterator is not None, "begin() first"
        return self._iterator.get_state()


class Replayed:
    """A source whose epochs are read again from their beginning: the state is the number of batches.

    Attributes:
        workers: Of a loader of a stream, which they share: others give another order. None where they do not matter.
    """

    has_epochs = True

    def __init__(self, source: Any) -> None:
        self._source = source
        loaders = [one for one in (source, *getattr(source, "pipeline", ())) if isinstance(one, DataLoader)]
        streams = [one.num_workers for one in loaders if isinstance(one.dataset, IterableDataset)]
        self.workers = streams[0] if streams else None

    def begin(self, state: Any, epoch: int) -> Iterator[Any]:  # noqa: ARG002 -- it has none
        """Iterate over all of this epoch."""
        _set_epoch(self._source, epoch)
        return iter(self._source)

    def state(self) -> None:
        """Return that there is none."""


def source_of(thing: Any, *, replay: bool) -> BatchSource:
    """Return how a source is read.

    Raises:
        ConfigError: It cannot be exact; names what can.
    """
    if replay:
        return Replayed(thing)
    if (found := continuation_of(thing)) is SHUFFLED_STREAM:
        raise _refused(thing, "its shuffle() keeps samples in a buffer that no state_dict() of it holds")
    if asks_for_more(thing):
        raise _refused(thing, "its state_dict() asks how much was read", (refusal_of(thing) or ("", ""))[1])
    is_kept = found is not None and found.is_kept_whole
    if keeps_its_place(thing) or (is_kept and keeps_state(thing)):
        return Loader(thing)
    if not is_kept and (known := refusal_of(thing)) is not None:
        raise _refused(thing, "it keeps no state that continues at every restart", known[1].partition("; or ")[0])
    if callable(getattr(thing, "__iter__", None)):
        return WithIterators(thing)
    raise _refused(thing, "it cannot be iterated")


def _has_get_state(thing: Any) -> bool:
    return callable(getattr(thing, "get_state", None)) and callable(getattr(thing, "set_state", None))


def _set_epoch(source: Any, epoch: int) -> None:
    """Tell an epoch to what orders samples by it: a stream of `datasets`, a sampler."""
    for part in (source, getattr(source, "sampler", None), getattr(source, "dataset", None)):
        is_order = part is not getattr(source, "dataset", None) or type(part).__module__.startswith("datasets.")
        if is_order and callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def _refused(thing: Any, why: str, otherwise: str = "") -> ConfigError:
    is_stream = isinstance(thing, IterableDataset) or hasattr(thing, "_ex_iterable")
    indexed = "an indexed data set with an ElasticSampler" if is_stream else ""
    again = "" if continuation_of(thing) is RANDOM_ORDER else BEGIN_AGAIN  # that would be another order too
    remedies = [one for one in (otherwise or indexed, again) if one]
    return ConfigError(
        "no exact position in this source of data",
        found=f"{type(thing).__module__}.{type(thing).__qualname__}: {why}",
        expected="state_dict() and load_state_dict(), or iterators with get_state() and set_state(), that continue at the next batch",
        state="Nothing was read.",
        remedy="; or ".join(remedies),
    )


def packed(state: Any) -> bytes:
    """Return the bytes of a library's state.

    Raises:
        UnsupportedStateError: A value in it cannot be held; names its key.
    """
    skeleton, tensors = pytree.flatten(state, "state")
    return pack_values({"state": skeleton, "tensors": {name: _as_bytes(one) for name, one in tensors.items()}})


def unpacked(data: bytes) -> Any:
    """Return the state that `packed` was given."""
    found = unpack_values(data)
    tensors = {name: _as_tensor(*one) for name, one in found["tensors"].items()}
    return pytree.unflatten(found["state"], tensors.__getitem__)


def _as_bytes(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), raw]


def _as_tensor(dtype: str, shape: list[int], raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
