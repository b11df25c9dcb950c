"""Mappings of files that another process may cut short, in a process that must outlive it."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np

try:
    from flashckpt.native import _copy as _built
except ImportError:  # installed without a compiler
    _c: Any = None
else:
    _c = _built


class GuardedMap(mmap.mmap):
    """A read-only mapping that is never the end of this process: pages that are lost are read as zeros, and marked.

    Whoever uses its bytes asks `is_lost` afterwards, and before anything rests on them. The handler of SIGBUS behind
    it belongs to the whole process: for the persister, not for a process that runs a user's program.
    """

    _number = -1

    @classmethod
    def of(cls, fd: int, nbytes: int, offset: int) -> GuardedMap | None:
        """Map bytes of a file; None where they cannot be guarded (no C part, or SIGBUS is another handler's).

        Args:
            fd: The file; may be closed afterwards.
            nbytes: Above 0.
            offset: A multiple of mmap.ALLOCATIONGRANULARITY.

        Raises:
            ValueError, OSError: It cannot be mapped, or ends before.
        """
        if not hasattr(_c, "guard"):  # not built, or built from sources of an earlier version
            return None
        made = cls(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        made._number = _c.guard(np.frombuffer(made, np.uint8).ctypes.data, whole)
        return made if made._number >= 0 else None

    @property
    def is_lost(self) -> bool:
        """Whether the file lost a page of this range since it was mapped and somebody read there."""
        return bool(_c.is_lost(self._number))

    def __del__(self) -> None:  # runs before the memory is unmapped, once no view of it is left
        number, self._number = self._number, -1
        if number >= 0 and _c is not None:  # None: while the interpreter ends
            _c.unguard(number)


class KeptMaps:
    """Mappings that stay from one use to the next: to map and unmap the pages of a slot costs as much CPU as to digest them.

    They keep the memory of a file that was removed: whoever uses them calls `let_go` now and then.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], tuple[GuardedMap, int]] = {}
        self._lock = threading.Lock()

    def of(self, fd: int, nbytes: int, offset: int) -> GuardedMap | None:
        """As `GuardedMap.of`, or the mapping that was made before of the same bytes, if nothing of it was lost."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino, offset
        with self._lock:
            kept = self._made.get(key)
            if kept is not None and len(kept[0]) == nbytes and not kept[0].is_lost:
                return kept[0]
            made = GuardedMap.of(fd, nbytes, offset)
            self._drop(key)
            if made is not None:
                self._made[key] = made, os.dup(fd)
            return made

    def let_go(self) -> None:
        """Forget what was mapped of files that have no name any more; what is still in use stays until it is not."""
        with self._lock:
            for key in [key for key, (_, fd) in self._made.items() if not os.fstat(fd).st_nlink]:
                self._drop(key)

    def _drop(self, key: tuple[int, int, int]) -> None:
        if (kept := self._made.pop(key, None)) is not None:
            os.close(kept[1])


kept_maps = KeptMaps()
"""Of this process."""
