"""Every pair of the trainer's switches: in some run both are on, which trains as one process does and survives a kill.

The rows are made from the table `FACTORS`: each pair of values occurs in one of them, or is refused before torch is
imported. In a row, ranks train, are killed by SIGKILL in the middle of a step, and are started again: what they train
then is what they had trained without the kill, bit for bit, and to rounding what one process trains.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.covering import Row, cover, cover_each
from support.documents import documents_run, write_documents
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashckpt.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.parallel import apply
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train import loop

Sections = dict[str, dict[str, Any]]


def parallel(**settings: Any) -> Sections:
    return {"parallel": settings}


FACTORS: dict[str, dict[str, Sections]] = {
    "keep": {
        "all": {},
        "full": parallel(activation_checkpoint="full"),
        "every:2": parallel(activation_checkpoint="every:2"),
        "groups:2": parallel(activation_checkpoint="groups:2"),
        "selective": parallel(activation_checkpoint="selective"),
        "ffn, moved": parallel(activation_checkpoint="ffn", activation_offload=True),
    },
    "data": {
        "one": parallel(dp_shard=1),
        "ddp": parallel(data_parallel="ddp", dp_replicate=2, dp_shard=1, bucket_mb=0.02),
        "zero 0": parallel(zero=0, dp_replicate=2, dp_shard=1),
        "zero 1": parallel(zero=1, dp_shard=2),
        "zero 2": parallel(zero=2, dp_shard=2),
        "zero 3": parallel(zero=3, dp_shard=2),
        "hsdp": parallel(dp_replicate=2, dp_shard=2),
    },
    "pipeline": {
        "none": {},
        "1F1B": parallel(pp=2),
        "interleaved": parallel(pp=2, schedule="Interleaved1F1B"),
        "zbv": parallel(pp=2, schedule="ZBVZeroBubble"),
    },
    "tensor": {
        "none": {},
        "sequence": parallel(tp=2),
        "loss": parallel(tp=2, sequence_parallel=False, loss_parallel=True),
    },
    "context": {"whole rows": {}, "cp 2": parallel(cp=2), "ring 2": parallel(cp=2, cp_exchange="ring")},
    "loss": {"whole": {}, "pieces": {"train": {"loss_chunk": 5}}},
    "precision": {"float32": {}, "bfloat16": {"train": {"precision": "bfloat16"}}, "float16": {"train": {"precision": "float16"}}},
    "state": {"device": {}, "host": parallel(offload="state")},
    "model": {
        "dense": {},
        "one kv head, tied": {"model": {"kv_heads": 1, "tied_embeddings": True}},
        "experts": {"model": {"experts": 4, "ffn": 32}},
        "experts, cut": {"model": {"experts": 4, "ffn": 32}, **parallel(ep=1)},
    },
    "rows": {"windows": {}, "documents": {"data": {"packing": "stream"}}},  # see `config_of`
}  # fmt: skip
STEPS, BEYOND = 2, 2
ALONE = ("precision", "model", "rows")  # what one process has too


def sections_of(row: Row) -> Sections:
    merged: Sections = {"train": {"micro_batch": 1}, "parallel": {}, "model": {}}
    for factor, value in row.items():
        for section, content in FACTORS[factor][value].items():
            merged[section] = {**merged.get(section, {}), **content}
    degrees = merged["parallel"]
    merged["train"]["global_batch"] = 2 * degrees.get("dp_replicate", 1) * degrees["dp_shard"]
    return merged


def world_of(sections: Sections) -> int:
    size = 1
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        size *= sections["parallel"].get(name, 1)
    return size


def works(row: Row) -> bool:
    sections = sections_of(row)
    try:
        resolve_layout(run_config(Path("unused"), **sections), world_of(sections))
    except (LayoutError, ConfigError):
        return False
    return world_of(sections) <= 8


VALUES = {name: list(values) for name, values in FACTORS.items()}
ROWS, REFUSED = cover(VALUES, works)
DROPPED, _ = cover_each(VALUES, works)
"""Rows with dropout: each value once. What is dropped depends on the layout, so one process is no measure for them."""


def name_of(row: Row) -> str:
    return ", ".join(value for factor, value in row.items() if value != next(iter(FACTORS[factor])))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("switches")
    (folder / "documents").mkdir()
    write_documents(folder / "documents")
    return folder, write_corpus(folder / "text")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setattr(JobDirectory, "ensure_daemon", lambda *_: None)  # restores here are from memory


def config_of(corpus: Any, sections: Sections, **more: dict[str, Any]) -> dict[str, Any]:
    folder, source = corpus
    optim = {"schedule": "constant", "warmup_steps": 1}
    data: dict[str, Any] = {"source": source}
    if "data" in sections:  # several in a row, each seen by its own tokens alone
        data = to_values(documents_run(folder / "documents", {}))["data"]
    return to_values(run_config(folder, **{"optim": optim, **sections, **more, "data": data}))


def trained(trainer: Any, steps: int) -> dict[int, str]:
    records = [trainer.one_step() for _ in range(steps)]
    return {record.step: record.loss.hex() for record in records}


def run_leg(rank: int, values: dict[str, Any], folder: str, leg: str) -> None:
    """Restore and train; the losses go to a file, for in the leg "killed" the ranks then die in the middle of a step."""
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began = trainer.done
        losses = trained(trainer, STEPS - began)
        kept, trainer.ckpt = trainer.ckpt, None  # from here on nothing is recorded
        losses |= trained(trainer, BEYOND)
        Path(folder, f"{leg}-{rank}").write_text(json.dumps({"began": began, "losses": losses}))
        if leg == "killed":
            trainer._apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]  # dies there
            trainer.one_step()
        assert kept is not None


def results(folder: Path, leg: str, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{leg}-{rank}").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def alone(corpus: Any) -> Any:
    cache: dict[str, list[float]] = {}

    def losses(row: Row, sections: Sections) -> list[float]:
        same = {name: row[name] for name in ALONE}
        key = f"{same} {sections['train']['global_batch']}"
        if key not in cache:
            own: Sections = {"train": {"global_batch": sections["train"]["global_batch"], "micro_batch": 1}}
            for factor, value in same.items():
                for section, content in FACTORS[factor][value].items():
                    own[section] = {**own.get(section, {}), **content}
            (only,) = values(run_ranks(train_rank, 1, config_of(corpus, own), STEPS + BEYOND, timeout_s=100))
            cache[key] = floats(only["losses"])
        return cache[key]

    return losses


def killed_and_resumed(sections: Sections, corpus: Any, tmp_path: Path) -> list[float]:
    """Train, kill every rank in the middle of a step and continue; return the losses, which are the same bits both times."""
    world = world_of(sections)
    checkpoint = {"root": str(tmp_path / "root"), "job": "switches", "snapshot_every": 1, "persist_every": 1000}
    config = config_of(corpus, sections, checkpoint=checkpoint)
    ended = run_ranks(run_leg, world, config, str(tmp_path), "killed", timeout_s=200)
    assert {rank.signal for rank in ended} == {signal.SIGKILL}, ended[0].error
    values(run_ranks(run_leg, world, config, str(tmp_path), "resumed", timeout_s=200))
    killed, resumed = (results(tmp_path, leg, world) for leg in ("killed", "resumed"))
    wanted = killed[0]["losses"]
    for rank in (*killed, *resumed):
        assert rank["losses"] == {step: loss for step, loss in wanted.items() if int(step) > rank["began"]}
    assert {rank["began"] for rank in killed} == {0}
    assert {rank["began"] for rank in resumed} <= {STEPS - 1, STEPS}
    return floats(list(wanted.values()))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_all_pairs_train_as_one_process_and_survive_a_kill(row: Row, corpus: Any, alone: Any, tmp_path: Path) -> None:
    sections = sections_of(row)
    found = killed_and_resumed(sections, corpus, tmp_path)
    near = 3e-6 if row["precision"] == "float32" else 3e-3  # rounding of another order of sums
    assert found == pytest.approx(alone(row, sections), abs=near)


@pytest.mark.parametrize("row", DROPPED, ids=name_of)
def test_every_switch_goes_with_dropout_and_drops_the_same_after_a_kill(
    row: Row, corpus: Any, alone: Any, tmp_path: Path
) -> None:
    sections = sections_of(row)
    sections["model"] = {**sections["model"], "dropout": 0.5}
    found = killed_and_resumed(sections, corpus, tmp_path)
    whole = alone(row, sections)
    far = [abs(one - other) for one, other in zip(found, whole, strict=True)]
    assert 0.003 < max(far) < 0.5, "something is dropped, and it trains all the same"


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_a_pair_that_no_run_can_have_is_refused_with_the_reason(row: Row) -> None:
    sections = sections_of(row)
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
