"""Where the simulation takes the place of the machine in the product's modules: each name that is replaced, once per program."""

from __future__ import annotations

import importlib
import logging
import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from simulation import memory
from simulation.clock import CLOCK, Process
from simulation.storage import SimStore
from simulation.threads import Burst, Pool, Threading, wakers

Connect = Callable[[Process], SimStore]
_TIMED = (
    "checkpoint.writer", "checkpoint.retention", "checkpoint.sweeping", "daemon.persister.attempts", "daemon.persister.flush",
    "daemon.persister.coordinator", "daemon.persister.service", "shm.job_directory", "shm.messages", "shm.segment",
    "restore.gather", "snapshot.segments",
)  # fmt: skip


class Wakeup:
    """In place of inotify: `wait` ends with an event on the node, or after its time; an idle persister looks less often."""

    idle_s = 30.0

    def __init__(self, folders: Any) -> None:
        self._fiber: Any = None
        self._is_woken = False
        self.is_busy: Callable[[], bool] = lambda: True
        process = CLOCK.scheduler.process
        for folder in folders:
            memory.FILES.on_touch[str(folder)] = self.wake
        wakers[process] = self.wake

    def wait(self, timeout_s: float) -> bool:
        if not self._is_woken:
            scheduler = CLOCK.scheduler
            fiber = self._fiber = scheduler.fiber
            assert fiber is not None
            number = self._number = getattr(self, "_number", 0) + 1
            limit_s = max(timeout_s, 1.0) if self.is_busy() else self.idle_s

            def late() -> None:
                if self._number == number:
                    scheduler.wake(fiber)

            scheduler.after(limit_s, late)
            scheduler.block()
            self._number += 1
        woken, self._is_woken = self._is_woken, False
        return woken

    def wake(self) -> None:
        self._is_woken = True
        if self._fiber is not None:
            CLOCK.scheduler.wake(self._fiber)

    def close(self) -> None:
        """Nothing to close."""


def crash_point(name: str) -> None:
    """Kill the process that runs where its time has come."""
    del name
    if (process := CLOCK.scheduler.process) is not None:
        process.passes_point()
        CLOCK.scheduler.check()


def _module(name: str) -> Any:
    return importlib.import_module(f"flashckpt.{name}")


def install(connect: Connect, host: Callable[[], str], draw: random.Random) -> None:
    """Put the simulation in place of the machine, in this process.

    Args:
        connect: Opens the root for a process.
        host: Returns the name of the node whose code runs.
        draw: What is random for the product.
    """
    for name in _TIMED:
        if hasattr(_module(name), "time"):
            _module(name).time = CLOCK
    _module("checkpoint.root_records").ThreadPoolExecutor = Burst
    flush = _module("daemon.persister.flush")
    flush.ThreadPoolExecutor, flush.threading = Pool, Threading
    _module("daemon.persister.housekeeping").threading = _module("daemon.persister.seeker").threading = Threading
    retention = _module("checkpoint.retention")
    retention.threading = Threading
    names = SimpleNamespace(token_hex=lambda count: f"{draw.getrandbits(8 * count):0{2 * count}x}")
    retention.secrets = _module("restore.gather").secrets = names
    _storage(connect)
    _memory()
    _persister(host)
    for module in list(sys.modules.values()):
        if (
            isinstance(module, ModuleType)
            and hasattr(module, "crash_point")
            and module.__name__.startswith("flashckpt")
        ):
            module.crash_point = crash_point  # type: ignore[attr-defined]


def _storage(connect: Connect) -> None:
    def opened(*_: object, **__: object) -> SimStore:
        assert CLOCK.scheduler.process is not None
        return connect(CLOCK.scheduler.process)

    _module("daemon.persister.coordinator").open_store = opened
    _module("checkpoint.catalog").open_in_rank = opened


