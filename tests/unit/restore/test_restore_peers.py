"""Restores from other nodes' memory: ranks that move, nodes that are lost, what is missing read from storage, faults."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.ranks import run_ranks, values
from support.spread import lose, node_dir, train_spread

pytestmark = pytest.mark.timeout(600)
BUSY_S = 200
"""Far beyond what ranks take, also on a machine that does much else."""


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


def trained(kind: str, root: Path, nodes: list[int], steps: int, **options: Any) -> list[dict[str, Any]]:
    """Train on these nodes, one entry per rank; every rank must have the same whole state."""
    results = values(run_ranks(train_spread, len(nodes), kind, str(root), nodes, steps, options, timeout_s=BUSY_S))
    assert len({one["whole"] for one in results}) == 1
    return results


def tier_sum(results: list[dict[str, Any]], tier: str) -> int:
    return sum(one["report"]["tiers"].get(tier, 0) for one in results)


def test_node_lost_and_replaced_restores_from_the_survivors_memory_and_no_byte_from_storage(tmp_path: Path) -> None:
    """HSDP over two nodes: each holds the whole state. The node that takes the lost one's place reads from its peers."""
    before = trained("hsdp", tmp_path, [0, 0, 1, 1], 3)
    lose(1)
    after = trained("hsdp", tmp_path, [0, 0, 2, 2], 3)
    assert [one["first"] for one in after] == [3] * 4
    assert after[0]["whole"] == before[0]["states"]["3"]
    for one in after[:2]:
        assert set(one["report"]["tiers"]) == {"memory"}
        assert one["report"]["reseeded"] == []
    for one in after[2:]:
        assert set(one["report"]["tiers"]) == {"peer"}
        assert one["report"]["reseeded"] != []  # held by the lost node alone
    assert tier_sum(after, "storage") == 0
    assert set(after[3]["report"]["nodes"]) == {"host0", "host2"}
    assert set(after[3]["report"]["nodes"]["host2"]) == {"peer"}


def test_ranks_that_change_nodes_find_their_own_state_and_generators_with_their_peers(tmp_path: Path) -> None:
    """Nothing is lost, everything lies on the other node: each byte and each generator, bit for bit."""
    before = trained("fsdp", tmp_path, [0, 0, 1, 1], 2)
    after = trained("fsdp", tmp_path, [1, 1, 0, 0], 2)
    for one, old in zip(after, before, strict=True):
        assert one["whole"] == old["states"]["2"]
        assert one["report"]["reseeded"] == []
        assert one["report"]["same"]
        assert one["report"]["tiers"].pop("memory") == 16  # four steps of AdamW, which every rank has
        assert set(one["report"]["tiers"]) == {"peer"}


def test_optimizer_state_that_no_source_here_names_is_asked_for_unless_it_never_was() -> None:
    """A node may hold a parameter and not a word of its state; one that its optimizer lists without state never stepped."""
    import torch
    from unit.planning.test_directory import box, manifest

    from flashckpt.planning.read_plan import SourceNames
    from flashckpt.restore.requirements import LiveState, requirements
    from flashckpt.state.placement import World
    from flashckpt.state.registry import StateRegistry

    model = torch.nn.Linear(4, 2)
    tracked = StateRegistry(World())
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.AdamW(model.parameters()))
    live = LiveState.read(tracked)
    rows = [box("model.weight", (2, 4), (0, 0), (2, 4)), box("model.bias", (2,), (0,), (2,))]
    rows.append(box("optimizer.weight.exp_avg", (2, 4), (0, 0), (2, 4)))

    def unnamed(**values: object) -> list[str]:
        held = [manifest(0, rows, values)]
        return [query.filed_under for query in requirements(live, SourceNames(held), held, exact=True).unnamed]

    assert unnamed() == ["optimizer.bias.*"]
    assert unnamed(**{"optimizer.groups": [[{"params": ["weight"]}]]}) == ["optimizer.bias.*"]
    assert unnamed(**{"optimizer.groups": [[{"params": ["weight", "bias"]}]]}) == []
    held = [manifest(0, rows)]
    assert requirements(live, SourceNames(held), held).unnamed == ()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("then", "now"), [([0, 0, 1, 1], [0, 1]), ([0, 1], [2, 0, 2, 1]), ([0, 1], [0, 0, 0])], ids=str
)
def test_shrink_and_grow_over_nodes_without_a_byte_from_storage(
    then: list[int], now: list[int], tmp_path: Path
) -> None:
    """Other boxes on every rank: what the own node has from there, the rest from the nodes that have it."""
    before = trained("fsdp", tmp_path, then, 2)
    if 1 not in now:  # its memory is still there, and one more rank of the job answers for it
        now = [*now, 1]
    after = trained("fsdp", tmp_path, now, 2)
    assert after[0]["whole"] == before[0]["states"]["2"]
    assert tier_sum(after, "storage") == 0
    assert tier_sum(after, "peer") > 0
    needed = {tier: tier_sum(after, tier) for tier in ("memory", "peer")}
    read = {tier: sum(one["report"]["read"].get(tier, 0) for one in after) for tier in needed}
    assert read["peer"] >= needed["peer"]


