"""float8: what is refused before torch is imported, which layers it is for, and what a plan makes of it. Without torchao."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.paths import ROOT
from torch import nn

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, read_config
from flashckpt.trainer.config.changes import compare, recorded_values
from flashckpt.trainer.float8.convert import convert_layers, described_float8
from flashckpt.trainer.float8.layers import float8_flops_per_token, float8_layers
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.apply import build_stage
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.forecast import memory, step_time
from flashckpt.trainer.plan.gpus import GPUS

EIGHT = ROOT / "configs" / "llama3-8b.toml"
FLOAT8 = {"float8": "tensorwise", "float8_emulate": True}
SIZES = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}
EXPERTS = {"experts": 4, "ffn": 32, "shared_ffn": 64}


def run(train: Any = None, **sections: Any) -> Any:
    return from_values({"model": SIZES, "train": {**FLOAT8, **(train or {})}, **sections})


@pytest.mark.parametrize(
    ("sections", "world", "found"),
    [
        ({"model": {**SIZES, "ffn": 136}}, 1, "feed_forward.w1 on a rank of parallel.tp = 1: 136 x 64, and 2 more"),
        ({"model": {**SIZES, "kv_heads": 1}, "parallel": {"tp": 4}}, 4, ""),  # keys of all ranks are on each
        ({"model": SIZES, "parallel": {"tp": 4, "sequence_parallel": False}}, 4, ""),
        ({"model": {**SIZES, "kv_heads": 4, "head_dim": 8}, "parallel": {"tp": 4}}, 4, "attention.wq on a rank of parallel.tp = 4: 8 x 64"),
        ({"model": SIZES, "train": {"seq_len": 24, "micro_batch": 1}}, 1, "gradients of weights add up: 24"),
        ({"model": SIZES, "train": {"seq_len": 24, "micro_batch": 2}}, 1, ""),
        ({"model": SIZES, "train": {"seq_len": 48}, "parallel": {"cp": 2}}, 2, "gradients of weights add up: 24"),
    ],
)  # fmt: skip
def test_sizes_that_have_no_products_in_float8_are_refused(sections: Any, world: int, found: str) -> None:
    config = from_values({**sections, "train": {**FLOAT8, **sections.get("train", {})}})
    if not found:
        resolve_layout(config, world)
        return
    with pytest.raises(LayoutError, match="there are no float8 products of them") as caught:
        resolve_layout(config, world)
    assert found in caught.value.found
    assert caught.value.expected == "multiples of 16"
    plain = from_values({**sections, "train": sections.get("train", {})})
    resolve_layout(plain, world)


def test_a_cpu_without_emulation_is_refused_and_emulation_without_float8_has_no_effect() -> None:
    with pytest.raises(ConfigError, match="needs a GPU with float8 products"):
        resolve_layout(run({"float8_emulate": False, "device": "cpu"}), 1)
    resolve_layout(run({"device": "cpu"}), 1)
    with pytest.raises(ConfigError, match="float8_emulate would have no effect"):
        run({"float8": "off"})
    with pytest.raises(ConfigError, match=r"train\.float8 has no such choice"):
        run({"float8": "blockwise"})


def test_refusals_do_not_import_torch() -> None:
    program = (
        "import sys, importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torchao' else found(name, *more)\n"
        "from flashckpt.trainer.__main__ import main\n"
        "codes = [main(['--train.float8', 'rowwise', *words]) for words in (\n"
        "    [], ['--train.device', 'cpu'], ['--model.dim', '72'])]\n"
        "print(*codes, 'torch' in sys.modules, 'torchao' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "10", "11", "False", "False"]
    assert "pip install 'flashckpt[float8]'" in done.stderr
    assert "a CPU: train.device = cpu" in done.stderr
    assert "72 x 72, and 6 more" in done.stderr


def test_a_part_is_not_converted_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    config = run()
    part = build_stage(config, resolve_layout(config, 1), 0)
    with pytest.raises(ConfigError, match="needs torchao"):
        convert_layers(part, config, 1, torch.device("cpu"))
    convert_layers(part, from_values({"model": SIZES}), 1, torch.device("cpu"))
    assert described_float8(from_values({"model": SIZES}), [part]) == ""


@pytest.mark.parametrize("found", ["8.6", "none"])
def test_a_device_without_such_products_is_refused_unless_they_are_emulated(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "there")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A10")
    config = run({"float8_emulate": False})
    part = build_stage(config, resolve_layout(config, 1), 0)
    with pytest.raises(ConfigError, match="needs a GPU with float8 products") as caught:
        convert_layers(part, config, 1, torch.device("cuda" if found == "8.6" else "cpu"))
    assert caught.value.found == ("NVIDIA A10 of compute capability 8.6" if found == "8.6" else "a device of type cpu")


@pytest.mark.parametrize("model", [SIZES, {**SIZES, **EXPERTS}])
def test_the_layers_are_the_linear_ones_of_a_block_but_routers_and_gates(model: Any) -> None:
    sizes = from_values({"model": model}).model
    with torch.device("meta"):
        block = Transformer(sizes, 16).layers["0"]
    linear = {
        name: tuple(module.weight.shape)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("router", "shared_gate"))
    }
    assert float8_layers(sizes, 1) == linear
    cut = float8_layers(sizes, 2)
    assert cut["attention.wq"] == (32, 64)
    assert cut["attention.wo"] == (64, 32)
    assert not any("shared" in name for name in cut)


def test_keys_and_values_that_do_not_divide_are_left_out() -> None:
    names = set(float8_layers(from_values({"model": {**SIZES, "kv_heads": 1}}).model, 2))
    assert names == {f"attention.{one}" for one in ("wq", "wo")} | {f"feed_forward.{one}" for one in ("w1", "w2", "w3")}


def test_turning_float8_on_or_off_is_a_warning_on_a_resume_and_nothing_is_new_state() -> None:
    plain, small = from_values({"model": SIZES}), run()
    assert {(one.key, one.severity) for one in compare(recorded_values(plain), small)} == {
        ("train.float8", "warning"), ("train.float8_emulate", "warning"),
    }  # fmt: skip
    old = recorded_values(plain)
    del old["train"]["float8"], old["train"]["float8_emulate"]
    assert compare(old, plain) == []


def timed(gpu: str, float8: str, mode: str = "none", **more: Any) -> Any:
    config = read_config(EIGHT, ["--train.float8", float8, "--parallel.activation_checkpoint", mode])
    config = from_values({**recorded_values(config), "train": {**recorded_values(config)["train"], **more}})
    layout = resolve_layout(config, 8)
    return config, step_time(config, layout, GPUS[gpu], memory(config, layout), ranks_per_node=8, efficiency=1.0)


@pytest.mark.parametrize("mode", ["none", "ffn", "full"])
def test_a_plan_counts_products_of_blocks_at_the_peak_of_float8(mode: str) -> None:
    config, plain = timed("h100", "off", mode)
    small, fast = timed("h100", "tensorwise", mode)
    layers = sum(rows * columns for rows, columns in float8_layers(config.model, 1).values())
    feed_forward = 3 * config.model.dim * config.model.ffn
    again = {"none": 0, "ffn": 2 * feed_forward, "full": 2 * layers}[mode]
    share = float8_flops_per_token(small, 1)
    assert share == config.model.layers * (6 * layers + again)
    tokens = config.train.global_batch * config.train.seq_len / 8
    saved = share * tokens * (1 / 989e12 - 1 / 1979e12)
    assert plain.compute_s - fast.compute_s == pytest.approx(saved)
    assert (plain.flops, plain.hardware_flops) == (fast.flops, fast.hardware_flops)
    _, emulated = timed("h100", "tensorwise", mode, float8_emulate=True)
    assert emulated.compute_s == pytest.approx(plain.compute_s)


def test_the_command_says_so_and_refuses_a_gpu_without_it(capfd: Any) -> None:
    words = ["plan", "--config", str(EIGHT), "--gpus", "8", "--train.float8", "tensorwise", "--gpu"]
    assert command.main([*words, "h100"]) == 0
    assert "float8: 77% of these FLOPs, at 1,979 TFLOPS" in capfd.readouterr().out
    assert command.main([*words, "h100", "--json", "--gpu-float8-flops", "1000"]) == 0
    assert json.loads(capfd.readouterr().out)["float8"]["rate"] == 1000e12
    assert command.main([*words, "a100"]) == 10
    assert "NVIDIA A100-SXM4-80GB" in capfd.readouterr().err
    assert command.main([*words, "h100", "--measure"]) == 10
    assert "--measure does not time products in float8" in capfd.readouterr().err


def test_a_dry_run_holds_what_a_run_without_float8_holds_and_needs_no_torchao(capfd: Any) -> None:
    held = []
    for float8 in ("off", "tensorwise"):
        words = ["--dry-run", "--world", "2", "--json", "--train.float8", float8]
        words += [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
        assert command.main(words) == 0
        ranks = json.loads(capfd.readouterr().out)["ranks"]
        held.append([{name: rank[name] for name in rank if not name.startswith(("slot_b", "snap"))} for rank in ranks])
    assert held[0] == held[1]
