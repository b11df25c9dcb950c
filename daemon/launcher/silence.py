"""Which nodes of a rendezvous are silent: each watches the one before it in a ring, and asks its machine before it calls it lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from flashckpt.daemon.launcher import findings

BEAT_S = 0.5
"""Seconds between two keep-alive messages."""
ASK_S = 0.6
"""Silence after which a node's agent and machine are asked: a keep-alive message is missing."""
SUSPECT_S, _LAST_S = 1.0, 1.5
"""Silence after which the first and the second question count that a machine leaves unanswered: then its node is lost."""
_REFUSED = 2
"""Questions in a row that a machine answers for an agent which is gone."""
_MOST_S = 0.75
"""Seconds that one look can add to a silence: a watcher that was itself stopped has not heard, which says nothing of the others."""
_STARVED_S = 2 * findings.ANSWER_S
"""A question that took so long was not asked in time: this machine was busy."""
_OLD_S, _OLD_LEFT_S = 10.0, 2.0
"""A keep-alive this old by the clocks of two machines may be of an earlier launch: its node has this long to show that it runs."""
_MOST_SEEN = 32
AWAY, GONE, ANSWERS = "its machine does not answer", "its machine answers, its agent has ended", "its machine answers"


@dataclass(kw_only=True)
class _Heard:
    beat: int
    looked_s: float
    silent_s: float = 0.0
    port: int = 0
    has_beaten: bool = False
    is_open: bool = False
    unanswered: int = 0
    refused: int = 0

    @property
    def has_ended(self) -> str:
        """AWAY or GONE where the agent is known to have ended, else ""."""
        return AWAY if self.unanswered > 1 else GONE if self.refused >= _REFUSED else ""

    @property
    def is_due(self) -> bool:
        """Whether it is to be asked; between the two questions that count a machine has the time to come back."""
        return self.silent_s >= (_LAST_S if self.unanswered else ASK_S)

    def hears(self, machine: bool | None, agent: bool | None) -> None:
        """Take up the answers to a question, as of `findings.ask`."""
        if (machine, agent) == (None, None):
            self.unanswered += self.silent_s >= SUSPECT_S
            return
        self.unanswered = 0
        self.refused = self.refused + 1 if agent is False and self.is_open else 0


class Neighbours:
    """The keep-alive messages that one node hears of others.

    Args:
        patience_s: Silence after which a node is lost even if its machine answers: its agent is stopped, or gone.
        read: Returns the newest keep-alive of a node, its time there in milliseconds, and the port of its agent; 0 for what there is not.
        ask: Returns what ports answer, as `findings.ask`; of many it may ask a few.
        clock: Seconds.
        now: Unix seconds.
    """

    def __init__(
        self,
        patience_s: float,
        read: Callable[[_NodeDesc], tuple[int, int]],
        ask: Callable[[Sequence[tuple[str, int]]], Sequence[bool | None]] = findings.ask,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._patience_s, self._read, self._ask_ports = patience_s, read, ask
        self._clock, self._now = clock, now
        self._can_ask = False
        self._heard: dict[_NodeDesc, _Heard] = {}

    @property
    def suspects(self) -> bool:
        """Whether a node is silent for longer than usual: the next look should come soon."""
        return any(heard.silent_s >= ASK_S for heard in self._heard.values())

    def lost(self, me: _NodeDesc, nodes: Collection[_NodeDesc]) -> dict[_NodeDesc, tuple[float, str]]:
        """Look at the nodes before this one up to the first that runs; return the lost ones.

        Of each: the seconds of its silence, and AWAY, GONE, or ANSWERS where its agent may be stopped.

        Each node reads one keep-alive so, whatever their number; where some are silent, their next neighbour
        looks at all of them.
        """
        seen, silent = set[_NodeDesc](), list[_NodeDesc]()
        for node in _before(me, nodes):
            heard = self._look(node)
            seen.add(node)
            if heard.silent_s >= ASK_S:
                silent.append(node)
            if heard.has_beaten and heard.silent_s < SUSPECT_S:
                break
            if len(seen) == _MOST_SEEN or (len(seen) == 1 and heard.silent_s < SUSPECT_S):
                break
        self._heard = {node: heard for node, heard in self._heard.items() if node in seen}
        self._ask(silent)
        every = {node: self._heard[node] for node in silent}
        return {
            node: (heard.silent_s, heard.has_ended or ANSWERS)
            for node, heard in every.items()
            if heard.has_ended or heard.silent_s >= self._patience_s
        }

    def _look(self, node: _NodeDesc) -> _Heard:
        now_s, (beat, port) = self._clock(), self._read(node)
        heard = self._heard.get(node)
        if heard is None:
            is_old = beat < (self._now() - _OLD_S) * 1000
            silent_s = max(0.0, self._patience_s - _OLD_LEFT_S) if is_old else 0.0
            heard = self._heard[node] = _Heard(beat=beat, looked_s=now_s, silent_s=silent_s)
            self._try(node, heard, port)
        elif beat > heard.beat:
            heard.beat, heard.silent_s, heard.has_beaten = beat, 0.0, True
            heard.unanswered = heard.refused = 0
            if port != heard.port:
                self._try(node, heard, port)
        else:
            heard.silent_s += min(now_s - heard.looked_s, _MOST_S)
        heard.looked_s = now_s
        return heard

    def _try(self, node: _NodeDesc, heard: _Heard, port: int) -> None:
        """Learn whether machines and agents answer while their nodes run: behind a firewall, no answer or a refusal says nothing."""

        def ask() -> None:
            machine, agent = self._ask_ports(_ports(node, heard))
            self._can_ask = self._can_ask or (machine, agent) != (None, None)
            heard.is_open = agent is True

        heard.port, heard.is_open = port, False
        threading.Thread(target=ask, name="flashckpt-ask", daemon=True).start()

    def _ask(self, silent: Sequence[_NodeDesc]) -> None:
        """Ask the machines of silent nodes, all at once: this node's own keep-alive waits meanwhile."""
        asked = {node: heard for node in silent if (heard := self._heard[node]).is_due}
        if not asked or not self._can_ask:
            return
        begun_s = self._clock()
        found = self._ask_ports([port for node, heard in asked.items() for port in _ports(node, heard)])
        if self._clock() - begun_s < _STARVED_S:
            for heard, machine, agent in zip(asked.values(), found[::2], found[1::2], strict=False):
                heard.hears(machine, agent)


def _ports(node: _NodeDesc, heard: _Heard) -> list[tuple[str, int]]:
    """Return what is asked of a node: a port of its machine on which nobody listens, and that of its agent."""
    return [(node.addr, findings.NOBODYS_PORT), (node.addr, heard.port)]


def _before(me: _NodeDesc, nodes: Collection[_NodeDesc]) -> Iterator[_NodeDesc]:
    ring = sorted(nodes)
    if me in nodes:
        at = ring.index(me)
        yield from reversed(ring[:at])
        yield from reversed(ring[at + 1 :])