def dies_in_its_third_snapshot(rank: int, root: str) -> None:
    train_spread(rank, "plain", root, [0, 1], 4, crash_later="slot.before-complete:3:rank1")


def test_snapshot_that_one_rank_never_completed_stands_behind_the_one_that_all_have(tmp_path: Path) -> None:
    """Rank 0's replica of step 3 covers the state, but not rank 1's generators: step 2 goes on bit for bit."""
    from flashckpt.shm.segment import Segment

    results = run_ranks(dies_in_its_third_snapshot, 2, str(tmp_path))
    assert results[1].signal == 9
    (path,) = node_dir(0).rglob("r00000-*.seg")
    segment = Segment.attach(path)
    # rank 1 trains on while its copy thread dies: rank 0 may have completed the fourth one as well
    assert max(h.identity for h in segment.headers() if h.is_complete) in {(1, 3), (1, 4)}
    segment.close()
    for one in trained("plain", tmp_path, [0, 1], 2):
        assert one["first"] == 2
        assert one["report"]["reseeded"] == []
        assert set(one["report"]["tiers"]) == {"memory"}


def test_first_snapshot_of_all_and_one_rank_never_completed_it_beats_a_fresh_start(tmp_path: Path) -> None:
    results = run_ranks(dies_in_its_first_snapshot, 2, str(tmp_path))
    assert results[1].signal == 9
    first, second = trained("plain", tmp_path, [0, 1], 1)
    # rank 1 trains on while its copy thread dies: rank 0 may have completed the second one as well
    assert first["first"] == second["first"]
    assert first["first"] in (1, 2)
    assert set(second["report"]["tiers"]) == {"peer"}
    assert second["report"]["reseeded"] == ["rng@rank1"]


def dies_in_its_first_snapshot(rank: int, root: str) -> None:
    train_spread(rank, "plain", root, [0, 1], 4, crash_later="slot.before-complete:1:rank1")


@pytest.mark.matrix
def test_not_covered_exactly_the_missing_ranges_come_from_storage(tmp_path: Path) -> None:
    """FSDP over two nodes: what the lost node held of the newest snapshot is nowhere but in the checkpoint of that step."""
    del os.environ["FLASHCKPT_AGENT_DIR"]  # a daemon of its own per node
    before = trained("fsdp", tmp_path, [0, 0, 1, 1], 2, persist_every=2, persisted=True)
    lose(1)
    agent_dir()
    after = trained("fsdp", tmp_path, [2, 0, 0, 2], 2, persist_every=2)  # ranks 1 and 2 on the node that is left
    assert after[0]["whole"] == before[0]["states"]["2"]
    rows = [(6, 6), (4, 6)]  # of 22 and of 24, on ranks 2 and 3
    lost = [12 * (a * 24 + a + b * 22 + b) for a, b in rows]  # float32, parameter and two moments
    assert [r["report"]["tiers"].get("storage", 0) for r in after] == [0, 0, *lost]
    assert after[0]["report"]["tiers"]["peer"] == after[1]["report"]["tiers"]["memory"]
    assert all(r["report"]["reseeded"] == [] for r in after)  # storage has every rank's values


