"""The engine on several ranks: bitwise resume on every layout, SIGKILL at every crash point of a snapshot."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir, train
from support.memory import ended, fork
from support.ranks import run_ranks, values, wait_for

SLOT_POINTS = (
    "slot.before-writing", "slot.after-writing", "slot.during-copy", "slot.before-manifest", "slot.before-complete",
    "slot.after-complete",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


@functools.cache
def unbroken(kind: str, world: int, steps: int) -> list[dict[str, Any]]:
    """Every rank's losses and digests of a run that nothing happens to and nothing is tracked of."""
    return values(run_ranks(train, world, kind, None, steps))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "world"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("tp", 2), ("fsdp_tp", 4), ("hsdp", 4)]
)
def test_all_ranks_die_and_go_on_bit_for_bit_from_memory(kind: str, world: int, tmp_path: Path) -> None:
    """Exact: the same layout resumed from memory has the losses and the state of the unbroken run, every byte."""
    whole = unbroken(kind, world, 6)
    values(run_ranks(train, world, kind, str(tmp_path), 4))
    resumed = values(run_ranks(train, world, kind, str(tmp_path), 6))
    for rank, (one, all_) in enumerate(zip(resumed, whole, strict=True)):
        assert one["first"] == 4, rank
        assert one["restored"] == all_["digests"]["4"], rank
        assert one["losses"] == {s: all_["losses"][s] for s in ("5", "6")}, rank
        assert one["digests"] == {s: all_["digests"][s] for s in ("5", "6")}, rank
        assert set(one["tiers"]) == {"memory"}, rank


def dies(rank: int, root: str, point: str, times: int) -> dict[str, Any]:
    return train(rank, "plain", root, 9, crash=f"{point}:{times}:rank1")


@pytest.mark.matrix
@pytest.mark.parametrize("point", SLOT_POINTS)
def test_one_rank_killed_at_a_point_of_its_fourth_snapshot_leaves_an_earlier_one_of_all_ranks(
    point: str, tmp_path: Path
) -> None:
    """Whatever the other rank went on to do meanwhile (M1: it may not overwrite what the dead one still needs)."""
    whole = unbroken("plain", 2, 9)
    times = 3 * 16 + 2 if point == "slot.during-copy" else 4  # 16 tensors are copied by the thread per snapshot
    _first, second = run_ranks(dies, 2, str(tmp_path), point, times)
    assert second.signal == 9, second
    resumed = values(run_ranks(train, 2, "plain", str(tmp_path), 9))
    step = resumed[0]["first"]
    assert step == resumed[1]["first"]
    assert step == (4 if point == "slot.after-complete" else 3)
    for one, all_ in zip(resumed, whole, strict=True):
        assert one["restored"] == all_["digests"][str(step)]
        assert one["losses"] == {s: all_["losses"][s] for s in one["losses"]}


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["restore.before-read", "restore.before-lineage", "restore.after-lineage"])
def test_one_rank_killed_while_it_restores_leaves_the_same_restore_point(point: str, tmp_path: Path) -> None:
    values(run_ranks(train, 2, "plain", str(tmp_path), 4))
    results = run_ranks(restore_dies, 2, str(tmp_path), point)
    assert results[1].signal == 9, results[1]
    resumed = values(run_ranks(train, 2, "plain", str(tmp_path), 5))
    assert [one["first"] for one in resumed] == [4, 4]


def restore_dies(rank: int, root: str, point: str) -> dict[str, Any]:
    from flashckpt import faults

    faults.arm(f"{point}:1:rank1")
    return train(rank, "plain", root, 4)


def on_another_layout(rank: int, root: str) -> str:
    """Restore what two FSDP ranks took into plain modules and return the digest of parameters as one."""
    import torch
    from support.engine import net

    from flashckpt import Checkpointer

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
    report = ckpt.restore()
    assert report is not None
    assert not report.is_same_layout
    state = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    return "".join(float(t.detach().double().sum()).hex() for t in state)


