"""Every pair of the trainer's switches: in some run both are on, which trains as one process does and survives a kill.

The rows are made from the table `support.switches.FACTORS`: each pair of values occurs in one of them, or is refused before torch is
imported. In a row, ranks train, are killed by SIGKILL in the middle of a step, and are started again: what they train
then is what they had trained without the kill, bit for bit, and to rounding what one process trains.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.covering import Row, cover, cover_each
from support.ranks import run_ranks, values
from support.switches import (
    FACTORS,
    Alone,
    Switches,
    config_of,
    killed_and_resumed,
    parallel,
    world_of,
    write_texts,
)
from support.training import run_config
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values
from flashckpt.trainer.parallel import apply
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train import loop

SWITCHES = Switches(factors=FACTORS)
ROWS, REFUSED = cover(SWITCHES.values, SWITCHES.works)
DROPPED, _ = cover_each(SWITCHES.values, SWITCHES.works)
"""Rows with dropout: each value once. What is dropped depends on the layout, so one process is no measure for them."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    return write_texts(tmp_path_factory.mktemp("switches"))


@pytest.fixture(scope="module")
def alone(corpus: Any) -> Any:
    return Alone(SWITCHES, corpus)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setattr(JobDirectory, "ensure_daemon", lambda *_: None)  # restores here are from memory


@pytest.mark.parametrize("row", ROWS, ids=SWITCHES.name_of)
def test_all_pairs_train_as_one_process_and_survive_a_kill(row: Row, corpus: Any, alone: Any, tmp_path: Path) -> None:
    sections = SWITCHES.sections_of(row)
    found = killed_and_resumed(sections, corpus, tmp_path)
    near = 3e-6 if row["precision"] == "float32" else 3e-3  # rounding of another order of sums
    assert found == pytest.approx(alone(row), abs=near)


@pytest.mark.parametrize("row", DROPPED, ids=SWITCHES.name_of)
def test_every_switch_goes_with_dropout_and_drops_the_same_after_a_kill(
    row: Row, corpus: Any, alone: Any, tmp_path: Path
) -> None:
    sections = SWITCHES.sections_of(row)
    sections["model"] = {**sections["model"], "dropout": 0.5}
    found = killed_and_resumed(sections, corpus, tmp_path)
    whole = alone(row)
    far = [abs(one - other) for one, other in zip(found, whole, strict=True)]
    assert 0.003 < max(far) < 0.5, "something is dropped, and it trains all the same"


@pytest.mark.parametrize("row", REFUSED, ids=SWITCHES.name_of)
def test_a_pair_that_no_run_can_have_is_refused_with_the_reason(row: Row) -> None:
    sections = SWITCHES.sections_of(row)
    with pytest.raises((LayoutError, ConfigError)) as caught:
        resolve_layout(run_config(Path("unused"), **sections), world_of(sections))
    assert caught.value.found
    assert caught.value.expected


# -- what each stage of ZeRO holds, in bytes


def held_by_zero(_rank: int, values: dict[str, Any]) -> list[dict[str, int]]:
    """Return bytes of parameters and gradients that this rank holds after each micro-batch's forward and backward."""
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    noted: list[dict[str, int]] = []
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        part: Any = trainer.parallel.parts[0]
        blocks = [block for block in part.layers.children() if isinstance(block, FSDPModule)]
        step: Any = trainer.train_step

        def note(where: str) -> None:
            noted.append({"where": where, **count(blocks)})  # type: ignore[dict-item]

        loss = step._loss
        backward: Any = torch.Tensor.backward

        def noting_loss(*args: Any) -> Any:
            note("forward")
            return loss(*args)

        def noting_backward(*args: Any) -> None:
            backward(*args)
            note("backward")

        step._loss = noting_loss
        torch.Tensor.backward = noting_backward  # type: ignore[method-assign]  # on purpose, in a process of its own
        trainer.one_step()
        state = trainer.optimizers[0].state
        moments = sum(apply.local_tensor(value["exp_avg"]).nbytes for value in state.values())
        return [*noted, {"moments": moments}]


def count(blocks: list[Any]) -> dict[str, int]:
    total = {"parameters": 0, "gradients": 0}
    for block in blocks:
        for parameter in (one for group in block._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params):
            whole = parameter._unsharded_param if hasattr(parameter, "_unsharded_param") else None
            total["parameters"] += parameter.sharded_param.to_local().nbytes
            if whole is not None and whole.untyped_storage().size():
                total["parameters"] += whole.nbytes
            grads = [
                parameter.sharded_param.grad,
                None if whole is None else whole.grad,
                parameter.unsharded_accumulated_grad,
            ]
            total["gradients"] += sum(apply.local_tensor(grad).nbytes for grad in grads if grad is not None)
    return total


