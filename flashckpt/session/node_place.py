"""A rank takes its place on its node: the job announced, the daemon started, the control row, the acknowledgements."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from flashckpt.core.lineage import BEGINNING
from flashckpt.core.settings import Settings
from flashckpt.environment import env
from flashckpt.logs import guarded
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.planning.inventory import local_world
from flashckpt.plugin import ReplicaPlan
from flashckpt.restore.coordinator import RestoreOutcome
from flashckpt.shm.ack_relay import AckRelay, RelayStore, RelayThread
from flashckpt.shm.acks import SnapshotAcks
from flashckpt.shm.agent_folder import agent_folder, ended_agent, write_job
from flashckpt.shm.control import Control, ControlRow
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.lease import Lease
from flashckpt.shm.messages import MessageFiles
from flashckpt.shm.persister_owner import OwnerThread, PersisterOwner
from flashckpt.shm.private import remove_file
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.segments import RankSegments
from flashckpt.state.registry import StateRegistry

_log = guarded(logging.getLogger("flashckpt"))
Callback = Callable[[str], Callable[..., object] | None]
"""Returns the user's callback of a name, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJob:
    """A job after its restore, on one rank.

    Attributes:
        tracked: The tracked objects.
        directory: The job's directory on this node.
        memory: The segments of this rank.
        settings: The checkpointer's settings.
        outcome: The restore's outcome.
        plan: Made before the restore, where it still is one for the state; else None.
        partnering: Who keeps replicas of whom; None without replication.
    """

    tracked: StateRegistry
    directory: JobDirectory
    memory: RankSegments
    settings: Settings
    outcome: RestoreOutcome
    plan: CopyPlan | None
    partnering: ReplicaPlan | None = None

    @property
    def mates(self) -> Sequence[int]:
        """Global ranks of this node, ascending."""
        return local_world(self.outcome.inventories, self.tracked.world.rank)

    @property
    def config(self) -> JobConfig:
        """The configuration for the daemon of this node."""
        settings, inventories = self.settings, self.outcome.inventories
        nodes = list(dict.fromkeys(i.node for i in inventories))
        return JobConfig(
            job=settings.job,
            root=settings.root,
            storage_options=settings.storage_options,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            persist_every=settings.persist_every,
            compression=settings.compression,
            world_size=self.tracked.world.size,
            node_count=len(nodes),
            node=nodes.index(inventories[self.tracked.world.rank].node),
            replicate=settings.replicate if self.partnering is not None else 0,
            replica_address=self.partnering.address if self.partnering is not None else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The things that a rank holds on its node while its session lasts.

    Attributes:
        lease: Shows that the job is running; ends with this process.
        control: The page that agent, daemon and ranks share.
        row: This rank's row in it.
        watermark: Which snapshots this rank, and all ranks, hold.
        relay: Carries that between the nodes; of the first rank of each, None elsewhere and on a single node.
        owner: Supervises the persister; of the first rank of each node where no agent does.
    """

    lease: Lease
    control: Control
    row: ControlRow
    watermark: SnapshotAcks
    relay: RelayThread | None = None
    owner: OwnerThread | None = None

    @classmethod
    def take(cls, opened: OpenedJob, *, entered_ns: int, initialised_ns: int) -> NodePlace:
        """Announce the job on this node, start the daemon where no agent does, and take the control row."""
        directory, mates, world = opened.directory, opened.mates, opened.tracked.world
        agent, lease, owner = agent_folder(), directory.hold_live(), None
        if mates[0] == world.rank:
            remove_file(directory.request_path("ended"))
            directory.write_config(opened.config)
            if agent is None:
                owner = _own_persister(directory)
        if agent is not None and env.LOCAL_RANK == 0:  # of each agent: a node may have several
            write_job(agent, directory.path)
        if opened.partnering is not None:
            opened.partnering.meet(directory, opened.outcome)
        control = Control.open(directory.control_path, rows=len(mates))
        row = control.row(mates.index(world.rank))
        _fill(row, opened, entered_ns=entered_ns, initialised_ns=initialised_ns)
        relay = _relay(opened, control)
        watermark = _acks(opened, control, relay)
        watermark.publish(opened.memory.complete())
        return cls(lease=lease, control=control, row=row, watermark=watermark, relay=relay, owner=owner)


def _own_persister(directory: JobDirectory) -> OwnerThread:
    """Start the persister, and what sees that it runs."""
    if ended := ended_agent():
        _log.warning("%s names an agent that is not running: this process starts and supervises the persister", ended)
    owner = PersisterOwner(directory, _log)
    owner.tick()
    return OwnerThread(owner)


def _fill(row: ControlRow, opened: OpenedJob, *, entered_ns: int, initialised_ns: int) -> None:
    world, record, report = opened.tracked.world, opened.outcome.record, opened.outcome.report
    row.clear()
    row.rank, row.pid, row.world_size = world.rank, os.getpid(), world.size
    row.generation, row.copied_by = record.number, IMPLEMENTATIONS.index(implementation())
    row.entered, row.initialised = entered_ns, initialised_ns
    row.restored_step = report.step if report else -1
    row.step = 0 if record.parent is None else record.parent.step
    row.restored = row.heartbeat_ns = time.monotonic_ns()
    row.restore_started = initialised_ns


def _acks(opened: OpenedJob, control: Control, relay: RelayThread | None) -> SnapshotAcks:
    world, mates, outcome = opened.tracked.world, opened.mates, opened.outcome
    record = outcome.record
    return SnapshotAcks(
        control=control,
        local_rank=mates.index(world.rank),
        rank=world.rank,
        world_size=world.size,
        local_world_size=len(mates),
        generation=record.number,
        restored=record.parent if outcome.superseded is None and record.parent != BEGINNING else None,
        parent=record.parent,
        on_publish=None if relay is None else relay.wake,
    )


def _relay(opened: OpenedJob, control: Control) -> RelayThread | None:
    """Start what carries acknowledgements to and from the other nodes, if there are any and this rank does it for its node."""
    world, mates, outcome = opened.tracked.world, opened.mates, opened.outcome
    if world.size == len(mates) or mates[0] != world.rank:
        return None
    firsts: dict[str, int] = {}
    for rank, inventory in enumerate(outcome.inventories):
        firsts.setdefault(inventory.node, rank)
    relay = AckRelay(
        control=control,
        store=_c10d_store(),
        generation=outcome.record.number,
        firsts=list(firsts.values()),
        first=world.rank,
        local_world_size=len(mates),
        messages=MessageFiles(opened.directory.path),
    )
    return RelayThread(relay)


def _c10d_store() -> RelayStore:
    """Return a connection to the store of the default process group: others may wait on theirs, and keep it busy meanwhile."""
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- there is no public way to the store
    try:
        return store.clone()  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # a store of another kind, or a host that takes no more connections
        return store  # type: ignore[no-any-return]
