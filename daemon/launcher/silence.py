"""Which nodes of a rendezvous are silent: each watches the one before it in a ring, and asks its machine before it calls it lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from flashckpt.daemon.launcher import findings

BEAT_S = 0.5
"""Seconds between two keep-alive messages."""
SUSPECT_S = 1.0
"""Silence after which a node's machine is asked."""
_UNANSWERED = 2
"""Questions in a row that a machine leaves unanswered before its node is lost."""
_MOST_S = 0.75
"""Seconds that one look can add to a silence: a watcher that was itself stopped has not heard, which says nothing of the others."""
_STARVED_S = 2 * findings.ANSWER_S
"""A question that took so long was not asked in time: this machine was busy."""
_OLD_S, _OLD_LEFT_S = 10.0, 2.0
"""A keep-alive this old by the clocks of two machines may be of an earlier launch: its node has this long to show that it runs."""
_MOST_SEEN = 32


@dataclass(kw_only=True)
class _Heard:
    beat: int
    looked_s: float
    silent_s: float = 0.0
    has_beaten: bool = False
    unanswered: int = 0

    @property
    def is_away(self) -> bool:
        """Whether its machine leaves questions unanswered."""
        return self.unanswered >= _UNANSWERED


class Neighbours:
    """The keep-alive messages that one node hears of others.

    Args:
        patience_s: Silence after which a node is lost even if its machine answers: its agent is stopped, or gone.
        read: Returns the newest keep-alive of a node: its time there in milliseconds, 0 if there is none.
        answers: Returns which machines answer at all; of many it may ask a few.
        clock: Seconds.
        now: Unix seconds.
    """

    def __init__(
        self,
        patience_s: float,
        read: Callable[[_NodeDesc], int],
        answers: Callable[[Mapping[int, str]], Mapping[int, bool]] = findings.answering,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._patience_s, self._read, self._answers = patience_s, read, answers
        self._clock, self._now = clock, now
        self._can_ask = False
        self._heard: dict[_NodeDesc, _Heard] = {}

    @property
    def suspects(self) -> bool:
        """Whether a node is silent for longer than usual: the next look should come soon."""
        return any(heard.silent_s >= SUSPECT_S for heard in self._heard.values())

    def lost(self, me: _NodeDesc, nodes: Collection[_NodeDesc]) -> dict[_NodeDesc, tuple[float, bool]]:
        """Look at the nodes before this one up to the first that runs; return the lost ones.

        Of each: the seconds of its silence, and whether its machine cannot be reached.

        Each node reads one keep-alive so, whatever their number; where some are silent, their next neighbour
        looks at all of them.
        """
        seen, silent = set[_NodeDesc](), list[_NodeDesc]()
        for node in _before(me, nodes):
            heard = self._look(node)
            seen.add(node)
            if heard.has_beaten and heard.silent_s < SUSPECT_S:
                break
            if heard.silent_s >= SUSPECT_S:
                silent.append(node)
            if len(seen) == _MOST_SEEN or (len(seen) == 1 and heard.silent_s < SUSPECT_S):
                break
        self._heard = {node: heard for node, heard in self._heard.items() if node in seen}
        self._ask(silent)
        return {node: (heard.silent_s, heard.is_away) for node in silent if self._is_lost(heard := self._heard[node])}

    def _look(self, node: _NodeDesc) -> _Heard:
        now_s, beat = self._clock(), self._read(node)
        heard = self._heard.get(node)
        if heard is None:
            is_old = beat < (self._now() - _OLD_S) * 1000
            silent_s = max(0.0, self._patience_s - _OLD_LEFT_S) if is_old else 0.0
            heard = self._heard[node] = _Heard(beat=beat, looked_s=now_s, silent_s=silent_s)
            threading.Thread(target=self._try, args=(node,), name="flashckpt-ask", daemon=True).start()
        elif beat > heard.beat:
            heard.beat, heard.silent_s, heard.unanswered, heard.has_beaten = beat, 0.0, 0, True
        else:
            heard.silent_s += min(now_s - heard.looked_s, _MOST_S)
        heard.looked_s = now_s
        return heard

    def _try(self, node: _NodeDesc) -> None:
        """Learn whether machines answer while their nodes run: where a firewall drops the question, no answer says nothing."""
        self._can_ask = self._answers({0: node.addr})[0] or self._can_ask

    def _ask(self, silent: Sequence[_NodeDesc]) -> None:
        """Ask the machines of silent nodes, all at once: this node's own keep-alive waits meanwhile."""
        if not silent or not self._can_ask:
            return
        begun_s = self._clock()
        answered = self._answers({place: node.addr for place, node in enumerate(silent)})
        is_starved = self._clock() - begun_s >= _STARVED_S
        for place, answers in answered.items():
            heard = self._heard[silent[place]]
            if answers:
                heard.unanswered = 0
            elif not is_starved:
                heard.unanswered += 1

    def _is_lost(self, heard: _Heard) -> bool:
        return heard.is_away or heard.silent_s >= self._patience_s


def _before(me: _NodeDesc, nodes: Collection[_NodeDesc]) -> Iterator[_NodeDesc]:
    ring = sorted(nodes)
    if me in nodes:
        at = ring.index(me)
        yield from reversed(ring[:at])
        yield from reversed(ring[at + 1 :])