@pytest.mark.matrix
def test_not_covered_and_not_committed_the_newest_covered_one_is_taken_and_said(tmp_path: Path) -> None:
    """Step 3 is lost with the node, step 2 is on storage: all ranks restore it and name what was passed over."""
    del os.environ["FLASHCKPT_AGENT_DIR"]
    before = trained("fsdp", tmp_path, [0, 0, 1, 1], 2, persist_every=2, persisted=True)
    agent_dir()
    trained("fsdp", tmp_path, [0, 0, 1, 1], 3, persist_every=100)
    lose(1)
    after = trained("fsdp", tmp_path, [0, 0, 2, 2], 2, persist_every=2)
    for one in after:
        assert one["first"] == 2
        assert one["whole"] == before[0]["states"]["2"]
        (sentence,) = one["report"]["passed"]
        assert "step 3 of generation 2 is not restored" in sentence
        assert sentence in one["report"]["text"]


def refused(rank: int, root: str, nodes: list[int], wishes: dict[str, Any]) -> str:
    from flashckpt.errors import FlashckptError

    try:
        train_spread(rank, "fsdp", root, nodes, 2, {"restore": wishes.get(str(rank), {})})
    except FlashckptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_neither_memory_nor_storage_covers_the_state_the_job_starts_anew_but_an_explicit_wish_ends_with_the_reason(
    tmp_path: Path,
) -> None:
    """What is left of a snapshot stands in nobody's way; who asks for that very step is told what is missing, on every rank."""
    trained("fsdp", tmp_path, [0, 1], 1)
    lose(1)
    for text in values(
        run_ranks(refused, 2, str(tmp_path), [0, 2], {"0": {"step": 1}, "1": {"step": 1}}, timeout_s=BUSY_S)
    ):
        assert text.startswith("ShardGapError")
        assert "model.0." in text
    for one in trained("fsdp", tmp_path, [0, 2], 1):
        assert one["first"] == 0
        assert one["report"] is None


def test_ranks_that_are_asked_for_different_steps_end_with_an_error_that_names_both(tmp_path: Path) -> None:
    for text in values(run_ranks(refused, 2, str(tmp_path), [0, 1], {"1": {"step": 7}}, timeout_s=BUSY_S)):
        assert text.startswith("DisagreementError")
        assert "rank 1: restore(step=7)" in text
        assert "rank 0: restore()" in text


# -- faults ---------------------------------------------------------------------------------------------


def flip(node: int, rank: int, at: int = 1000) -> None:
    """Flip one bit of the newest snapshot of a rank, where its first large tensor lies."""
    from flashckpt.shm.segment import Segment

    (path,) = node_dir(node).rglob(f"r{rank:05d}-*.seg")
    segment = Segment.attach(path, writable=True)
    slot = max((h.identity, k) for k, h in enumerate(segment.headers()) if h.is_complete)[1]
    with path.open("r+b") as file:
        file.seek(segment.spec.data_at(slot) + at)
        raw = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([raw[0] ^ 1]))
    segment.close()


def test_damaged_range_of_a_peer_is_replaced_by_another_replica(tmp_path: Path) -> None:
    """Three replicas: one is lost, two have a flipped bit, each in another tensor: each is mended by the other."""
    before = trained("plain", tmp_path, [0, 1, 2], 2)
    lose(2)
    flip(0, 0, at=1000)
    flip(1, 1, at=5000)
    after = trained("plain", tmp_path, [0, 1, 3], 2)
    assert after[2]["whole"] == before[0]["states"]["2"]
    assert [one["first"] for one in after] == [2, 2, 2]
    for one in after[:2]:  # found when it was read, so the others were asked
        assert set(one["report"]["tiers"]) == {"memory", "peer"}
        assert len(one["report"]["damaged"]) == 1
    assert set(after[2]["report"]["tiers"]) == {"peer"}
    assert any("memory of host" in sentence for sentence in after[2]["report"]["damaged"])


