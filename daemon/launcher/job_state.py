"""The state of a rendezvous as torch's operations know it, and its text.

torch keeps a pickle in the store, and its agents decode whatever they find: anybody who can reach the port can run code in
them. Nothing from a store is ever unpickled here.
"""

from __future__ import annotations

import json
import secrets
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

_ALIVE = "last_heartbeats"
"""The field that is no part of the text: each node keeps itself alive under its own key (shared_state)."""


class JobState(_RendezvousState):
    """torch's state of a rendezvous, and a random name of its last complete round.

    What agents sign for each other in a round holds under that name alone: no value of another round verifies, and none
    of an earlier launch with the same secret and --rdzv-id.

    Attributes:
        token: The round's random name; "" before the first round is complete.
        lost: Nodes that were removed because they were silent, in this round and the one before: round, milliseconds of silence, 1 if
            its agent is known to have ended, alone or with its machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = ""
        self.lost: dict[_NodeDesc, list[int]] = {}

    def draw(self) -> None:
        """Give the round that is being completed a new name."""
        self.token = secrets.token_hex(16)
        self.lost = {node: one for node, one in self.lost.items() if one[0] >= self.round - 1}

    def nodes(self) -> set[_NodeDesc]:
        """Return all nodes that train, wait, or stand by."""
        return {*self.participants, *self.wait_list, *self.redundancy_list}


def encode(state: _RendezvousState) -> str:
    """Return the state as JSON, equal for equal states."""
    fields = {name: _plain(value) for name, value in sorted(vars(state).items()) if name != _ALIVE}
    return json.dumps(fields, separators=(",", ":"))


def decode(text: str) -> JobState:
    """Return the state of a JSON text.

    Raises:
        ValueError: it is not one, or a field has the wrong type.
    """
    fields, state = json.loads(text), JobState()
    known = {name: empty for name, empty in vars(state).items() if name != _ALIVE}
    if not isinstance(fields, dict) or fields.keys() != known.keys():
        raise ValueError("the state has other fields")
    for name, empty in known.items():
        value = _value(fields[name])
        wanted = (datetime, type(None)) if empty is None else (type(empty),)
        if type(value) not in wanted:
            raise ValueError(f"{name} is a {type(value).__name__}")
        setattr(state, name, value)
    _check(state)
    state.last_heartbeats = dict.fromkeys(state.nodes(), datetime.now(timezone.utc))
    return state


def _node(plain: Any) -> _NodeDesc:
    address, pid, number = plain
    if (type(address), type(pid), type(number)) != (str, int, int):
        raise ValueError("a node is a name, a process and a number")
    return _NodeDesc(address, pid, number)


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
    if value is None or isinstance(value, (bool, int, str, list)):
        return value
    raise TypeError(f"unsupported type {type(value).__name__} in torch's rendezvous state")


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "node":
        return _node(inner)
    if kind == "time":
        return datetime.fromtimestamp(float(inner), timezone.utc)
    if kind == "set":
        return {_value(item) for item in inner}
    if kind == "map":
        return {_value(key): _value(item) for key, item in inner}
    raise ValueError(f"{kind} is not known")


def _check(state: JobState) -> None:
    """Raise ValueError unless every collection holds nodes, with ranks or times."""
    nodes, ranks = [*state.nodes(), *state.lost], state.participants.values()
    if not (all(isinstance(node, _NodeDesc) for node in nodes) and all(type(rank) is int for rank in ranks)):
        raise ValueError("not the nodes of a rendezvous")
    if not all(
        isinstance(one, list) and [type(part) for part in one] == [int, int, int] for one in state.lost.values()
    ):
        raise ValueError("a lost node has a round, milliseconds, and 0 or 1")
