"""The rendezvous state that the nodes of a job share: signed JSON in a store, with small keys beside it.

The state has one key, and is replaced by compare-and-set. A number beside it counts its changes: who looks asks for the number,
and reads the state when it is another. Its upper half counts those that end a wait, of which a round of many nodes has a few. A keep-alive is a small key of each node, which one neighbour reads (silence). So what idle nodes
ask for is as small with many nodes as with few.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _remove_participant_epilogue,
)

from flashckpt.daemon.launcher.job_secret import Seal, UnsealedError
from flashckpt.daemon.launcher.job_state import JobState, decode, encode
from flashckpt.daemon.launcher.silence import ANSWERS, BEAT_S, Neighbours

_log = logging.getLogger("flashckpt.dlrun")
_NOTHING = "-"
_LOOK_S, _LOOK_NODE_S, _SUSPECT_CACHE_S = 0.15, 0.01, 0.1
"""Seconds between two looks at the number; more where there are many nodes, fewer where one is silent."""
_POLL_S, _POLL_NODE_S = 0.05, 0.0005
_MOST_ASKERS = 64
_WHOLE_S = 5.0
"""After which the state is read though its number is the same: its writer may have died before it counted."""
_TURN_S, _MOST_TURN_S = 0.002, 1.0
"""Seconds for each node of the job over which nodes spread the next try, where another was faster."""
_TURN_BITS = 32
_BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
T = TypeVar("T")


class SharedState(_BackendRendezvousStateHolder):
    """Keeps this node's copy of the state in step with the store; a drop-in for torch's own holder.

    Args:
        store: Holds the state.
        settings: The rendezvous settings.
        seal: Signs it.
        node: This node; None for one that only looks.
        seat: The socket that listens as long as this agent runs (`rendezvous_store.seat`).
    """

    _state: JobState

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        seal: Seal,
        node: _NodeDesc | None = None,
        seat: socket.socket | None = None,
    ) -> None:
        super().__init__(backend=None, settings=settings)  # type: ignore[arg-type]  # sync, below, is all that uses it
        self._store, self._seal, self._node, self._seat = store, seal, node, seat
        if seat is not None:
            weakref.finalize(self, seat.close)
        self._key = f"flashckpt.rendezvous.{settings.run_id}"
        self._state, self._text = JobState(), _NOTHING
        self._changes, self._read_s = -1, 0.0
        self._is_calm = False
        self._beat, self._beat_at = 0, datetime.min.replace(tzinfo=timezone.utc)
        patience = settings.keep_alive_interval * settings.keep_alive_max_attempt
        self._silence = Neighbours(patience.total_seconds(), self._beat_of)

    @property
    def state(self) -> JobState:
        """This node's copy."""
        return self._state

    def sync(self) -> bool | None:
        """Read the state, or write it if it was changed here; returns whether a change was taken, None if there was none.

        Raises:
            RendezvousConnectionError: the store cannot be reached.
            RendezvousStateError: it holds data that no node of this job wrote.
        """
        has_set: bool | None = None
        if self._dirty:
            has_set, self._dirty = self._write(), False
        elif self._last_sync_time >= max(time.monotonic() - self._cache_s(), 0):
            return None
        elif not self._is_calm and self.has_changed():
            self._read()
        self._is_calm, self._last_sync_time = False, time.monotonic()
        self._remove_lost()
        return has_set

    def has_changed(self) -> bool:
        """Return whether the state must be read again."""
        return self._count(0) != self._changes or time.monotonic() > self._read_s + _WHOLE_S

    def _has_turned(self) -> bool:
        return self._count(0) >> _TURN_BITS != self._changes >> _TURN_BITS or time.monotonic() > self._read_s + _WHOLE_S

    def wait(self, timeout_s: float) -> None:
        """Return when a wait may be over, or after `timeout_s` seconds; only then does the next `sync` read the state."""
        end = time.monotonic() + timeout_s
        pause_s = _POLL_S + _POLL_NODE_S * len(self._state.nodes())  # all ask one process
        while (is_calm := not self._has_turned()) and time.monotonic() < end:
            time.sleep(pause_s)
        self._is_calm, self._last_sync_time = is_calm, -1

    def beat(self) -> None:
        """Say that this node runs."""
        if self._node is not None:
            self._beat_at = datetime.now(timezone.utc)
            self._beat = max(self._beat + 1, int(self._beat_at.timestamp() * 1000))
            port = self._seat.getsockname()[1] if self._seat is not None else 0
            data = self._seal.close(f"{self._node} {self._beat} {port}").decode()
            self._asked(lambda: self._store.set(f"{self._key}.beat.{self._node}", data))
            self._state.last_heartbeats[self._node] = self._beat_at
            with contextlib.suppress(OSError):  # no more have asked
                for _ in range(_MOST_ASKERS if self._seat is not None else 0):
                    self._seat.accept()[0].close()  # type: ignore[union-attr]  # it is there

    def _cache_s(self) -> float:
        many_s = _LOOK_NODE_S * len(self._state.participants)  # all ask one process
        return _SUSPECT_CACHE_S if self._silence.suspects else min(BEAT_S, max(_LOOK_S, many_s))

    def _write(self) -> bool:
        """Write the state; where another node was faster, wait a moment, as one of many that try, and read its state."""
        if datetime.now(timezone.utc) - self._beat_at > timedelta(seconds=BEAT_S / 2):
            self.beat()
        if self._replace():
            return True
        time.sleep(random.uniform(0, min(_MOST_TURN_S, _TURN_S * self._settings.min_nodes)))
        self._read()
        return False

    def _replace(self) -> bool:
        wanted = self._seal.close(encode(self._state)).decode()
        if wanted == self._text:
            return True
        if self._swap(self._key, self._text, wanted) != wanted:
            return False
        before, self._text, self._read_s = self._text, wanted, time.monotonic()
        turns = self._ends_wait(JobState() if before == _NOTHING else self._decode(before))
        self._count(
            1 + (turns << _TURN_BITS)
        )  # not taken for the number of this state: another write may have been counted
        return True

    def _ends_wait(self, before: JobState) -> bool:
        """Return whether a node that waits may have something to do: not where others have only joined it, or left before it."""
        most = self._settings.max_nodes
        then, now = (
            (one.round, one.complete, one.closed, one.deadline, len(one.participants) < most, one.lost.keys())
            for one in (before, self._state)
        )
        return then != now

    def _read(self) -> None:
        changes = self._count(0)  # before the state: one that is written meanwhile is read again
        found = self._swap(self._key, "", _NOTHING)  # sets the key only if it is unset; otherwise it only reads
        self._state = JobState() if found == _NOTHING else self._decode(found)
        self._text, self._changes, self._read_s = found, changes, time.monotonic()
        if self._node in self._state.last_heartbeats:
            self._state.last_heartbeats[self._node] = self._beat_at

    def _decode(self, text: str) -> JobState:
        try:
            return decode(self._seal.open(text.encode()))
        except UnsealedError as error:
            raise RendezvousStateError(f"the rendezvous state is refused: {error}") from error
        except _BROKEN as error:
            raise RendezvousStateError(
                f"the rendezvous state is not one of dlrun's ({type(error).__name__})"
            ) from error

    def _remove_lost(self) -> None:
        """Take nodes that are lost out of the state, for all."""
        if self._node is None:
            return
        state = self._state
        lost = self._silence.lost(self._node, state.nodes())
        for node, (silent_s, how) in lost.items():
            _log.warning("node %s: no keep-alive for %.1f s, %s: it is out of the round", node.addr, silent_s, how)
            was_in = state.participants.pop(node, None) is not None
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
            state.lost[node] = [state.round, int(silent_s * 1000), int(how != ANSWERS)]
            if was_in:
                _remove_participant_epilogue(state, self._settings)
        if lost and not self._replace():
            self._read()  # the next look finds them silent still

    def _beat_of(self, node: _NodeDesc) -> tuple[int, int]:
        """Return a node's newest keep-alive and the port of its seat, 0 for what there is not, or what it did not write."""
        found = self._swap(f"{self._key}.beat.{node}", "", _NOTHING)
        try:
            name, beat, port = self._seal.open(found.encode()).rsplit(" ", 2) if found != _NOTHING else ("", "0", "0")
            return (int(beat), int(port) & 0xFFFF) if name == str(node) else (0, 0)
        except (UnsealedError, ValueError):
            return 0, 0

    def _count(self, by: int) -> int:
        return int(self._asked(lambda: self._store.add(f"{self._key}.changes", by)))

    def _swap(self, key: str, expected: str, wanted: str) -> str:
        found = self._asked(lambda: self._store.compare_set(key, expected, wanted))
        return bytes(found).decode(errors="replace")

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the rendezvous store cannot be reached") from error
