"""From tracked objects to a job that is open on this rank: state planned, memory reserved, the newest state restored.

Then the rank takes its place on its node: the job announced, the daemon started, the control row, the acknowledgements.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashckpt import entry_points
from flashckpt.accelerator import index_of
from flashckpt.core.lineage import BEGINNING
from flashckpt.core.settings import Settings
from flashckpt.environment import env
from flashckpt.faults import crash_point
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.planning.inventory import Inventory, local_world
from flashckpt.planning.odd_node import odd_node
from flashckpt.plugin import ReplicaPlan
from flashckpt.report import guarded, notice
from flashckpt.restore.absent_state import recorded_beside
from flashckpt.restore.coordinator import RestoreCoordinator, RestoreOutcome, RestoreRequest
from flashckpt.shm import block, gc
from flashckpt.shm.ack_relay import AckRelay, RelayStore, RelayThread
from flashckpt.shm.acks import SnapshotAcks
from flashckpt.shm.agent_folder import agent_folder, ended_agent, note_bad_numbers, read_job, write_job, write_opening
from flashckpt.shm.control import RESTORED_FROM, Control, ControlRow
from flashckpt.shm.job_directory import JobConfig, JobDirectory
from flashckpt.shm.lease import Lease
from flashckpt.shm.messages import MessageFiles
from flashckpt.shm.persister_owner import OwnerThread, PersisterOwner
from flashckpt.shm.private import remove_file
from flashckpt.snapshot import segments
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.staging import BLOCK_BYTES, BLOCKS
from flashckpt.state import replication, samplers
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import MemoryNeed, StateLayout, need_of
from flashckpt.state.structure import in_order
from flashckpt.storage.factory import place_of, root_digest

_logger = logging.getLogger("flashckpt")
_log = guarded(_logger)
_UNREAD_BYTES = 256 << 10
"""Room for tensors in the state of objects that are not asked for it yet: positions and generators."""


@dataclass(eq=False, kw_only=True)
class Opening:
    """The opening of one job on one rank. Collective.

    Args:
        request: The parts of this job to restore.
        begins_fresh: The state was filled from elsewhere: nothing of this job is restored.
    """

    tracked: StateRegistry
    settings: Settings
    request: RestoreRequest
    begins_fresh: bool
    directory: JobDirectory = field(init=False)
    memory: segments.RankSegments = field(init=False)
    partnering: ReplicaPlan | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        settings = self.settings
        self.directory = JobDirectory.open(settings.job)
        self.memory = segments.RankSegments(
            self.directory,
            root_digest=root_digest(settings.root),
            rank=self.tracked.world.rank,
            pin_for=index_of(p.device for part in self.tracked.parts() for p in part.parameters())
            if torch.accelerator.is_available()
            else None,
        )

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Give everything up where something is raised: restore() may be called again, with other arguments."""
        try:
            yield
        except BaseException:
            self.memory.release()
            self.directory.let_go()
            gc.remove_unused(self.directory.path)
            raise

    def run(self) -> OpenedJob:
        """Plan, reserve memory, restore.

        Raises:
            FlashckptError: See `Checkpointer.restore`.
        """
        coordinator = RestoreCoordinator(
            tracked=self.tracked,
            directory=self.directory,
            options=self.settings.storage_options,
            request=self.request,
        )
        self.memory.refuse_other_run()
        if self.tracked.objects or self.tracked.world.size > 1:
            samplers.refuse_gaps(self.tracked.objects, self.tracked.parts())
        layout, inventories = self._open_memory(coordinator)
        refused = self.tracked.ahead.refused  # of what is planned here: a restore plans again
        unread = set(self.tracked.unread)
        asked = {i.restore_step for i in inventories}
        if len(asked) > 1 and self.tracked.world.rank == 0:
            _log.warning(
                "dlrun --restore-step is followed where all nodes are given one number: %s here", sorted(asked)
            )
        if self.request.is_open and len(asked) == 1 and (step := min(asked)) >= 0:
            coordinator = replace(coordinator, request=replace(self.request, step=step))
        begin = coordinator.begin_fresh if self.begins_fresh else coordinator.run
        outcome = begin(inventories, own=self.memory.segment)
        self.memory.use_new()
        if [held for i in inventories for held in i.slots if held.suspect]:
            self._name_odd_node(inventories)
        if outcome.report is None and not self.begins_fresh:
            replication.verify(layout.structure)
            self.tracked.nothing_is_given()
        is_current = unread == self.tracked.unread and self.tracked.planned is layout.structure
        is_current = is_current and outcome.report is None
        return OpenedJob(
            tracked=self.tracked,
            directory=self.directory,
            memory=self.memory,
            settings=self.settings,
            outcome=outcome,
            plan=CopyPlan.of(layout, refused) if is_current else None,
            mates=local_world(inventories, self.tracked.world.rank),
            partnering=self.partnering,
        )

    def _name_odd_node(self, inventories: list[Inventory]) -> None:
        """Say, and let the agent know, where one node alone had bad numbers; its own agent counts such steps."""
        rank, agent = self.tracked.world.rank, agent_folder()
        if (odd := odd_node(inventories)) is None or local_world(inventories, rank)[0] != rank:
            return
        step = odd.identity.step
        if agent is not None:
            note_bad_numbers(agent, step, is_here=odd.node == inventories[rank].node)
        if rank == 0:
            _log.error(
                "numbers became NaN or infinite on %s alone, in step %d (rank %s)",
                odd.host,
                step,
                str(odd.ranks)[1:-1].rstrip(","),
            )

    def _open_memory(self, coordinator: RestoreCoordinator) -> tuple[StateLayout, list[Inventory]]:
        """Plan, learn what all ranks have and need, then reserve this rank's segment in the background."""
        directory, rank = self.directory, self.tracked.world.rank
        layout, need = self._plan()
        is_there = directory.segment_path(rank, need.layout).exists()
        inventories = coordinator.gather(0 if is_there else need.slot_bytes, segments.free_bytes(directory))
        mates = local_world(inventories, rank)
        missing, wanted = sum(inventories[r].need_bytes for r in mates), self.settings.slot_count
        replica_bytes = None
        if self.settings.replicate and local_world(inventories, 0) != list(range(len(inventories))):
            agree = entry_points.load(entry_points.EXTRAS, "replicas").agree
            partnering: ReplicaPlan = agree(self.settings, inventories, layout.reserved, self.directory)
            self.partnering, replica_bytes = partnering, partnering.missing_bytes
            if env.LOCAL_RANK == 0 and (agent := agent_folder()) is not None:
                write_opening(agent, directory.path)  # partners wait for the address of its persister
                crash_point("opening.after-named")
        slots = block.slots_for(
            missing, min(inventories[r].free_bytes for r in mates), wanted, replica_bytes=replica_bytes
        )
        self.memory.open(need, slots=slots, job=self.settings.job, is_opening=True)
        assert self.memory.segment is not None
        if mates[0] == rank:
            self._say(self.memory.segment.spec.slots, need, ranks=len(mates))
        return layout, inventories

    def _plan(self) -> tuple[StateLayout, MemoryNeed]:
        """Plan the state as it is, with what the first step will make; reserve also for what a restore will bring."""
        _, captured = self.tracked.settled(ahead=True)
        layout = self.tracked.layout()
        need = layout.need(value_bytes := len(repr(captured.values)))
        if more := recorded_beside(layout.reserved, need.layout, self.directory, self.tracked):
            planned = map(layout.reserved.shard, range(len(layout.reserved)))
            need = need_of(in_order([*planned, *more]), value_bytes=value_bytes)
        if self.tracked.unread:
            need = need.with_room(_UNREAD_BYTES)
        return layout, need

    def _say(self, slots: int, need: MemoryNeed, *, ranks: int) -> None:
        fallback = " (3 did not fit)" if slots < 3 and self.settings.slot_count is None else ""
        total = need.slot_bytes * slots * ranks
        pin_for = self.memory.pin_for
        notice(
            _logger,
            "snapshots: %d slots%s of %.1f MB for each of %d ranks, about %.1f MB of this node's memory, in %s; copied by: %s%s%s",
            slots, fallback, need.slot_bytes / 1e6, ranks, total / 1e6, self.directory.path, implementation(),
            "" if pin_for is None else f"; page-locked for each rank: {locked(slots * need.data_bytes)}",
            "; with two slots snapshots are skipped while bytes of a checkpoint are being written" if slots == 2 else "",
            is_shown=self.tracked.world.rank == 0,
        )  # fmt: skip
        if self.tracked.world.rank == 0 and (place := place_of(self.settings.root, self.settings.storage_options)):
            notice(_logger, "checkpoints: %s at %s", self.settings.root, place)
        if self.settings.replicate:
            text = "replicas: none, the job has one node" if self.partnering is None else self.partnering.text
            notice(_logger, "%s", text, is_shown=self.tracked.world.rank == 0)


