"""Slots are looked at while the root is asked, too: what the nodes are to meet at is held as soon as it is complete here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.shm.inventory import NodeInventory, pin_all, release
from flashckpt.shm.segment import Pin

LOOK_S = 0.05
"""Seconds between two looks, each of which costs 2.5 ms of CPU with 8 ranks."""


class Seeker:
    """Holds one snapshot from when it is complete here until the negotiation has seen it.

    With two slots a snapshot that nobody pins is overwritten two steps later. A turn that asks the root may take longer,
    and then the node would miss what it has promised to pin; of many nodes one always would.
    """

    def __init__(self, see: Callable[[], NodeInventory]) -> None:
        self._see = see
        self._pins: dict[int, Pin] = {}
        self._held: SnapshotId | None = None
        self._is_news = False  # to a turn that began before it was held

    @contextlib.contextmanager
    def seeking(self, first: SnapshotId | None) -> Iterator[None]:
        """Meanwhile hold the first persist step from `first` on; None: nothing is sought."""
        if first is None or self._held is not None:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._seek, args=(first, is_over), name="flashckpt-seeker", daemon=True)
        with contextlib.suppress(RuntimeError):  # a limit on threads: it is looked at in the next turn, as without this
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            if thread.is_alive():
                thread.join()

    def _seek(self, first: SnapshotId, is_over: threading.Event) -> None:
        while not is_over.wait(LOOK_S):
            with contextlib.suppress(
                OSError, FlashckptError
            ):  # the job directory is being removed; a turn says what else
                view = self._see()
                found = next((identity for identity in view.flagged() if identity >= first), None)
                pins = pin_all(view, found, tuple(view.holders(found))) if found is not None else None
                if pins:
                    self._held, self._pins, self._is_news = found, pins, True
                    return

    def let_go(self, seen: NodeInventory | None = None) -> None:
        """Release what is held: the negotiation has pinned it where it wants it.

        Args:
            seen: What a turn that is over began with. Where it does not show what was held meanwhile, the next one will,
                unless a restore has emptied those slots.
        """
        if self._held is None:
            return
        is_to_come = self._is_news and seen is not None and not seen.holders(self._held)
        self._is_news = False
        if not is_to_come:
            self._held = None
            release(self._pins)
