"""`--node-check`: find the bad or slow node before the first generation, with nothing but the rendezvous store.

Every node times a matrix product, its memory and its disk; then nodes are paired, and the two of each pair gather each other's
block, both ways at once. A node that is slow alone is reported at once. A pair that is slow or fails makes two suspects, and
each suspect is paired again with a good node: one that is slow there too is bad.

The first node collects the measurements and publishes what follows from them, so that the store serves a few requests per node,
however many there are, and all nodes agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median_low
from typing import Any, TypeVar, cast

from flashckpt import framing
from flashckpt.acceptor import Acceptor
from flashckpt.daemon.launcher import node_probe, rendezvous_store
from flashckpt.daemon.launcher.options import NodeCheckError
from flashckpt.daemon.launcher.stop import Group, KeyValueStore

T = TypeVar("T")
_log = logging.getLogger("flashckpt.dlrun")
PRODUCT, MEMORY, DISK, EXCHANGE = "its matrix product", "its memory", "its disk", "the exchange with other nodes"
SILENT = ""
"""In their place where a node sent nothing."""
SLOW, SLOW_DISK = 2.0, 8.0
"""A node or pair this many times slower than the median is slow."""
NOISE_S, DISK_NOISE_S = 0.05, 3.0
"""Differences below this are the scheduler's, not the node's; a disk is shared with others."""
TIMEOUT_S = 20.0
"""Seconds after which a silent partner, or half of those after which a silent node counts as broken: at 2,048 nodes all ends in 2 minutes."""
_BLOCK_BYTES = 4 << 20
_ROUNDS = 4
_MOST_CONNECTIONS = 512
PREFIX = "flashckpt/node-check"


@dataclass(frozen=True, kw_only=True)
class NodeTiming:
    """Seconds of one measurement of a node, or of one pair's exchange; infinite where it failed."""

    nodes: tuple[int, ...]
    seconds: float
    what: str = PRODUCT


def is_due(group: Group, *, checked: bool, timeout_s: float = TIMEOUT_S) -> bool:
    """Return whether some node of this round was never checked, the same on every node: all take part, or none."""
    mine, keys = {str(group.rank): 0 if checked else 1}, [str(rank) for rank in range(group.size)]
    try:
        return bool(_agree(group, "new", mine, keys, lambda found: any(one != 0 for one in found), timeout_s=timeout_s))
    except _NoAnswerError:
        return True  # the check will report it


def _agree(
    group: Group,
    name: str,
    mine: Mapping[str, Any],
    keys: Sequence[str],
    conclude: Callable[[list[Any]], T],
    *,
    timeout_s: float,
) -> T:
    """Publish `mine` and return what the first node concludes from the values of all `keys`, None for those that did not come in time.

    Raises:
        _NoAnswerError: It published nothing.
    """
    store = group.store
    for key, value in mine.items():
        store.set(f"{PREFIX}/{name}/{key}", json.dumps(value))
    if group.rank == 0:
        end = time.monotonic() + timeout_s
        found = conclude([_get(store, f"{name}/{key}", end - time.monotonic()) for key in keys])
        store.set(f"{PREFIX}/{name}", json.dumps([found]))
        return found
    answer = _get(store, name, 2 * timeout_s)
    if not isinstance(answer, list) or len(answer) != 1:
        raise _NoAnswerError
    return cast("T", answer[0])


def _get(store: KeyValueStore, key: str, timeout_s: float) -> Any:
    key = f"{PREFIX}/{key}"
    try:
        store.wait([key], timedelta(seconds=max(0.05, timeout_s)))
        return json.loads(store.get(key))
    except (RuntimeError, TimeoutError, ValueError):
        return None


def must_meet_again(bad: Mapping[int, str], group: Group, *, min_nodes: int) -> bool:
    """Return whether the nodes must meet again without the bad ones; raise on a node that is left out.

    Raises:
        NodeCheckError: this node is bad, or too few good ones remain.
    """
    if not bad:
        _log.info("node check: all %d nodes are good", group.size)
        return False
    text = "; ".join(f"node {node}: {why}" for node, why in sorted(bad.items()))
    if group.size - len(bad) < min_nodes:
        raise NodeCheckError(f"too few good nodes: {text}", expected=f"at least {min_nodes} nodes")
    if group.rank in bad:
        raise NodeCheckError(f"this node is excluded: {bad[group.rank]}", state="The other nodes continue.")
    _log.warning("node check: excluded: %s", text)
    return True