def vanishing(rank: int, root: str, nodes: list[int]) -> dict[str, Any]:
    """Rank 0 gives its snapshot up between two rounds."""
    from flashckpt.planning import pieces
    from flashckpt.restore import peers

    def hook() -> None:
        whole = peers.Peers._is_current

        def is_current(self: Any, slot: int) -> bool:
            return whole(self, slot) and not (rank == 0 and self.round > 0)

        peers.Peers._is_current = is_current  # type: ignore[method-assign]  # of this process alone
        pieces.JOB_BYTES = peers.ROUND_BYTES = 1 << 20

    return train_spread(rank, "plain", root, nodes, 2, {"width": 12_000}, hook=hook)


def test_peer_whose_snapshot_vanishes_between_rounds_is_replaced(tmp_path: Path) -> None:
    before = trained("plain", tmp_path, [0, 1, 2], 2, width=12_000)
    lose(2)
    after = values(run_ranks(vanishing, 3, str(tmp_path), [0, 1, 3]))
    assert after[2]["whole"] == before[0]["states"]["2"]
    assert {tier for one in after for tier in one["report"]["tiers"]} == {"memory", "peer"}


def killed(rank: int, root: str, point: str, victim: int) -> dict[str, Any]:
    return train_spread(rank, "plain", root, [0, 2], 2, crash=f"{point}:1:rank{victim}")


@pytest.mark.parametrize(
    ("point", "victim"), [("peers.before-round", 1), ("peers.while-serving", 0), ("peers.after-round", 1)]
)
def test_rank_killed_while_it_serves_or_receives_leaves_every_source_intact(
    point: str, victim: int, tmp_path: Path
) -> None:
    """Rank 0 serves from what is left, rank 1 receives on a new node."""
    before = trained("plain", tmp_path, [0, 1], 2)
    lose(1)
    results = run_ranks(killed, 2, str(tmp_path), point, victim, timeout_s=30)
    assert results[victim].signal == 9, results[victim]
    after = trained("plain", tmp_path, [0, 2], 2)
    assert after[0]["whole"] == before[0]["states"]["2"]
    assert [set(one["report"]["tiers"]) for one in after] == [{"memory"}, {"peer"}]
    assert not any(one["report"]["damaged"] for one in after)


# -- bounds ---------------------------------------------------------------------------------------------


