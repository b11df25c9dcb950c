"""The requests that a plan counts are those of the functions that make them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.persisting import job, persist_step, turn
from support.requests import RequestStore
from support.slots import make_pin, shard

from flashckpt.checkpoint import indexes, intents, merging, root_records
from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.intents import Proposals, read_intents
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import commit, write_packs
from flashckpt.core.intent import NodeProposal
from flashckpt.daemon.persister import messaging
from flashckpt.daemon.persister import protocol as p
from flashckpt.errors import FencedError
from flashckpt.plan import coordination as model
from flashckpt.plan.coordination import AtSize, Coordination, coordination, walls
from flashckpt.shm import ack_relay
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

SPARE = 4
"""Requests per persist that do not grow with anything, by which a commit or its retention may differ."""
REQUESTS = (
    "get",
    "get_range",
    "put",
    "put_if_absent",
    "put_object",
    "head",
    "list",
    "folders",
    "delete",
    "delete_many",
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests so far, where 1,000 keys are one."""
    counted: Counter[str] = Counter()

    def count(name: str) -> Any:
        real = getattr(store, name)

        def counting(*arguments: Any, **more: Any) -> Any:
            found = real(*arguments, **more)
            many = found if name == "list" else arguments[0] if name == "delete_many" else ()
            counted[name] += max(1, -(-len(many) // model.KEYS_PER_REQUEST))
            return found

        return counting

    for name in REQUESTS:
        monkeypatch.setattr(store, name, count(name))
    return counted


def costs(ranks: int, nodes: int) -> Coordination:
    return coordination(ranks=ranks, nodes=nodes, checkpoint_bytes=ranks * 400, rows=1, request_s=0.02)


@pytest.mark.parametrize("nodes", [2, 5])
def test_looks(store: Store, asked: Counter[str], nodes: int) -> None:
    for node in range(nodes):
        ranks = (2 * node, 2 * node + 1)
        Proposals().publish(store, 1, NodeProposal(ranks=ranks, world_size=2 * nodes))
    board, made = Proposals(), costs(2 * nodes, nodes)
    asked.clear()
    read_intents(store)
    board.read(store, 1)
    assert asked.total() == made.look_requests
    asked.clear()
    read_intents(store)
    board.read(store, 1)
    assert asked.total() * nodes / messaging.CARRIED_LOOK_S == made.idle_requests_per_s


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_commit_and_retention(store: Store, asked: Counter[str], ranks: int) -> None:
    for step in (10, 20):
        pins = [make_pin([shard(f"t{r}", (100,))], rank=r, world_size=ranks, step=step) for r in range(ranks)]
        put_indexes(store, prefix_of(1, step), [write_packs(pin, store, prefix_of(1, step)) for pin in pins])
        asked.clear()
        assert commit(store, prefix_of(1, step), range(ranks))
        assert asked.total() == costs(ranks, 1).commit_requests
    asked.clear()
    assert prune(store, Policy(keep_last=1)).checkpoints
    assert asked.total() == costs(ranks, 1).retention_requests, asked


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [2, 16, 128, 1100])  # more than one page of a listing
def test_an_idle_node_asks_what_it_asks_whatever_their_number_and_a_commit_asks_each_once(nodes: int) -> None:
    counted = RequestStore()
    root = cast("Store", counted)
    for node in range(nodes):
        Proposals().publish(root, 1, NodeProposal(ranks=(node,), world_size=nodes))
    board = Proposals()
    board.read(root, 1, of_all=False)
    counted.reset()
    read_intents(root, 1)
    board.read(root, 1, of_all=False)
    assert counted.total == 2
    prefix = prefix_of(1, 10)
    for node in range(nodes):
        pin = make_pin([shard(f"t{node}", (10,))], rank=node, world_size=nodes, values={f"rng@rank{node}": b"x"})
        put_indexes(root, prefix, [write_packs(pin, root, prefix)])
    counted.reset()
    assert commit(root, prefix, range(nodes))
    made = coordination(ranks=nodes, nodes=nodes, checkpoint_bytes=nodes * 400, rows=1, request_s=0.02)
    assert counted.total == pytest.approx(made.commit_requests, abs=SPARE)
    assert counted.total <= nodes + 4 + nodes * 3 // 500


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [2, 16, 128, 1100])
def test_an_idle_minute_of_a_job_that_runs_is_a_look_per_node(nodes: int) -> None:
    jobs = job(nodes, 1, carries=True)
    for node in jobs:
        node.take(5)
    turn(jobs, 1000.0)
    before, seconds = jobs[0].counted.total, int(messaging.CARRIED_LOOK_S)
    for second in range(16, seconds + 1, 16):
        turn(jobs, 1000.0 + second)
    asked = jobs[0].counted.total - before
    assert asked == 2 * nodes
    made = coordination(ranks=nodes, nodes=nodes, checkpoint_bytes=nodes * 400, rows=1, request_s=0.02)
    assert (
        made.idle_requests_per_s * seconds - asked == (nodes - 1) // model.KEYS_PER_REQUEST
    )  # pages of a full listing