def full_state(rank: int, root: str) -> str:
    import torch
    from support.engine import parallel_net

    from flashckpt import Checkpointer

    model, mesh = parallel_net("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer, mesh=mesh)
    assert ckpt.restore() is not None
    state = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    text = "".join(float(t.full_tensor().detach().double().sum()).hex() for t in state)
    assert ckpt._session is not None
    ckpt._session.close()
    return text


@pytest.mark.matrix
def test_snapshots_of_two_sharded_ranks_restore_into_three_plain_ones_from_memory(tmp_path: Path) -> None:
    values(run_ranks(train, 2, "fsdp", str(tmp_path), 3))
    sharded = values(run_ranks(full_state, 2, str(tmp_path)))
    plain = values(run_ranks(on_another_layout, 3, str(tmp_path)))
    assert len({*sharded, *plain}) == 1


def fewer_rows_than_ranks(rank: int, root: str) -> int:
    """Return the rows of the weight that this rank of two replicas of three shards holds, once a checkpointer takes it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from flashckpt import Checkpointer

    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    fully_shard(model, mesh=mesh)
    ckpt = Checkpointer(root, job="t")
    ckpt.track(model=model, mesh=mesh)
    assert ckpt.restore() is None
    assert ckpt._session is not None
    ckpt._session.close()
    (weight,) = model.parameters()
    assert isinstance(weight, DTensor)
    return len(weight.to_local())


def test_several_ranks_may_hold_nothing_of_a_tensor_that_has_replicas(tmp_path: Path) -> None:
    assert values(run_ranks(fewer_rows_than_ranks, 6, str(tmp_path))) == [1, 0, 0, 1, 0, 0]


def differing_replicas(rank: int, root: str) -> str:
    import torch

    from flashckpt import Checkpointer
    from flashckpt.errors import ReplicaMismatchError

    torch.manual_seed(rank)
    ckpt = Checkpointer(root, job="t")
    ckpt.track(model=torch.nn.Linear(3, 3), replicated_over="world")
    try:
        ckpt.restore()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def test_replicas_that_were_declared_equal_and_differ_are_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    for text in values(run_ranks(differing_replicas, 2, str(tmp_path))):
        assert "model.bias" in text


@pytest.mark.matrix
def test_memory_is_gone_and_storage_takes_its_place(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR")  # a daemon of its own
    whole = unbroken("fsdp", 2, 6)
    values(run_ranks(persisting, 2, str(tmp_path)))
    shutil.rmtree(shm_dir / f"flashckpt-{os.getuid()}")
    resumed = values(run_ranks(train, 2, "fsdp", str(tmp_path), 6, {"persist_every": 4}))
    for one, all_ in zip(resumed, whole, strict=True):
        assert one["first"] == 4
        assert one["restored"] == all_["digests"]["4"]
        assert one["losses"] == {s: all_["losses"][s] for s in ("5", "6")}
        assert set(one["tiers"]) == {"storage"}


def persisting(rank: int, root: str) -> None:
    import torch
    from support.engine import parallel_net

    from flashckpt import Checkpointer

    model, mesh = parallel_net("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    ckpt = Checkpointer(root, snapshot_every=1, persist_every=4, job="t")
    ckpt.track(model=model, optimizer=optimizer, rng=True, mesh=mesh)
    ckpt.restore()
    for step in range(1, 5):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.wait(60)
    ckpt.close()


def holds_the_job(root: str, ready: str) -> None:
    import torch

    from flashckpt import Checkpointer

    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=torch.nn.Linear(3, 3))
    ckpt.restore()
    ckpt.step(1)
    Path(ready).touch()
    signal.pause()


def comes_second(rank: int, root: str) -> str:
    import torch

    from flashckpt import Checkpointer
    from flashckpt.errors import JobInUseError

    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=torch.nn.Linear(5, 5), replicated_over="world")
    try:
        ckpt.restore()
    except JobInUseError as error:
        return str(error)
    return ""


def test_another_world_under_the_job_id_of_a_living_one_is_refused_on_every_rank(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    holder = fork(lambda: holds_the_job(str(tmp_path), str(ready)))
    try:
        wait_for(ready.exists, what="the first run")
        for text in values(run_ranks(comes_second, 2, str(tmp_path))):
            assert f"process {holder}" in text
    finally:
        os.kill(holder, signal.SIGKILL)
        ended(holder)


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("called from step()")


def steps_bare(rank: int, root: str) -> dict[str, float]:
    """Take four snapshots; from the second on every collective, and every function that plans, is refused."""
    import torch
    import torch.distributed as dist
    from support.engine import parallel_net

    from flashckpt import Checkpointer, collectives
    from flashckpt.session import session
    from flashckpt.state.registry import StateRegistry

    model, mesh = parallel_net("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer, rng=True, mesh=mesh)
    ckpt.restore()
    kept = {
        name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "broadcast", "barrier", "gather"))
    }
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(8, 24)).pow(2).mean().backward()
        optimizer.step()
        if step > 1:
            for module, names in ((dist, kept), (collectives, ("all_gather", "from_rank_0")), (session, ("Plan",))):
                for name in names:
                    setattr(module, name, refused)
            StateRegistry.structure = refused  # type: ignore[method-assign]
        ckpt.step(step)
        for name, function in kept.items():
            setattr(dist, name, function)
    assert ckpt._session is not None
    ckpt._session.close()
    return ckpt._session.stats


@pytest.mark.matrix
def test_from_the_second_snapshot_on_nothing_is_planned_and_no_collective_is_run(tmp_path: Path) -> None:
    for stats in values(run_ranks(steps_bare, 2, str(tmp_path))):
        assert stats["snapshots"] == 4
        assert "plans" not in stats, "nor was the first one planned in the loop"