def _limit(reference_s: float, what: str = PRODUCT) -> float:
    times, noise_s = (SLOW_DISK, DISK_NOISE_S) if what == DISK else (SLOW, NOISE_S)
    return max(times * reference_s, reference_s + noise_s)


def slow(timings: Sequence[NodeTiming]) -> list[NodeTiming]:
    """Return the timings that failed or took more than SLOW times the median of those that did not fail.

    The lower median is used, so that of two pairs the faster one is the reference.
    """
    limits = {}
    for what in {item.what for item in timings}:
        good = [item.seconds for item in timings if item.what == what and item.seconds != float("inf")]
        limits[what] = _limit(median_low(good), what) if good else 0.0
    return [item for item in timings if item.seconds > limits[item.what]]


def first_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return neighbours as pairs; of an odd number the last one is paired with the first as well."""
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    return pairs if len(nodes) % 2 == 0 or len(nodes) < 2 else [*pairs, (nodes[-1], nodes[0])]


def second_pairs(nodes: Sequence[int], first: Sequence[NodeTiming], alone: Sequence[int]) -> list[tuple[int, int]]:
    """Pair every suspect of the first round with a node that did well in it.

    Nodes found slow `alone` are neither suspects nor good partners.
    """
    bad = slow(first)
    suspects = sorted({node for item in bad for node in item.nodes} - set(alone))
    good = [node for node in nodes if node not in suspects and node not in alone]
    return [(suspect, good[i % len(good)]) for i, suspect in enumerate(suspects)] if good else []


def verdict(alone: Sequence[NodeTiming], first: Sequence[NodeTiming], second: Sequence[NodeTiming]) -> dict[int, str]:
    """Return node -> what is wrong with it.

    If no good node is left to compare with, both nodes of a slow pair are reported.
    """
    bad = {item.nodes[0]: _text(item) for item in slow(alone)}
    suspects = {node for item in slow(first) for node in item.nodes} - set(bad)
    rechecked = {item.nodes[0] for item in second}
    for item in [*slow_against(second, first), *(i for i in slow(first) if not rechecked & set(i.nodes))]:
        for node in item.nodes[:1] if item in second else item.nodes:
            if node in suspects:
                bad[node] = _text(replace(item, what=EXCHANGE))
    return bad


def slow_against(second: Sequence[NodeTiming], first: Sequence[NodeTiming]) -> list[NodeTiming]:
    """Return the second round's timings that are slow by the measure of the good pairs of the first."""
    bad = slow(first)
    good = [item for item in first if item not in bad]
    reference = median_low(item.seconds for item in good) if good else 0.0
    return [item for item in second if item.seconds > _limit(reference)] if good else list(second)


def _text(item: NodeTiming) -> str:
    if item.what == SILENT:
        return "it sent no measurement"
    return f"{item.what} failed" if item.seconds == float("inf") else f"{item.what} took {item.seconds:.3f} s"


