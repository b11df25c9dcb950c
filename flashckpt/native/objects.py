"""Walks over very many Python objects by the C part; the callers have the same in Python for where there is none."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.native import copying

_same_members = getattr(copying.part, "same_members", None)  # a C part that was built of older sources lacks both
_read_counters = getattr(copying.part, "read_counters", None)


class CounterPath(NamedTuple):
    """How memory leads from a Python object to a counter of 4 bytes: bytes from the start of each to the next one's address.

    Attributes:
        to_body: From the object.
        to_counter: From what is there.
        to_value: From what is there.
    """

    to_body: int
    to_counter: int
    to_value: int


def same_members(dicts: list[Any], lists: list[Any], held: list[Any]) -> bool | None:
    """Return whether the values of the dicts, then the elements of the lists, are the very objects of `held`, in order.

    Returns:
        None where the C part cannot say it: it does not run here, or a container is of a class that may iterate in its own way.
    """
    if _same_members is None or not copying.is_native():
        return None
    found: bool | None = _same_members(dicts, defaultdict, lists, held)
    return found


def read_counters(objects: list[Any], path: CounterPath) -> npt.NDArray[np.uint32] | None:
    """Return the counter that `path` leads to from each object; None where one leads nowhere, or the C part does not run here.

    The path must have been found to be right for objects of this kind: memory is read without being asked for.
    """
    if _read_counters is None or not copying.is_native():
        return None
    found = np.empty(len(objects), np.uint32)
    return found if _read_counters(objects, *path, found.ctypes.data) else None
