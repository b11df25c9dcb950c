"""A model is made on the meta device and filled once: what a rank holds, the same in every layout, nothing on a restart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.model import initial
from flashckpt.trainer.model.counter_normal import fill_normal, stream_keys
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel import apply
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train import loop

DENSE = {"dim": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "layers": 4, "head_dim": 8, "qkv_bias": True, "qk_norm": True}
EXPERTS = {**DENSE, "experts": 4, "ffn": 16, "shared_ffn": 24, "tied_embeddings": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, DENSE),
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}, DENSE),
    "fsdp over three, uneven": (3, {}, DENSE),
    "2x2x2": (8, {"pp": 2, "tp": 2}, DENSE),
    "hsdp, tp": (8, {"dp_replicate": 2, "tp": 2, "sequence_parallel": False}, DENSE),
    "interleaved": (2, {"pp": 2, "schedule": "Interleaved1F1B"}, EXPERTS),
    "2x2x2 with experts": (8, {"pp": 2, "tp": 2}, EXPERTS),
}


def built(config_values: Any) -> Any:
    config = from_values(config_values)
    with process_group(config) as device:
        parallel = apply.build_parallel(config, resolve_layout(config, int(os.environ["WORLD_SIZE"])), device)
        return config, parallel, parallel.fill(config)


def compare_to_whole(_rank: int, config_values: Any) -> Any:
    """Return the names of this rank's tensors that are not the whole model's to the bit, and what it wrote and holds."""
    config, parallel, written = built(config_values)
    whole = Transformer(config.model, config.train.seq_len)
    initial.fill(whole, config.model, config.train.seed)
    wanted, wrong, names = dict(whole.named_parameters()), [], []
    for part in parallel.bare_parts():
        for name, parameter in part.named_parameters():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            names.append(name)
            if not torch.equal(full, wanted[name]):
                wrong.append(name)
    held = sum(apply.local_tensor(parameter).numel() for parameter in parallel.parameters())
    return {"wrong": wrong, "names": names, "all": sorted(wanted), "written": written, "held": held}


def config_of(folder: Path, parallel: Any, model: Any) -> Any:
    train = {"global_batch": 24, "micro_batch": 1}
    return to_values(run_config(folder, model=model, parallel=parallel, train=train))


@pytest.mark.matrix
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_the_whole_models_to_the_bit(name: str, tmp_path: Path) -> None:
    world, parallel, model = LAYOUTS[name]
    ranks = values(run_ranks(compare_to_whole, world, config_of(tmp_path, parallel, model)))
    assert [rank["wrong"] for rank in ranks] == [[]] * world
    assert sorted({name for rank in ranks for name in rank["names"]}) == ranks[0]["all"]
    assert all(rank["written"] == rank["held"] for rank in ranks)


def test_each_kind_of_tensor_begins_as_it_should() -> None:
    config = from_values({"model": EXPERTS}).model
    whole = Transformer(config, 16)
    initial.fill(whole, config, 7)
    found = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    assert all((value == 1).all() for name, value in found.items() if name.endswith("norm.weight"))
    assert all((value == 0).all() for name, value in found.items() if name.endswith("bias"))
    assert torch.equal(found["output.weight"], found["tok_embeddings.weight"])
    for name in ("attention.wo.weight", "feed_forward.experts.w2", "feed_forward.shared.w2.weight"):
        assert found[f"layers.0.{name}"].std() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert found["layers.0.feed_forward.experts.w1"].std() == pytest.approx(0.02, rel=0.1)


# -- memory of a start


def peak_of_start(_rank: int, config_values: Any, small: Any) -> Any:
    """Return by how many bytes the peak of this process's memory grew while its part was made and filled."""
    built(small)  # what torch loads and keeps when it is first asked
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is held now
    before = memory("VmHWM")
    _, parallel, _ = built(config_values)
    held = sum(apply.local_tensor(parameter).nbytes for parameter in parallel.parameters())
    return {"peak": memory("VmHWM") - before, "held": held}


def memory(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{key}:"))


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=["fsdp", "tp", "pp"])
def test_the_peak_of_a_start_is_the_shard(parallel: Any, tmp_path: Path) -> None:
    model = {"dim": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "layers": 4, "vocab": 32768}
    configs = config_of(tmp_path, parallel, model), config_of(tmp_path, parallel, {})
    for rank in values(run_ranks(peak_of_start, 4, *configs)):
        assert rank["held"] > 40 << 20
        assert rank["peak"] < rank["held"] + (16 << 20)  # a block; the largest tensor has 64 MiB, a stage twice that


# -- a start that restores


def run_counted(_rank: int, config_values: Any) -> Any:
    """Run to the end; return how many elements were filled, and what a rank holds."""
    written = []

    def counting(out: Any, *args: Any) -> None:
        written.append(out.numel())
        fill_normal(out, *args)

    vars(initial)["fill_normal"] = counting  # in a process of its own
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        code = trainer.run()
        return {"code": code, "filled": sum(written), "done": trainer.done}


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 2}], ids=["fsdp", "replicas"])
def test_a_start_that_restores_fills_nothing(parallel: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))
    source = write_corpus(tmp_path / "text")
    checkpoint = {"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 2}
    filled = []
    for steps in (2, 4):
        config = run_config(
            tmp_path, parallel=parallel, train={"steps": steps}, data={"source": source}, checkpoint=checkpoint
        )
        ranks = values(run_ranks(run_counted, 2, to_values(config), timeout_s=100))
        assert [(rank["code"], rank["done"]) for rank in ranks] == [(0, steps)] * 2
        filled.append([rank["filled"] for rank in ranks])
    assert all(count > 0 for count in filled[0])
    assert filled[1] == [0, 0]


def test_two_seeds_give_two_models_and_a_stream_has_two_keys() -> None:
    assert stream_keys(1, "w") != stream_keys(2, "w") != stream_keys(1, "v")
    assert len(set(stream_keys(1, "w"))) == 2