def _memory() -> None:
    segment, lease, directory = _module("shm.segment"), _module("shm.lease"), _module("shm.job_directory")
    messages, records, gather = _module("shm.messages"), _module("shm.private"), _module("restore.gather")
    files, fake = memory.FILES, memory.FileOs()
    segment.os = lease.os = directory.os = messages.os = fake
    segment.open_file, segment.Path = files.open, memory.SimPath
    segment.check_place = lambda *_: None
    segment.block = SimpleNamespace(
        mapped=lambda _, fd, __: memory.SimBlock(files.descriptors[fd]), withdraw=lambda _: None
    )
    segment.Lease = directory.Lease = memory.SimLease
    segment.is_at = directory.is_at = _is_at
    lease.kept_maps = memory.Mapped
    directory.replace = files.rename
    directory.mark_file = messages.mark_file = files.touch
    directory.remove_file = messages.remove_file = files.remove
    records._replace, records.read_file = files.write, memory.read_file
    messages.read_file = directory.read_file = memory.read_file
    messages._replace = files.write
    gather.agent_folder, gather.env, gather.Path = lambda: None, _AgentOfRank, memory.SimPath
    folder = _module("shm.agent_folder")
    folder.Path, folder._replace = memory.SimPath, lambda path, text: files.write(path, text.encode())
    gather.Control, gather.ControlView = SimpleNamespace(open=_opened), _Rows


def _opened(path: memory.SimPath) -> Any:
    if str(path) not in controls:
        raise FileNotFoundError(path)
    return controls[str(path)]


class _Rows:
    """In place of `ControlView`: the rows of a node's control page."""

    def __init__(self, path: memory.SimPath) -> None:
        self._control = _opened(path)

    def rows(self) -> list[Any]:
        """Return all of them."""
        return [self._control.row(index) for index in range(self._control.rows)]


class _AgentOfRank:
    """In place of the environment that an agent gives its ranks."""

    FLASHCKPT_RESTART, FLASHCKPT_AGENT_DIR = 0, ""


def under_agent(folder: Any, restart: int, work: Callable[[], Any]) -> Any:
    """Do something as a rank of an agent, of which this is the folder, does after so many starts."""
    _AgentOfRank.FLASHCKPT_RESTART, _AgentOfRank.FLASHCKPT_AGENT_DIR = restart, str(folder)
    return work()


controls: dict[str, Any] = {}
"""The control page of each node, by its path."""


def forget(seed: int, *, spread: bool) -> None:
    """Forget what the simulation before left in modules: one seed is one story, whatever was run earlier.

    With odd seeds the ranks of a node, which are small here, share an object; with even ones each has its own. With `spread` a job
    of two ranks is a large one, whose MANIFEST names indexes.
    """
    _module("daemon.persister.flush").TOGETHER_BYTES = (seed % 2) << 23
    _module("checkpoint.indexes").RANGED_FROM = 2 if spread else 64
    merging = _module("checkpoint.merging")
    merging.SPREAD_BYTES, merging.ROWS_PER_PATTERN_ROW = (0, 0) if spread else (8 << 20, 4)
    controls.clear()
    _module("checkpoint.catalog")._infos.clear()
    _module("checkpoint.writer")._upload_bytes_s.clear()


def _is_at(path: Any, fd: int) -> bool:
    try:
        return memory.FILES.find(path) is memory.FILES.descriptors.get(fd)
    except FileNotFoundError:
        return False


class _Nothing:
    """Scrapes and plug-ins of other packages: there are none."""

    endpoint = None

    def __init__(self, *_: object) -> None:
        pass

    def turn(self, *_: object, **__: object) -> None:
        """Do nothing."""

    observe = turn

    def numbers(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def report(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return nothing."""
        return {}, {}

    def close(self) -> None:
        """Do nothing."""


def _persister(host: Callable[[], str]) -> None:
    service, coordinator = _module("daemon.persister.service"), _module("daemon.persister.coordinator")
    service.Wakeup, service.SessionHistory = Wakeup, _Nothing
    service.metrics.Scrapes = _Nothing
    _module("shm.acks").ControlView = lambda path: controls[str(path)]
    service.turn_over = lambda _: None
    service.LEAST_S = 0.25  # events that come together make one turn
    service.remove_file = memory.FILES.remove
    service.os = coordinator.os = memory.FileOs()
    coordinator.socket = _module("restore.gather").socket = SimpleNamespace(gethostname=host)
    logging.disable(logging.CRITICAL)
