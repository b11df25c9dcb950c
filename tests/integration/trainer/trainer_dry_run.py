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

import flashckpt.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.storage.factory import open_store
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.dry_run.command import describe
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.plan.flops import count_parameters
from flashckpt.trainer.train.loop import Trainer, prepare

PAGES = 4 * 4096
"""How far the room for a manifest may be off: it is made for the text of random states, among other values."""
DENSE = {"dim": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "layers": 4, "head_dim": 8, "qkv_bias": True, "qk_norm": True}
EXPERTS = {**DENSE, "experts": 4, "ffn": 16, "shared_ffn": 24, "tied_embeddings": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, DENSE),
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, DENSE),
    "fsdp over three, uneven": (3, {}, {**DENSE, "vocab": 257}),
    "2x2x2": (8, {"pp": 2, "tp": 2}, DENSE),
    "4x2x1, uneven over tp": (8, {"dp_shard": 4, "tp": 2}, {**DENSE, "dim": 20, "ffn": 36, "vocab": 260}),
    "hsdp, tp": (8, {"dp_replicate": 2, "tp": 2, "sequence_parallel": False}, DENSE),
    "interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}, EXPERTS),
    "2x2x2 with experts, tied": (8, {"pp": 2, "tp": 2}, EXPERTS),
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
        trainer.ckpt.wait(100)
        assert memory.segment is not None
        spec = memory.segment.spec
        result = {
            "parameter_bytes": sum(local_tensor(p).nbytes for p in parameters),
            "gradient_bytes": sum(local_tensor(p.grad).nbytes for p in parameters if p.grad is not None),
            "optimizer_bytes": sum(local_tensor(value).nbytes for state in states for value in state.values()),
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
