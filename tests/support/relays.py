"""Nodes whose acknowledgements meet in a counted store: one process, each node with its own control page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from flashckpt.core.intent import NodeMessage
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.ack_relay import AckRelay
from flashckpt.shm.acks import SnapshotAcks
from flashckpt.shm.control import Control
from flashckpt.shm.messages import MessageFiles


class CountedStore:
    """A store in a dict; what would wait for a key that nobody has set fails here.

    Attributes:
        requests: By kind.
        keys: What is in it.
    """

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: Any, /) -> None:
        self.requests["set"] += 1
        self.keys[key] = bytes(value)

    def check(self, keys: list[str], /) -> bool:
        self.requests["check"] += 1
        return all(key in self.keys for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.keys[key] for key in keys]


class RelayedNode:
    """One node: its ranks' side of the acknowledgements, and its relay."""

    def __init__(
        self,
        folder: Path,
        store: Any,
        *,
        node: int,
        nodes: int,
        ranks: int = 1,
        generation: int = 2,
        restored: Any = None,
    ) -> None:
        self.control = Control.open(folder / f"control-{node}", rows=ranks)
        first = node * ranks
        self.ranks = [
            SnapshotAcks(
                control=self.control, local_rank=local, rank=first + local, world_size=nodes * ranks,
                local_world_size=ranks, generation=generation, restored=restored,
            )
            for local in range(ranks)
        ]  # fmt: skip
        directory = folder / f"job-{node}"
        (directory / "events").mkdir(parents=True, exist_ok=True)
        self.messages, self._own_ranks = MessageFiles(directory), tuple(range(first, first + ranks))
        self.relay = AckRelay(
            control=self.control, store=store, generation=generation, first=first, local_world_size=ranks,
            firsts=[one * ranks for one in range(nodes)], messages=MessageFiles(directory),
        )  # fmt: skip
        self._generation = generation

    def send(self, step: int, *, waits: bool = True, generation: int | None = None) -> NodeMessage:
        """The persister of the node proposes a step."""
        message = NodeMessage(
            ranks=self._own_ranks, world_size=99, pinned=SnapshotId(2, step), waits=waits,
            generation=generation or self._generation, proposes_in=2,
        )  # fmt: skip
        self.messages.send(message)
        return message

    def received(self, generation: int | None = None) -> tuple[NodeMessage, ...] | None:
        """What its persister hears."""
        return self.messages.received(generation or self._generation)

    def publish(self, *steps: int, low_watermark: int | None = None) -> None:
        """All ranks of the node publish the same."""
        low = None if low_watermark is None else SnapshotId(2, low_watermark)
        for rank in self.ranks:
            rank.publish([SnapshotId(2, step) for step in steps], low_watermark=low)

    def known(self) -> tuple[list[int], set[int]]:
        """The steps that are common, newest first, and those that are unrecoverable, as its first rank reads them."""
        known = self.ranks[0].known()
        return [one.step for one in known.common], {one.step for one in known.unrecoverable}
