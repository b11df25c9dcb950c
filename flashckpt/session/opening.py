"""From tracked objects to a job that is open on this rank: state planned, memory reserved, the newest state restored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashckpt import entry_points
from flashckpt.accelerator import index_of
from flashckpt.core.settings import Settings
from flashckpt.errors import FlashckptError
from flashckpt.logs import guarded, notice
from flashckpt.native import implementation
from flashckpt.planning.inventory import Inventory, local_world
from flashckpt.plugin import ReplicaPlan
from flashckpt.restore.absent_state import recorded_beside
from flashckpt.restore.coordinator import RestoreCoordinator, RestoreRequest
from flashckpt.session.node_place import OpenedJob
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.job_id import earlier_job_id, root_digest
from flashckpt.snapshot import segments
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.staging import BLOCK_BYTES, BLOCKS
from flashckpt.state import replication, samplers
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import MemoryNeed, need_of
from flashckpt.state.structure import in_order
from flashckpt.storage.factory import place_of

_logger = logging.getLogger("flashckpt")
_UNREAD_BYTES = 256 << 10
"""Room for tensors in the state of objects that are not asked for it yet: positions and generators."""


@dataclass(eq=False, kw_only=True)
class Opening:
    """The opening of one job on one rank. Collective.

    Args:
        tracked: The tracked objects.
        settings: The checkpointer's settings.
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
            pin_for=index_of(p.device for part in self.tracked.parts() for p in part.parameters()),
        )

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Give everything up where something is raised: restore() may be called again, with other arguments."""
        try:
            yield
        except BaseException:
            self.memory.release()
            self.directory.let_go()
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
        samplers.refuse_gaps(self.tracked.objects, self.tracked.parts())
        plan, inventories = self._open_memory(coordinator)
        unread = set(self.tracked.unread)
        begin = coordinator.begin_fresh if self.begins_fresh else coordinator.run
        outcome = begin(inventories, own=self.memory.segment)
        if outcome.report is None and not self.begins_fresh:
            replication.verify(plan.layout.structure)
            self.tracked.nothing_is_given()
        is_current = unread == self.tracked.unread and self.tracked.planned is plan.layout.structure
        is_current = is_current and outcome.report is None
        return OpenedJob(
            tracked=self.tracked,
            directory=self.directory,
            memory=self.memory,
            settings=self.settings,
            outcome=outcome,
            plan=plan if is_current else None,
            partnering=self.partnering,
        )

    def _open_memory(self, coordinator: RestoreCoordinator) -> tuple[CopyPlan, list[Inventory]]:
        """Plan, learn what all ranks have and need, then reserve this rank's segment in the background."""
        directory, rank = self.directory, self.tracked.world.rank
        plan, need = self._plan()
        is_there = directory.segment_path(rank, need.layout).exists()
        inventories = coordinator.gather(0 if is_there else need.slot_bytes, segments.free_bytes(directory))
        mates = local_world(inventories, rank)
        missing, wanted = sum(inventories[r].need_bytes for r in mates), self.settings.slot_count
        replica_bytes = None
        if self.settings.replicate and local_world(inventories, 0) != list(range(len(inventories))):
            agree = entry_points.load(entry_points.EXTRAS, "replicas").agree
            partnering: ReplicaPlan = agree(self.settings, inventories, plan.layout.reserved, self.directory)
            self.partnering, replica_bytes = partnering, partnering.missing_bytes
        slots = segments.slots_for(
            missing, min(inventories[r].free_bytes for r in mates), wanted, replica_bytes=replica_bytes
        )
        self.memory.open(need, slots=slots, job=self.settings.job, is_opening=True)
        assert self.memory.segment is not None
        if mates[0] == rank:
            self._say(self.memory.segment.spec.slots, need, ranks=len(mates))
        return plan, inventories

    def _plan(self) -> tuple[CopyPlan, MemoryNeed]:
        """Plan the state as it is, with what the first step will make; reserve also for what a restore will bring."""
        _, captured = self.tracked.settled(ahead=True)
        layout = self.tracked.layout()
        need = layout.need(value_bytes := len(repr(captured.values)))
        if more := recorded_beside(layout.reserved, need.layout, self.directory, self.tracked):
            planned = map(layout.reserved.shard, range(len(layout.reserved)))
            need = need_of(in_order([*planned, *more]), value_bytes=value_bytes)
        if self.tracked.unread:
            need = need.with_room(_UNREAD_BYTES)
        return CopyPlan.of(layout, self.tracked.ahead.refused), need

    def _say(self, slots: int, need: MemoryNeed, *, ranks: int) -> None:
        fallback = " (3 did not fit)" if slots < 3 and self.settings.slot_count is None else ""
        total = need.slot_bytes * slots * ranks
        pin_for = self.memory.pin_for
        notice(
            _logger,
            "snapshots: %d slots%s of %.1f MB for each of %d ranks, about %.1f MB of this node's memory, in %s; copied by: %s%s%s",
            slots, fallback, need.slot_bytes / 1e6, ranks, total / 1e6, self.directory.path, implementation(),
            "" if pin_for is None else f"; page-locked for each rank: {locked(slots * need.data_bytes)}",
            "; with two slots snapshots are skipped while a checkpoint is being written" if slots == 2 else "",
            is_shown=self.tracked.world.rank == 0,
        )  # fmt: skip
        if self.tracked.world.rank == 0 and (place := place_of(self.settings.root, self.settings.storage_options)):
            notice(_logger, "checkpoints: %s at %s", self.settings.root, place)
        self._say_what_is_left()
        if self.settings.replicate:
            text = "replicas: none, the job has one node" if self.partnering is None else self.partnering.text
            notice(_logger, "%s", text, is_shown=self.tracked.world.rank == 0)

    def _say_what_is_left(self) -> None:
        """Name the memory that this job left on this node under the id of an earlier release."""
        settings = self.settings
        if (old := earlier_job_id(settings.job, settings.root)) is None:
            return
        with contextlib.suppress(FlashckptError, OSError):
            config = JobDirectory.open(old, create=False).read_config()
            if config is not None and config.root == settings.root:
                guarded(_logger).warning(
                    "the id of job %s is now %s: to restore from the memory under its old id, start once with FLASHCKPT_JOB_ID=%s; flashckpt gc frees that memory",
                    old, settings.job, old,
                )  # fmt: skip


def locked(slot_bytes: int) -> str:
    """Say what a rank page-locks for copies from its device, for slots of so many bytes together."""
    if segments.locks_slots(slot_bytes):
        return f"its slots, {slot_bytes / 1e6:.1f} MB"
    return f"at most {BLOCKS * BLOCK_BYTES / 1e6:.1f} MB of staging buffers"
