"""Persisters of several nodes agree through living ranks: real ranks, relays and persisters, each node with its own memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine import net
from support.ranks import run_ranks

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.intents import READY
from flashckpt.storage.factory import open_store

NODES, PERSISTS = 3, 4


def proposals(root: Path) -> list[str]:
    return sorted(info.key for info in open_store(root).list(READY))


def rank_of_a_node(rank: int, folder: str) -> list[list[str]]:
    """Train, and wait for each commit; return what lay on the root of proposals after each."""
    memory, root = Path(folder) / f"node{rank}", Path(folder) / "root"
    memory.mkdir()
    os.environ["FLASHCKPT_SHM_DIR"] = str(memory)
    os.environ.pop("FLASHCKPT_AGENT_DIR", None)
    torch.manual_seed(rank)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Checkpointer(str(root), snapshot_every=1, persist_every=5, job="t") as ckpt:
        parts: dict[str, Any] = {f"model{rank}": model, f"optimizer{rank}": optimizer}
        ckpt.track(**parts)
        ckpt.restore()
        for step in range(1, 5 * PERSISTS + 1):
            model(torch.ones(2, 24)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            if step % 5 == 0:
                ckpt.wait(timeout=60)
                seen.append(proposals(root))
                dist.barrier()
    return seen


@pytest.mark.matrix
def test_while_ranks_live_no_proposal_lies_on_the_root_and_all_commit(tmp_path: Path) -> None:
    results = run_ranks(rank_of_a_node, NODES, str(tmp_path), timeout_s=110)
    assert all(result.ok for result in results), [result.error for result in results]
    seen = results[0].value
    assert len(seen) == PERSISTS
    assert seen[1:] == [seen[0]] * (PERSISTS - 1), (
        "nodes that started before their ranks carried anything may leave some"
    )
    found = list_checkpoints(open_store(tmp_path / "root"))
    assert found[0].step == 5 * PERSISTS
    assert len(found) == 3, "keep_last, by default"