def locked(slot_bytes: int) -> str:
    """Say what a rank page-locks for copies from its device, for slots of so many bytes together."""
    if segments.locks_slots(slot_bytes):
        return f"its slots, {slot_bytes / 1e6:.1f} MB"
    return f"at most {BLOCKS * BLOCK_BYTES / 1e6:.1f} MB of staging buffers"


Callback = Callable[[str], Callable[..., object] | None]
"""Returns the user's callback of a name, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJob:
    """A job after its restore, on one rank.

    Attributes:
        directory: The job's directory on this node.
        plan: Made before the restore, where it still is one for the state; else None.
        mates: Global ranks of this node, ascending.
        partnering: Who keeps replicas of whom; None without replication.
    """

    tracked: StateRegistry
    directory: JobDirectory
    memory: segments.RankSegments
    settings: Settings
    outcome: RestoreOutcome
    plan: CopyPlan | None
    mates: Sequence[int]
    partnering: ReplicaPlan | None = None

    @property
    def config(self) -> JobConfig:
        """The configuration for the daemon of this node."""
        settings, inventories = self.settings, self.outcome.inventories
        nodes = list(dict.fromkeys(i.node for i in inventories))
        return JobConfig(
            job=settings.job,
            root=settings.root,
            storage_options=settings.storage_options,
            **settings.for_persister(),
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
            _warn_of_another_job(agent, opened)
            write_job(agent, directory.path)
        if opened.partnering is not None:
            directory.notify(world.rank)
            opened.partnering.meet(directory, opened.outcome)
        control = Control.open(directory.control_path, rows=len(mates))
        row = control.row(mates.index(world.rank))
        _fill(row, opened, entered_ns=entered_ns, initialised_ns=initialised_ns)
        relay = _relay(opened, control)
        watermark = _acks(opened, control, relay)
        watermark.publish(opened.memory.complete())
        return cls(lease=lease, control=control, row=row, watermark=watermark, relay=relay, owner=owner)


def _warn_of_another_job(agent: Path, opened: OpenedJob) -> None:
    """Say that a restart found nothing because its root is not that of the start before: one named by the time, say."""
    before, now = read_job(agent), opened.directory.path
    if env.FLASHCKPT_RESTART and opened.outcome.report is None and before not in {None, now}:
        _log.warning(
            "this restart begins from scratch: its root is another one than that of the start before (memory in %s, was in %s)."
            " Name the root by the run, not by the time or the start",
            now, before,
        )  # fmt: skip


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
    row.stage = opened.tracked.world.coordinates.get("pp", 0)
    row.entered, row.initialised = entered_ns, initialised_ns
    row.restored_step = report.step if report else -1
    row.restored_from = max((RESTORED_FROM.index(tier) for tier in report.tier_bytes), default=0) if report else 0
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
