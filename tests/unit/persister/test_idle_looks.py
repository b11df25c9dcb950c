"""What a persister asks of the root while nothing is to be persisted, and how soon it acts once something is."""

from __future__ import annotations

from collections import Counter

import pytest
from support.negotiations import Node, Root

from flashckpt.daemon.persister.messaging import CARRIED_LOOK_S, IDLE_LOOK_S, ROOT_LOOK_S

TENTH = 0.1


def job(nodes: int) -> list[Node]:
    root = Root()
    found = [Node(root=root, name=f"n{at}", ranks=(at,), world_size=nodes, nodes=nodes) for at in range(nodes)]
    for node in found:
        node.start()
    return found


def tick(node: Node, now_s: float, *, urgent: bool = False) -> Counter[str]:
    """Give a node a turn; return the names of what it did with the root, reading included."""
    done: Counter[str] = Counter()
    node.tick(now_s, urgent=urgent)
    while node.pending:
        done[type(node.advance()).__name__] += 1
    return done


def test_idle_nodes_look_seldom_and_write_nothing_while_snapshots_come() -> None:
    nodes, asked = job(3), Counter[str]()
    for at in range(1200):  # two minutes, ten snapshots a second, none of them to be persisted
        for node in nodes:
            node.take(at)
            done = tick(node, at * TENTH)
            asked.update(done if at >= 600 else ())
    looks = 60 / IDLE_LOOK_S + 1
    assert 0 < asked["ReadProposals"] <= 3 * looks
    assert asked["ReadIntents"] <= 3 * looks
    assert not asked["PublishProposal"], "what nobody waits for is not published with each snapshot"


def test_idle_nodes_whose_ranks_carry_messages_look_once_a_minute_and_send_nothing() -> None:
    nodes, asked = job(3), Counter[str]()
    for node in nodes:
        node.carries = True
    for at in range(3000):
        for node in nodes:
            node.take(at)
            done = tick(node, at * TENTH)
            asked.update(done if at >= 600 else ())
    looks = 240 / CARRIED_LOOK_S + 1
    assert 0 < asked["ReadIntents"] <= 3 * looks
    assert asked["ReadProposals"] <= 3 * looks
    assert not asked["PublishProposal"]
    assert not asked["Send"]


def committed_after(nodes: list[Node], began: int, *, urgent: bool) -> int:
    """Return the turns, a tenth of a second each, until the first node has committed."""
    for at in range(began, began + 600):
        for node in nodes:
            node.finish(at * TENTH)
            tick(node, at * TENTH, urgent=urgent)
        if nodes[0].root.committed:
            return at - began
    raise AssertionError("not committed within a minute")


@pytest.mark.parametrize("urgent", [False, True])
def test_idle_nodes_wake_at_once_for_what_is_theirs(urgent: bool) -> None:
    nodes = job(3)
    for at in range(600):
        for node in nodes:
            node.take(at)
            tick(node, at * TENTH)
    for node in nodes:
        node.take(600, persist=not urgent)
    assert committed_after(nodes, 601, urgent=urgent) * TENTH < 6 * ROOT_LOOK_S


def test_a_node_without_the_step_hears_of_it_with_its_next_look() -> None:
    nodes = job(2)
    for at in range(600):
        for node in nodes:
            node.take(at)
            tick(node, at * TENTH)
    nodes[0].take(600, persist=True)  # the other one skips this snapshot, and takes the next persist step
    for at in range(601, 601 + int((IDLE_LOOK_S + 2 * ROOT_LOOK_S) / TENTH)):
        for node in nodes:
            tick(node, at * TENTH)
    for node in nodes:
        node.take(900, persist=True)
    assert committed_after(nodes, 901, urgent=False) * TENTH < 6 * ROOT_LOOK_S
