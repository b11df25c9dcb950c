"""A dry run counts what real ranks of the same layout hold, byte for byte: on devices, in memory, in a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.storage.factory import open_store
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.dry_run.command import describe
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.held import held as plan_held
from flashckpt.trainer.train.loop import Trainer, prepare

PAGES = 4 * 4096
"""How far the room for a manifest may be off: it is made for the text of random states, among other values."""
DENSE = {"dim": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "layers": 4, "head_dim": 8, "qkv_bias": True, "qk_norm": True}
EXPERTS = {**DENSE, "experts": 4, "ffn": 16, "shared_ffn": 24, "tied_embeddings": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, DENSE),
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, DENSE),
    "zero 1, state in host memory": (2, {"zero": 1, "offload": "state"}, DENSE),
    "fsdp over three, uneven": (3, {}, {**DENSE, "vocab": 257}),
    "2x2x2": (8, {"pp": 2, "tp": 2}, DENSE),
    "4x2x1, uneven over tp": (8, {"dp_shard": 4, "tp": 2}, {**DENSE, "dim": 20, "ffn": 36, "vocab": 260}),
    "hsdp, tp": (8, {"dp_replicate": 2, "tp": 2, "sequence_parallel": False}, DENSE),
    "groups of two": (4, {"dp_replicate": 2, "sync_every": 3}, DENSE),
    "groups of one rank, averaged": (
        2,
        {"dp_replicate": 2, "dp_shard": 1, "sync_every": 1, "outer_momentum": 0.0},
        DENSE,
    ),
    "interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}, EXPERTS),
    "2x2x2 with experts, tied": (8, {"pp": 2, "tp": 2}, EXPERTS),
    "experts over two of four": (4, {"ep": 2}, EXPERTS),
    "more ranks than experts, tp": (8, {"ep": 2, "tp": 2}, {**DENSE, "experts": 2, "ffn": 16}),
    "a ring": (4, {"cp": 2, "cp_exchange": "ring"}, DENSE),
}


def held(rank: int, config_values: Any) -> Any:
    """Train two steps and return what this rank holds."""
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer._restore()
        for _ in range(2):
            trainer.one_step()
        assert trainer.ckpt is not None
        assert trainer.ckpt._session is not None
        memory = trainer.ckpt._session.memory
        parameters = trainer.parallel.parameters()
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        copies = [] if trainer.outer is None else [trainer.outer.anchor, trainer.outer.momentum]
        beside = sum(local_tensor(held).nbytes for copy in copies if copy is not None for held in copy.held)
        trainer.ckpt.wait(100)
        assert memory.segment is not None
        spec = memory.segment.spec
        result = {
            "parameter_bytes": sum(local_tensor(p).nbytes for p in parameters),
            "gradient_bytes": sum(local_tensor(p.grad).nbytes for p in parameters if p.grad is not None),
            "optimizer_bytes": sum(local_tensor(value).nbytes for state in states for value in state.values()) + beside,
            "slot_data_bytes": spec.data_capacity,
            "slot_bytes": spec.slot_bytes,
            "snapshot_bytes": memory.segment.path.stat().st_size,
            "slots": spec.slots,
        }
        trainer.data.close()
        trainer.ckpt.close()
        return result


def checkpoint_bytes(root: str) -> int:
    store = open_store(root)
    (newest, *_) = list_checkpoints(store)
    table = read_manifest(store, newest).table
    return int(table.nbytes[table.replica == 0].sum())


def config_of(folder: Path, parallel: Any, model: Any) -> Any:
    return run_config(
        folder,
        model=model,
        parallel=parallel,
        train={"steps": 4, "global_batch": 12 if not parallel else 16, "micro_batch": 1},
        data={"source": write_corpus(folder / "text")},
        checkpoint={"root": str(folder / "root"), "job": "dry-run", "snapshot_every": 1, "persist_every": 2},
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_counts_what_real_ranks_hold_byte_for_byte(name: str, tmp_path: Path) -> None:
    world, parallel, model = LAYOUTS[name]
    config = config_of(tmp_path, parallel, model)
    found = describe(config, DryRunOptions(world=world, ranks_per_node=world))
    real = values(run_ranks(held, world, to_values(config), timeout_s=240))
    layout = found["layout"]
    for rank, numbers in enumerate(real):
        pp = rank // (world // layout["pp"])
        shard = rank // layout["tp"] % layout["dp_shard"]
        (row,) = [one for one in found["ranks"] if pp in one["pp"] and shard in one["dp_shard"]]
        for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "slot_data_bytes"):
            assert row[key] == numbers[key], (name, rank, key)
        state = sum(numbers[key] for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
        on_host = state if parallel.get("offload") else 0
        assert row["state_on_host_bytes"] == on_host
        guess = row["estimate"]
        assert guess["device_bytes"] == state - on_host + guess["gathered_bytes"] + guess["activation_bytes"]
        assert abs(row["slot_bytes"] - numbers["slot_bytes"]) <= PAGES
        assert abs(row["snapshot_bytes"] - numbers["snapshot_bytes"]) <= 3 * PAGES
        assert found["snapshots"]["slots"] == numbers["slots"]
    assert sum(one["count"] for one in found["ranks"]) == world
    assert abs(found["snapshots"]["node_bytes"] - sum(one["snapshot_bytes"] for one in real)) <= world * 3 * PAGES
    assert found["checkpoint"]["bytes"] == checkpoint_bytes(config.checkpoint.root)
    assert found["model"]["parameters"] == count_parameters(config.model)
    json.dumps(found)


def test_sixteen_thousand_ranks_take_less_than_two_gigabytes() -> None:
    words = ["--dry-run", "--world", "16384", "--config", str(ROOT / "configs" / "llama3-405b.toml"), "--json"]
    process = subprocess.Popen([sys.executable, "-m", "flashckpt.trainer", *words], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert found["model"]["parameters"] == 405_853_388_800
    assert usage.ru_maxrss < 2_000_000  # kB, of the largest of its processes


# -- what is gathered and kept for a while


class Peaks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes at every operator how many bytes FSDP holds beyond the rank's own parts: whole parameters and gradients."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        states = [module._get_fsdp_state() for module in part.modules() if isinstance(module, FSDPModule)]
        self._parameters = [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]
        self.parameters = self.gradients = self.both = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        parameters = gradients = 0
        for one in self._parameters:
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None and local_tensor(whole).untyped_storage().size():
                parameters += local_tensor(whole).nbytes
            added_up = (None if whole is None else whole.grad, one.unsharded_accumulated_grad)
            gradients += sum(local_tensor(grad).nbytes for grad in added_up if grad is not None)
        self.parameters, self.gradients = max(self.parameters, parameters), max(self.gradients, gradients)
        self.both = max(self.both, parameters + gradients)
        return out


def gathered(_rank: int, config_values: Any) -> dict[str, int]:
    """Return the most that this rank had gathered in its second step; the first makes what later ones have."""
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer.initialise()
        trainer.one_step()
        with Peaks(trainer.parallel.parts[0]) as peaks:
            trainer.one_step()
        trainer.data.close()
        return {"parameters": peaks.parameters, "gradients": peaks.gradients, "both": peaks.both}


WIDE: dict[str, int] = {"dim": 48, "heads": 4, "kv_heads": 2, "ffn": 96, "layers": 6}
CUTS: dict[str, tuple[dict[str, Any], int]] = {
    "0": ({"zero": 0, "dp_replicate": 2, "dp_shard": 1}, 2),
    "1": ({"zero": 1}, 2),
    "2": ({"zero": 2}, 2),
    "3": ({"zero": 3}, 2),
    "-1": ({}, 2),
    "1, one micro-batch": ({"zero": 1}, 1),
    "3, one micro-batch": ({"zero": 3}, 1),
}


@pytest.mark.parametrize("name", CUTS)
def test_what_a_dry_run_says_is_gathered_is_what_each_zero_gathers(name: str, tmp_path: Path) -> None:
    parallel, micro_batches = CUTS[name]
    train = {"steps": 4, "global_batch": 4, "micro_batch": 2 // micro_batches}
    data = {"source": write_corpus(tmp_path / "text")}
    config = run_config(tmp_path, model=WIDE, parallel=parallel, train=train, data=data)
    (row,) = describe(config, DryRunOptions(world=2))["ranks"]
    ranks = values(run_ranks(gathered, 2, to_values(config), timeout_s=240))
    block = 4 * (2 * WIDE["dim"] + 2 * WIDE["dim"] * 48 + 2 * WIDE["dim"] * 24 + 3 * WIDE["dim"] * WIDE["ffn"])
    ahead = (
        0 if parallel.get("zero", -1) in (0, 1, 2) else block
    )  # on a device the next block is gathered beside this one
    assert [rank["both"] for rank in ranks] == [row["estimate"]["gathered_bytes"] - ahead] * 2


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3, -1])
@pytest.mark.parametrize("experts", [2, 3])  # cut by experts, and by rows of each
def test_what_a_dry_run_says_is_gathered_has_the_experts_in_it(
    experts: int, zero: int, micro_batches: int, tmp_path: Path
) -> None:
    train = {"steps": 4, "global_batch": 4, "micro_batch": 2 // micro_batches}
    data, model = {"source": write_corpus(tmp_path / "text")}, {**WIDE, "experts": experts}
    config = run_config(tmp_path, model=model, parallel={"ep": 1, "zero": zero}, train=train, data=data)
    ranks = values(run_ranks(gathered, 2, to_values(config), timeout_s=240))
    plan = plan_held(config, resolve_layout(config, 2), 0)
    said = {row["estimate"]["gathered_bytes"] for row in describe(config, DryRunOptions(world=2))["ranks"]}
    most = max(said) - (
        0 if zero in (1, 2) else 4 * plan.block
    )  # on a device the next block is gathered beside this one
    ours = 4 * plan.experts // WIDE["layers"]
    assert ours == 4 * 3 * experts * WIDE["dim"] * WIDE["ffn"]
    # gradients of a block's experts are scattered before those of the rest of it are made; the estimate has both
    apart = (
        0 if (zero, micro_batches) == (1, 2) or (zero, micro_batches) == (-1, 2) else min(ours, 4 * plan.block - ours)
    )
    assert [rank["both"] for rank in ranks] == [most - apart] * 2