def test_each_stage_of_zero_cuts_what_its_number_says(corpus: Any) -> None:
    train = {"global_batch": 4, "micro_batch": 1}
    held = {
        zero: values(
            run_ranks(held_by_zero, 2, config_of(corpus, {"train": train, **parallel(zero=zero)}), timeout_s=100)
        )[0]
        for zero in (0, 1, 2, 3)
    }
    whole = max(entry["gradients"] for entry in held[0][:-1])
    first_backward = {zero: entries[1] for zero, entries in held.items()}
    first_forward = {zero: entries[0] for zero, entries in held.items()}
    assert first_forward[1]["where"] == "forward"
    assert held[0][-1]["moments"] == 2 * held[1][-1]["moments"] == 2 * held[3][-1]["moments"]
    assert {zero: entry["gradients"] for zero, entry in first_backward.items()} == {
        0: whole, 1: whole, 2: whole // 2, 3: whole // 2,
    }  # fmt: skip
    for zero in (1, 2):  # the shard, and the whole until the last micro-batch
        assert first_forward[zero]["parameters"] == first_backward[zero]["parameters"] == whole // 2 + whole
    assert first_forward[3]["parameters"] == first_backward[3]["parameters"] == whole // 2
    for zero in (1, 2, 3):
        last = held[zero][-2]
        assert (last["parameters"], last["gradients"]) == (whole // 2, whole // 2)


# -- the factor of float16


def overflow(_rank: int, values: dict[str, Any]) -> list[Any]:
    """Return for two steps whose first overflows: whether each was skipped, whether weights changed, and the factor."""
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        noted: list[Any] = [trainer.record.scaler.scale]
        if not trainer.done:
            trainer.record.scaler.scale = 2.0**23  # no gradient of a float16 is as large
        for _ in range(2):
            before = [apply.local_tensor(parameter).clone() for parameter in trainer.parallel.parameters()]
            skipped = trainer.one_step().skipped
            pairs = zip(before, trainer.parallel.parameters(), strict=True)
            same = all(torch.equal(one, apply.local_tensor(other)) for one, other in pairs)
            noted.append([skipped, same, trainer.record.scaler.scale])
        trainer.ckpt = None
        return noted


def test_an_overflow_skips_the_step_on_all_ranks_and_the_factor_is_in_the_snapshot(corpus: Any, tmp_path: Path) -> None:
    checkpoint = {"root": str(tmp_path / "root"), "job": "overflow", "snapshot_every": 1, "persist_every": 1000}
    train = {"global_batch": 4, "micro_batch": 1, "precision": "float16"}
    config = config_of(corpus, {"train": train}, checkpoint=checkpoint)
    first, other = values(run_ranks(overflow, 2, config, timeout_s=200))
    assert first == other
    assert first[:2] == [2.0**12, [True, True, 2.0**22]]
    resumed = values(run_ranks(overflow, 2, config, timeout_s=200))
    assert {rank[0] for rank in resumed} <= {first[1][2], first[2][2]}  # of the newest snapshot, not the first factor


# -- what travels


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes the elements of every collective inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d"):
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
            self.sizes.append((func.name(), max((tensor.numel() for tensor in tensors), default=0)))
        return out


def largest_collective(_rank: int, values: dict[str, Any]) -> dict[str, int]:
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        with Collectives() as seen:
            trainer.train_step.backward(trainer.data.next())
        weights = max(parameter.numel() for parameter in trainer.parallel.parameters())
        return {"largest": max(size for _, size in seen.sizes), "count": len(seen.sizes), "weights": weights}


@pytest.mark.parametrize("is_sharded", [True, False])
def test_loss_parallel_never_gathers_logits(is_sharded: bool, corpus: Any) -> None:
    rows, length, vocab, dim = 4, 16, 512, 32
    sections = {
        "model": {"vocab": vocab},
        "train": {"global_batch": rows, "micro_batch": rows, "seq_len": length},
        **parallel(tp=2, loss_parallel=is_sharded),
    }
    seen = values(run_ranks(largest_collective, 2, config_of(corpus, sections), timeout_s=100))[0]
    assert seen["count"]
    if is_sharded:  # activations at most; losses are one number per token
        assert seen["largest"] <= rows * length * dim
    else:
        assert seen["largest"] == rows * length * vocab


def buckets(_rank: int, values: dict[str, Any]) -> int:
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        sent: list[int] = []
        reduce = dist.all_reduce

        def hook(_state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types, not with their names
            sent.append(bucket.buffer().nbytes)
            reduce(bucket.buffer().div_(2))
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        part: Any = trainer.parallel.parts[0]
        part.register_comm_hook(None, hook)
        trainer.one_step()
        return len(sent)


def test_bucket_mb_is_how_much_ddp_sends_at_once(corpus: Any) -> None:
    counts = []
    for size in (0.02, 25.0):
        sections = parallel(data_parallel="ddp", dp_replicate=2, dp_shard=1, bucket_mb=size)
        counts.append(values(run_ranks(buckets, 2, config_of(corpus, sections), timeout_s=100))[0])
    assert counts[1] <= 2 < 6 < counts[0]  # the first bucket of DDP has a size that nobody sets
