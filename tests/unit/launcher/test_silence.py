"""When a node of a rendezvous counts as lost: by missed keep-alive messages and, sooner, by a machine that does not answer either."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from support.ranks import wait_for
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from flashckpt.daemon.launcher import rendezvous_store
from flashckpt.daemon.launcher.findings import ask
from flashckpt.daemon.launcher.silence import ANSWERS, AWAY, BEAT_S, GONE, Neighbours

NODES = [_NodeDesc(name, 1, 0) for name in "abcd"]
A, B, C, D = NODES
LOOK_S, PATIENCE_S = 0.25, 6.0


class Ring:
    """One watcher, the beats of the others, and their machines; time passes by looks."""

    def __init__(self, me: _NodeDesc) -> None:
        self.me, self.now_s, self.reads = me, 0.0, 0
        self.beating, self.reachable = set(NODES), {node.addr for node in NODES}
        self.listening = set(self.reachable)
        self.asking_s = 0.0
        self.silence = Neighbours(PATIENCE_S, self.read, self.ask, lambda: self.now_s, lambda: self.now_s)
        self.last = dict.fromkeys(NODES, 0)

    def ask(self, ports: Sequence[tuple[str, int]]) -> list[bool | None]:
        if threading.current_thread() is threading.main_thread():  # the others are not waited for
            self.now_s += self.asking_s
        return [(port > 1 and name in self.listening) if name in self.reachable else None for name, port in ports]

    def read(self, node: _NodeDesc) -> tuple[int, int]:
        self.reads += 1
        if node in self.beating:
            self.last[node] = int(self.now_s / BEAT_S) * int(BEAT_S * 1000)
        return self.last[node], 2

    def after(self, seconds: float, step_s: float = LOOK_S) -> dict[_NodeDesc, tuple[float, str]]:
        """Look for some seconds; return who is lost at the end, or as soon as any is."""
        end = self.now_s + seconds
        found: dict[_NodeDesc, tuple[float, str]] = {}
        while self.now_s < end and not found:
            self.now_s += step_s
            found = self.silence.lost(self.me, NODES)
        return found


def test_a_machine_that_does_not_answer_is_lost_within_two_seconds() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.discard(A)
    ring.reachable.discard("a")
    begun = ring.now_s
    ((node, (silent_s, how)),) = ring.after(10).items()
    assert (node, how) == (A, AWAY)
    assert ring.now_s - begun <= 2.0
    assert silent_s >= 1.0


def test_a_node_that_is_stopped_or_busy_is_not_lost_while_its_machine_answers_and_the_limit_is_not_over() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    for _ in range(3):
        ring.beating.discard(A)
        assert ring.after(PATIENCE_S - 1) == {}
        ring.beating.add(A)
        assert ring.after(2) == {}
    ring.beating.discard(A)
    assert [(node, how) for node, (_, how) in ring.after(10).items()] == [(A, ANSWERS)]


def test_an_agent_that_has_ended_is_lost_within_a_second_where_its_machine_says_so() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.discard(A)
    ring.listening.discard("a")
    begun = ring.now_s
    assert [(node, how) for node, (_, how) in ring.after(10).items()] == [(A, GONE)]
    assert ring.now_s - begun <= 1.5


def test_a_refusal_says_nothing_of_an_agent_that_never_let_itself_be_asked_nor_one_between_answers() -> None:
    """A firewall that refuses for it; and one refusal, by something on the way."""
    ring = Ring(B)
    ring.listening.clear()
    assert ring.after(10) == {}
    ring.beating.discard(A)
    assert ring.after(PATIENCE_S - 1) == {}
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.discard(A)
    for _ in range(8):
        ring.listening ^= {"a"}
        assert ring.after(LOOK_S) == {}


@pytest.mark.parametrize("age_s", [0.0, 0.25, 0.45])
def test_a_machine_that_is_paused_for_a_second_is_not_lost(age_s: float) -> None:
    """It is paused so long after its last keep-alive message, and answers nothing that was asked meanwhile."""
    ring = Ring(B)
    assert ring.after(10, step_s=0.05) == {}
    ring.beating.discard(A)
    assert ring.after(age_s, step_s=0.05) == {}
    ring.reachable.discard("a")
    ring.asking_s, back_s = 0.3, ring.now_s + 1.0
    while ring.now_s < back_s:
        assert ring.after(0.05, step_s=0.05) == {}
    ring.reachable.add("a")
    ring.asking_s = 0.0
    assert ring.after(0.5) == {}
    ring.beating.add(A)
    assert ring.after(10) == {}


def test_a_seat_answers_as_long_as_it_is_there() -> None:
    seat = rendezvous_store.seat("127.0.0.1")
    assert seat is not None
    port = seat.getsockname()[1]
    wait_for(
        lambda: ask([("127.0.0.1", 1), ("127.0.0.1", port), ("127.0.0.1", 0)]) == [False, True, None], what="an answer"
    )
    seat.close()
    wait_for(lambda: ask([("127.0.0.1", port)]) == [False], what="a refusal")
    assert rendezvous_store.seat("no-such-host.invalid") is None


def test_one_lost_packet_is_no_lost_machine() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.discard(A)
    assert ring.after(1.0) == {}
    ring.reachable.discard("a")
    assert ring.after(LOOK_S) == {}
    ring.reachable.add("a")
    assert ring.after(2) == {}


def test_a_watcher_that_was_stopped_itself_calls_nobody_lost() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.clear()
    assert ring.after(60, step_s=60) == {}
    ring.beating.update(NODES)
    assert ring.after(10) == {}


def test_where_machines_never_answer_only_the_limit_counts() -> None:
    """A firewall that drops the question."""
    ring = Ring(B)
    ring.reachable.clear()
    assert ring.after(10) == {}
    ring.beating.discard(A)
    assert ring.after(PATIENCE_S - 1) == {}
    assert list(ring.after(10)) == [A]


def test_a_watcher_that_is_too_busy_to_ask_takes_no_answer_for_none() -> None:
    ring = Ring(B)
    assert ring.after(10) == {}
    ring.beating.discard(A)
    ring.reachable.discard("a")
    ring.asking_s = 1.5
    assert all(how == ANSWERS for _ in range(3) for _, how in ring.after(2.0).values())


def test_nodes_of_an_earlier_launch_are_given_two_seconds() -> None:
    """The store outlives launches: their state is in it, their keep-alive messages are old, their machines may be those of today."""
    ring = Ring(D)
    ring.now_s = 1000.0
    ring.beating -= {A, B, C}
    found = set[_NodeDesc]()
    while ring.now_s < 1004.0:
        found |= set(ring.after(LOOK_S))
    assert found == {A, B, C}


def test_a_node_whose_clock_is_an_hour_behind_is_not_lost() -> None:
    ring = Ring(B)
    ring.silence = Neighbours(PATIENCE_S, ring.read, ring.ask, lambda: ring.now_s, lambda: ring.now_s + 3600)
    assert ring.after(20) == {}


@pytest.mark.parametrize("me", NODES, ids=lambda node: node.addr)
def test_a_node_reads_one_keep_alive_at_a_look(me: _NodeDesc) -> None:
    ring = Ring(me)
    assert ring.after(10) == {}
    assert ring.reads == 10 / LOOK_S


def test_all_nodes_of_a_rack_are_lost_at_once() -> None:
    """Of the three before D none lives to watch the next."""
    ring = Ring(D)
    assert ring.after(10) == {}
    ring.beating -= {A, B, C}
    ring.reachable -= {"a", "b", "c"}
    ring.asking_s = 0.5
    begun, found = ring.now_s, set[_NodeDesc]()
    while ring.now_s < begun + 5.0:
        found |= set(ring.after(LOOK_S))
    assert found == {A, B, C}


def test_who_is_in_no_round_watches_nobody() -> None:
    ring = Ring(_NodeDesc("e", 1, 0))
    assert ring.after(10) == {}
    assert not ring.reads
