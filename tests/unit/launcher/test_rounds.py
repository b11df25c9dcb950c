"""What a node learns from the numbers of its rounds: two nodes that take turns, over one store."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from flashckpt.daemon.launcher import rendezvous, rounds
from flashckpt.daemon.launcher.agent import DlrunAgent
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous
from flashckpt.shm import agent_folder


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FreshStoreRendezvous]]:
    def here(_self: Any, _address: str, port: int) -> TCPStore:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False)

    monkeypatch.setattr(DynamicRendezvousHandler, "_create_tcp_store_server", here)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    made = [
        FreshStoreRendezvous(
            DynamicRendezvousHandler.from_backend(
                "turns",
                TCPStore("localhost", store.port, is_master=False),
                C10dRendezvousBackend(store, "turns"),
                1,
                1,
                local_addr=name,
                timeout=RendezvousTimeout(join=timedelta(seconds=30)),
            )
        )
        for name in "ab"
    ]
    yield made
    for node in made:
        cast("DynamicRendezvousHandler", node.inner)._stop_heartbeats()


def leave(node: FreshStoreRendezvous) -> None:
    inner = cast("DynamicRendezvousHandler", node.inner)
    inner._stop_heartbeats()
    inner._op_executor.run(_RendezvousExitOp(), inner._get_deadline(timedelta(seconds=30)))


def test_a_node_sees_that_the_job_ran_without_it(nodes: list[FreshStoreRendezvous]) -> None:
    first, second = nodes
    missed = []
    for node in (first, first, second, first, first):
        node.next_rendezvous()
        missed.append(node.has_missed)
        leave(node)
    assert missed == [False, False, False, True, False]


def test_an_agent_tells_its_ranks_that_the_job_ran_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda *_: None)
    agent: Any = DlrunAgent.__new__(DlrunAgent)
    agent._stores = SimpleNamespace(has_missed=False, notes=None)
    agent._watch = SimpleNamespace(agent_dir=tmp_path, job=None)
    agent._options, agent._others = SimpleNamespace(node_check=False), lambda _: None
    for has_missed in (False, True, False):  # until ranks have begun
        agent._stores.has_missed = has_missed
        agent._rendezvous(None)
    assert agent_folder.has_missed(tmp_path)
    agent_folder.write_job(tmp_path, tmp_path / "job")
    assert not agent_folder.has_missed(tmp_path)


def test_a_node_prepares_for_a_job_before_it_waits_and_after_and_not_for_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent: Any = DlrunAgent.__new__(DlrunAgent)
    awaited: list[str] = []
    names = iter(["", "mine"])
    agent._stores = SimpleNamespace(has_missed=False, notes=SimpleNamespace(job=lambda: next(names)))
    agent._watch = SimpleNamespace(job=None, expect=awaited.append)
    agent._options, agent._others = SimpleNamespace(node_check=False), lambda _: None
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda *_: awaited.append("waits"))
    agent._rendezvous(None)
    assert awaited == ["", "waits", "mine"]
    agent._watch.job = object()
    agent._rendezvous(None)
    assert awaited[3:] == ["waits"]


def test_node_waits_a_random_time_before_its_first_round_only(
    nodes: list[FreshStoreRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits up to 0.3 s as long as the number of the round is 0: also before the second one."""
    waits: list[Any] = []
    monkeypatch.setattr(rounds, "_torch_delay", waits.append)
    node = nodes[0]
    node.next_rendezvous()
    assert waits == [(0, 0.3)]
    cast("DynamicRendezvousHandler", node.inner)._state_holder.state.round = 0
    node.next_rendezvous()
    assert waits == [(0, 0.3)]
    rounds._delay(1, is_again=True)
    assert waits == [(0, 0.3), 1], "the pause between two looks of another rendezvous"


def test_event_of_a_rendezvous_is_named_after_the_function_that_torch_would_name() -> None:
    def recorded() -> list[str]:
        stack = inspect.stack()
        return [rendezvous._caller(1), rendezvous._caller(), stack[0].function, stack[1].function]

    me = "test_event_of_a_rendezvous_is_named_after_the_function_that_torch_would_name"
    assert recorded() == ["recorded", me] * 2