class Check:
    """One run of the check on one node.

    Args:
        store: The store of a round in which all nodes take part.
        node: This node's number in the round.
        address: Where the others reach this node.
        timeout_s: Seconds after which a silent partner counts as broken.
        measure: Measures this node alone: seconds by what.
        delay_s: Added to every block sent, to try the check out.
    """

    def __init__(
        self,
        store: Any,
        *,
        node: int,
        count: int,
        address: str,
        timeout_s: float = TIMEOUT_S,
        measure: Callable[[], Mapping[str, float]] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._group, self._node, self._count = Group(store=store, rank=node, size=count), node, count
        self._address, self._timeout_s = address, timeout_s
        self._measure, self._delay_s = measure or measured_alone, delay_s

    def run(self) -> dict[int, str]:
        """Measure and return the verdict: node -> what is wrong with it; the same on every node."""
        listener = rendezvous_store.listener(self._address, 0) or _on_all_addresses()
        self._acceptor = Acceptor(listener, self._serve, name="node-check", most=_MOST_CONNECTIONS)
        try:
            return self._judged(listener.getsockname()[1])
        except _NoAnswerError:
            return {0: "it collects the measurements, and published none"}
        finally:
            self._acceptor.close()
            listener.close()

    def _judged(self, port: int) -> dict[int, str]:
        self._group.store.set(f"{PREFIX}/address/{self._node}", json.dumps([self._address, port]))
        every = {str(node): (node,) for node in range(self._count)}
        measured = {str(self._node): self._measure()}
        alone = self._share("alone", measured, every, lambda found: _as_json(verdict(found, [], [])))
        nodes = [node for node in range(self._count) if str(node) not in alone]
        first: list[NodeTiming] = []

        def again(found: list[NodeTiming]) -> list[list[int]]:
            first.extend(found)
            return [list(pair) for pair in second_pairs(nodes, found, [])]

        pairs = self._exchange("first", first_pairs(nodes), again)
        paired = [(int(one), int(two)) for one, two in pairs]
        bad = self._exchange("second", paired, lambda found: _as_json(verdict([], first, found)))
        self._share("done", {str(self._node): {PRODUCT: 0.0}}, {str(node): (node,) for node in nodes}, lambda _: 0)
        return {int(node): str(why) for node, why in (alone | bad).items()}

    def _serve(self, sock: socket.socket, _: Any) -> None:
        """Send back the first block of a partner, then exchange blocks with it; ConnectionError at the end of it."""
        sock.settimeout(self._timeout_s)
        block = framing.receive(sock, _BLOCK_BYTES)  # a longer one is not of a node of this job
        self._acceptor.proven(sock)
        sock.sendall(framing.frame(block))
        while True:
            self._gather(sock, block)

    def _gather(self, sock: socket.socket, block: bytes) -> None:
        """Send a block and receive the partner's, both ways at once."""
        time.sleep(self._delay_s)
        sending = threading.Thread(target=_send, args=(sock, block), name="flashckpt-node-check", daemon=True)
        sending.start()
        try:
            framing.receive(sock, _BLOCK_BYTES)
        finally:
            sending.join(self._timeout_s)

    def _exchange(self, name: str, pairs: Sequence[tuple[int, int]], conclude: Callable[[list[NodeTiming]], T]) -> T:
        """Measure every pair, its first node asking; pairs run at the same time."""
        mine = {str(i): {EXCHANGE: self._ask(second)} for i, (first, second) in enumerate(pairs) if first == self._node}
        return self._share(name, mine, {str(i): pair for i, pair in enumerate(pairs)}, conclude)

    def _share(
        self,
        name: str,
        mine: Mapping[str, Mapping[str, float]],
        wanted: Mapping[str, tuple[int, ...]],
        conclude: Callable[[list[NodeTiming]], T],
    ) -> T:
        """Publish this node's measurements; return what the first node concludes from all, a missing one counting as failed."""

        def timed(found: list[Any]) -> T:
            return conclude([
                NodeTiming(nodes=nodes, seconds=float(seconds), what=str(what))
                for nodes, one in zip(wanted.values(), found, strict=True)
                for what, seconds in (one if isinstance(one, dict) and one else {SILENT: float("inf")}).items()
            ])  # fmt: skip

        return _agree(self._group, name, mine, list(wanted), timed, timeout_s=2 * self._timeout_s)

    def _ask(self, partner: int) -> float:
        address = _get(self._group.store, f"address/{partner}", self._timeout_s)
        if address is None:
            return float("inf")
        block = bytes(_BLOCK_BYTES)
        try:
            with socket.create_connection((address[0], address[1]), timeout=self._timeout_s) as sock:
                _send(sock, block)
                framing.receive(sock, _BLOCK_BYTES)
                rounds = []
                for _ in range(_ROUNDS):
                    begun = time.monotonic()
                    self._gather(sock, block)
                    rounds.append(time.monotonic() - begun)
                return min(rounds)  # other pairs' traffic may slow one exchange; a slow node is slow in all of them
        except OSError:
            return float("inf")


class _NoAnswerError(Exception):
    """The first node published nothing."""


def _as_json(bad: Mapping[int, str]) -> dict[str, str]:
    return {str(node): why for node, why in bad.items()}


def _send(sock: socket.socket, block: bytes) -> None:
    with contextlib.suppress(OSError):  # the one that receives will see it
        sock.sendall(framing.frame(block))


def measured_alone() -> dict[str, float]:
    """Measure this node; its disk where temporary files go."""
    product_s, memory_s = node_probe.node_product_and_memory()
    return {PRODUCT: product_s, MEMORY: memory_s, DISK: node_probe.disk_s(tempfile.gettempdir())}


def _on_all_addresses() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
