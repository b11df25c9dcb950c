"""`--node-check`: find the bad or slow node before the first generation, with nothing but the rendezvous store.

Every node times a matrix product; then nodes are paired and each pair sends a block back and forth. A node
that is slow alone is reported at once. A pair that is slow or fails makes two suspects, and each suspect is
paired again with a good node: one that is slow there too is bad. The verdict is a pure function of the
measurements, so that all nodes agree on it.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median_low
from typing import Any

from flashckpt import framing
from flashckpt.acceptor import Acceptor
from flashckpt.daemon.launcher import rendezvous_store
from flashckpt.daemon.launcher.options import NodeCheckError
from flashckpt.daemon.launcher.stop import Group

_log = logging.getLogger("flashckpt.dlrun")
SLOW = 2.0
"""A node or pair this many times slower than the median is slow."""
NOISE_S = 0.05
"""Differences below this are the scheduler's, not the node's."""
_BLOCK_BYTES = 4 << 20
_ROUNDS = 4
_MOST_CONNECTIONS = 512
PREFIX = "flashckpt/node-check"


@dataclass(frozen=True, kw_only=True)
class NodeTiming:
    """Seconds of one node's product, or of one pair's exchange; infinite where it failed."""

    nodes: tuple[int, ...]
    seconds: float


def is_due(group: Group, *, checked: bool, timeout_s: float = 30.0) -> bool:
    """Return whether some node of this round was never checked, the same on every node: all take part, or none."""
    group.store.set(f"{PREFIX}/new/{group.rank}", "0" if checked else "1")
    for rank in range(group.size):
        key = f"{PREFIX}/new/{rank}"
        try:
            group.store.wait([key], timedelta(seconds=timeout_s))
        except (RuntimeError, TimeoutError):
            return True  # it is gone; the check will report it
        if group.store.get(key) == b"1":
            return True
    return False


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


def _limit(reference_s: float) -> float:
    return max(SLOW * reference_s, reference_s + NOISE_S)


def slow(timings: Sequence[NodeTiming]) -> list[NodeTiming]:
    """Return the timings that failed or took more than SLOW times the median of those that did not fail.

    The lower median is used, so that of two pairs the faster one is the reference.
    """
    good = [item.seconds for item in timings if item.seconds != float("inf")]
    limit = _limit(median_low(good)) if good else 0.0
    return [item for item in timings if item.seconds > limit]


def first_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return neighbours as pairs; of an odd number the last one is paired with the first as well."""
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    return pairs if len(nodes) % 2 == 0 or len(nodes) < 2 else [*pairs, (nodes[-1], nodes[0])]


def second_pairs(nodes: Sequence[int], first: Sequence[NodeTiming], alone: Sequence[int]) -> list[tuple[int, int]]:
    """Pair every suspect of the first round with a node that did well in it.

    Args:
        nodes: All nodes.
        first: The pairs of the first round.
        alone: Nodes already found slow alone: neither suspects nor good partners.
    """
    bad = slow(first)
    suspects = sorted({node for item in bad for node in item.nodes} - set(alone))
    good = [node for node in nodes if node not in suspects and node not in alone]
    return [(suspect, good[i % len(good)]) for i, suspect in enumerate(suspects)] if good else []


def verdict(alone: Sequence[NodeTiming], first: Sequence[NodeTiming], second: Sequence[NodeTiming]) -> dict[int, str]:
    """Return node -> what is wrong with it.

    If no good node is left to compare with, both nodes of a slow pair are reported.
    """
    bad = {item.nodes[0]: _text("its matrix product", item) for item in slow(alone)}
    suspects = {node for item in slow(first) for node in item.nodes} - set(bad)
    rechecked = {item.nodes[0] for item in second}
    for item in [*slow_against(second, first), *(i for i in slow(first) if not rechecked & set(i.nodes))]:
        for node in item.nodes[:1] if item in second else item.nodes:
            if node in suspects:
                bad[node] = _text("the exchange with other nodes", item)
    return bad


def slow_against(second: Sequence[NodeTiming], first: Sequence[NodeTiming]) -> list[NodeTiming]:
    """Return the second round's timings that are slow by the measure of the good pairs of the first."""
    bad = slow(first)
    good = [item for item in first if item not in bad]
    reference = median_low(item.seconds for item in good) if good else 0.0
    return [item for item in second if item.seconds > _limit(reference)] if good else list(second)


def _text(what: str, item: NodeTiming) -> str:
    return f"{what} failed" if item.seconds == float("inf") else f"{what} took {item.seconds:.3f} s"


