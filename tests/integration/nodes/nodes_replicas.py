"""The trainer with `[checkpoint] replicate` on several nodes (make test-nodes; root): nodes are lost with their memory.

No second holder of the state but the replicas: FSDP over all ranks, or tensor and pipeline parallel. What the restore
reads comes from memory of the nodes that are left, byte for byte; the trace is that of a run in which nothing happened.
docs/replicas.md has a table of what is proven here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.nodes import Nodes, nodes
from support.replicated import (
    DP_TP_PP,
    FSDP,
    STEPS,
    TP_PP,
    Replica,
    check_exact,
    check_trace,
    committed,
    hold,
    replicas_on,
    replicated,
    restore_of,
    restores,
    run_on,
    stop,
    train_on,
    write_run,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]


@pytest.mark.parametrize(("layout", "ranks"), [(FSDP, 1), (TP_PP, 2)], ids=["fsdp", "tp2-pp2"])
def test_node_replaced_no_byte_from_storage_and_the_trace_is_that_of_a_run_without_the_loss(
    layout: str, ranks: int, tmp_path: Path
) -> None:
    count = 3 if ranks == 1 else 2
    with nodes(tmp_path, count + 1) as them:
        words = write_run(tmp_path, layout)
        for node in range(count):
            run_on(them, node, words, str(count), ranks)
        them.until(lambda: replicated(them, 0) >= 6, "step 6 with all partners")
        lost = count - 1
        them.kill(lost)
        run_on(them, count, words, str(count), ranks)
        train_on(them)
        (said,) = restores(them)
        assert "same layout" in said
        assert "peer" in them.log(0).partition(said)[2].partition("\nstep ")[0]
        assert not [step for step, generation in committed(tmp_path).items() if generation == 1], (
            "nothing of before the loss is on storage, so that no byte came from there"
        )
        stop(them, [*range(count - 1), count])
    check_trace(tmp_path, same_layout=True)


def begun(them: Nodes, words: list[object], count: int, *, nnodes: str = "", ranks: int = 1) -> None:
    """Train on the first nodes until step 6 is with all partners."""
    for node in range(count):
        run_on(them, node, words, nnodes or str(count), ranks)
    them.until(lambda: replicated(them, 0) >= 6, "step 6 with all partners")


def test_damaged_replicas_are_named_and_exactly_what_no_partner_has_whole_comes_from_storage(tmp_path: Path) -> None:
    """The last of three nodes is replaced. Of the replicas of its rank one has a damaged manifest, the other a damaged row."""
    with nodes(tmp_path, 4) as them:
        words = write_run(tmp_path, FSDP, replicate=2, persist_every=2)
        begun(them, words, 3)
        step = hold(them, [2])
        them.until(lambda: step in committed(tmp_path), f"the checkpoint of step {step}")
        them.kill(2)
        Replica.of(replicas_on(them, 0)[2], step).damage_record()
        lost = Replica.of(replicas_on(them, 1)[2], step).damage_row(3)
        run_on(them, 3, words, "3")
        found = restore_of(them, 3)
        train_on(them)
        stop(them, [0, 1, 3])
    assert found.step == step
    assert found.tiers["storage"] == lost
    assert f"is left out: the snapshot of step {step} in memory is damaged" in them.log(0)
    assert re.search(r"rank 2 \(memory of .*were read from .* instead", them.log(3))
    check_exact(tmp_path, 3)


def test_two_damaged_replicas_of_one_rank_complete_each_other(tmp_path: Path) -> None:
    """Both partners have a damaged row, each another one; nothing is on storage."""
    with nodes(tmp_path, 4) as them:
        words = write_run(tmp_path, FSDP, replicate=2)
        begun(them, words, 3)
        step = hold(them, [2])
        them.kill(2)
        for node in (0, 1):
            Replica.of(replicas_on(them, node)[2], step).damage_row(node)
        run_on(them, 3, words, "3")
        found = restore_of(them, 3)
        train_on(them)
        assert not [step for step, generation in committed(tmp_path).items() if generation == 1]
        stop(them, [0, 1, 3])
    assert found.step == step
    assert set(found.tiers) == {"memory", "peer"}
    assert re.search(r"rank 2 \(memory of .*were read from rank 2 \(memory of .* instead", them.log(3))
    check_exact(tmp_path, 3)


@pytest.mark.parametrize("replicate", [1, 2], ids=["then-storage", "then-the-other-partner"])
def test_partner_dies_while_it_gives_its_replica_and_the_next_source_takes_over(replicate: int, tmp_path: Path) -> None:
    """Three nodes of one rank: the last is lost and replaced, and the one that its rank is to be read from dies meanwhile, too."""
    with nodes(tmp_path, 5) as them:
        words = write_run(tmp_path, FSDP, replicate=replicate, persist_every=2 if replicate == 1 else STEPS)
        for node in range(3):
            dies = {"FLASHCKPT_CRASH_AT": "peers.while-serving"} if node == 0 else None
            run_on(them, node, words, "3", host=1, env=dies)
        them.until(lambda: replicated(them, 0) >= 6, "step 6 with all partners")
        step = hold(them, [2])
        if replicate == 1:
            them.until(lambda: step in committed(tmp_path), f"the checkpoint of step {step}")
        lost = Replica.of(replicas_on(them, 0)[2], step).state_bytes
        them.kill(2)
        run_on(them, 3, words, "3", host=1)
        them.until(lambda: "killed from outside" in them.log(0), "the death of the partner")
        them.kill(0)
        run_on(them, 4, words, "3", host=1)
        found = restore_of(them, 3)
        train_on(them)
        stop(them, [1, 3, 4])
    assert found.step == step
    assert found.tiers.get("storage", 0) == (lost if replicate == 1 else 0)
    check_exact(tmp_path, 3)


@pytest.mark.parametrize(("count", "gone", "replicate"), [(3, [2], 1), (4, [2, 3], 2)], ids=["3-to-2", "4-to-2"])
def test_nodes_gone_for_good_and_the_job_shrinks_without_a_byte_from_storage(
    count: int, gone: list[int], replicate: int, tmp_path: Path
) -> None:
    """FSDP, at once as many nodes as there are partners; what is trained twice, and after, is the same to rounding."""
    with nodes(tmp_path, count) as them:
        words = write_run(tmp_path, FSDP, replicate=replicate)
        begun(them, words, count, nnodes=f"2:{count}")
        step = hold(them, gone)
        for node in gone:
            them.kill(node)
        found = restore_of(them, 2)
        train_on(them)
        stop(them, [0, 1])
    assert found.step == step
    assert set(found.tiers) <= {"memory", "peer"}
    check_trace(tmp_path, same_layout=False)


def test_node_of_dp_tp_pp_replaced_without_a_byte_from_storage_and_with_the_same_trace(tmp_path: Path) -> None:
    """Eight ranks, 2 x 2 x 2, two on each of four nodes."""
    with nodes(tmp_path, 5) as them:
        words = write_run(tmp_path, DP_TP_PP)
        begun(them, words, 4, ranks=2)
        step = hold(them, [3])
        them.kill(3)
        run_on(them, 4, words, "4", 2)
        found = restore_of(them, 8)
        train_on(them)
        stop(them, [0, 1, 2, 4])
    assert found.step == step
    assert set(found.tiers) == {"memory", "peer"}
    check_exact(tmp_path, 8)