def counted(rank: int, root: str, nodes: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Restore and count what goes through the exchange: collectives, and the most bytes of one of them."""
    from flashckpt import collectives
    from flashckpt.planning import pieces
    from flashckpt.restore import peers

    pieces.JOB_BYTES, peers.ROUND_BYTES = 1 << 20, 2 << 20
    seen = {"gathers": 0, "groups": 0, "most": 0, "rounds": 0}
    gather, group, send = collectives.all_gather_bytes, collectives.HostGroup.__init__, collectives.HostGroup.all_to_all

    def gathering(data: bytes) -> list[bytes]:
        seen["gathers"] += 1
        return gather(data)

    def grouping(self: Any) -> None:
        seen["groups"] += 1
        group(self)

    def sending(self: Any, parts: Any) -> list[memoryview]:
        received = send(self, parts)
        leaving = sum(memoryview(b).nbytes for part in parts for b in part)
        seen["most"] = max(seen["most"], leaving, sum(map(len, received)))
        seen["rounds"] += 1
        return received

    collectives.all_gather_bytes = gathering
    collectives.HostGroup.__init__ = grouping  # type: ignore[method-assign]  # of this process alone
    collectives.HostGroup.all_to_all = sending  # type: ignore[method-assign]
    report = train_spread(rank, "plain", root, nodes, 1, options)
    return {**report, **seen}


def test_rounds_are_bounded_in_both_directions_and_reads_rounded_to_chunks(tmp_path: Path) -> None:
    """One survivor serves three ranks 13 MB each: no round brings a rank, or takes from it, more than ROUND_BYTES."""
    trained("plain", tmp_path, [0, 1], 1, width=24_000)
    lose(1)
    after = values(run_ranks(counted, 4, str(tmp_path), [0, 2, 2, 3], {"width": 24_000}))
    for one in after[1:]:
        assert one["report"]["tiers"]["peer"] > 12_000_000
        assert one["report"]["read"]["peer"] == one["report"]["tiers"]["peer"]  # whole tensors: no chunk in part
    assert all(0 < one["most"] < (2 << 20) + (1 << 16) for one in after), [one["most"] for one in after]
    assert after[0]["rounds"] > 3 * 12_000_000 // (2 << 20)


def test_restart_that_each_node_covers_by_itself_exchanges_nothing(tmp_path: Path) -> None:
    """Inventory, places of samplers and two votes (the claim is a broadcast): no collective more than on a single node."""
    trained("plain", tmp_path, [0, 1], 1)
    os.environ["FLASHCKPT_RESTART"] = "1"
    spread = values(run_ranks(counted, 2, str(tmp_path), [0, 1], {}))
    assert [(one["groups"], one["gathers"]) for one in spread] == [(0, 4)] * 2


def by_a_group_of_its_own(rank: int) -> list[Any]:
    """As where the default group carries device tensors only."""
    import torch

    from flashckpt import collectives

    device = collectives._device
    collectives._device = lambda: torch.device("cuda")
    group = collectives.HostGroup()
    collectives._device = device
    told = group.all_to_all([[bytes([rank] * to), b"", bytes([to])] for to in range(3)])
    found = [group.total(rank), *(part.hex() for part in told)]
    group.close()
    return found


def test_host_memory_travels_by_a_group_of_its_own_where_the_default_one_carries_none() -> None:
    assert values(run_ranks(by_a_group_of_its_own, 3)) == [
        [3, "00", "00", "00"],
        [3, "0001", "0101", "0201"],
        [3, "000002", "010102", "020202"],
    ]


def lying(rank: int, root: str, nodes: list[int], how: str) -> dict[str, Any]:
    """Rank 0 serves something other than what it holds."""
    from flashckpt.restore import peers

    def hook() -> None:
        whole = peers.Peers._serve

        def serve(self: Any, requests: Any) -> Any:
            parts: list[list[Any]] = whole(self, requests)
            if rank != 0:
                return parts
            for part in parts:
                data = bytearray(b"".join(bytes(one) for one in part[1:]))
                if how == "other bytes":
                    data = bytearray(byte ^ 0xFF for byte in data)
                elif how == "fewer bytes":
                    data = data[: len(data) // 2]
                part[:] = [b"\x4d" * len(part[0]) if how == "no such answer" else bytes(part[0]), bytes(data)]
            return parts

        peers.Peers._serve = serve  # type: ignore[method-assign]  # of this process alone

    return train_spread(rank, "plain", root, nodes, 2, hook=hook)


@pytest.mark.parametrize("how", ["other bytes", "fewer bytes", "no such answer"])
def test_peer_that_sends_wrong_bytes_is_replaced_by_another_replica(tmp_path: Path, how: str) -> None:
    before = trained("plain", tmp_path, [0, 1, 2], 2)
    lose(2)
    after = values(run_ranks(lying, 3, str(tmp_path), [0, 1, 3], how))
    assert after[2]["whole"] == before[0]["states"]["2"]
    assert [one["first"] for one in after] == [2, 2, 2]


class WatchedStore:
    """The store of a process group; writes down which thread asks it for what."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)  # then all go through this one
        asked = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            self.asked.append((threading.current_thread().name, name))
            return asked(*arguments)

        return call


def trains_with_a_watched_store(rank: int, root: str) -> dict[str, Any]:
    """Two nodes of one rank each; what is common is waited for between steps, outside `ckpt.step()`."""
    import torch.distributed as dist

    from flashckpt.session import opening

    watched = WatchedStore(dist.distributed_c10d._get_default_store())
    opening._c10d_store = lambda: watched
    result = train_spread(rank, "plain", root, [0, 1], 4, {"slots": 3})
    return {
        "first": result["first"],
        "threads": sorted({thread for thread, _ in watched.asked}),
        "count": len(watched.asked),
    }


def test_steps_of_a_job_on_two_nodes_ask_the_store_for_nothing_on_the_training_thread(tmp_path: Path) -> None:
    for one in values(run_ranks(trains_with_a_watched_store, 2, str(tmp_path))):
        assert one["count"] > 0
        assert one["threads"] == ["flashckpt-acks"]
