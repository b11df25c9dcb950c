"""Cold restores of replicas: a range that several ranks want is read once and sent on. Faults, and where it is not worth it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.ranks import run_ranks, values
from support.spread import lose, train_spread

from flashckpt.planning.wanted_alike import SendingPace, members_of

pytestmark = pytest.mark.timeout(600)
BUSY_S = 200
"""Far beyond what ranks take, also on a machine that does much else."""
OPTIONS = {"width": 12_000, "persist_every": 2}


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    del os.environ["FLASHCKPT_AGENT_DIR"]  # a daemon of its own per node


def committed(kind: str, root: Path, nodes: list[int]) -> str:
    """Train to a checkpoint, lose every node, and return the digest of the state."""
    options = {**OPTIONS, "persisted": True}
    found = values(run_ranks(train_spread, len(nodes), kind, str(root), nodes, 2, options, timeout_s=BUSY_S))
    for node in set(nodes):
        lose(node)
    agent_dir()
    return str(found[0]["states"]["2"])


def counted(
    rank: int, kind: str, root: str, nodes: list[int], verdict: str, fault: str = "", crash: str | None = None
) -> dict[str, Any]:
    """Restore, and count the bytes of packs that this rank reads from the root."""
    from flashckpt.planning import pieces
    from flashckpt.restore import shared_reads
    from flashckpt.storage.posix import PosixStore

    read: list[int] = []

    def hook() -> None:
        pieces.JOB_BYTES = shared_reads.LEAST_BYTES = 1 << 20
        shared_reads.TRIED = 2
        if verdict:
            SendingPace.is_worth_it = lambda self: verdict == "worth it"  # type: ignore[method-assign]  # of this process alone
        whole = PosixStore.get_range

        def get_range(self: Any, key: str, start: int, out: memoryview) -> None:
            whole(self, key, start, out)
            if ".p" in key:
                read.append(len(out))

        PosixStore.get_range = get_range  # type: ignore[method-assign]
        FAULTS[fault](rank)

    found = train_spread(rank, kind, root, nodes, 2, dict(OPTIONS), hook=hook, crash=crash)
    return {**found, "from_root": sum(read)}


def nothing(rank: int) -> None:
    """Leave all as it is."""


def unreadable(rank: int) -> None:
    """Rank 0 cannot read ahead."""
    from flashckpt.errors import StoreError
    from flashckpt.restore.sources import StorageSource

    def read_range(self: Any, *_: Any) -> None:
        StorageSource.read_range = whole  # type: ignore[method-assign]
        raise StoreError("the storage does not answer")

    whole = StorageSource.read_range
    if rank == 0:
        StorageSource.read_range = read_range  # type: ignore[method-assign,assignment]


def damaged(rank: int) -> None:
    """What comes to rank 1 has another byte than what was sent."""
    from flashckpt.collectives import HostGroup

    whole = HostGroup.receive

    def receive(self: Any, out: Any, source: int) -> None:
        whole(self, out, source)
        if out.nbytes > 1000:
            out.reshape(-1)[500] ^= 1

    if rank == 1:
        HostGroup.receive = receive  # type: ignore[method-assign,assignment]


def failing(rank: int) -> None:
    """Rank 1 cannot fill its state."""
    from flashckpt.errors import DamagedError
    from flashckpt.restore import executor

    def run(self: Any, job: Any) -> None:
        raise DamagedError("this rank fails")

    if rank == 1:
        executor._Executor._run = run  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int], None]] = {
    "": nothing, "unreadable": unreadable, "damaged": damaged, "failing": failing,
}  # fmt: skip


def restored(kind: str, root: Path, nodes: list[int], *, verdict: str = "worth it", fault: str = "") -> list[Any]:
    arguments = (kind, str(root), nodes, verdict, fault)
    return values(run_ranks(counted, len(nodes), *arguments, timeout_s=BUSY_S))


@pytest.mark.parametrize(("kind", "nodes"), [("plain", [0, 1, 2]), ("hsdp", [0, 0, 1, 1])])
def test_what_replicas_want_alike_is_read_from_the_root_once(kind: str, nodes: list[int], tmp_path: Path) -> None:
    whole = committed(kind, tmp_path, nodes)
    packs = sum(path.stat().st_size for path in tmp_path.rglob("r*.p*.fck"))
    after = restored(kind, tmp_path, nodes)
    assert {one["whole"] for one in after} == {whole}
    wanted = sum(sum(one["report"]["tiers"].values()) for one in after)
    assert all(set(one["report"]["tiers"]) == {"storage"} for one in after)
    copies = len(nodes) if kind == "plain" else 2
    assert wanted > 0.95 * copies * packs
    assert sum(one["from_root"] for one in after) < 1.05 * packs
    assert min(one["from_root"] for one in after) > 0.7 * packs / len(nodes), "they take turns"


def test_where_sending_on_is_not_faster_each_reads_for_itself(tmp_path: Path) -> None:
    nodes = [0, 1]
    whole = committed("plain", tmp_path, nodes)
    packs = sum(path.stat().st_size for path in tmp_path.rglob("r*.p*.fck"))
    after = restored("plain", tmp_path, nodes, verdict="is not")
    assert {one["whole"] for one in after} == {whole}
    tried = 2 << 20
    assert sum(one["from_root"] for one in after) > 2 * packs - 2 * tried


@pytest.mark.parametrize("fault", ["unreadable", "damaged"])
def test_what_does_not_come_or_comes_damaged_each_rank_reads_for_itself(fault: str, tmp_path: Path) -> None:
    nodes = [0, 1]
    whole = committed("plain", tmp_path, nodes)
    after = restored("plain", tmp_path, nodes, fault=fault)
    assert {one["whole"] for one in after} == {whole}
    assert [one["first"] for one in after] == [2, 2]
    read, tiers = after[1]["from_root"], after[1]["report"]["tiers"]["storage"]
    assert read > 0.9 * tiers or fault == "unreadable", "what came was used as it was"


def test_rank_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    committed("plain", tmp_path, [0, 1])
    results = run_ranks(counted, 2, "plain", str(tmp_path), [0, 1], "worth it", "failing", timeout_s=BUSY_S)
    assert all("this rank fails" in one.error for one in results)


@pytest.mark.parametrize(("point", "victim"), [("shared.before-send", 0), ("shared.after-batch", 1)])
def test_rank_killed_while_it_sends_on_or_receives_leaves_the_checkpoint_to_the_next_start(
    point: str, victim: int, tmp_path: Path
) -> None:
    nodes = [0, 1]
    whole = committed("plain", tmp_path, nodes)
    crash = f"{point}:1:rank{victim}"
    results = run_ranks(counted, 2, "plain", str(tmp_path), nodes, "worth it", "", crash, timeout_s=30)
    assert results[victim].signal == 9, results[victim]
    after = restored("plain", tmp_path, nodes)
    assert {one["whole"] for one in after} == {whole}


def test_pace_compares_what_a_byte_costs_sent_on_and_read_by_all() -> None:
    pace = SendingPace(2)
    assert pace.is_worth_it(), "nothing is known"
    pace.hear(0, [1000, 1000, 0, 0])
    assert pace.is_worth_it(), "nothing was sent"
    pace.hear(1, [1000, 1000, 400, 1000])
    assert pace.is_worth_it(), "0.4 to receive a byte, 0.5 to read half a byte more"
    pace.hear(1, [1000, 1000, 600, 1000])
    assert not pace.is_worth_it()
    of_many = SendingPace(8)
    of_many.hear(0, [1000, 1000, 600, 1000])
    assert of_many.is_worth_it(), "without it each reads seven eighths more"


def test_ranks_that_want_the_same_are_found_and_those_that_want_it_alone_are_none() -> None:
    import numpy as np

    asked = [np.array(keys, np.uint64) for keys in ([7, 5, 5], [5, 9], [], [9, 5, 8])]
    numbers, sets = members_of(asked)
    named = [[sets[number] for number in part.tolist()] for part in numbers]
    assert named == [[(), (0, 1, 3), (0, 1, 3)], [(0, 1, 3), (1, 3)], [], [(1, 3), (0, 1, 3), ()]]
