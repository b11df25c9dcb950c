"""A rank that joined the process group and lacks the key of the job: it receives no state, and none of its own is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.ranks import run_ranks, values
from support.spread import lose, train_spread

from flashckpt.errors import DamagedError
from flashckpt.restore import gather
from flashckpt.shm import agent_folder
from flashckpt.shm.agent_folder import derived

pytestmark = pytest.mark.timeout(600)
KEY = derived(b"correct-horse-battery-staple", "ranks")
OTHER = derived(b"another secret of a job", "ranks")
REFUSED = "ConfigError: not every rank has proved that it belongs to this job"


def meeting(rank: int, keys: list[str]) -> list[Any]:
    from flashckpt import collectives

    real, gathers = collectives.all_gather_bytes, []

    def counting(data: bytes) -> list[bytes]:
        gathers.append(len(data))
        return real(data)

    collectives.all_gather_bytes = counting
    found = gather.gathered([rank, "said"], bytes.fromhex(keys[rank]))
    return [found, len(gathers)]


@pytest.mark.parametrize(("key", "gathers"), [(KEY, 2), (b"", 1)])
def test_ranks_with_one_key_or_none_hear_each_other(key: bytes, gathers: int) -> None:
    found = values(run_ranks(meeting, 3, [key.hex()] * 3))
    assert found == [[[[rank, "said"] for rank in range(3)], gathers]] * 3


@pytest.mark.parametrize("stranger", [OTHER, b""])
def test_stranger_is_named_by_every_other_rank(stranger: bytes) -> None:
    results = run_ranks(meeting, 3, [KEY.hex(), stranger.hex(), KEY.hex()])
    for honest in (results[0], results[2]):
        assert f"{REFUSED}: rank 1 did not" in honest.error
        assert "Nothing was restored, and no state was sent." in honest.error
    assert ("belongs to this job" if stranger else "this rank has no job secret, and other ranks have one") in results[
        1
    ].error


def test_proof_of_another_rank_or_restore_does_not_count() -> None:
    one, two = b"1" * 32, b"2" * 32
    proofs = {gather.proof(KEY, 0, one), gather.proof(KEY, 1, one), gather.proof(KEY, 0, two)}
    assert len(proofs) == 3
    assert gather.proof(b"", 0, one) == b""


def absurd(rank: int, how: str, nbytes: int) -> str:
    """Rank 1 announces a message of an absurd length; return what rank 0 says about it."""
    import torch
    import torch.distributed as dist

    from flashckpt import collectives

    announced = torch.tensor([nbytes], dtype=torch.int64)
    try:
        if rank == 1 and how == "all_gather":
            dist.gather(announced.view(torch.uint8).repeat(128), dst=0)  # a length, where each rank begins with its own
            dist.broadcast(torch.empty(2, 1024, dtype=torch.uint8), src=0)
        elif rank == 1:
            dist.all_to_all_single(torch.empty(2, dtype=torch.int64), announced.repeat(2))
        elif how == "all_gather":
            collectives.all_gather_bytes(b"said")
        else:
            collectives.HostGroup().all_to_all([[b"said"], [b"said"]])
    except DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("nbytes", [1 << 60, -1])
def test_length_that_a_rank_announces_is_not_believed(how: str, nbytes: int) -> None:
    said = values(run_ranks(absurd, 2, how, nbytes))
    assert f"{nbytes % 2**64 if how == 'all_gather' else nbytes} bytes" in said[0]
    assert "Nothing of it was received." in said[0]


def changed_on_the_way(rank: int) -> Any:
    """Rank 0, which passes on what the others say, changes what rank 2 has said."""
    import torch.distributed as dist

    broadcast: Any = dist.broadcast

    def lying(tensor: Any, *, src: int) -> None:
        if rank == 0:
            tensor[2, 8 + 32 + 3] ^= 1  # behind a length and the number that the rank has drawn
        broadcast(tensor, src=src)

    vars(dist)["broadcast"] = lying
    return gather.gathered("said", KEY)


def test_what_a_rank_said_cannot_be_changed_by_the_one_that_passes_it_on() -> None:
    for result in run_ranks(changed_on_the_way, 3):
        assert REFUSED.partition(":")[0] in result.error
        assert "Nothing was restored" in result.error


def heard(rank: int) -> str:
    """Rank 0 announces that it will broadcast an absurd length."""
    import torch
    import torch.distributed as dist

    from flashckpt import collectives

    if rank == 0:
        dist.broadcast(torch.tensor([1 << 60]), src=0)
        return ""
    try:
        collectives.bytes_from_rank_0(b"")
    except DamagedError as error:
        return str(error)
    return ""


def test_length_that_rank_0_announces_is_not_believed() -> None:
    assert f"{1 << 60} bytes" in values(run_ranks(heard, 2))[1]


def trained_as(rank: int, root: str, strangers: list[int], steps: int) -> dict[str, Any]:
    """Restore from the other node; count the bytes that ranks send each other after the first exchange."""
    from flashckpt import collectives

    agent_folder.write_key(Path(os.environ["FLASHCKPT_AGENT_DIR"]), KEY)
    if rank in strangers:
        os.environ["FLASHCKPT_AGENT_DIR"] += "-of-a-stranger"
        Path(os.environ["FLASHCKPT_AGENT_DIR"]).mkdir()
    sent, send = Path(root).with_name(f"sent{rank}"), collectives.HostGroup.all_to_all

    def sending(self: Any, parts: Any) -> list[memoryview]:
        sent.touch()
        return send(self, parts)

    collectives.HostGroup.all_to_all = sending  # type: ignore[method-assign]
    return train_spread(rank, "plain", root, [0, 1], steps)


def test_node_without_the_secret_gets_nothing_from_the_memory_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm_dir: Path
) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()
    root = str(tmp_path / "root")
    values(run_ranks(trained_as, 2, root, [], 2, timeout_s=200))
    lose(1)
    results = run_ranks(trained_as, 2, root, [1], 3, timeout_s=200)
    assert REFUSED in results[0].error
    assert "this rank has no job secret" in results[1].error
    assert not list(tmp_path.glob("sent*")), "an exchange between the nodes"
    after = values(run_ranks(trained_as, 2, root, [], 3, timeout_s=200))
    assert [one["first"] for one in after] == [2, 2]
    assert set(after[1]["report"]["tiers"]) == {"peer"}
    assert len(list(tmp_path.glob("sent*"))) == 2, "and with it there is one"