def test_what_the_model_takes_from_the_product_is_what_the_product_does() -> None:
    assert root_records.IN_FLIGHT == model.IN_FLIGHT
    assert messaging.ROOT_LOOK_S == model.LOOK_S
    assert messaging.CARRIED_LOOK_S == model.CARRIED_LOOK_S
    assert ack_relay.LONGEST_S == model.CARRIED_S
    assert messaging.LONG_COMMIT_WRITERS == model.LONG_COMMIT_WRITERS
    assert indexes.RANGED_FROM == model.RANGED_FROM
    assert merging.SPREAD_BYTES == model.INDEXED_FROM


def test_manifest_of_a_large_job_grows_with_its_ranks_or_with_their_tensors_and_not_with_both() -> None:
    def bytes_of(ranks: int, rows: int) -> float:
        made = coordination(ranks=ranks, nodes=ranks // 8, checkpoint_bytes=1e9, rows=rows, request_s=0.02)
        return made.manifest_bytes

    assert bytes_of(16, 2000) > 10 * bytes_of(16, 100), "a row for each box"
    assert bytes_of(16384, 2000) < bytes_of(16384, 100) + bytes_of(1024, 2000) < 5e6


def test_a_node_alone_has_nobody_to_agree_with() -> None:
    made = costs(8, 1)
    assert (made.look_requests, made.idle_requests_per_s, made.agree_s) == (0, 0.0, 0.0)
    assert made.commit_requests == 5


@pytest.mark.matrix
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (2, 8), (16, 4), (128, 1)])
def test_requests_of_a_persist_are_those_of_all_persisters(
    nodes: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intents, "parallel", lambda work, items: [work(item) for item in items])  # threads cost most
    jobs = job(nodes, ranks, carries=True)
    persist_step(jobs, 10, 1000.0)
    asked = persist_step(jobs, 20, 1010.0)  # retention deletes the first one
    made = costs(nodes * ranks, nodes)
    assert made.job_requests == pytest.approx(sum(asked.values()), abs=SPARE), asked
    assert not {"PublishProposal", "ReadProposals"} & {name for name, count in asked.items() if count}
    before = jobs[0].counted.total
    for second in range(int(messaging.CARRIED_LOOK_S)):
        turn(jobs, 1080.0 + second)
    assert jobs[0].counted.total - before == made.idle_requests_per_s * messaging.CARRIED_LOOK_S


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_the_claim_is_read_back_once_per_generation_and_a_persist_asks_for_newer_ones_alone(nodes: int) -> None:
    """Before, each check was a listing, a conditional write and a read: 3 requests, 1 + 2 times per node and persist."""
    jobs = job(nodes, 1, carries=True)
    first, later = (persist_step(jobs, step, 1000.0 + step)["CheckFence"] for step in (10, 20))
    assert later == 1 + nodes, "one listing where it is decided, and one of each node before the commit"
    assert first > later, "the claim itself"
    old, new = jobs[0].executor, jobs[-1].executor
    assert old is not None
    assert new is not None
    root = cast("Store", jobs[0].counted)
    own = new._record
    new._record = replace(own, token="of another run")
    with pytest.raises(FencedError, match="belongs to another run"):  # the number alone says nothing
        new._write(p.CheckFence(), root)
    new._record = replace(own, number=2)
    new._write(p.CheckFence(), root)
    old._record = own
    with pytest.raises(FencedError, match="generation 2 was claimed"):
        old._write(p.CheckFence(), root)


def test_where_no_ranks_carry_it_nodes_agree_by_objects_on_the_root_and_ask_more() -> None:
    asked = []
    for carries in (True, False):
        jobs = job(5, 1, carries=carries)
        persist_step(jobs, 10, 1000.0)
        asked.append(persist_step(jobs, 20, 1010.0 if carries else 2000.0))
    told, by_objects = asked
    assert by_objects["PublishProposal"] > 5
    assert by_objects["ReadProposals"] > 5
    assert sum(by_objects.values()) > sum(told.values())


def test_a_storage_that_answers_fewer_requests_takes_as_long_as_they_last() -> None:
    def made(rate: float) -> Coordination:
        return coordination(ranks=8192, nodes=1024, checkpoint_bytes=1, rows=1, request_s=0.001, requests_per_s=rate)

    assert made(100).agree_s == 10 * made(1000).agree_s > 10 * made(1e9).agree_s
    assert made(1000).least_s == made(1000).job_requests / 1000


def test_walls_are_named_with_the_size_at_which_they_begin() -> None:
    def at(gpus: int, *, persist_s: float, wanted_s: float) -> AtSize:
        return AtSize(gpus=gpus, costs=costs(gpus, gpus // 8), persist_s=persist_s, wanted_s=wanted_s)

    sizes = [
        at(8, persist_s=20, wanted_s=600),
        at(1024, persist_s=30, wanted_s=60),
        at(16384, persist_s=30, wanted_s=5),
    ]
    found = {one["wall"]: one["gpus"] for one in walls(sizes)}
    assert list(found.values()) == [16384, None, None, 16384, None]
    larger = AtSize(gpus=1 << 22, costs=costs(1 << 22, 1 << 19), persist_s=20, wanted_s=600)
    assert [begins(larger) for begins in model.WALLS.values()] == [False, True, True, True, True]
