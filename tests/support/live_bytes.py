"""Counts the bytes of tensors while they are alive, operator by operator: what a device would have to hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators inside make, until they are freed.

    Attributes:
        now: Bytes alive; peak: the most so far; largest: of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        self._known[key] = weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        del self._known[key]
