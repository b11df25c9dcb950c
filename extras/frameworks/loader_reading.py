"""Batches of a source one by one, and the place of each: a state of its library, and how many batches follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from flashckpt.core.records import digest_of
from flashckpt.errors import FlashckptError, SamplerStateError
from flashckpt.integrations.loader_sources import BEGIN_AGAIN, BatchSource, packed, unpacked
from flashckpt.printable import printable
from flashckpt.sampler.datasets.reaching import may_pass, reach
from flashckpt.state import rng

_PATIENCE = 2
"""Batches in a row without a move of the state that are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """A place in the data: right after some batch.

    Attributes:
        state: A state of the library; empty: the beginning of the epoch.
        epoch: That of the state.
        batches: Batches that follow it up to here, over ends of epochs.
    """

    state: bytes = b""
    epoch: int = 0
    batches: int = 0


class BatchReader:
    """Draws batches. Where storage cannot be reached for a while, it begins again at its place.

    Args:
        source: What is read.
        name: Of it, for people.

    Attributes:
        place: After the last batch: where reading continues.
        drawn: The same by way of the batch: drawn from there, the last of these batches is this one.
        epoch: That of the next batch.
    """

    def __init__(self, source: BatchSource, name: str) -> None:
        self._source, self._name = source, name
        self._iterator: Iterator[Any] | None = None
        self._begin_at = b""
        self._still = 0
        self.place = self.drawn = DataPlace()
        self.epoch = 0

    def draw(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The epoch has ended; the next call draws from the next one.
            SamplerStateError: The state of the library does not move.
            StoreError: The storage could not be reached.
        """
        try:
            batch = self._next()
        except StopIteration:
            self._end()
            raise
        before = self.place
        self.drawn = replace(before, batches=before.batches + 1)
        self.place = self._after(before)
        return batch

    def seek(self, place: DataPlace) -> Any:
        """Go to a place; return the batch right before it, None where there is none. The generators stay as they are.

        Raises:
            SamplerStateError: The data has fewer batches now.
        """
        generators = rng.capture()  # what was drawn at random for these batches counts already
        self._iterator, self._begin_at, self.epoch = None, place.state, place.epoch
        self.place = self.drawn = replace(place, batches=0)
        batch = None
        try:
            for _ in range(place.batches):
                batch = self._over_an_end()
        except StopIteration:
            raise _ended(self._name, place) from None
        except FlashckptError:
            raise
        except Exception as error:
            raise _not_taken(self._name, error) from error
        rng.restore(generators)
        return batch

    def _over_an_end(self) -> Any:
        try:
            return self.draw()
        except StopIteration:
            if self._source.has_epochs:  # its places never lie behind the end of their epoch
                raise
            return self.draw()

    def _next(self) -> Any:
        try:
            return self._once()
        except Exception as error:
            if isinstance(error, StopIteration) or not may_pass(error):
                raise
        found = reach(self._name, self._again, "batches")
        if not found:
            raise StopIteration
        return found[0]

    def _once(self) -> Any:
        if self._iterator is None:
            if self._begin_at:
                return self._first_of(self._begin_at)
            self._iterator = self._source.begin(None, self.epoch)
        return next(self._iterator)

    def _first_of(self, state: bytes) -> Any:
        """Give the library its state back; some look at it only when the first batch is asked for."""
        self._iterator = self._source.begin(unpacked(state), self.epoch)
        first = next(self._iterator)
        self._begin_at = b""
        return first

    def _again(self) -> list[Any]:
        """Return the next batch of a source that is begun again; nothing at the end of an epoch."""
        self.seek(self.place)
        try:
            return [self._once()]
        except StopIteration:
            return []

    def _end(self) -> None:
        # libraries differ in what their state says at an end: from before the last batch it is reached by drawing
        self._iterator, self.epoch = None, self.epoch + 1
        self.place = DataPlace(epoch=self.epoch) if self._source.has_epochs else self.drawn

    def _after(self, before: DataPlace) -> DataPlace:
        state = self._source.state()
        if state is None:
            return self.drawn
        now = packed(state)
        self._still = self._still + 1 if now == before.state else 0
        if self._still >= _PATIENCE:
            raise _does_not_move(self._name, state)
        return DataPlace(state=now, epoch=self.epoch)


def rows_of(batch: Any) -> int:
    """Return how many samples a batch has: the length of the first thing in it that has one."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, (torch.Tensor, np.ndarray)):
        return len(parts) if parts.ndim else 1
    if isinstance(parts, (list, tuple)) and parts:
        first = parts[0]
        return len(first) if isinstance(first, (torch.Tensor, np.ndarray)) and first.ndim else len(parts)
    return 1


def digest_of_batch(batch: Any) -> int:
    """Return a digest of all values in a batch; of tensors on an accelerator the shape alone counts."""
    return digest_of(*_views(batch)) >> 1  # a signed integer


def _views(node: Any) -> Iterator[Any]:
    if isinstance(node, torch.Tensor):
        yield f"{node.dtype}{tuple(node.shape)}".encode()
        if node.device.type == "cpu" and node.numel():
            yield node.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(node, np.ndarray) and not node.dtype.hasobject:
        yield f"{node.dtype}{node.shape}".encode()
        yield np.frombuffer(node.tobytes(), np.uint8)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield repr(key).encode()
            yield from _views(value)
    elif isinstance(node, (list, tuple, np.ndarray)):
        yield f"{len(node)}:".encode()
        for value in node:
            yield from _views(value)
    elif is_dataclass(node) and not isinstance(node, type):
        yield from _views({one.name: getattr(node, one.name) for one in fields(node)})
    elif node is None or isinstance(node, (str, bytes, int, float, np.generic)):
        yield repr(node).encode()
    else:
        yield node.tobytes() if callable(getattr(node, "tobytes", None)) else type(node).__qualname__.encode()


def _does_not_move(name: str, state: Any) -> SamplerStateError:
    return SamplerStateError(
        f"the state of {name} does not move while batches are drawn from it",
        found=f"after {_PATIENCE + 1} batches as before them: {str(state)[:200]}",
        expected="every batch moves it on, or a restart would train the same samples again",
        state="Nothing was trained on the last batch.",
        remedy="give ExactLoader what counts the batches: the loader rather than the data set in it; or replay=True",
    )


def _not_taken(name: str, error: Exception) -> SamplerStateError:
    text = printable(" ".join(str(error).split())[:300])
    return _not_there(f"{name} does not take back the state that it gave", f"{type(error).__name__}: {text}")


def _ended(name: str, place: DataPlace) -> SamplerStateError:
    found = f"fewer than {place.batches} batches from the recorded state of epoch {place.epoch} on"
    return _not_there(f"{name} ends before the place that was recorded", found)


def _not_there(problem: str, found: str) -> SamplerStateError:
    return SamplerStateError(
        problem,
        found=found,
        expected="the data, the workers and the batch size of the run that was recorded",
        state="Nothing was trained; every snapshot and checkpoint is intact.",
        remedy=f"start it with these; or {BEGIN_AGAIN}",
    )
