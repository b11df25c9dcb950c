"""Restores of fully sharded state from a partner's memory: nothing of it has a second holder but for the replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.ranks import run_ranks, values
from support.replicas import replicas_of
from support.spread import lose, node_dir, train_spread

from flashckpt.shm.agent_folder import derived, link_key, read_job
from flashckpt.shm.job_directory import JobDirectory

pytestmark = pytest.mark.timeout(600)
BUSY_S = 200
SECRET = "correct-horse-battery-staple"


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()
    del os.environ["FLASHCKPT_AGENT_DIR"]  # a persister of its own per node


def trained(root: Path, nodes: list[int], steps: int, **options: Any) -> list[dict[str, Any]]:
    options = {"replicate": 1, "persist_every": 100000, "slots": 4, **options}
    results = values(run_ranks(train_spread, len(nodes), "fsdp", str(root), nodes, steps, options, timeout_s=BUSY_S))
    assert len({one["whole"] for one in results}) == 1
    return results


def tier_sum(results: list[dict[str, Any]], tier: str) -> int:
    return sum(one["report"]["tiers"].get(tier, 0) for one in results)


@pytest.mark.matrix
def test_node_replaced_its_state_comes_from_its_partner_with_its_generators_and_no_byte_from_storage(
    tmp_path: Path,
) -> None:
    before = trained(tmp_path, [0, 0, 1, 1], 3, replicated=True)
    lose(1)
    after = trained(tmp_path, [0, 0, 2, 2], 3)
    assert [one["first"] for one in after] == [3] * 4
    assert after[0]["whole"] == before[0]["states"]["3"]
    assert tier_sum(after, "storage") == 0
    assert all(one["report"]["reseeded"] == [] and one["report"]["same"] for one in after)
    assert all(set(one["report"]["tiers"]) == {"peer"} for one in after[2:])


def named(rank: int, root: str) -> None:
    options = {"replicate": 1, "persist_every": 100000, "slots": 4}
    train_spread(rank, "fsdp", root, [2, 1], 2, options, crash="opening.after-named:1:rank0")


def test_new_node_whose_rank_is_killed_once_its_agent_knows_of_the_job_begins_again(tmp_path: Path) -> None:
    before = trained(tmp_path, [0, 1], 2, replicated=True)
    lose(0)
    agent_dir()
    results = run_ranks(named, 2, str(tmp_path), timeout_s=30)
    assert results[0].signal == 9, results[0]
    folder = Path(os.environ.pop("FLASHCKPT_AGENT_DIR"))
    assert read_job(folder) is None
    assert read_job(folder, "opening") is not None
    after = trained(tmp_path, [2, 1], 2)
    assert after[0]["whole"] == before[0]["states"]["2"]
    assert tier_sum(after, "storage") == 0


def test_node_gone_the_rest_goes_on_with_its_replicas_in_their_own_memory(tmp_path: Path) -> None:
    before = trained(tmp_path, [0, 1, 2], 3, replicated=True)
    lose(1)
    after = trained(tmp_path, [0, 2], 3)
    assert after[0]["whole"] == before[0]["states"]["3"]
    assert tier_sum(after, "storage") == 0


def test_two_nodes_gone_with_two_partners(tmp_path: Path) -> None:
    before = trained(tmp_path, [0, 1, 2], 2, replicate=2, replicated=True)
    lose(0)
    lose(2)
    (after,) = trained(tmp_path, [1], 2, replicate=0)
    assert after["whole"] == before[0]["states"]["2"]
    assert set(after["report"]["tiers"]) == {"memory"}


def test_replicas_of_hsdp_are_the_generators_alone(tmp_path: Path) -> None:
    """Each row has a second holder on the other node: only what one rank alone has goes to the partner."""
    options = {"replicate": 1, "slots": 4, "replicated": True}
    values(run_ranks(train_spread, 4, "hsdp", str(tmp_path), [0, 0, 1, 1], 2, options, timeout_s=BUSY_S))
    (folder,) = node_dir(1).glob("flashckpt-*/t")
    kept = replicas_of(JobDirectory(folder))
    assert {rank for rank, _ in kept} == {0, 1}
    for manifest in kept.values():
        assert not len(manifest.table)
        assert any(key.startswith("rng@") for key in manifest.values)


def keyed(rank: int, root: str) -> dict[str, Any]:
    """Train with replicas and a job secret; return what rank 0 has drawn for the session, and the key of its persisters."""
    from flashckpt import collectives
    from flashckpt.replicate import records

    drawn: list[str] = []
    give = collectives.bytes_from_rank_0

    def giving(data: bytes) -> bytes:
        found = give(data)
        drawn.append(found.hex())
        return found

    collectives.bytes_from_rank_0 = giving
    os.environ["FLASHCKPT_JOB_SECRET"] = SECRET
    found = train_spread(rank, "fsdp", root, [0, 1], 2, {"replicate": 1, "slots": 4, "replicated": True})
    session = records.read_session(JobDirectory.open("t", create=False))
    assert session is not None
    return {**found, "drawn": drawn, "key": session.key.hex()}


def test_persisters_sign_with_a_key_that_nobody_sees_between_the_ranks(tmp_path: Path) -> None:
    """Under another launcher than dlrun; the ranks have the secret in their environment there."""
    one, other = values(run_ranks(keyed, 2, str(tmp_path), timeout_s=200))
    assert one["key"] == other["key"]
    assert one["drawn"] == other["drawn"]
    ranks = derived(SECRET.encode(), "ranks")
    assert one["key"] in [link_key(ranks, bytes.fromhex(drawn)).hex() for drawn in one["drawn"]]
    assert one["key"] not in one["drawn"]
