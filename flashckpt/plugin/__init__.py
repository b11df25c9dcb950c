"""Kinds of plug-ins, those of extras/ and of other packages.

| group                | name          | object                                                                |
|----------------------|---------------|-----------------------------------------------------------------------|
| `flashckpt.stores`   | scheme of URL | `StoreType`, a subclass of `flashckpt.storage.store.Store`            |
| `flashckpt.commands` | command       | `click.Command` behind `flashckpt NAME`                               |
| `flashckpt.formats`  | format        | `Format` behind `flashckpt import --format NAME`                      |
| `flashckpt.trainer`  | command       | `TrainerCommand` behind `python -m flashckpt.trainer NAME`            |
| `flashckpt.persister`| any           | `PersisterExtension`, made once in the persister of a job on a node   |
| `flashckpt.hooks`    | any           | `TrainerHooks`, made once in each rank of the trainer                 |
| `flashckpt.preload`  | any           | a module that the zygote imports, so that no worker has to            |
| `flashckpt.extras`   | fixed         | the single places that only extras/ fills: callers of `entry_points.optional` |

What flashckpt declares itself comes first and cannot be replaced. An entry point is looked up when it is asked for: a
program that uses none reads no metadata of other packages. docs/plugins.md is the page for authors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashckpt.storage.store import Store, StoreType

if TYPE_CHECKING:
    from flashckpt.core.lineage import Generation
    from flashckpt.core.snapshot_id import SnapshotId
    from flashckpt.restore.coordinator import RestoreOutcome
    from flashckpt.shm.inventory import NodeInventory
    from flashckpt.shm.job_directory import JobConfig, JobDirectory

__all__ = [
    "ExtensionType",
    "Format",
    "PersisterExtension",
    "ReplicaNodes",
    "ReplicaPlan",
    "Store",
    "StoreType",
    "TrainerCommand",
]


class Format(Protocol):
    """A function that reads checkpoints of another format."""

    def __call__(self, path: Path) -> dict[Any, Any]:
        """Return a state dict, nested as it was saved: tensors of torch, and values that `torch.save` would take."""


class TrainerCommand(Protocol):
    """A function that takes the words after its name and returns the exit code."""

    def __call__(self, words: list[str]) -> int:
        """Run it; a FlashckptError that it raises is reported, and its exit code is the program's."""


class ReplicaPlan(Protocol):
    """What `agree` of the place "replicas" returns to a rank: who keeps replicas of whom.

    Attributes:
        missing_bytes: Memory that replicas of other nodes will take on this node besides what they take now.
    """

    missing_bytes: int

    @property
    def address(self) -> str:
        """Where the persister of this node listens."""

    @property
    def text(self) -> str:
        """The line that is logged about it before training."""

    def meet(self, directory: JobDirectory, outcome: RestoreOutcome) -> None:
        """Write what the persister of this node has to know. Collective."""


class ReplicaNodes(Protocol):
    """What the place "replica-session" reads of a job directory: the nodes of a generation."""

    node: int
    ranks: Sequence[str]

    @property
    def partners(self) -> Sequence[Sequence[int]]:
        """The nodes that keep replicas of each node."""

    def ranks_of(self, node: int) -> Sequence[int]:
        """Return the ranks of a node."""

    def name(self, node: int) -> str:
        """Return the name of a node, for people."""


class PersisterExtension(Protocol):
    """Work that the persister does besides persisting. Its constructor gets the job's directory, and what wakes the loop."""

    def turn(
        self, config: JobConfig, view: NodeInventory, record: Generation, committed: SnapshotId | None = None
    ) -> None:
        """Do what can be done now; what it raises is logged, and it is called again."""

    def report(self, trouble: str) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """Return its fields of `flashckpt.shm.private.DaemonStatus`, and its numbers for the metrics.

        Args:
            trouble: What its last turn raised; "" where it raised nothing.
        """

    def close(self) -> None:
        """End its threads."""


ExtensionType = Callable[["JobDirectory", Callable[[], None]], PersisterExtension]
