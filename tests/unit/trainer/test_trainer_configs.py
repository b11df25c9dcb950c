"""The shipped configurations: each divides, is built by a dry run on the ranks that it names, and is the published model."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.built_rank import built_rank
from support.paths import ROOT

from flashckpt.plan.model import PUBLISHED_GPU_HOURS, Failures, forecast
from flashckpt.plan.report import Rates, costs_from
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.dry_run.command import as_text, describe, rank_kinds, slot_of
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.hub.hub_config import from_hub, to_hub
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.plan.failures import RELAUNCH_S, REPLACE_S, failure_forecast
from flashckpt.trainer.plan.forecast import RESERVED, Memory, memory, step_time
from flashckpt.trainer.plan.gpus import GPUS
from flashckpt.trainer.plan.held import held

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072}
LLAMA |= {"vocab_size": 128256, "num_key_value_heads": 8}
SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(dim: int, layers: int, heads: int, ffn: int, factor: float, *, tied: bool = False) -> dict[str, Any]:
    return LLAMA | {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "rope_scaling": {**SCALED, "factor": factor}, "tie_word_embeddings": tied,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama3-1b": (1_235_814_400, 1_235_814_400, llama(2048, 16, 32, 8192, 32.0, tied=True)),
    "llama3-8b": (8_030_261_248, 8_030_261_248, llama(4096, 32, 32, 14336, 8.0)),
    "llama3-70b": (70_553_706_496, 70_553_706_496, llama(8192, 80, 64, 28672, 8.0)),
    "llama3-405b": (405_853_388_800, 405_853_388_800, llama(16384, 126, 128, 53248, 8.0)),
    "qwen3-moe-30b-a3b": (
        30_532_122_624,
        3_353_032_704,
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Parameters in all and active, and the keys of config.json that say what is computed, as they were published."""


def world_of(path: Path) -> int:
    """Return the ranks that the comment of a configuration starts, else those of its layout."""
    (line,) = re.findall(r"^#\s+dlrun (.*)$", path.read_text(), re.MULTILINE)[:1] or [""]
    sizes = [int(number) for number in re.findall(r"--(?:nnodes|nproc-per-node)[ =](\d+)", line)]
    if sizes:
        return math.prod(sizes)
    parallel = read_config(path).parallel
    return parallel.pp * parallel.dp_replicate * abs(parallel.dp_shard) * parallel.tp


def is_as_built(path: Path, world: int) -> None:
    """What is computed of every kind of rank is what one of them holds that is built, to the byte."""
    config = read_config(path)
    config = on_device(config, "cpu" if config.train.device == "cpu" else "cuda")
    layout = resolve_layout(config, world)
    for kind in rank_kinds(config, layout):
        there = built_rank(config, layout, kind.example(layout))
        for shard in (kind.shards[0], kind.shards[-1]):
            found = held(config, layout, kind.pp_ranks[-1], shard)
            assert (found.parameters, found.gradients) == (there.parameters, there.gradients)
            assert (found.optimizer, found.whole) == (there.optimizer, there.whole)
        assert slot_of(config, layout, kind).data_capacity == there.slot_data


def alike(line: str, other: str) -> bool:
    """Compare words exactly, decimal numbers to their last digit: a slot has a page more or less by the process."""
    decimal = r"\d+\.\d+"
    numbers = [[float(found) for found in re.findall(decimal, text)] for text in (line, other)]
    words = [re.sub(decimal, "0.0", text).split() for text in (line, other)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], abs=0.11)


SHOWN = {"llama3-8b": "trainer.md", "llama3-405b": "trainer-dry-run.md"}
"""Pages that show the table of a configuration."""


