"""`plan`: times, search and the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt.errors import ConfigError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, read_config, to_values
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.command import make_plan
from flashckpt.trainer.plan.forecast import memory, step_time
from flashckpt.trainer.plan.gpus import ALIASES, GPUS, find_gpu, gpu_of_device
from flashckpt.trainer.plan.measure import BlockTimer, blocks_of
from flashckpt.trainer.plan.options import parse
from flashckpt.trainer.plan.search import reasons, search, to_paste
from flashckpt.trainer.plan.start import start_line

CONFIGS = ROOT / "configs"
EIGHT = str(CONFIGS / "llama3-8b.toml")
H100 = GPUS["h100"]


def run(capfd: Any, *words: str) -> tuple[int, str, str]:
    code = command.main(["plan", *words])
    out, err = capfd.readouterr()
    return code, out, err


def test_a_step_lies_between_the_longer_of_computing_and_moving_and_their_sum() -> None:
    config = read_config(CONFIGS / "llama3-70b.toml")
    layout = resolve_layout(config, 256)
    time = step_time(config, layout, H100, memory(config, layout), ranks_per_node=8)
    talks = sum(one.seconds for one in time.traffic)
    assert time.lower_s == max(time.compute_s, talks) + time.optimizer_s
    assert time.upper_s == pytest.approx((time.compute_s + talks) * time.straggling + time.optimizer_s)
    assert time.lower_s <= time.estimate_s <= time.upper_s


def test_a_search_drops_what_does_not_fit_and_ranks_the_rest() -> None:
    config = read_config(EIGHT)
    found = search(config, 8, H100, ranks_per_node=8)
    times = [one.time.estimate_s for one in found.ranked]
    assert all(one.memory.fits(H100) for one in found.ranked)
    assert times[0] <= 1.02 * min(times)
    assert found.dropped["needs more than the 80 GB of a device"] > 10
    small = search(config, 8, replace(H100, memory=40 * 10**9), ranks_per_node=8)
    assert len(small.ranked) < len(found.ranked)


def test_a_search_tries_experts_over_as_many_ranks_as_divide_and_as_a_node_has() -> None:
    model = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256, "experts": 16}
    config = from_values({"model": model, "train": {"global_batch": 64}})
    ranked = search(config, 32, H100, ranks_per_node=8).ranked
    assert {one.layout.ep for one in ranked if one.layout.dp_shard == 32} == {16, 8}
    assert {one.layout.ep for one in ranked if (one.layout.dp_shard, one.layout.tp) == (8, 1)} == {8}
    best = next(one for one in ranked if one.layout.ep == 8 and one.layout.edp == 4)
    assert "ep = 8" in to_paste(best)
    assert "cut over the 4 that have the same" in " ".join(reasons(best))
    fixed = replace(config, parallel=replace(config.parallel, ep=4))
    assert {one.layout.ep for one in search(fixed, 32, H100, ranks_per_node=8).ranked} == {4}


def test_a_search_keeps_the_number_of_groups_that_train_apart() -> None:
    config = read_config(EIGHT)
    apart = replace(config, parallel=replace(config.parallel, dp_replicate=2, dp_shard=-1, sync_every=50))
    found = search(apart, 16, H100, ranks_per_node=8)
    assert {one.layout.groups for one in found.ranked} == {2}
    assert "dp_replicate = 2" in to_paste(found.ranked[0])
    assert "sync_every = 50" in to_paste(found.ranked[0])


def test_alike_candidates_are_ranked_by_the_rules_of_the_study() -> None:
    """Micro-batch 1 before more, nothing computed again before recomputation, pipelines before tensor parallelism."""
    found = search(read_config(EIGHT), 8, H100, ranks_per_node=8)
    best = found.ranked[0]
    assert best.config.train.micro_batch == 1
    assert best.config.parallel.activation_checkpoint == "none"
    for one, other in zip(found.ranked, found.ranked[1:], strict=False):
        if math.isclose(one.time.estimate_s, other.time.estimate_s, rel_tol=1e-9):
            assert one.config.train.micro_batch <= other.config.train.micro_batch
    large = read_config(CONFIGS / "llama3-70b.toml")
    large = replace(large, model=replace(large.model, layers=40))  # 35 G parameters
    found = search(large, 32, H100, ranks_per_node=8)
    text = [" ".join(reasons(one)) for one in found.ranked if one.layout.tp > 1]
    assert "sequence parallel pays above 30 G parameters and 2,048 tokens" in text[0]
    short = search(from_values({"train": {"global_batch": 16}}), 8, GPUS["cpu"], ranks_per_node=8)
    assert not any("pays" in " ".join(reasons(one)) for one in short.ranked)


def test_what_is_pasted_is_the_layout_that_was_found(tmp_path: Path) -> None:
    config = read_config(EIGHT)
    for best in search(config, 8, H100, ranks_per_node=8).ranked[:8]:
        path = tmp_path / "paste.toml"
        path.write_text(to_paste(best))
        pasted = to_values(read_config(path))
        whole = to_values(config)
        again = from_values({**whole, "parallel": pasted["parallel"] | {"timeout_s": config.parallel.timeout_s},
                             "train": {**whole["train"], "micro_batch": pasted["train"]["micro_batch"]}})  # fmt: skip
        assert resolve_layout(again, 8) == best.layout
        assert again.parallel.activation_checkpoint == best.config.parallel.activation_checkpoint


def test_a_plan_that_does_not_fit_says_so_after_its_numbers(capfd: Any) -> None:
    code, out, err = run(capfd, "--config", EIGHT, "--gpus", "8", "--gpu", "a100-40")
    assert code == 11
    assert "DOES NOT FIT" in out
    assert "the run does not fit into the memory of a device" in err
    code, out, err = run(capfd, "--config", EIGHT, "--gpus", "1", "--gpu", "h100", "--search", "--gpu-memory", "4")
    assert (code, out) == (11, "")
    assert "no layout fits 1 GPUs" in err


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--gpus", "8", "--gpu", "h1000"], 10, "unknown GPU 'h1000'"),
        (["--gpus", "8"], 10, "--gpu"),
        (["--gpu", "h100"], 10, "--gpus"),
        (["--gpus", "0", "--gpu", "h100"], 10, "not a number from 1"),
        (["--gpus", "8", "--gpu", "h100", "--gpu-memory", "-1"], 10, "not a number above 0"),
        (["--gpus", "8", "--gpu", "h100", "--efficiency", "1.5"], 10, "not a share"),
        (["--gpus", "8", "--gpu", "h100", "--tokens", "many"], 10, "not a number of tokens"),
        (["--gpus", "8", "--gpu", "h100", "--failures", "never"], 10, "neither a preset nor hours"),
        (["--gpus", "8", "--gpu", "h100", "--top", "3"], 10, "no effect without --search"),
        (["--gpus", "8", "--gpu", "h100", "--train.stepz", "3"], 10, "unknown setting"),
        (["--gpus", "7", "--gpu", "h100", "--parallel.tp", "2"], 11, "the layout does not fill the world"),
        (["--gpus", "8", "--gpu", "h100", "--measure"], 10, "cannot time a h100 on this machine"),
    ],
)
def test_wrong_words_are_one_clear_error(words: list[str], code: int, problem: str, capfd: Any) -> None:
    found, out, err = run(capfd, "--config", EIGHT, *words)
    assert (found, out) == (code, "")
    assert problem in err
    assert "Traceback" not in err


def test_figures_of_a_gpu_are_overridden() -> None:
    words = [
        "--gpus",
        "8",
        "--gpu",
        "A100",
        "--gpu-memory",
        "64",
        "--gpu-flops",
        "200",
        "--node-link",
        "10",
        "--network",
        "1",
    ]
    options, rest = parse([*words, "--memory-rate", "5", "--train.steps", "3", "--tokens", "1.5T"])
    assert rest == ["--train.steps", "3"]
    gpu = options.gpu
    assert (gpu.name, gpu.memory, gpu.flops, gpu.memory_rate) == ("a100-80", 64 * 10**9, 200e12, 5e9)
    assert (gpu.node_link, gpu.network, options.tokens) == (10e9, 1e9, 1.5e12)
    assert find_gpu("a100") == GPUS[ALIASES["a100"]]
    assert gpu_of_device("NVIDIA A100-SXM4-40GB") == GPUS["a100-40"]
    assert gpu_of_device("NVIDIA Tomorrow") is None


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from flashckpt.trainer.__main__ import main; "
        f"code = main(['plan', '--gpus', '8', '--gpu', 'h100', '--search', '--json', '--config', {EIGHT!r}]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["search"]["ranked"]


def test_two_blocks_are_timed_and_correct_the_plan() -> None:
    words = ["--gpus", "2", "--gpu", "cpu", "--config", str(CONFIGS / "tiny.toml"), "--measure"]
    options, _ = parse(words)
    _, found = make_plan(read_config(options.config), options)
    assert found["efficiency"]["from"] == "measured on this processor"
    share = found["efficiency"]["share"]
    assert 0 < share <= 1
    again = found["step"]["products_s"] * share * GPUS["cpu"].flops * 2
    assert again == pytest.approx(found["model"]["hardware_flops_per_token"] * found["step"]["tokens"])
    searched, _ = parse([*words, "--search", "--top", "2"])
    _, ranks = make_plan(read_config(options.config), searched)
    assert len(ranks["search"]["ranked"]) == 2
    assert all(0 < one["efficiency"] <= 1 for one in ranks["search"]["ranked"])


def test_measured_blocks_have_the_sizes_of_one_rank() -> None:
    model = read_config(EIGHT).model
    blocks = blocks_of(model, 8)
    assert (blocks.layers, blocks.heads, blocks.kv_heads, blocks.ffn) == (2, 4, 1, 14336 // 8)
    assert blocks.head_size == model.head_size
    timer = BlockTimer(GPUS["cpu"])
    config = from_values(
        {"train": {"seq_len": 131072}, "model": {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}}
    )
    with pytest.raises(ConfigError, match="would take too long"):
        timer._measure(config, 1)


def test_the_line_of_a_start_has_bytes_bubble_and_flops() -> None:
    config = read_config(CONFIGS / "3d.toml")
    line = start_line(config, resolve_layout(config, 8), "")
    assert line.startswith("plan: ")
    assert "parameters 115.2 kB, gradients 115.2 kB, optimizer 230.5 kB" in line
    assert "bubble 33.3%" in line
    assert line.endswith("MFLOPs per token")  # no peak is known of a processor
    eight = read_config(EIGHT)
    known = start_line(replace(eight, log=replace(eight.log, peak_tflops=0.0)), resolve_layout(eight, 8), H100.device)
    assert "57.9 GFLOPs per token, MFU of " in known


def test_json_has_the_documented_members(capfd: Any) -> None:
    code, out, _ = run(capfd, "--config", EIGHT, "--gpus", "8", "--gpu", "h100", "--json", "--search", "--top", "1")
    assert code == 0
    found = json.loads(out)
    page = (ROOT / "docs" / "trainer-plan.md").read_text()
    parts = ("model", "layout", "memory", "efficiency", "failures", "search", "run")
    for name in [*found, *(name for part in parts for name in found[part]), *found["step"], *found["wire"][0]]:
        assert f"`{name}`" in page, name


def test_the_example_of_the_page_is_what_the_command_prints(capfd: Any) -> None:
    page = (ROOT / "docs" / "trainer-plan.md").read_text()
    words = ["--gpus", "256", "--gpu", "h100", "--tokens", "15T"]
    assert f"plan --config configs/llama3-70b.toml {' '.join(words)}" in page
    code, out, _ = run(capfd, "--config", str(CONFIGS / "llama3-70b.toml"), *words)
    assert code == 0
    summary = out.split("\n\n")[0] + "\n"
    assert page.split("```\n")[1] == summary
    assert max(map(len, summary.splitlines())) <= 80
