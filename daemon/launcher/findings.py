"""An agent's findings about a failure, published to the other nodes: short records in the round's store.

A node whose ranks only saw their connections close looks here for the rank that failed. Anybody who can reach the
store can write to it: a record is parsed as JSON, cut to a length, and stripped of control characters before it is printed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.core.incident import in_ranges
from flashckpt.daemon.launcher.stop import KeyValueStore

_FIRST, _NODE = "flashckpt/first-failure", "flashckpt/node"
_LOOK_S = 0.2
ANSWER_S = 0.3
NOBODYS_PORT = 1
_MOST_ASKED = 32
_MOST = 300
"""Characters of a text that are shown."""
_GONE = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    TimeoutError,
    RecursionError,
)  # the store's host is gone, or a record is malformed


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The rank that failed first, as the agent of its node saw it; `step` is -1 if the script reports no steps."""

    rank: int
    host: str
    cause: str
    step: int

    def text(self) -> str:
        """Return the finding as a line."""
        step = f" at step {self.step}" if self.step >= 0 else ""
        return f"rank {self.rank} on {self.host} failed first{step}: {self.cause}"


def publish(store: KeyValueStore, finding: Finding) -> None:
    """Publish a finding for the other nodes; only the first one of a round is kept."""
    try:
        if not store.check([_FIRST]):
            store.set(_FIRST, json.dumps(asdict(finding)))
    except _GONE:
        return


def read(store: KeyValueStore) -> Finding | None:
    """Return what some node has published about this round, None if nothing."""
    try:
        if not store.check([_FIRST]):
            return None
        record = json.loads(store.get(_FIRST))
        words = {name: _clean(record[name]) for name in ("host", "cause")}
        return Finding(rank=int(record["rank"]), step=int(record["step"]), **words)
    except _GONE:
        return None


def introduce(store: KeyValueStore, node: int, *, host: str, ranks: Sequence[int]) -> None:
    """Publish the host and ranks of a node, so that others can name it if it stops answering."""
    store.set(f"{_NODE}/{node}", json.dumps({"host": host, "ranks": list(ranks)}))


def host_of(store: KeyValueStore, node: int) -> str:
    """Return the host name of a node of this round, "" where it has not said it."""
    record = _introduced(store, node)
    return _clean(record.get("host", ""))


def ranks_of(store: KeyValueStore, node: int) -> str:
    """Return the ranks of a node of this round as text: "4-7"."""
    try:
        return in_ranges(int(rank) for rank in _introduced(store, node).get("ranks", ()))
    except (ValueError, TypeError):
        return ""


def _introduced(store: KeyValueStore, node: int) -> dict[str, Any]:
    try:
        record = json.loads(store.get(f"{_NODE}/{node}")) if store.check([f"{_NODE}/{node}"]) else {}
    except _GONE:
        return {}
    return record if isinstance(record, dict) else {}


def answering(addresses: Mapping[int, str]) -> dict[int, bool]:
    """Return which machines answer at all, if only with a refusal; of many, the first few are asked."""
    found = ask([(address, NOBODYS_PORT) for address in addresses.values()])
    return {node: answer is not None for node, answer in zip(addresses, found, strict=False)}


def ask(ports: Sequence[tuple[str, int]]) -> list[bool | None]:
    """Return of ports (address, number) whether somebody listens there; None: the machine does not answer, or the number is 0.

    Of many, the first few are asked. An answer that comes within ANSWER_S counts, however late this process sees it.
    """
    found = dict[int, bool | None]()
    threads = [
        threading.Thread(target=_ask, args=(i, *port, found), name="flashckpt-ask", daemon=True)
        for i, port in enumerate(ports[:_MOST_ASKED])
        if port[1]
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * ANSWER_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [found.get(i) for i in range(len(ports[:_MOST_ASKED]))]


def _ask(i: int, address: str, port: int, found: dict[int, bool | None]) -> None:
    try:
        with socket.create_connection((address, port), timeout=ANSWER_S):
            found[i] = True
    except OSError as error:
        found[i] = False if isinstance(error, ConnectionError) else None


def describe_lost(store: KeyValueStore, node: int, address: str) -> str:
    """Return in words that a node of this round is gone: "node 3 (host b, rank 4, 5) is gone"."""
    try:
        record = json.loads(store.get(f"{_NODE}/{node}")) if store.check([f"{_NODE}/{node}"]) else {}
        ranks = ", ".join(str(int(rank)) for rank in record["ranks"])
        host = _clean(record["host"])
    except _GONE:
        return f"node {address} is gone: it sends no heartbeats"
    where = f"{address} ({host})" if host != address else address
    return f"node {where} with rank{'s' if ',' in ranks else ''} {ranks} is gone: it sends no heartbeats"


def await_cause(store: KeyValueStore, lost: Callable[[], dict[int, str]], *, timeout_s: float) -> dict[int, str]:
    """Wait until some node names the failed rank, or nodes have been silent for too long; return the silent nodes.

    Args:
        store: The round's store.
        lost: Asks which nodes (group rank -> address) the round has lost.
        timeout_s: When to give up, in seconds.
    """
    end, gone = time.monotonic() + timeout_s, dict[int, str]()
    while not gone and read(store) is None and time.monotonic() < end:
        gone = lost()
        time.sleep(_LOOK_S)
    return gone


def cause(store: KeyValueStore, lost: Mapping[int, str]) -> str:
    """Return what ended a generation, from what other nodes published and which ones are silent."""
    if lost:
        return "; ".join(describe_lost(store, node, address) for node, address in sorted(lost.items()))
    found = read(store)
    return found.text() if found is not None else "no node of the job reported which rank failed first"


def why_left(store: KeyValueStore, lost: Mapping[int, str]) -> str:
    """Return what ended a generation for other nodes, "" where nothing did: they only joined."""
    return cause(store, lost) if lost or read(store) is not None else ""


def _clean(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:_MOST])