@pytest.mark.matrix
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_holds_what_its_ranks_hold_when_they_are_built(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")  # a snapshot holds the folder that a run began in, and its bytes are counted
    world = world_of(path)
    found = describe(read_config(path), DryRunOptions(world=world, ranks_per_node=min(8, world)))
    assert sum(one["count"] for one in found["ranks"]) == found["world"]
    model = read_config(path).model
    held = found["model"]["parameters"] + model.tied_embeddings * model.vocab * model.dim
    layout = found["layout"]
    assert layout["padding"] == 0  # its batch divides
    copies = sum(one["count"] * one["parameter_bytes"] for one in found["ranks"]) // layout["dp_replicate"]
    assert copies >= 4 * held  # what tensor-parallel ranks hold alike is there several times
    assert found["checkpoint"]["bytes"] >= 12 * held
    assert found["checkpoint"]["bytes"] == pytest.approx(12 * held, rel=1e-3)
    is_as_built(path, world)
    if path.stem in SHOWN:
        page = (ROOT / "docs" / SHOWN[path.stem]).read_text()
        for line in as_text(found).splitlines():
            if line and not line.startswith(("data:", "Per rank;")):
                assert any(alike(line, other) for other in page.splitlines()), line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_says_where_it_was_run_or_that_it_was_not(path: Path) -> None:
    comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert re.search(r"not (?:yet )?run|minutes?\b|CPU ranks|eight ranks", comment, re.IGNORECASE)
    if re.search(r"not (?:yet )?run", comment, re.IGNORECASE) and path.stem in PUBLISHED:
        assert f"{world_of(path):,} rank" in comment or f"for {world_of(path)} " in comment


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_sizes(name: str) -> None:
    total, active, values = PUBLISHED[name]
    config = read_config(ROOT / "configs" / f"{name}.toml")
    assert (count_parameters(config.model), count_parameters(config.model, active=True)) == (total, active)
    assert from_hub(values, name) == config.model
    assert to_hub(config.model, config.train.seq_len, "bfloat16")["model_type"] == values["model_type"]


def test_every_configuration_is_in_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "trainer-configs.md").read_text()
    for path in CONFIGS:
        assert f"`{path.name}`" in page, path.name
        if path.stem in PUBLISHED:
            assert f"{PUBLISHED[path.stem][0]:,}" in page


# -- what the pages advise


def on_h100s(path: Path, **parallel: Any) -> tuple[RunConfig, Memory, float]:
    """Return a run on its GPUs, its memory, and the seconds of a step."""
    config = on_device(read_config(path), "cuda")
    config = replace(config, parallel=replace(config.parallel, **parallel))
    layout = resolve_layout(config, world_of(path))
    needed = memory(config, layout)
    time = step_time(config, layout, GPUS["h100"], needed, ranks_per_node=8, efficiency=0.0)
    return config, needed, time.estimate_s


FOR_GPUS = [path for path in CONFIGS if read_config(path).log.peak_tflops or read_config(path).train.compile]


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.stem)
def test_a_configuration_for_gpus_follows_the_advice_of_the_pages(path: Path) -> None:
    """docs/memory.md: the first mode that fits; docs/parallelism.md: the smallest `zero`; docs/trainer-configs.md: compiled."""
    config, needed, _ = on_h100s(path)
    room = GPUS["h100"].memory * (1 - RESERVED)
    assert config.train.compile
    assert config.train.attention != "sdpa" or not config.data.sources  # flex, where documents would keep all scores
    assert needed.peak <= room
    modes = ["none", "ffn", "every:2", "full"]  # in the order of the page; `selective` is not compiled
    for mode in modes[: modes.index(config.parallel.activation_checkpoint)]:
        assert on_h100s(path, activation_checkpoint=mode)[1].peak > room, mode
    layout = resolve_layout(config, world_of(path))
    if config.parallel.zero != 1 and layout.dp_shard > 1 and layout.pp == 1:
        assert on_h100s(path, zero=1)[1].peak > room


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.stem)
def test_intervals_of_a_configuration_cost_little_more_than_those_of_its_plan(path: Path) -> None:
    config, needed, step_s = on_h100s(path)
    gpus, bytes_ = world_of(path), 12 * count_parameters(config.model)
    best = failure_forecast(needed, bytes_, gpus=gpus, ranks_per_node=8, hours=PUBLISHED_GPU_HOURS, step_s=step_s)
    costs = costs_from(
        needed.held.state, bytes_, gpus=gpus, gpus_per_node=min(8, gpus), rates=Rates(), relaunch_s=RELAUNCH_S,
        replace_s=REPLACE_S,
    )  # fmt: skip
    every, persist = config.checkpoint.snapshot_every, config.checkpoint.persist_every
    assert isinstance(every, int)
    assert isinstance(persist, int)
    assert persist % every == 0
    failures = Failures(gpus=gpus, gpu_mtbf_s=PUBLISHED_GPU_HOURS * 3600)
    found = forecast(failures, costs, snapshot_s=every * step_s, persist_every=persist // every)
    assert found.goodput > best["goodput"] - 0.015
