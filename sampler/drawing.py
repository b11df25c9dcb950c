"""Who draws from an iteration, and how much of it has reached the program: loaders of torch deal ahead to their workers.

A loader keeps what it has dealt and not yet delivered; nothing public tells it. So the loader's iterator is found on
the stack when it draws for the first time. Whatever is not found draws for itself: what it takes, the program has.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sized
from types import FrameType
from typing import Any

import torch
from torch.utils.data import BatchSampler, dataloader

_log = logging.getLogger("flashckpt")
_ITERATOR: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
_NAMES = "_index_sampler", "_next_data", "_next_index", "_num_workers"
_NAMES_OF_WORKERS = "_task_info", "_prefetch_factor"
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
_MOST_GIVEN = 1 << 12
"""Batches of which the ids are kept until a step is committed: an evaluation commits none."""
_MOST_ROWS = 1 << 16
"""Rows among which the samples of a step are looked for."""
_DEPTH = 24
"""Most frames between a sampler and the loader that draws from it."""


class Drawing:
    """The reader of one iteration; made when its first rows are asked for.

    Args:
        sampler: The elastic sampler that the iteration is of.
        ended: Called when a loader has said to the program that the iteration is over.

    Attributes:
        is_known: Whether a loader, where it is one, has the names by which its batches are counted.
        thread: The one that took from it last.
        is_loader: Whether it is a loader, which says when it is at its end.
        batch: Rows of its batches, of the first where they differ; 0: not known.
    """

    def __init__(self, sampler: object, ended: Callable[[], None]) -> None:
        self.thread, self.batch, self._drops = threading.get_ident(), 0, False
        self._cuts: deque[int] | None = None
        self._given: deque[Any] | None = None
        self._checked: int | None = None
        self._tasks: Sized = ()
        self._most = 0
        loader = _loader_above()
        lacking = _lacking(loader)
        if lacking:
            _say_not_counted(lacking)
        self.is_known = not lacking
        self.is_loader, self.has_workers = self.is_known and loader is not None, hasattr(loader, "_task_info")
        if not self.is_loader:
            return
        batches: Any = loader._index_sampler  # noqa: SLF001 -- see above
        if batches is sampler:
            self.batch = 1  # batch_size=None
        elif isinstance(batches, BatchSampler) and batches.sampler is sampler:
            self.batch, self._drops = batches.batch_size, batches.drop_last
        else:
            self._given = deque(maxlen=_MOST_GIVEN)
            loader._next_index = self._noting(type(loader)._next_index)  # noqa: SLF001 -- as above
        self._tasks = getattr(loader, "_task_info", ())
        self._most = getattr(loader, "_prefetch_factor", 1) * getattr(loader, "_num_workers", 1)
        self._loader = weakref.ref(loader, self._left)
        self._watch = loader._next_data = self._watching(type(loader)._next_data, ended)  # noqa: SLF001 -- as above

    def _watching(self, inner: Callable[[Any], Any], ended: Callable[[], None]) -> Callable[[], Any]:
        def _next_data() -> Any:
            self.thread = threading.get_ident()
            try:
                return inner(self._loader())
            except StopIteration:
                ended()
                raise

        return _next_data

    def _noting(self, inner: Callable[[Any], Any]) -> Callable[[], Any]:
        def _next_index() -> Any:
            batch = inner(self._loader())
            if self._given is not None:
                self._given.append(batch)
            return batch

        return _next_index

    def is_mixed(self, rows: Callable[[int, int], Any], handed_out: int) -> bool:
        """Return whether a batch sampler of the program's own has given out other rows than the next ones, since the last call.

        Which rows are in the first batch is not known, so the first call says nothing; nor is it of ids that it changes.

        Args:
            rows: Ids of the rows from one number to another.
            handed_out: Rows of which it knows.
        """
        if self._given is None:
            return False
        got = [self._given.popleft() for _ in range(len(self._given) - len(self._tasks))]
        if self._checked is None or not got:
            self._checked = self._checked or 0
            return False
        self._checked = max(self._checked, handed_out - _MOST_ROWS)
        ids = rows(self._checked, handed_out).tolist()
        given: set[int] = set()
        with contextlib.suppress(TypeError):
            given.update(one for batch in got for one in batch)
        if not given or not given.issubset(ids):
            self._given = None
            return False
        seen: set[int] = set()  # an id may come again: in the next epoch, or as a sample of a small source of a mixture
        for row, one in enumerate(ids, self._checked):
            if one not in given:
                seen.clear()
                continue
            seen.add(one)
            if len(seen) == len(given):
                self._checked = row + 1
                return False
        return True

    def _left(self, _: object) -> None:
        self._tasks = range(len(self._tasks))  # the number alone: batches that nobody will take are let go

    @property
    def is_open(self) -> bool:
        """Whether a loader has it and no other iteration: what is dealt to its workers is still to come."""
        return self.is_loader and getattr(self._loader(), "_next_data", None) is self._watch

    @property
    def is_exact(self) -> bool:
        """Whether `taken` is what the program has; else it may be too much: batches or a loader of a kind that is not known."""
        return self.is_known and (not self.has_workers or bool(self.batch))

    def cut(self, rows: int) -> None:
        """Note that a batch ends after so many rows of the iteration."""
        if self._cuts is None:
            self._cuts, self.batch, self._given = deque(maxlen=self._most + 2), rows, None
        self._cuts.append(rows)

    def taken(self, rows: int) -> int:
        """Return how many of the rows that were handed out the program has."""
        ahead = len(self._tasks)
        if not ahead and not self._drops:
            return rows
        if self._cuts is not None:
            return self._cuts[-1 - ahead] if ahead < len(self._cuts) else 0
        if not self.batch:
            return rows
        batches = rows // self.batch if self._drops else -(-rows // self.batch)
        return max(0, min(rows, (batches - ahead) * self.batch))


def _lacking(loader: Any) -> str:
    """Return the private names, of those that counting needs, that a loader's iterator or this torch lacks."""
    if _ITERATOR is None:
        return "_BaseDataLoaderIter"
    names = () if loader is None else _NAMES + _NAMES_OF_WORKERS * bool(getattr(loader, "_num_workers", 0))
    return ", ".join(name for name in names if not hasattr(loader, name))


@functools.cache  # once
def _say_not_counted(lacking: str) -> None:
    """Say that steps are believed."""
    _log.warning(
        "the samples of a step cannot be counted: the loader of torch %s has no %s. Make sure that global_batch_size "
        "is the number of samples of one optimizer step; a wrong one is not noticed",
        torch.__version__, lacking,
    )  # fmt: skip


def _loader_above() -> Any:
    """Return the loader's iterator that is asking; None if none is."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 -- there is no other name for it
    for _ in range(0 if _ITERATOR is None else _DEPTH):
        if frame is None:
            break
        # the locals of other frames are not looked at: before Python 3.13 a look keeps them alive
        if frame.f_globals.get("__name__") in _LOADERS and isinstance(found := frame.f_locals.get("self"), _ITERATOR):
            return found
        frame = frame.f_back
    return None
