"""The rendezvous state that the nodes of a job share: signed JSON in a store, with small keys beside it.

The state has one key, and is replaced by compare-and-set. A number beside it counts its changes: who waits asks for the number,
and reads the state when it is another. A keep-alive is a small key of each node, which one neighbour reads (silence). So what idle nodes
ask for is as small with many nodes as with few.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from datetime import datetime, timezone
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
from flashckpt.daemon.launcher.silence import BEAT_S, Neighbours

_log = logging.getLogger("flashckpt.dlrun")
_NOTHING = "-"
_CACHE_S, _SUSPECT_CACHE_S = BEAT_S, 0.1
_POLL_S, _POLL_NODE_S = 0.05, 0.0005
_WHOLE_S = 5.0
"""After which the state is read though its number is the same: its writer may have died before it counted."""
_TURN_S, _MOST_TURN_S = 0.002, 1.0
"""Seconds for each node of the job over which nodes spread the next try, where another was faster."""
_BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
T = TypeVar("T")


class SharedState(_BackendRendezvousStateHolder):
    """Keeps this node's copy of the state in step with the store; a drop-in for torch's own holder.

    Args:
        store: Holds the state.
        settings: The rendezvous settings.
        seal: Signs it.
        node: This node; None for one that only looks.
    """

    _state: JobState

    def __init__(self, store: Store, settings: RendezvousSettings, seal: Seal, node: _NodeDesc | None = None) -> None:
        super().__init__(backend=None, settings=settings)  # type: ignore[arg-type]  # sync, below, is all that uses it
        self._store, self._seal, self._node = store, seal, node
        self._key = f"flashckpt.rendezvous.{settings.run_id}"
        self._state, self._text = JobState(), _NOTHING
        self._changes, self._read_s = -1, 0.0
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
        elif self.has_changed():
            self._read()
        self._last_sync_time = time.monotonic()
        self._remove_lost()
        return has_set

    def has_changed(self) -> bool:
        """Return whether the state must be read again."""
        return self._count(0) != self._changes or time.monotonic() > self._read_s + _WHOLE_S

    def wait(self, timeout_s: float) -> None:
        """Return when the state has changed, or after `timeout_s` seconds; the next `sync` reads it."""
        end = time.monotonic() + timeout_s
        pause_s = _POLL_S + _POLL_NODE_S * len(self._state.nodes())  # all ask one process
        while not self.has_changed() and time.monotonic() < end:
            time.sleep(pause_s)
        self._last_sync_time = -1

    def beat(self) -> None:
        """Say that this node runs."""
        if self._node is not None:
            self._beat_at = datetime.now(timezone.utc)
            self._beat = max(self._beat + 1, int(self._beat_at.timestamp() * 1000))
            data = self._seal.close(f"{self._node} {self._beat}").decode()
            self._asked(lambda: self._store.set(f"{self._key}.beat.{self._node}", data))
            self._state.last_heartbeats[self._node] = self._beat_at

    def _cache_s(self) -> float:
        return _SUSPECT_CACHE_S if self._silence.suspects else _CACHE_S

    def _write(self) -> bool:
        """Write the state; where another node was faster, wait a moment, as one of many that try, and read its state."""
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
        self._text, self._read_s = wanted, time.monotonic()
        self._count(1)  # not taken for the number of this state: another write may have been counted
        return True

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
        for node, (silent_s, is_away) in lost.items():
            machine = "its machine does not answer" if is_away else "its machine answers"
            _log.warning("node %s: no keep-alive for %.1f s, %s: it is out of the round", node.addr, silent_s, machine)
            was_in = state.participants.pop(node, None) is not None
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
            state.lost[node] = [state.round, int(silent_s * 1000), int(is_away)]
            if was_in:
                _remove_participant_epilogue(state, self._settings)
        if lost and not self._replace():
            self._read()  # the next look finds them silent still

    def _beat_of(self, node: _NodeDesc) -> int:
        """Return a node's newest keep-alive, 0 if there is none that it wrote."""
        found = self._swap(f"{self._key}.beat.{node}", "", _NOTHING)
        try:
            name, _, beat = self._seal.open(found.encode()).rpartition(" ") if found != _NOTHING else ("", "", "0")
            return int(beat) if name == str(node) else 0
        except (UnsealedError, ValueError):
            return 0

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