class Check:
    """One run of the check on one node.

    Args:
        store: The store of a round in which all nodes take part.
        node: This node's number in the round.
        count: How many nodes there are.
        address: Where the others reach this node.
        timeout_s: Seconds after which a silent partner counts as broken.
        product: Measures this node alone, in seconds.
        delay_s: Added to every block sent, to try the check out.
    """

    def __init__(
        self,
        store: Any,
        *,
        node: int,
        count: int,
        address: str,
        timeout_s: float = 30.0,
        product: Callable[[], float] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._store, self._node, self._count = store, node, count
        self._address, self._timeout_s = address, timeout_s
        self._product, self._delay_s = product or node_product_s, delay_s

    def run(self) -> dict[int, str]:
        """Measure and return the verdict: node -> what is wrong with it; the same on every node."""
        listener = rendezvous_store.listener(self._address, 0) or _on_all_addresses()
        self._acceptor = Acceptor(listener, self._serve, name="node-check", most=_MOST_CONNECTIONS)
        try:
            self._set(f"address/{self._node}", [self._address, listener.getsockname()[1]])
            nodes = list(range(self._count))
            alone = self._share("alone", {self._node: self._product()}, {node: (node,) for node in nodes})
            first = self._exchange("first", first_pairs(nodes))
            slow_alone = [item.nodes[0] for item in slow(alone)]
            second = self._exchange("second", second_pairs(nodes, first, slow_alone))
            self._share("done", {self._node: 0.0}, {node: (node,) for node in nodes})
            return verdict(alone, first, second)
        finally:
            self._acceptor.close()
            listener.close()

    def _serve(self, sock: socket.socket, _: Any) -> None:
        """Send back what a partner sends; ConnectionError at the end of it."""
        sock.settimeout(self._timeout_s)
        while True:
            block = framing.receive(sock, _BLOCK_BYTES)  # a longer one is not of a node of this job
            self._acceptor.proven(sock)
            time.sleep(self._delay_s)
            sock.sendall(block)

    def _exchange(self, name: str, pairs: Sequence[tuple[int, int]]) -> list[NodeTiming]:
        """Measure every pair, its first node asking; pairs run at the same time."""
        mine = {i: self._ping(second) for i, (first, second) in enumerate(pairs) if first == self._node}
        return self._share(name, mine, dict(enumerate(pairs)))

    def _share(self, name: str, mine: Mapping[int, float], wanted: Mapping[int, tuple[int, ...]]) -> list[NodeTiming]:
        """Publish this node's measurements and collect all; a missing one counts as failed."""
        for number, seconds in mine.items():
            self._set(f"{name}/{number}", seconds)
        end = time.monotonic() + 2 * self._timeout_s
        found = []
        for number, nodes in wanted.items():
            seconds = self._get(f"{name}/{number}", end)
            found.append(NodeTiming(nodes=nodes, seconds=float("inf") if seconds is None else float(seconds)))
        return found

    def _set(self, key: str, value: Any) -> None:
        self._store.set(f"{PREFIX}/{key}", json.dumps(value))

    def _get(self, key: str, end: float) -> Any:
        key = f"{PREFIX}/{key}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.05, end - time.monotonic())))
        except (RuntimeError, TimeoutError):
            return None
        return json.loads(self._store.get(key))

    def _ping(self, partner: int) -> float:
        address = self._get(f"address/{partner}", time.monotonic() + self._timeout_s)
        if address is None:
            return float("inf")
        block = bytes(_BLOCK_BYTES)
        try:
            with socket.create_connection((address[0], address[1]), timeout=self._timeout_s) as sock:
                rounds = []
                for _ in range(_ROUNDS):
                    begun = time.monotonic()
                    time.sleep(self._delay_s)
                    sock.sendall(framing.frame(block))
                    framing.read(sock, len(block))
                    rounds.append(time.monotonic() - begun)
                return min(rounds)  # other pairs' traffic may slow one exchange; a slow node is slow in all of them
        except OSError:
            return float("inf")


def _on_all_addresses() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def product_s(size: int = 512, rounds: int = 5) -> float:
    """Return the seconds of the fastest of some matrix products on this node's processor or first device."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    one = torch.ones(size, size, device=device)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        float((one @ one)[0, 0])
        times.append(time.perf_counter() - begun)
    return min(times)


def node_product_s() -> float:
    """Return `product_s`; measured in a child process if there is a device, so that the agent holds no device context."""
    import torch

    if not torch.accelerator.is_available():
        return product_s()
    code = "from flashckpt.daemon.launcher.node_check import product_s; print(product_s(4096))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return float(result.stdout) if result.returncode == 0 else float("inf")
