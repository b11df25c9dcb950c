"""Stopping all ranks after the same step, and deferring signals until the agent can act on them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.machine.process import wait_readable
from flashckpt.errors import DamagedError
from flashckpt.shm.control import ControlRow

_REQUEST, _STEPS, _AFTER = "flashckpt/stop/request", "flashckpt/stop/steps", "flashckpt/stop/after"
_STORE_MARGIN_S = 1.5  # several polls of every agent, and the round trip through the store
MAX_AHEAD = 1000
"""Most steps between the highest one done and the one to stop after."""

_log = logging.getLogger("flashckpt.dlrun")


class KeyValueStore(Protocol):
    """The part of a c10d store that the agreement uses; `check` does not wait for a key."""

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value (waits for it)."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when all keys are set; RuntimeError after the timeout."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The agents of one round: their store, this one's rank and how many there are."""

    store: KeyValueStore
    rank: int
    size: int


def stop_step(steps: Sequence[int], *, step_s: float, margin_s: float = 0.1) -> int:
    """Return the step after which every rank stops: far enough ahead that no rank can be past it.

    A rank may end its present step right after its number was read, and then needs `step_s` for each
    further one; the number must reach it within `margin_s`.

    Args:
        steps: The step each rank completed last.
        step_s: Seconds per step, at least; 0 counts as a millisecond.
        margin_s: Seconds from reading the steps until every rank can see the number.
    """
    return max(steps) + 1 + min(MAX_AHEAD, math.ceil(margin_s / max(step_s, 1e-3)))


class AgreedStop:
    """One stop of all ranks after one step, from the request to the exit code.

    On one node the agent reads the steps and writes the number. Between nodes the agents agree through
    the store of the round: any agent's request, then every node's highest step, then the step that
    group rank 0 derives from them; each agent polls several times a second.
    """

    def __init__(self, watch: JobWatch, grace_s: float) -> None:
        self._watch, self._grace_s = watch, grace_s
        self._until: float | None = None
        self._step = -1

    @property
    def is_under_way(self) -> bool:
        """Whether a stop was asked for."""
        return self._until is not None

    @property
    def is_late(self) -> bool:
        """Whether the grace time has passed without all ranks having stopped."""
        return self._until is not None and time.monotonic() > self._until

    def ask(self, store: KeyValueStore | None) -> None:
        """Ask all nodes to stop; `store` is None where this node is the only one."""
        self._note()
        if store is not None:
            store.set(_REQUEST, "1")

    def _note(self) -> None:
        if self._until is None:
            self._until = time.monotonic() + self._grace_s

    def hear(self, store: KeyValueStore) -> bool:
        """Return whether some node asked for a stop."""
        if self._until is None and store.check([_REQUEST]):
            self._note()
        return self._until is not None

    def tick(
        self, signals: Sequence[int], rows: Sequence[ControlRow], *, ranks: int, step_s: float, group: Group | None
    ) -> bool:
        """Receive requests, make one, or advance the agreement (see `advance`); called several times a second.

        Returns False if the ranks cannot stop together: they do not use flashckpt, or the grace time has
        passed.

        Args:
            signals: Stop signals received so far.
            rows: See `advance`, for the others too.
            ranks: How many ranks this node has.
            step_s: Seconds per step, at least.
            group: The other nodes; None where there are none.
        """
        store = group.store if group is not None else None
        if signals and not self.is_under_way:
            if self._watch.control() is None:
                return False
            self.ask(store)
        elif store is not None:
            self.hear(store)
        if not self.is_under_way:
            return True
        if self.is_late:
            _log.error(
                "the workers did not stop within %.0f s and are killed; snapshots in memory are kept", self._grace_s
            )
            return False
        step = self.advance(rows, ranks=ranks, step_s=step_s, group=group)
        if step is not None:
            why = signal.Signals(signals[0]).name if signals else "another node was asked to stop"
            _log.warning("%s: all ranks stop after step %d, their state is kept", why, step)
        return True

    def advance(self, rows: Sequence[ControlRow], *, ranks: int, step_s: float, group: Group | None) -> int | None:
        """Advance the agreement; returns the step once, when it is published to this node's ranks.

        Args:
            rows: The control rows of this node's live ranks; until there are `ranks` of them nothing is agreed.
            ranks: How many ranks this node has.
            step_s: Seconds per step, at least.
            group: The other nodes; None where there are none.
        """
        control = self._watch.control()
        if self._step >= 0 or control is None or len(rows) < ranks:
            return None
        steps = [row.step for row in rows]
        step = stop_step(steps, step_s=step_s) if group is None else _agree(group, max(steps), step_s)
        if step is None:
            return None
        try:
            control.stop_after = step
        except (OSError, DamagedError):  # truncated just now: its ranks are dying
            return None
        self._step = step
        return step

    def has_stopped(self, rows: Sequence[ControlRow]) -> bool:
        """After a clean end: whether the ranks ended because they were asked to. Withdraws the request."""
        control = self._watch.control()
        if self._step < 0 or control is None:
            return False
        with contextlib.suppress(OSError, DamagedError):
            control.stop_after = -1
        return max((row.step for row in rows), default=-1) >= self._step


def _agree(group: Group, highest: int, step_s: float) -> int | None:
    mine = f"{_STEPS}{group.rank}"
    if not group.store.check([mine]):
        group.store.set(mine, json.dumps([highest, step_s]))
    if group.store.check([_AFTER]):
        return int(group.store.get(_AFTER))
    every = [f"{_STEPS}{rank}" for rank in range(group.size)]
    if group.rank == 0 and group.store.check(every):
        said = [json.loads(group.store.get(key)) for key in every]
        step = stop_step([one[0] for one in said], step_s=min(one[1] for one in said), margin_s=_STORE_MARGIN_S)
        group.store.set(_AFTER, str(step))
    return None  # also group rank 0 reads it back, a moment later: all see one number


class StopSignals:
    """Collects stop signals while the agent supervises; `fd` becomes readable with the first of them.

    Outside supervision (a rendezvous may last minutes) a signal is passed to `interrupt` at once, which
    raises. Later signals never interrupt anything: a flush under way completes.
    """

    def __init__(self, names: str, interrupt: Callable[[int], None]) -> None:
        self._names, self._interrupt = names, interrupt
        self._old: dict[int, object] = {}
        self.fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.received: list[int] = []
        self.supervising = False

    def install(self) -> None:
        """Take over the named signals; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not handled: the agent does not run in the main thread")
            return
        for name in self._names.split(","):
            number = getattr(signal, name.strip(), None)
            if number is None:
                _log.warning("unknown signal %r in --signals-to-handle", name)
                continue
            try:
                self._old[number] = signal.signal(number, self._on_signal)
            except (OSError, ValueError) as error:
                _log.warning("signal %s cannot be handled: %s", name, error)

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"s")
        if len(self.received) == 1 and not self.supervising:
            self._interrupt(number)

    def await_first(self, timeout_s: float) -> bool:
        """Return whether a signal was received, now or within `timeout_s` seconds."""
        if not self.received:
            wait_readable([self.fd], timeout_s)
        return bool(self.received)

    def drain(self) -> None:
        """Empty the wake pipe, so that the next wait sleeps again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        self._old.clear()
        os.close(self.fd)
        os.close(self._wake)
