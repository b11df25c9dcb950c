"""The rendezvous state that the nodes of a job share: signed JSON in a store.

torch keeps a pickle there, and its agents decode whatever they find: anybody who can reach the port can run code in
them. Nothing from a store is ever unpickled here.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from datetime import datetime, timezone
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from flashckpt.daemon.launcher.job_secret import Seal, UnsealedError

_log = logging.getLogger("flashckpt.dlrun")
_NOTHING = "-"
_CACHE_S = 1.0


class JobState(_RendezvousState):
    """torch's state of a rendezvous, and a random name of its last complete round.

    What agents sign for each other in a round holds under that name alone: no value of another round verifies, and none
    of an earlier launch with the same secret and --rdzv-id.

    Attributes:
        token: The round's random name; "" before the first round is complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = ""

    def draw(self) -> None:
        """Give the round that is being completed a new name."""
        self.token = secrets.token_hex(16)


class SharedState(_BackendRendezvousStateHolder):
    """Keeps this node's copy of the state in step with the store; a drop-in for torch's own holder."""

    def __init__(self, store: Store, settings: RendezvousSettings, seal: Seal) -> None:
        super().__init__(backend=None, settings=settings)  # type: ignore[arg-type]  # sync, below, is all that uses it
        self._state = JobState()
        self._store, self._seal = store, seal
        self._key = f"flashckpt.rendezvous.{settings.run_id}"
        self._text = _NOTHING

    def sync(self) -> bool | None:
        """Read the state, or write it if it was changed here; returns whether a change was taken, None if there was none.

        Raises:
            RendezvousConnectionError: the store cannot be reached.
            RendezvousStateError: it holds data that no node of this job wrote.
        """
        has_set: bool | None = None
        if self._dirty:
            wanted = self._seal.close(encode(self._state)).decode()
            found = self._swap(self._text, wanted)
            has_set = found == wanted
        elif self._last_sync_time >= max(time.monotonic() - _CACHE_S, 0):
            return None
        else:
            found = self._swap("", _NOTHING)  # sets the key only if it is unset; otherwise it only reads
        self._state = JobState() if found == _NOTHING else self._decode(found)
        self._text, self._dirty, self._last_sync_time = found, False, time.monotonic()
        self._sanitize()
        return has_set

    def _swap(self, expected: str, wanted: str) -> str:
        try:
            found = self._store.compare_set(self._key, expected, wanted)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the rendezvous store cannot be reached") from error
        return bytes(found).decode(errors="replace")

    def _decode(self, text: str) -> JobState:
        try:
            return decode(self._seal.open(text.encode()))
        except UnsealedError as error:
            raise RendezvousStateError(f"the rendezvous state is refused: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise RendezvousStateError(
                f"the rendezvous state is not one of dlrun's ({type(error).__name__})"
            ) from error


def encode(state: _RendezvousState) -> str:
    """Return the state as JSON, equal for equal states."""
    return json.dumps({name: _plain(value) for name, value in sorted(vars(state).items())}, separators=(",", ":"))


def decode(text: str) -> JobState:
    """Return the state of a JSON text.

    Raises:
        ValueError: it is not one, or a field has the wrong type.
    """
    fields, state = json.loads(text), JobState()
    if not isinstance(fields, dict) or fields.keys() != vars(state).keys():
        raise ValueError("the state has other fields")
    for name, empty in vars(state).items():
        value = _value(fields[name])
        wanted = (datetime, type(None)) if empty is None else (type(empty),)
        if type(value) not in wanted:
            raise ValueError(f"{name} is a {type(value).__name__}")
        setattr(state, name, value)
    _check(state)
    return state


def _plain(value: Any) -> Any:
    """Return a value of the state as JSON has it: times, nodes, sets and maps by one-element objects."""
    if isinstance(value, _NodeDesc):
        return {"node": [value.addr, value.pid, value.local_id]}
    if isinstance(value, datetime):
        return {"time": value.timestamp()}
    if isinstance(value, set):
        return {"set": [_plain(item) for item in sorted(value)]}
    if isinstance(value, dict):
        return {"map": [[_plain(key), _plain(value[key])] for key in sorted(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"unsupported type {type(value).__name__} in torch's rendezvous state")


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "node":
        address, pid, number = inner
        if (type(address), type(pid), type(number)) != (str, int, int):
            raise ValueError("a node is a name, a process and a number")
        return _NodeDesc(address, pid, number)
    if kind == "time":
        return datetime.fromtimestamp(float(inner), timezone.utc)
    if kind == "set":
        return {_value(item) for item in inner}
    if kind == "map":
        return {_value(key): _value(item) for key, item in inner}
    raise ValueError(f"{kind} is not known")


def _check(state: JobState) -> None:
    """Raise ValueError unless every collection holds nodes, with ranks or times."""
    nodes = [*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats]
    ranks, times = state.participants.values(), state.last_heartbeats.values()
    if not (
        all(isinstance(node, _NodeDesc) for node in nodes)
        and all(type(rank) is int for rank in ranks)
        and all(isinstance(time, datetime) for time in times)
    ):
        raise ValueError("not the nodes of a rendezvous")
